"""Values are cast exactly, or refused by row: drawn by hypothesis."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from tests.drawn import drawn, floats
from tests.training.data.task_types import CLASSIFICATION, Rating
from training.data.casting import cast_blocks
from training.data.json_files import read_json
from training.data.parquet_and_arrow_files import read_parquet
from training.data.row_dicts import BOOLEANS
from training.data.slice_columns import SliceColumns
from training.recipe import Data
from training.recipe.source_columns import SourceColumns

CASTS = ("string", "int64", "float64", "bool")
LARGE = st.sampled_from([2**53 - 1, 2**53, 2**53 + 1, 2**62 + 1, 2**63 - 1, -(2**53) - 1, -(2**63)])
whole = st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1) | LARGE
numbers = st.sampled_from([0.0, -0.0, 1.0, 0.5, -3.0, 2.0**53, 1e16, 1e300, 5.0000001]) | floats
spelt = st.sampled_from(
    ["", " ", "7", "+5", "-05", " 7 ", "5.0", "5.5", "1e3", "0x1F", "1_000", "٣", "true", "FALSE", "2", "nan", "inf"]
) | whole.map(str) | floats.map(str) | st.text(st.characters(codec="utf-8"), max_size=3)  # fmt: skip
KINDS: dict[str, Any] = {
    "int64": whole,
    "float64": numbers,
    "string": spelt,
    "bool": st.booleans(),
    "date32": st.dates(),
}
columns = st.sampled_from(sorted(KINDS)).flatmap(
    lambda kind: st.tuples(st.just(kind), st.lists(st.none() | KINDS[kind], min_size=1, max_size=6))
)
json_values = st.none() | st.booleans() | whole | st.integers(2**63, 2**70) | numbers | spelt


def is_exact(value: Any, to: str, cast: Any) -> bool:
    """Whether this is the value in the other type."""
    if value is None or (isinstance(value, str) and not value.strip() and to != "string"):
        return cast is None
    if cast is None:
        return False
    if to == "string":
        return str(cast) == (str(value).lower() if isinstance(value, bool) else str(value)) or (
            isinstance(value, float) and float(cast) == value
        )
    if to == "bool":
        return bool(cast == (BOOLEANS.get(value.lower()) if isinstance(value, str) else value))
    if to == "float64" and isinstance(value, str):
        return bool(cast == float(value))
    return not isinstance(value, date) and Decimal(cast) == Decimal(value)


def check(source: str, values: list[Any], content: bytes, to: str) -> None:
    """Casts the column of a file, and checks each row."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / f"rows.{source}"
        file.write_bytes(content)
        data = Data(source=source, path="-", text=["text"], label="label", cast={"label": to})  # type: ignore[arg-type]
        wanted = SourceColumns(data, Rating() if to == "float64" else CLASSIFICATION)
        reader = read_json if source == "json" else read_parquet
        blocks = reader(wanted, "train", {"train": [str(file)]}, SliceColumns(wanted, Path(folder)))
        made, refused = dict[int, Any](), set[int]()
        for one in cast_blocks(blocks, wanted):
            made |= zip(one.block.numbers.tolist(), one.block.rows.column("label").to_pylist(), strict=True)
            refused |= {problem.row for problem in one.block.row_problems}
    assert made.keys() | refused == {*range(1, 1 + len(values))} and not made.keys() & refused
    for row, label in made.items():
        read = {"int64": int, "bool": BOOLEANS.get}.get(to, lambda text: text)
        cast = label if label is None else read(label)
        assert is_exact(values[row - 1], to, cast), (values[row - 1], to, label)


@drawn
@given(column=columns, to=st.sampled_from(CASTS))
def test_drawn_values_of_a_typed_column_are_cast_exactly_or_refused_by_row(
    column: tuple[str, list[Any]], to: str
) -> None:
    kind, values = column
    if kind == "date32" and to != "string":  # the whole column is refused
        return
    stored = pa.array(values, pa.bool_() if kind == "bool" else getattr(pa, kind)())
    table = pa.table({"text": ["t"] * len(values), "label": stored})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    check("parquet", values, sink.getvalue().to_pybytes(), to)


@drawn
@given(values=st.lists(json_values, min_size=1, max_size=6), to=st.sampled_from(CASTS))
def test_drawn_values_of_json_are_cast_exactly_or_refused_by_row(values: list[Any], to: str) -> None:
    lines = [json.dumps({"text": "t", "label": value}) for value in values]
    check("json", values, "\n".join(lines).encode(), to)
