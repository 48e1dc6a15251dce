"""Rows of JSON files: JSON lines, or one array of objects.

Python's json parses the lines, since pyarrow's reader stops at the first line that differs and does not name it. ijson
parses arrays, one object at a time.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from training.data.blocks import Block, source_error
from training.data.decoding import LONGEST_ROW_BYTES, Opened, opened
from training.data.faults import Fault, shortened
from training.data.file_systems import display_name
from training.data.mappings import from_mappings

if TYPE_CHECKING:
    from training.data.slice_columns import SliceColumns
    from training.recipe.source_columns import SourceColumns


def read_json(wanted: SourceColumns, split: str, pinned: Mapping[str, Any], slices: SliceColumns) -> Iterator[Block]:
    """JSON lines, one object a line, blank lines skipped; or one array of objects."""
    for file in pinned[split]:
        where = display_name(file)
        with opened(file, wanted.data) as raw:
            lines = io.BufferedReader(raw, 2**20)
            array = lines.peek(1000).lstrip(b" \t\r\n").startswith(b"[")
            rows = _elements(_Array(lines, where), where) if array else _lines(lines, where)
            for block in from_mappings(rows, wanted, where, slices):
                yield replace(block, share=raw.share)


def _lines(lines: io.BufferedReader[Opened], where: str) -> Iterator[tuple[int, Any]]:
    number = 0
    while line := lines.readline(LONGEST_ROW_BYTES + 1):
        number += 1
        if len(line) > LONGEST_ROW_BYTES:
            raise source_error(
                where, f"has a line of more than {LONGEST_ROW_BYTES:,} bytes (line {number}): one object a line"
            )
        if line.strip():
            yield number, _parsed(number, line)


def _parsed(number: int, line: bytes) -> Any:
    """Returns the value of one line, or its fault."""
    try:
        return json.loads(line.decode(), object_pairs_hook=_unique)
    except _KeyTwice as error:
        return _twice(number, str(error))
    except UnicodeDecodeError as error:
        return Fault(number, "encoding", "is not UTF-8 text", f" (byte 0x{line[error.start]:02x})")
    except json.JSONDecodeError as error:
        return Fault(number, "malformed", "is not JSON", f" ({error.msg}, column {error.colno})")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets in brackets
        return Fault(number, "malformed", "is not JSON that can be read", f" ({str(error).partition(';')[0]})")


class _KeyTwice(ValueError):
    """An object has this key twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds an object. Raises _KeyTwice."""
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
        names = [name for name, _ in pairs]
        raise _KeyTwice(next(name for name in names if names.count(name) > 1))
    return parsed


def _twice(number: int, key: str) -> Fault:
    return Fault(number, "malformed", "has an object with one key twice", f" ({shortened(key)})")


class _Array:
    """The bytes of a JSON array, with a limit on the size of one element."""

    def __init__(self, file: io.BufferedReader[Opened], where: str) -> None:
        self._file, self._where = file, where
        self.row = 0
        self._of_row = 0

    def read(self, size: int = -1) -> bytes:
        """Returns the next bytes. Raises UserError if the element is too long."""
        self._of_row += size
        if self._of_row > LONGEST_ROW_BYTES:
            message = f"has an element of more than {LONGEST_ROW_BYTES:,} bytes after row {self.row}"
            raise source_error(self._where, message)
        return self._file.read(size)

    def end_element(self, row: int) -> None:
        """Resets the size at the end of an element."""
        self.row, self._of_row = row, 0


class _Object(dict[str, Any]):
    """An object of a JSON array that records a repeated key."""

    twice: str | None = None

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self:
            self.twice = key
        super().__setitem__(key, value)


_Object.__name__ = "dict"  # the type in messages


def _key_twice(value: Any) -> str | None:
    """Returns a key that an object within the value has twice; None if there is none."""
    if isinstance(value, _Object) and value.twice is not None:
        return value.twice
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    found = (_key_twice(one) for one in inside if isinstance(one, dict | list))
    return next((key for key in found if key is not None), None)


def _elements(array: _Array, where: str) -> Iterator[tuple[int, Any]]:
    import ijson

    number = 0
    try:
        for number, row in enumerate(ijson.items(array, "item", use_float=True, map_type=_Object), 1):
            array.end_element(number)
            key = _key_twice(row)
            yield number, row if key is None else _twice(number, key)
    except (ijson.JSONError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise source_error(where, f"is not a JSON array to its end: after row {number}, {reason}") from error
