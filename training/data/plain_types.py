"""Arrow columns of any type as plain ones: no dictionaries, views or extensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

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
    """Returns texts as bytes, and extensions as their storage, without a copy."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if types.is_dictionary(column.type):
        # Arrow cannot take values from views, so a dictionary of views is decoded.
        return pa.DictionaryArray.from_arrays(column.indices, plain(column.dictionary))
    for is_text, to in _BYTES:
        if is_text(column.type):
            return column.view(to)
    return column.view(_replace_types(column.type, _bytes_type)) if types.is_nested(column.type) else column


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
