"""Rows of JSON files: JSON lines, or one array of objects.

Python's json parses the lines, since pyarrow's reader stops at the first line that differs and does not name it. ijson
parses arrays, one object at a time.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from training.data.blocks import Block, source_error
from training.data.decoding import TextFile, open_text
from training.data.faults import Fault
from training.data.file_systems import PIECE_BYTES, display_name
from training.data.mappings import from_mappings

if TYPE_CHECKING:
    from training.data.blocks import ExtraColumns
    from training.recipe.source_columns import SourceColumns


def read_json(wanted: SourceColumns, split: str, pinned: Mapping[str, Any], slices: ExtraColumns) -> Iterator[Block]:
    """JSON lines, one object a line, blank lines skipped; or one array of objects."""
    for file in pinned[split]:
        where = display_name(file)
        with open_text(file, wanted.data) as raw:
            for block in from_mappings(json_values(raw, where), wanted, where, slices):
                yield replace(block, share=raw.share)


def json_values(file: TextFile, where: str) -> Iterator[tuple[int, Any]]:
    """Returns the numbered values of a file, with a Fault in place of a line that is not JSON."""
    is_array = file.peek(1000).lstrip(b" \t\r\n").startswith(b"[")
    return _read_elements(file, where) if is_array else _read_lines(file, where)


def _read_lines(lines: TextFile, where: str) -> Iterator[tuple[int, Any]]:
    number = 0
    while line := lines.readline(LONGEST_ELEMENT_BYTES + 1):
        number += 1
        if len(line) > LONGEST_ELEMENT_BYTES:
            while line and not line.endswith(b"\n"):
                line = lines.readline(PIECE_BYTES)
            yield number, Fault(number, "long_text", f"has more than {LONGEST_ELEMENT_BYTES / 2**20:g} MiB")
            continue
        line = line.removeprefix(codecs.BOM_UTF8)  # of joined files, each with its mark
        if line.strip():
            yield number, _parse_line(number, line)


def _parse_line(number: int, line: bytes) -> Any:
    """Returns the value of one line, or its fault."""
    try:
        if line.count(b"[") + line.count(b"{") > MAX_DEPTH and _depth(line) > MAX_DEPTH:
            return Fault(number, "malformed", "has brackets in brackets", f", more than {MAX_DEPTH} deep")
        return _DECODER.decode(line.decode())
    except _RepeatedName as error:
        return _repeated(number, str(error))
    except UnicodeDecodeError as error:
        return Fault(number, "encoding", "is not UTF-8 text", f" (byte 0x{line[error.start]:02x})")
    except json.JSONDecodeError as error:
        column = min(error.pos, len(error.doc.rstrip())) + 1  # not beyond the line's end, which starts another line
        return Fault(number, "malformed", "is not JSON", f" ({error.msg}, column {column})")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets in brackets
        return Fault(number, "malformed", "is not JSON that can be read", f" ({str(error).partition(';')[0]})")


def _read_elements(array: TextFile, where: str) -> Iterator[tuple[int, Any]]:
    import ijson

    number = 0
    try:
        elements = ijson.items(_Shallow(array, where), "item", use_float=True, map_type=_Object)
        for number, row in enumerate(elements, 1):
            name = _find_repeated(row)
            yield number, row if name is None else _repeated(number, name)
    except (ijson.JSONError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise source_error(where, f"is not a JSON array to its end: after row {number}, {reason}") from error


class _Shallow:
    """A JSON array for ijson, which needs memory for the square of the depth of brackets in brackets, and for a whole
    element. Raises UserError at a depth of more than MAX_DEPTH, and for an element of more than LONGEST_ELEMENT_BYTES.
    """

    def __init__(self, file: TextFile, where: str) -> None:
        self._file, self._where = file, where
        self._depth, self._in_text, self._escapes = 0, False, False
        self._bytes = 0  # of the present element

    def read(self, size: int = -1) -> bytes:
        piece: bytes = self._file.read(size)
        if piece and self._deepest(piece) > MAX_DEPTH:
            raise source_error(self._where, f"has brackets in brackets, more than {MAX_DEPTH} deep: make it flatter")
        if self._bytes > LONGEST_ELEMENT_BYTES:
            most = f"{LONGEST_ELEMENT_BYTES / 2**20:g} MiB"
            raise source_error(self._where, f"has an element of more than {most}: is a bracket never closed?")
        return piece

    def _deepest(self, piece: bytes) -> int:
        """Returns the depth at the deepest place of the next piece."""
        plain = b"." + piece[1:] if self._escapes else piece
        if b"\\" in plain:
            plain = _ESCAPED.sub(b"..", plain)
        self._escapes = plain.endswith(b"\\")
        codes = np.frombuffer(plain, np.uint8)
        in_text = (np.cumsum(codes == ord('"')) + self._in_text) % 2 == 1
        codes = np.where(in_text, 0, codes)
        steps = np.isin(codes, (ord("["), ord("{"))).astype(np.int64) - np.isin(codes, (ord("]"), ord("}")))
        depths = self._depth + np.cumsum(steps)
        self._depth, self._in_text = int(depths[-1]), bool(in_text[-1])
        ends = np.flatnonzero(depths <= 1)
        self._bytes = len(piece) - 1 - int(ends[-1]) if len(ends) else self._bytes + len(piece)
        return int(depths.max())


class _RepeatedName(Exception):
    """A name that an object has twice, of whose values Python would keep the last."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedName(next(name for name in names if names.count(name) > 1))
    return values


class _Object(dict[str, Any]):
    """An object of an array, which remembers a name that it has twice."""

    repeated: str | None = None

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self:
            self.repeated = name
        super().__setitem__(name, value)


def _find_repeated(value: Any) -> str | None:
    """Returns a name that an object within the value has twice; None if there is none."""
    if isinstance(value, _Object) and value.repeated is not None:
        return value.repeated
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((name for part in inner if (name := _find_repeated(part)) is not None), None)


def _depth(line: bytes) -> int:
    """Returns the depth of a line's brackets at its deepest place."""
    codes = np.frombuffer(_TEXTS.sub(b"", _ESCAPED.sub(b"", line)), np.uint8)
    steps = np.isin(codes, (ord("["), ord("{"))).astype(np.int64) - np.isin(codes, (ord("]"), ord("}")))
    return int(np.cumsum(steps).max(initial=0))


def _repeated(number: int, name: str) -> Fault:
    return Fault(number, "malformed", "has an object with one name twice", f" ({name!r})")


LONGEST_ELEMENT_BYTES = 16 * 2**20
"""Of an array."""
MAX_DEPTH = 100
"""Of brackets in brackets: a value within objects and lists."""
_ESCAPED, _TEXTS = re.compile(rb"\\.", re.DOTALL), re.compile(rb'"[^"]*"')
_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
