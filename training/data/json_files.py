"""Rows of JSON files: JSON lines, or one array of objects.

Python's json parses the lines, since pyarrow's reader stops at the first line that differs and does not name it. ijson
parses arrays, one object at a time.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from training.data.blocks import Block, source_error
from training.data.decoding import LONGEST_ROW_BYTES, TextFile, open_text
from training.data.faults import Fault
from training.data.file_systems import display_name
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
    while line := lines.readline(LONGEST_ROW_BYTES + 1):
        number += 1
        if len(line) > LONGEST_ROW_BYTES:
            raise source_error(
                where, f"has a line of more than {LONGEST_ROW_BYTES:,} bytes (line {number}): one object a line"
            )
        line = line.removeprefix(codecs.BOM_UTF8)  # of joined files, each with its mark
        if line.strip():
            yield number, _parse_line(number, line)


def _parse_line(number: int, line: bytes) -> Any:
    """Returns the value of one line, or its fault."""
    try:
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
        for number, row in enumerate(ijson.items(array, "item", use_float=True, map_type=_Object), 1):
            name = _find_repeated(row)
            yield number, row if name is None else _repeated(number, name)
    except (ijson.JSONError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise source_error(where, f"is not a JSON array to its end: after row {number}, {reason}") from error


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


def _repeated(number: int, name: str) -> Fault:
    return Fault(number, "malformed", "has an object with one name twice", f" ({name!r})")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
