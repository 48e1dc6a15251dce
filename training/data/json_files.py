"""Rows of JSON files: JSON lines, one array of objects, or objects one after another. A table in another shape is
refused by its shape.

Python's json parses the lines, since pyarrow's reader stops at the first line that differs and does not name it. ijson
parses arrays, one object at a time.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from training.data.arrow_columns import NESTED
from training.data.batch_requests import is_request
from training.data.decoding import TextFile, open_text
from training.data.file_systems import PIECE_BYTES, display_name
from training.data.readers import Block, source_error
from training.data.row_dicts import from_mappings
from training.data.row_problems import RowProblem

if TYPE_CHECKING:
    from training.data.readers import ExtraColumns
    from training.recipe.source_columns import SourceColumns


def read_json(wanted: SourceColumns, split: str, pinned: Mapping[str, Any], slices: ExtraColumns) -> Iterator[Block]:
    """JSON lines, one object a line, blank lines skipped; or one array of objects, also as the one list of an object,
    such as `{"data": […]}`; or objects one after another, each on one line or several."""
    for file in pinned[split]:
        where = display_name(file)
        with open_text(file, wanted.data) as raw:
            for block in from_mappings(json_values(raw, where, wanted), wanted, where, slices):
                yield replace(block, share=raw.share)


def json_values(file: TextFile, where: str, wanted: SourceColumns) -> Iterator[tuple[int, Any]]:
    """Returns the numbered values of a file, with a RowProblem in place of a line that is not JSON.

    Raises UserError for a table in another shape than rows.
    """
    start = file.peek(PIECE_BYTES).decode(errors="replace").lstrip(" \t\r\n")
    if start.startswith("["):
        if start[1:].lstrip().startswith("["):
            raise source_error(where, f"holds {_UNNAMED}")
        return _read_elements(file, where, "item")
    try:
        first, end = json.JSONDecoder().raw_decode(start)
    except (ValueError, RecursionError):  # a line that is not JSON, or an object that is longer than the start
        lines = start.split("\n", 2)
        is_long = len(lines) == 1 and len(start) > PIECE_BYTES // 2
        goes_on = len(lines) > 1 and lines[0].rstrip().endswith(("{", "[", ",")) and not lines[1].startswith("{")
        names = _names_of(wanted)
        if (is_long or goes_on) and (opening := _LIST_OF_LISTS.match(start)) and json.loads(opening[1]) not in names:
            raise source_error(where, f"holds {_UNNAMED}") from None
        if (is_long or goes_on) and (opening := _LIST_OF_OBJECTS.match(start)):
            name, first_row = json.loads(opening[1]), start[opening.end() : opening.end() + PIECE_BYTES // 16]
            if name not in names and any(json.dumps(column) in first_row for column in names):
                return _read_elements(file, where, f"{name}.item")
        return _read_elements(file, where, "") if goes_on else _read_lines(file, where)
    rest = start[end:].lstrip(" \t\r")
    if isinstance(first, dict) and not rest.strip():
        lists = [rows for rows in first.values() if isinstance(rows, list) and rows and isinstance(rows[0], list)]
        if lists and len(lists) == len(first) and not _names_of(wanted) & first.keys():
            raise source_error(where, f"holds {_UNNAMED}")
        rows_under = _find_list(first, wanted, where) if len(start) < PIECE_BYTES // 2 else None
        if rows_under is not None:
            return _read_elements(file, where, f"{rows_under}.item")
    is_joined = rest.startswith("{") or "\n" in start[:end]
    return _read_elements(file, where, "") if is_joined else _read_lines(file, where)


def _names_of(wanted: SourceColumns) -> set[str]:
    """The names of columns to read, before and after data.rename."""
    return {*wanted.names, *wanted.source_names.values()}


def _find_list(only: Mapping[str, Any], wanted: SourceColumns, where: str) -> str | None:
    """Returns the name of the list of rows in the one object of a file; None if the object is a row.

    Raises UserError for a table in another shape.
    """
    names = _names_of(wanted)
    plain = {wanted.source_names[name] for name in wanted.names if wanted.form_of(name) not in NESTED}
    if any(isinstance(only.get(name), dict | list) for name in plain):
        raise source_error(where, f"holds its table by columns: {RECORDS}")
    if names & only.keys() or is_request(only):
        return None
    lists = [name for name, rows in only.items() if isinstance(rows, list) and rows and isinstance(rows[0], dict)]
    with_columns = [name for name in lists if names & only[name][0].keys()]
    if len(with_columns) == 1:
        return with_columns[0]
    if with_columns:
        message = (
            f"holds lists of rows under several names ({', '.join(with_columns)}): write each to a file of its own"
        )
        raise source_error(where, message)
    if isinstance(only.get("columns"), list) and isinstance(only.get("data"), list):
        raise source_error(where, f"holds its columns' names apart from its rows: {RECORDS}")
    if only and all(isinstance(row, dict) and names & row.keys() for row in only.values()):
        raise source_error(where, f"holds its rows by index: {RECORDS}")
    return None


def _read_lines(lines: TextFile, where: str) -> Iterator[tuple[int, Any]]:
    number = 0
    while line := lines.readline(LONGEST_ELEMENT_BYTES + 1):
        number += 1
        if len(line) > LONGEST_ELEMENT_BYTES:
            while line and not line.endswith(b"\n"):
                line = lines.readline(PIECE_BYTES)
            yield number, RowProblem(number, "long_text", f"has more than {LONGEST_ELEMENT_BYTES / 2**20:g} MiB")
            continue
        line = line.removeprefix(codecs.BOM_UTF8)  # of joined files, each with its mark
        if line.strip():
            yield number, _parse_line(number, line)


def _parse_line(number: int, line: bytes) -> Any:
    """Returns the value of one line, or its problem."""
    try:
        if line.count(b"[") + line.count(b"{") > MAX_DEPTH and _depth(line) > MAX_DEPTH:
            return RowProblem(number, "malformed", "has brackets in brackets", f", more than {MAX_DEPTH} deep")
        text = line.decode()
        stripped = text.rstrip()
        return _DECODER.decode(stripped[:-1] if stripped.endswith("},") else text)
    except _RepeatedName as error:
        return _repeated(number, str(error))
    except UnicodeDecodeError as error:
        return RowProblem(number, "encoding", "is not UTF-8 text", f" (byte 0x{line[error.start]:02x})")
    except json.JSONDecodeError as error:
        column = min(error.pos, len(error.doc.rstrip())) + 1  # not beyond the line's end, which starts another line
        return RowProblem(number, "malformed", "is not JSON", f" ({error.msg}, column {column})")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets in brackets
        return RowProblem(number, "malformed", "is not JSON that can be read", f" ({str(error).partition(';')[0]})")


def _read_elements(file: TextFile, where: str, place: str) -> Iterator[tuple[int, Any]]:
    """Yields the values at a place, as ijson names it: `item` of an array, or empty for values one after another."""
    import ijson

    number = 0
    try:
        options = {"use_float": True, "map_type": _Object, "multiple_values": not place}
        elements = ijson.items(_Shallow(file, where), place, **options)
        for number, row in enumerate(elements, 1):
            name = _find_repeated(row)
            yield number, row if name is None else _repeated(number, name)
    except (ijson.JSONError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        shape = "a JSON array" if place else "JSON"
        raise source_error(where, f"is not {shape} to its end: after row {number}, {reason}") from error


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
        counts = Counter(name for name, _ in pairs)
        raise _RepeatedName(next(name for name, count in counts.items() if count > 1))
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


def _repeated(number: int, name: str) -> RowProblem:
    return RowProblem(number, "malformed", "has an object with one name twice", f" ({name!r})")


RECORDS = 'write it with a line a row (in pandas, orient="records", lines=True)'
_UNNAMED = (
    'rows as lists without names: write a row as an object such as {"text": …, "label": …}, a row a line, and each '
    "split into a file of its own"
)
_LIST_OF_LISTS = re.compile(r'\{\s*("(?:[^"\\]|\\.)*")\s*:\s*\[\s*\[')
_LIST_OF_OBJECTS = re.compile(r'\{\s*("(?:[^"\\]|\\.)*")\s*:\s*\[\s*\{')
LONGEST_ELEMENT_BYTES = 16 * 2**20
"""Of an array."""
MAX_DEPTH = 100
"""Of brackets in brackets: a value within objects and lists."""
_ESCAPED, _TEXTS = re.compile(rb"\\.", re.DOTALL), re.compile(rb'"[^"]*"')
_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
