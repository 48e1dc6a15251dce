"""Opening of files of rows: unpacked and transcoded to UTF-8, in bounded memory."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from training.data.file_systems import PIECE_BYTES, as_user_error, display_name, is_url, name_of, open_url
from training.data.sources import EXPORT, SPREADSHEETS, delimiter_of
from training.local_files import open_local
from training.problems import UserError
from training.recipe.tables.formats import PACKED

if TYPE_CHECKING:
    from training.recipe import Data

MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",  # begins as that of UTF-16 does, so it comes first
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Other formats that often have a wrong suffix, by their first bytes.
_NO_TEXT = {
    b"\x1f\x8b": "packed by gzip: let its name end in .gz",
    b"\x28\xb5\x2f\xfd": "packed by zstd: let its name end in .zst",
    b"PK\x03\x04": f"a zip archive or a spreadsheet: unpack it, or {EXPORT}",
    b"\xd0\xcf\x11\xe0": f"a spreadsheet or document of older programs: {EXPORT}",
    b"PAR1": "a Parquet file: set data.source: parquet",
    b"ARROW1": "an Arrow file: set data.source: arrow",
}
LONGEST_ROW_BYTES = 2 * 2**20
"""Of CSV and JSON."""
SEPARATOR = b"\x1f"
"""A control character, which texts do not hold."""
_SAMPLE_BYTES = 4096
_MANY_NULS = 0.2  # of a sample: more than any text in UTF-8 holds, fewer than any Latin text in UTF-16
_NOT_DECODED = "training.data.decoding.not_decoded"


def _replace_undecodable(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\udcff", error.end  # half a surrogate pair encodes to invalid UTF-8


codecs.register_error(_NOT_DECODED, _replace_undecodable)


class _PieceReader(io.RawIOBase):
    """Pieces of bytes as a raw file."""

    def __init__(self, pieces: Generator[bytes, None, None]) -> None:
        self._pieces, self._rest = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest and (piece := next(self._pieces, None)) is not None:
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


class TextFile(io.BufferedReader):
    """The unpacked bytes of one file, in UTF-8, read once from the beginning."""

    def __init__(self, stored: _Stored, pieces: Generator[bytes, None, None]) -> None:
        super().__init__(_PieceReader(pieces), PIECE_BYTES)
        self._stored = stored

    @property
    def share(self) -> float:
        """The share of the file that was read, 0 to 1, in stored bytes. 0 while its size is unknown."""
        return min(1.0, self._stored.done / self._stored.size) if self._stored.size else 0.0

    def close(self) -> None:
        """Closes the underlying file too."""
        super().close()
        self._stored.close()


@contextlib.contextmanager
def open_text(file: str, data: Data) -> Iterator[TextFile]:
    """Opens a local path or URL: unpacked if its name ends in .gz or .zst, in UTF-8, without a byte order mark; with
    `data.maxsplit`, the delimiters that it counts are SEPARATOR.

    Bytes that `data.encoding` cannot decode become invalid UTF-8, so that readers can name the row. Memory is that of a
    few pieces, for a file of any size.
    Raises UserError, here or while it is read: for a file that is missing, not readable, damaged, cut short, in UTF-16
    while the recipe says UTF-8, or of more than `data.max_file_gb` when unpacked; and of kind NETWORK for a file
    system that does not answer.
    """
    stored = _Stored(file)
    pieces = _decode_pieces(stored, data)
    if data.maxsplit is not None:
        pieces = _separate(pieces, delimiter_of(file, data).encode(), data.maxsplit)
    with contextlib.closing(TextFile(stored, pieces)) as result:
        yield result


@contextlib.contextmanager
def open_seekable(file: str) -> Iterator[pa.NativeFile]:
    """Opens a local path or URL for random access (Parquet, Arrow). Raises UserError like `open_text`."""
    if not is_url(file):
        with as_user_error(file):
            descriptor = open_local(file)
            try:  # no memory map: a file that is cut while it is read would kill the process
                local = pa.OSFile(f"/proc/self/fd/{descriptor}", "rb")
            finally:
                os.close(descriptor)
        with local:
            yield local
        return
    with contextlib.closing(_Stored(file, random_access=True)) as stored:
        if not stored.seekable():
            message = "is on a server that gives files from their beginning only: download it, and name the file."
            raise UserError.of("data", display_name(file), message)
        with pa.PythonFile(stored, mode="r") as remote:
            yield remote


class _Stored:
    """The stored bytes of a file, as a Python file whose errors are UserError."""

    def __init__(self, file: str, *, random_access: bool = False) -> None:
        self.file, self.done = file, 0
        self.closed = False
        self.size: int | None
        with as_user_error(file):
            if is_url(file):
                self._bytes, self.size = open_url(file, random_access=random_access)
            else:
                self._bytes = io.FileIO(open_local(file))
                self.size = os.fstat(self._bytes.fileno()).st_size

    def read(self, size: int = PIECE_BYTES) -> bytes:
        with as_user_error(self.file):
            piece: bytes = self._bytes.read(size)
        self.done += len(piece)
        return piece

    def seekable(self) -> bool:
        """Whether it supports random access: reads its last byte."""
        try:
            with as_user_error(self.file):
                self._bytes.seek(max(0, (self.size or 0) - 1))
                self._bytes.read(1)
                self._bytes.seek(0)
        except (ValueError, NotImplementedError):  # of a web server that gives no parts
            return False
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        with as_user_error(self.file):
            place: int = self._bytes.seek(offset, whence)
        return place

    def tell(self) -> int:
        place: int = self._bytes.tell()
        return place

    def close(self) -> None:
        self.closed = True
        self._bytes.close()


def _decode_pieces(stored: _Stored, data: Data) -> Generator[bytes, None, None]:
    """Yields the file's text, unpacked and in UTF-8."""
    name = name_of(stored.file).lower()
    packing = next((packing for suffix, packing in PACKED.items() if name.endswith(suffix)), None)
    unpacked = iter(stored.read, b"") if packing is None else _unpack(stored, packing)
    capped = _limit_size(unpacked, stored, data, packing)
    first = next(capped, b"")
    _need_text(first, stored.file)
    encoding = codecs.lookup(data.encoding).name
    if encoding in ("utf-8", "utf-8-sig"):
        _need_utf8(first, stored.file)
        yield first.removeprefix(codecs.BOM_UTF8)
        yield from capped
        return
    if encoding in ("utf-16", "utf-32") and first and _find_mark(first) != encoding:
        others = f"utf-8, {encoding}-le or {encoding}-be"
        message = f"has no mark of its byte order, so it is not {encoding}: is it {others}? Set data.encoding."
        raise UserError.of("data", display_name(stored.file), message)
    decoder = codecs.getincrementaldecoder(encoding)(_NOT_DECODED)
    yield _encode(decoder.decode(first, final=False)).removeprefix(codecs.BOM_UTF8)
    for piece in capped:
        yield _encode(decoder.decode(piece, final=False))
    yield _encode(decoder.decode(b"", final=True))


def _separate(pieces: Iterator[bytes], delimiter: bytes, most: int) -> Generator[bytes, None, None]:
    """Yields the same text with SEPARATOR in place of the first delimiters of each line."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield b"".join(line.replace(delimiter, SEPARATOR, most) + b"\n" for line in lines)
        if len(rest) > LONGEST_ROW_BYTES:  # which the reader refuses
            yield rest
            rest = b""
    yield rest.replace(delimiter, SEPARATOR, most)


def _unpack(stored: _Stored, packing: str) -> Iterator[bytes]:
    try:
        with pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), packing) as stream:
            while piece := stream.read(PIECE_BYTES):
                yield piece
    except (OSError, pa.ArrowException) as error:
        message = f"is damaged, cut short, or not packed by {packing} ({error}): copy or pack it again."
        raise UserError.of("data", display_name(stored.file), message) from error


def _limit_size(pieces: Iterator[bytes], stored: _Stored, data: Data, packing: str | None) -> Iterator[bytes]:
    """Yields the same pieces. Raises UserError if they exceed `data.max_file_gb`."""
    most, done = data.max_file_gb * 1e9, 0
    known = 0 if packing else stored.size or 0
    packed = f" once unpacked from {stored.size / 1e6:.3g} MB of {packing}" if packing and stored.size else ""
    for piece in pieces:
        done += len(piece)
        if max(done, known) > most:
            message = f"holds more than {data.max_file_gb:g} GB{packed}: if that is intended, raise data.max_file_gb"
            raise UserError.of("data", display_name(stored.file), f"{message}, else it is not the file that it seems.")
        yield piece


def _need_text(start: bytes, file: str) -> None:
    """Raises UserError if a file's first bytes are those of another format."""
    for mark, description in _NO_TEXT.items():
        if start.startswith(mark):
            is_sheet = name_of(file).lower().endswith(SPREADSHEETS)
            message = f"is a spreadsheet: {EXPORT}, and name that file" if is_sheet else f"is no text but {description}"
            raise UserError.of("data", display_name(file), f"{message}.")


def _need_utf8(start: bytes, file: str) -> None:
    """Raises UserError if a file's first bytes are not UTF-8."""
    if encoding := _find_mark(start):
        raise UserError.of(
            "data", display_name(file), f"is {encoding.upper()} by its first bytes: set data.encoding: {encoding}."
        )
    sample = start[:_SAMPLE_BYTES]
    if sample.count(0) > _MANY_NULS * len(sample):
        encoding = "utf-16-le" if sample[1::2].count(0) >= sample[::2].count(0) else "utf-16-be"
        message = f"is no UTF-8: many of its first bytes are NUL. If it is UTF-16 text, set data.encoding: {encoding}."
        raise UserError.of("data", display_name(file), message)


def _find_mark(start: bytes) -> str | None:
    """Returns the encoding by a text's byte order mark."""
    return next((encoding for mark, encoding in MARKS.items() if start.startswith(mark)), None)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
