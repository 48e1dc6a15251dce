"""Vectors in Arrow columns and Parquet files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from training.data.vectors import as_lists, as_matrix, parquet_options

VECTORS = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)


def test_a_matrix_becomes_lists_and_again_the_same_matrix() -> None:
    column = as_lists(VECTORS)
    assert column.to_pylist() == VECTORS.tolist() and column.type == pa.list_(pa.float32())
    np.testing.assert_array_equal(as_matrix(column, 4), VECTORS)
    np.testing.assert_array_equal(as_matrix(pa.chunked_array([column[:2], column[3:]]), 4), np.delete(VECTORS, 2, 0))
    assert as_matrix(column[:0], 4).shape == (0, 4)


@pytest.mark.parametrize("rows", [[[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0], None], [[1.0], [2.0, 3.0, 4.0]]])
def test_lists_of_other_sizes_or_missing_ones_are_no_matrix(rows: list[list[float] | None]) -> None:
    with pytest.raises(ValueError, match="a row has no list of 2 numbers"):
        as_matrix(pa.array(rows, pa.list_(pa.float32())), 2)


def test_more_numbers_than_a_column_of_lists_can_hold_are_refused() -> None:
    many = np.broadcast_to(np.float32(0), (2**19, 2**12))  # no memory
    with pytest.raises(ValueError, match="2,147,483,648 numbers are more than one column of lists can hold"):
        as_lists(many)


def test_parquet_has_a_dictionary_of_texts_and_none_of_the_numbers_of_vectors(tmp_path: Path) -> None:
    fixed = pa.FixedSizeListArray.from_arrays(VECTORS.reshape(-1), 4)
    table = pa.table({"text": ["one"] * 6, "embedding": as_lists(VECTORS), "fixed": fixed})
    pq.write_table(table, tmp_path / "rows.parquet", **parquet_options(table.schema))
    group = pq.ParquetFile(tmp_path / "rows.parquet").metadata.row_group(0)
    found = {group.column(place).path_in_schema: group.column(place) for place in range(group.num_columns)}
    assert {path: column.has_dictionary_page for path, column in found.items()} == {
        "text": True,
        "embedding.list.element": False,
        "fixed.list.element": False,
    }
    assert pq.read_table(tmp_path / "rows.parquet").equals(table)
