"""What an Arrow stream says of itself: how large it becomes, and whether it has its end.

pyarrow takes a stream that was cut between two messages for one that ended, and unpacks a record batch before anybody
can ask how large it is. Both stand in the messages' heads, which are read here without their bodies. The format:
https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pyarrow as pa

FILE_MARK = b"ARROW1"  # begins and ends a file; between them lies a stream
_CONTINUED = b"\xff\xff\xff\xff"  # before each length, but in what was written before 2019
_DICTIONARY, _ROWS = 2, 3
_VERSION_BYTES = 8  # of the mark at a file's beginning, padded


def is_file(source: pa.NativeFile) -> bool:
    """Whether it begins as an Arrow file does, and not as a stream."""
    source.seek(0)
    return bytes(source.read(len(FILE_MARK))) == FILE_MARK


def unpacked_bytes(source: pa.NativeFile) -> int:
    """How many bytes all record batches of a file or stream say that they hold, unpacked.

    Raises ValueError, IndexError or OSError for one that is damaged, or that lacks its end.
    """
    end = source.size()
    begin = 0
    if is_file(source):
        begin = _VERSION_BYTES
        source.seek(end - 4 - len(FILE_MARK))
        end -= _number("<i", source.read(4), 0) + 4 + len(FILE_MARK)  # where its table of contents begins
    return sum(_unpacked(source, head, body) for head, body in _messages(source, begin, end))


def _messages(source: pa.NativeFile, begin: int, end: int) -> Iterator[tuple[bytes, int]]:
    """The head of each message, and where its body begins."""
    while True:
        source.seek(begin)
        mark = source.read(4)
        if mark == _CONTINUED:
            mark = source.read(4)
        length = _number("<i", mark, 0) if len(mark) == 4 else -1
        if length == 0:
            return
        body = source.tell() + length
        if length < 0 or body > end:
            raise ValueError("it is cut short or damaged, for its mark of the end is missing")
        head = source.read(length)
        yield head, body
        size = _body_bytes(head)
        if size < 0:
            raise ValueError(f"a message of {size} bytes")
        begin = body + size


def _body_bytes(head: bytes) -> int:
    place = _place(head, _table(head, 0), 3)
    return _number("<q", head, place) if place else 0


def _unpacked(source: pa.NativeFile, head: bytes, body: int) -> int:
    message = _table(head, 0)
    kind = head[_place(head, message, 1)]
    if kind not in (_DICTIONARY, _ROWS):
        return 0
    rows = _table(head, _place(head, message, 2))
    if kind == _DICTIONARY:
        rows = _table(head, _place(head, rows, 1))
    if not _place(head, rows, 3):  # nothing says how it is packed
        return _body_bytes(head)
    buffers = _table(head, _place(head, rows, 2))
    total = 0
    for place in range(buffers + 4, buffers + 4 + 16 * _number("<I", head, buffers), 16):
        offset, length = _number("<q", head, place), _number("<q", head, place + 8)
        if length > 0:
            source.seek(body + offset)
            unpacked = _number("<q", source.read(8), 0)  # -1: stored as it is
            total += length if unpacked < 0 else unpacked
    return total


# Flatbuffers: a table begins with the way back to the list of its fields' places.


def _table(head: bytes, place: int) -> int:
    """What the offset at a place points to."""
    return place + _number("<I", head, place)


def _place(head: bytes, table: int, slot: int) -> int:
    """Where a field of a table lies, 0 for one that is absent."""
    fields = table - _number("<i", head, table)
    offset = _number("<H", head, fields + 4 + 2 * slot) if 4 + 2 * slot < _number("<H", head, fields) else 0
    return table + offset if offset else 0


def _number(form: str, head: bytes, place: int) -> int:
    if place < 0:
        raise ValueError("a message that points before its beginning")
    try:
        found: int = struct.unpack_from(form, head, place)[0]
    except struct.error as error:
        raise ValueError("a message is damaged") from error
    return found
