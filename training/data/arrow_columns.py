"""Arrow columns of any type as plain ones: without dictionaries, views or extensions; and columns of more than one
value a row, lists of texts or labels and other JSON values, which come as Arrow lists and objects, or as JSON texts in
CSV cells and in Python objects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from training.data.conversation_forms import as_messages
from training.data.row_problems import shorten
from training.recipe.column_types import EXAMPLES, Form

_BYTES = (
    (types.is_string, pa.binary()),
    (types.is_large_string, pa.large_binary()),
    (types.is_string_view, pa.binary_view()),
)
"""The types of texts, each with the type of the same bytes."""
_LISTS = (
    (types.is_list, pa.list_),
    (types.is_large_list, pa.large_list),
    (types.is_list_view, pa.list_view),
    (types.is_large_list_view, pa.large_list_view),
)
"""The types of lists of any length, with their constructors."""


def plain(column: pa.Array) -> pa.Array:
    """Returns the column in a type that all Arrow functions support: texts as bytes, which may be invalid UTF-8, and
    values in place of dictionaries, views and extensions, also within lists and objects."""
    return decoded(as_bytes(column))


def as_bytes(column: pa.Array) -> pa.Array:
    """Returns texts as bytes, and extensions as their storage, without a copy. Within lists and objects, columns of
    type null become booleans without values."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if types.is_dictionary(column.type):
        # Arrow cannot take values from views, so a dictionary of views is decoded.
        return pa.DictionaryArray.from_arrays(column.indices, plain(column.dictionary))
    for is_text, to in _BYTES:
        if is_text(column.type):
            return column.view(to)
    if not types.is_nested(column.type):
        return column
    if (typed := _replace_types(column.type, _null_as_boolean)) != column.type:
        column.validate()
        column = column.cast(typed)  # a view of lists and objects with columns of type null has wrong lengths
    return column.view(_replace_types(column.type, _bytes_type))


def decoded(column: pa.Array) -> pa.Array:
    """Returns the result of `as_bytes` with values in place of dictionaries and views."""
    if types.is_dictionary(column.type) and not types.is_nested(column.type.value_type):
        column = column.dictionary.take(column.indices)
    if types.is_binary_view(column.type) or types.is_fixed_size_binary(column.type):
        return column.cast(pa.binary())
    if types.is_nested(column.type) and (to := _replace_types(column.type, _value_type)) != column.type:
        # A slice of lists still holds all values: `take` keeps only those of its rows.
        return column.take(pa.array(np.arange(len(column)))).cast(to)
    return column


def _bytes_type(kind: pa.DataType) -> pa.DataType:
    return next((to for is_text, to in _BYTES if is_text(kind)), kind)


def _null_as_boolean(kind: pa.DataType) -> pa.DataType:
    return pa.bool_() if types.is_null(kind) else kind


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if types.is_dictionary(kind) else kind


def _replace_types(kind: pa.DataType, make: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Returns the type with the types of its single values replaced, at any depth."""
    for is_list_of, of in _LISTS:
        if is_list_of(kind):
            return of(kind.value_field.with_type(_replace_types(kind.value_type, make)))
    if types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_replace_types(kind.value_type, make)), kind.list_size)
    if types.is_struct(kind):
        return pa.struct([field.with_type(_replace_types(field.type, make)) for field in kind])
    return make(kind)


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type has a list a row."""
    return types.is_fixed_size_list(kind) or any(is_list_of(kind) for is_list_of, _ in _LISTS)


def with_label_names(column: pa.Array, names: Sequence[str]) -> pa.Array:
    """Replaces whole numbers by the names with these indices, or by their spelling if there is none. Returns the column
    as it is if there are no names or no whole numbers."""
    if not names or not (types.is_integer(column.type) or types.is_boolean(column.type)):
        return column
    spelt, places = column.cast(pa.string()), pa.array([str(place) for place in range(len(names))], pa.string())
    return pc.coalesce(pa.array(names, pa.string()).take(pc.index_in(spelt, value_set=places)), spelt)


def unpacked_sizes(column: pa.Array) -> np.ndarray[Any, np.dtype[Any]]:
    """Returns the bytes of each row's values that `decoded` would take from dictionaries, at any depth."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    kind = column.type
    sizes: np.ndarray[Any, np.dtype[Any]] = np.zeros(len(column))
    if types.is_dictionary(kind):
        lengths = _lengths(column.dictionary)
        sizes = lengths.take(column.indices).fill_null(0).to_numpy(zero_copy_only=False).astype(float)
    elif types.is_struct(kind):
        sizes = sum((unpacked_sizes(field) for field in column.flatten()), sizes)
    elif is_list(kind) and (inner := unpacked_sizes(column.flatten())).any():
        sizes = np.bincount(pc.list_parent_indices(column).to_numpy(), inner, len(column))
    return sizes


def longest_values(column: pa.Array) -> int:
    """Returns the bytes that the column would have if each value were the longest of its dictionary, at any depth."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    kind = column.type
    if types.is_dictionary(kind):
        return len(column) * (pc.max(_lengths(column.dictionary)).as_py() or 0)
    if types.is_struct(kind):
        return sum(map(longest_values, column.flatten()))
    return longest_values(column.flatten()) if is_list(kind) else 0


def _lengths(values: pa.Array) -> pa.Array:
    """Returns the bytes of each value; 0 for values that are no texts."""
    values = as_bytes(values)
    if types.is_binary_view(values.type):
        values = values.cast(pa.large_binary())
    if not (types.is_binary(values.type) or types.is_large_binary(values.type)):
        return pa.array(np.zeros(len(values), np.int64))
    return pc.binary_length(values).fill_null(0).cast(pa.int64())


def text_sizes(column: pa.Array) -> np.ndarray[Any, np.dtype[Any]]:
    """Returns the bytes of each row's texts; zeros for a column without texts."""
    values = pc.list_flatten(column) if is_list(column.type) else column
    if not types.is_string(values.type):
        return np.zeros(len(column))
    sizes = pc.binary_length(values).fill_null(0).to_numpy(zero_copy_only=False)
    rows = pc.list_parent_indices(column).to_numpy() if is_list(column.type) else np.arange(len(column))
    return np.bincount(rows, sizes, len(column))


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
"""Problems of values by their position in the block: check, description and value."""


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
    """Splits the texts of a column as `split_at` does. Also returns a problem for each text that is a list already,
    because its brackets and quotation marks would become parts of labels."""
    texts = column.cast(pa.string())
    in_brackets = pc.fill_null(pc.match_substring_regex(texts, _LIST), False)
    places = pc.indices_nonzero(in_brackets).to_pylist()
    wrong = {place: _list_problem(separator, name, texts[place].as_py()) for place in places}
    return split_at(separator, pc.if_else(in_brackets, None, texts)), wrong


def _list_problem(separator: str, name: str, text: str) -> tuple[str, str, str]:
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
            raise _Misfit(*_encoding_problem(name)) from None
        if wrong:
            raise _Misfit(*wrong[0])
        return split[0].as_py()

    return _convert_each(column.to_pylist(), lambda text: _check_value(parse(text), name, form), form)


def from_arrow(column: pa.Array, name: str, form: Form, names: Sequence[str]) -> tuple[pa.Array, Wrong]:
    """Converts Arrow lists and objects in the same way; whole numbers become the label names at these indices. Returns
    columns of other types unchanged."""
    if form in _ANY_JSON:
        return _convert_each(
            plain(column), lambda value: _check_value(as_messages(value.as_py(), from_arrow=True), name, form), form
        )
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
        wrong = {place: _encoding_problem(name) for place in np.flatnonzero(rows_with_any(column, is_invalid)).tolist()}
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
            return _need_utf8(as_json(as_messages(value)))
        if isinstance(value, list) and _ENTRIES[form].issuperset(map(type, value)):
            converted = value if _ONLY_TEXT.issuperset(map(type, value)) else list(map(_spell_label, value))
            _need_utf8("".join(converted))
            return converted
    except UnicodeEncodeError as error:
        raise _Misfit(*half_character_problem(name)) from error
    except UnicodeDecodeError as error:
        raise _Misfit(*_encoding_problem(name)) from error
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


def half_character_problem(name: str) -> tuple[str, str, str]:
    """Returns the problem of a text with half a surrogate pair: JSON and Python can hold it, but no encoding can."""
    return "malformed", f"holds half a character (such as \\ud83d without its other half) in column {name!r}", ""


def _encoding_problem(name: str) -> tuple[str, str, str]:
    return "encoding", "is not UTF-8 text", f" (column {name!r})"
