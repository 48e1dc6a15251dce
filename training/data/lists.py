"""Columns of more than one value a row: lists of texts or labels, and other JSON values.

They come as Arrow lists and objects, or as JSON texts in CSV cells and in Python objects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from training.data.faults import shorten
from training.data.plain_types import is_list, plain, with_label_names
from training.recipe.column_types import EXAMPLES, Form

NESTED = ("texts", "labels", "value", "content")
"""The forms of such columns."""
_ANY_JSON = ("value", "content")
"""The forms that are stored as their JSON."""

_ONLY_TEXT = {str}
_ENTRIES: dict[str, set[type]] = {"texts": {str, type(None)}, "labels": {str, bool, int, type(None)}}
"""The Python types of list entries; None is a missing entry."""

_LIST = r"^\s*\[\s*(?:'.*'|\".*\"|[-0-9][^\[\]]*)?\s*\]\s*$"
"""A cell that is a list of Python or JSON."""

Wrong = dict[int, tuple[str, str, str]]
"""Faults of values by their position in the block: check, description and value."""


class _Misfit(ValueError):
    """A value that fails a check: the check, a description and the value."""


def flat_values(column: pa.Array) -> pa.Array:
    """Returns the values of all lists one after another; a column without lists as it is."""
    return pc.list_flatten(column) if is_list(column.type) else column


def rows_with_any(lists: pa.Array, mask: pa.Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Returns the rows with at least one value that is true in a mask of `flat_values`."""
    rows = np.zeros(len(lists), bool)
    rows[pc.list_parent_indices(lists).filter(mask).to_numpy()] = True
    return rows


def row_sums(lists: pa.Array, numbers: pa.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the sum of each row's numbers, given one for each of `flat_values`."""
    sums = np.zeros(len(lists), np.int64)
    np.add.at(sums, pc.list_parent_indices(lists).to_numpy(), numbers.to_numpy(zero_copy_only=False))
    return sums


def lists_like(lists: pa.Array, values: pa.Array) -> pa.Array:
    """Returns these values as lists with the lengths and nulls of `lists`."""
    ends = np.cumsum(pc.list_value_length(lists).fill_null(0).to_numpy(), dtype=np.int32)
    offsets = pa.array(np.concatenate([np.zeros(1, np.int32), ends]))
    return pa.ListArray.from_arrays(offsets, values, mask=lists.is_null() if lists.null_count else None)


def as_json(value: Any) -> str:
    """Returns the value as JSON, the same for equal values. Raises TypeError, ValueError or RecursionError for a value
    that JSON cannot hold."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_to_json_type)


def _to_json_type(value: Any) -> Any:
    if isinstance(value, bytes):  # an Arrow text that is not decoded yet
        return value.decode()
    if not hasattr(value, "tolist"):  # as arrays and numbers of numpy have
        raise TypeError(f"{type(value).__name__} is not a JSON type")
    return value.tolist()


def split_at(separator: str, column: pa.Array) -> pa.Array:
    """Splits texts at a separator, without white space around the parts. A blank text becomes a missing value."""
    texts = column.cast(pa.string())
    texts = pc.if_else(pc.equal(pc.utf8_trim_whitespace(texts), ""), None, texts)
    parts = pc.split_pattern(texts, separator)
    return lists_like(parts, pc.utf8_trim_whitespace(flat_values(parts)))


def split_cells(separator: str, column: pa.Array, name: str) -> tuple[pa.Array, Wrong]:
    """Splits the texts of a column as `split_at` does, and names those that are lists already: their brackets and
    quotation marks would become parts of labels."""
    texts = column.cast(pa.string())
    is_list = pc.fill_null(pc.match_substring_regex(texts, _LIST), False)
    wrong = {
        place: _list_fault(separator, name, texts[place].as_py()) for place in pc.indices_nonzero(is_list).to_pylist()
    }
    return split_at(separator, pc.if_else(is_list, None, texts)), wrong


def _list_fault(separator: str, name: str, text: str) -> tuple[str, str, str]:
    description = (
        f"holds a list in brackets in column {name!r}, where data.label_separator {separator!r} splits texts without "
        f"them; with data.label_separator: null, such a cell is JSON: {EXAMPLES['labels']}"
    )
    return "malformed", description, f": {shorten(text)}"


def texts_as_json(column: pa.Array) -> pa.Array:
    """Returns the JSON of cells of the form content: cells that begin with `[{` are JSON already, others are texts. A
    blank cell becomes a missing value."""
    return pa.array([_content_as_json(cell) for cell in column.to_pylist()], pa.string())


def _content_as_json(cell: str | None) -> str | None:
    if cell is None or not cell.strip():
        return None
    return cell if cell.lstrip().startswith("[{") else as_json(cell)


def from_json(column: pa.Array, name: str, form: Form, separator: str | None = None) -> tuple[pa.Array, Wrong]:
    """Parses a column of JSON texts: into lists of texts (whole numbers and truths as they are spelt), or
    for any JSON value into normalized JSON. With a separator, a text is split into a list. An empty cell becomes a
    missing value."""

    def parse(text: str) -> Any:
        try:
            value = json.loads(text) if text.strip() else None
        except (ValueError, RecursionError) as error:
            description = f"holds no JSON such as {EXAMPLES[form]} in column {name!r}"
            raise _Misfit("malformed", description, f": {shorten(text)}") from error
        if separator is None or not isinstance(value, str):
            return value
        try:
            split, wrong = split_cells(separator, pa.array([value]), name)
        except UnicodeEncodeError:  # half a character
            raise _Misfit(*_encoding_fault(name)) from None
        if wrong:
            raise _Misfit(*wrong[0])
        return split[0].as_py()

    return _convert_each(column.to_pylist(), lambda text: _check_value(parse(text), name, form), form)


def from_arrow(column: pa.Array, name: str, form: Form, names: Sequence[str]) -> tuple[pa.Array, Wrong]:
    """Converts Arrow lists and objects in the same way; whole numbers become the label names at these indices. Returns
    columns of other types unchanged."""
    if form in _ANY_JSON:
        return _convert_each(plain(column), lambda value: _check_value(value.as_py(), name, form), form)
    if types.is_null(column.type):
        return pa.nulls(len(column), pa.list_(pa.string())), {}
    if not is_list(column.type):
        return column, {}
    values = with_label_names(plain(flat_values(column)), names if form == "labels" else ())
    type_checks = [types.is_binary, types.is_large_binary, types.is_string, types.is_null]
    if form == "labels":
        type_checks += [types.is_integer, types.is_boolean]
    if not any(check(values.type) for check in type_checks):
        return column, {}
    wrong: Wrong = {}
    try:
        values = values.cast(pa.string())
    except pa.ArrowInvalid:
        is_invalid = pa.array([not _is_text(value) for value in values.to_pylist()], pa.bool_())
        wrong = {place: _encoding_fault(name) for place in np.flatnonzero(rows_with_any(column, is_invalid)).tolist()}
        values = pc.if_else(is_invalid, None, values).cast(pa.string())
    return lists_like(column, values.fill_null("")), wrong


def _convert_each(values: Any, convert: Callable[[Any], Any], form: Form) -> tuple[pa.Array, Wrong]:
    converted: list[Any] = []
    wrong: Wrong = {}
    for place, value in enumerate(values):
        try:
            converted.append(None if value is None else convert(value))
        except _Misfit as misfit:
            converted.append(None)
            wrong[place] = misfit.args
    return pa.array(converted, pa.string() if form in _ANY_JSON else pa.list_(pa.string())), wrong


def _check_value(value: Any, name: str, form: Form) -> Any:
    """Returns one value as it is stored. Raises _Misfit if it is not of the form."""
    if value is None:
        return None
    try:
        if form in _ANY_JSON:
            return _need_utf8(as_json(value))
        if isinstance(value, list) and _ENTRIES[form].issuperset(map(type, value)):
            converted = value if _ONLY_TEXT.issuperset(map(type, value)) else list(map(_spell_label, value))
            _need_utf8("".join(converted))
            return converted
    except UnicodeEncodeError as error:
        raise _Misfit(*half_character_fault(name)) from error
    except UnicodeDecodeError as error:
        raise _Misfit(*_encoding_fault(name)) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise _Misfit("type", f"holds a value that JSON cannot write in column {name!r}", f" ({error})") from error
    expected = "texts" if form == "texts" else "labels, which are texts or whole numbers,"
    raise _Misfit("type", f"holds no list of {expected} in column {name!r}", f": {shorten(value)}")


def _need_utf8(value: str) -> str:
    """Returns the text. Raises UnicodeEncodeError if UTF-8 cannot encode it."""
    if not value.isascii():
        value.encode()
    return value


def _spell_label(value: str | bool | int | None) -> str:
    """Returns the spelling of a list entry; an empty text for a missing one."""
    if isinstance(value, str):
        return value
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _is_text(value: bytes | None) -> bool:
    try:
        return value is None or value.decode() is not None
    except UnicodeDecodeError:
        return False


def half_character_fault(name: str) -> tuple[str, str, str]:
    """Returns the fault of a text with half a surrogate pair: JSON and Python can hold it, but no encoding can."""
    return "malformed", f"holds half a character (such as \\ud83d without its other half) in column {name!r}", ""


def _encoding_fault(name: str) -> tuple[str, str, str]:
    return "encoding", "is not UTF-8 text", f" (column {name!r})"
