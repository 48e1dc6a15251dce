"""Vectors, such as embeddings, in Arrow columns and Parquet files. Their numbers become no Python objects.

N rows, D dimensions.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

MAX_SCORES = 10_000_000
"""Similarities in memory at a time."""
VectorType = Literal["float32", "float16", "binary"]


def rows_at_once(documents: int) -> int:
    """The queries that are compared at a time with so many documents."""
    return max(1, MAX_SCORES // max(1, documents))


def as_lists(vectors: npt.NDArray[Any]) -> pa.ListArray:
    """(N, D) as a column of lists. Parquet cannot hold a missing list of a fixed size.

    Raises ValueError for more numbers than such a column can hold.
    """
    if vectors.size > np.iinfo(np.int32).max:
        raise ValueError(f"{vectors.size:,} numbers are more than one column of lists can hold")
    offsets = np.arange(len(vectors) + 1, dtype=np.int32) * vectors.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(vectors.reshape(-1)))


def as_matrix(column: pa.Array | pa.ChunkedArray, dimensions: int) -> npt.NDArray[Any]:
    """(N, D) of a column of lists with D numbers each. Raises ValueError for other lists and missing ones."""
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if column.null_count or not pc.all(pc.equal(pc.list_value_length(column), dimensions), min_count=0).as_py():
        raise ValueError(f"a row has no list of {dimensions:,} numbers")
    matrix: npt.NDArray[Any] = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, dimensions)
    return matrix


def as_vectors(column: pa.ListArray, kind: VectorType, dimensions: int) -> pa.FixedSizeListArray:
    """Lists (N,) of D numbers each, or null, as lists of one size: float32 or float16, or for `binary` uint8, in which
    a bit says whether a number is positive, eight dimensions a byte, the first one in the highest bit.

    A null becomes NaN, or zeros: pyarrow 25 writes null lists of one size into Parquet, and cannot read them.
    """
    there = column.is_valid().to_numpy(zero_copy_only=False)
    found = as_matrix(column.drop_null(), dimensions)
    if kind == "binary":
        found = np.packbits(found > 0, axis=1)
    elif kind == "float16":
        found = found.astype(np.float16)
    if not there.all():
        vectors = np.full((len(there), found.shape[1]), 0 if kind == "binary" else np.nan, found.dtype)
        vectors[there] = found
        found = vectors
    return pa.FixedSizeListArray.from_arrays(found.reshape(-1), found.shape[1])


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """The options of pyarrow's writers for these columns. A dictionary of the numbers of vectors, most of which occur
    once, would cost most of the time of writing them."""
    has_vectors = any(_is_vector(field.type) for field in schema)
    flat = [field.name for field in schema if not types.is_nested(field.type)]
    return {"compression": "zstd", "use_dictionary": flat if has_vectors else True}


def _is_vector(kind: pa.DataType) -> bool:
    return types.is_fixed_size_list(kind) or (types.is_list(kind) and types.is_floating(kind.value_type))
