"""Parquet and Arrow files that are empty, cut, damaged, larger than they look, or of types that are no texts."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.raised import raised_problems
from tests.training.data.task_types import CLASSIFICATION
from training.data.casting import CastBlock, cast_blocks
from training.data.load_rows import load
from training.data.parquet_and_arrow_files import BLOCK_BYTES, read_arrow, read_parquet
from training.data.slice_columns import SliceColumns
from training.problems import Problem, UserError
from training.recipe import Data
from training.recipe.column_types import RowSpecification
from training.recipe.source_columns import SourceColumns
from training.task_types.sft import SupervisedFineTuning

GOOD = {"text": ["one", "two", "three"], "label": ["a", "b", "a"], "stars": [1, 2, 3]}
LONG = "x" * 900_000


def stream(table: pa.Table, **options: Any) -> bytes:
    with io.BytesIO() as file:
        with pa.ipc.new_stream(file, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
            writer.write_table(table, max_chunksize=max(2, len(table) // 4))
        return file.getvalue()


def ipc_file(table: pa.Table, **options: Any) -> bytes:
    with io.BytesIO() as file:
        with pa.ipc.new_file(file, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
            writer.write_table(table, max_chunksize=max(2, len(table) // 4))
        return file.getvalue()


def parquet(table: pa.Table, **options: Any) -> bytes:
    with io.BytesIO() as file:
        pq.write_table(table, file, **options)
        return file.getvalue()


FORMS: dict[str, Callable[..., bytes]] = {"stream.arrow": stream, "file.arrow": ipc_file, "rows.parquet": parquet}


def recipe(name: str, **more: Any) -> Data:
    source = "parquet" if name.endswith("parquet") else "arrow"
    return Data(**{"source": source, "path": "-", "text": ["text"], "label": "label", **more})


def read(
    folder: Path, name: str, content: bytes, task_type: RowSpecification = CLASSIFICATION, **more: Any
) -> list[CastBlock]:
    """The blocks of one file, shaped."""
    (folder / name).write_bytes(content)
    data = recipe(name, **more)
    reader = read_parquet if data.source == "parquet" else read_arrow
    wanted = SourceColumns(data, task_type)
    return list(
        cast_blocks(reader(wanted, "train", {"train": [str(folder / name)]}, SliceColumns(wanted, folder)), wanted)
    )


def source_error(folder: Path, name: str, content: bytes, **more: Any) -> Problem:
    return raised_problems(read, folder, name, content, **more)[0]


def column(made: list[CastBlock], name: str = "text") -> list[Any]:
    return [value for one in made for value in one.block.rows.column(name).to_pylist()]


def problems(made: list[CastBlock]) -> list[tuple[int, str, str]]:
    return [
        (problem.row, problem.check, problem.description + problem.value)
        for one in made
        for problem in one.block.row_problems
    ]


@pytest.mark.parametrize("name", FORMS)
def test_a_file_without_rows_has_its_types_all_the_same(name: str, tmp_path: Path) -> None:
    empty = pa.table(GOOD).slice(0, 0)
    (made,) = read(tmp_path, name, FORMS[name](empty), filter="stars >= 2")
    assert made.block.rows.num_rows == 0


@pytest.mark.parametrize("name", ["stream.arrow", "file.arrow"])
@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"use_legacy_format": True}], ids=str)
def test_arrow_is_read_however_it_was_written(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    assert column(read(tmp_path, name, FORMS[name](pa.table(GOOD), **options))) == GOOD["text"]


@pytest.mark.parametrize("name", FORMS)
def test_a_damaged_file_is_reported_or_read_but_never_a_traceback(name: str, tmp_path: Path) -> None:
    whole = FORMS[name](pa.table(GOOD))
    chance = random.Random(7)
    for number in range(40):
        content = bytearray(whole[: chance.randrange(8, len(whole))] if number % 4 == 0 else whole)
        content[chance.randrange(6, len(content))] ^= 1 << chance.randrange(8)
        try:
            read(tmp_path, name, bytes(content))
        except UserError:
            continue


@pytest.mark.parametrize("name", FORMS)
def test_an_error_of_the_consumer_of_the_rows_is_not_blamed_on_the_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FORMS[name](pa.table(GOOD)))
    reader = read_parquet if name.endswith("parquet") else read_arrow
    wanted = SourceColumns(recipe(name), CLASSIFICATION)
    blocks = reader(wanted, "train", {"train": [str(tmp_path / name)]}, SliceColumns(wanted, tmp_path))
    next(blocks)
    with pytest.raises(ValueError, match="of my own"):
        blocks.throw(ValueError("of my own"))  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("form", [ipc_file, parquet])
def test_the_cap_counts_the_values_of_the_rows_and_not_the_sizes_that_the_file_declares(
    form: Callable[..., bytes], tmp_path: Path
) -> None:
    packed = form(pa.table({"text": [LONG] * 150, "label": ["a"] * 150}), compression="zstd")
    assert len(packed) < 2_000_000
    name = "rows.parquet" if form is parquet else "rows.arrow"
    assert "raise data.max_file_gb" in source_error(tmp_path, name, packed, max_file_gb=0.1).message


@pytest.mark.slow
def test_one_long_text_for_many_rows_is_unpacked_in_parts(tmp_path: Path) -> None:
    content = parquet(pa.table({"text": [LONG] * 400, "label": ["a"] * 400}), compression="zstd")
    assert len(content) < 5_000
    (tmp_path / "rows.parquet").write_bytes(content)
    wanted = SourceColumns(recipe("rows.parquet"), CLASSIFICATION)
    before, most = pa.total_allocated_bytes(), 0
    pinned = {"train": [str(tmp_path / "rows.parquet")]}
    for block in read_parquet(wanted, "train", pinned, SliceColumns(wanted, tmp_path)):
        most = max(most, pa.total_allocated_bytes() - before)
        assert block.rows.num_rows <= BLOCK_BYTES // len(LONG)
    assert most < 8 * BLOCK_BYTES


def test_a_page_whose_checksum_is_wrong_is_reported(tmp_path: Path) -> None:
    content = bytearray(parquet(pa.table(GOOD), write_page_checksum=True, use_dictionary=False, compression="none"))
    content[content.index(b"three")] ^= 1
    assert "checksum" in source_error(tmp_path, "rows.parquet", bytes(content)).message.lower()


def test_blocks_are_bounded_by_bytes_as_well_as_rows(tmp_path: Path) -> None:
    content = parquet(pa.table({"text": [f"{n}{LONG}" for n in range(60)], "label": ["a"] * 60}))
    blocks = [made.block for made in read(tmp_path, "long.parquet", content)]
    assert sum(block.rows.num_rows for block in blocks) == 60
    assert max(block.rows.nbytes for block in blocks) <= 1.1 * BLOCK_BYTES
    assert [block.numbers[0] for block in blocks] == [1, *(block.numbers[-1] + 1 for block in blocks[:-1])]


def not_utf8(kind: pa.DataType) -> pa.Array:
    stored = pa.array([b"one", b"\xff\xfe and more bytes", b"three"], pa.binary())
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(pa.array([0, 1, 2]), stored.view(pa.string()))
    return stored.cast(pa.binary_view()).view(kind) if kind == pa.string_view() else stored.view(kind)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.string_view(), pa.dictionary(pa.int64(), pa.string())],
    ids=["string", "view", "dictionary"],
)
def test_texts_that_are_no_utf8_are_named_by_their_rows(name: str, kind: pa.DataType, tmp_path: Path) -> None:
    table = pa.table({"text": not_utf8(kind), "label": ["a", "b", "a"]})
    made = read(tmp_path, name, FORMS[name](table))
    assert column(made) == ["one", "three"]
    assert problems(made) == [(2, "encoding", "is not UTF-8 text (column 'text')")]


ODD: dict[str, pa.Array] = {
    "list": pa.array([[1]]),
    "struct": pa.array([{"a": 1}]),
    "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8())),
    "list in a dictionary": pa.DictionaryArray.from_arrays(pa.array([0]), pa.array([[1]])),
    "runs": pa.RunEndEncodedArray.from_arrays([1], ["a"]),
    "date": pa.array([date(2026, 1, 31)]),
    "time": pa.array([5], pa.int32()).view(pa.time32("s")),
    "date of no year": pa.array([10**9], pa.int32()).view(pa.date32()),
    "unknown zone": pa.array([1], pa.int64()).view(pa.timestamp("ns", "No/Where")),
    "duration": pa.array([1], pa.duration("s")),
    "decimal": pa.array([Decimal("1.50")]),
    "half float": pa.array([np.float16("nan")]),
    "fixed size": pa.array([b"\xff1"], pa.binary(2)),
    "string view": pa.array(["5"], pa.string_view()),
    "binary view": pa.array([b"\xff"], pa.binary_view()),
    "null": pa.nulls(1),
    "numbers in a dictionary": pa.array([1]).dictionary_encode(),
    "uuid": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"1" * 16], pa.binary(16))),
}


def test_a_time_that_no_text_can_tell_is_a_problem_of_its_row(tmp_path: Path) -> None:
    """Arrow would write `<value out of range: …>` as the text."""
    times = pa.array([1, 2**62, 3], pa.timestamp("us"))
    made = read(tmp_path, "t.arrow", stream(pa.table({"text": times, "label": list("aba")})), cast={"text": "string"})
    assert column(made) == ["1970-01-01 00:00:00.000001", "1970-01-01 00:00:00.000003"]
    assert problems(made) == [(2, "type", "holds no string in column 'text': a timestamp[us] out of range")]


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("to", [None, "string", "int64", "float64", "bool"])
def test_a_column_of_any_type_is_cast_or_reported(kind: str, to: str | None, tmp_path: Path) -> None:
    table = pa.table({"text": ["one"], "label": ODD[kind]})
    try:
        (made,) = read(tmp_path, "odd.arrow", stream(table), cast={"label": to} if to else {})
        assert made.block.rows.num_rows + len(made.block.row_problems) == 1
    except UserError as error:
        (problem,) = error.problems
        assert problem.where in ("data.label", "data.cast.label")
        assert "column 'label' of" in problem.message


def test_a_cast_that_does_not_exist_names_those_that_do(tmp_path: Path) -> None:
    table = pa.table({"text": ["one"], "label": ODD["date"], "all": [[1]]})
    problem = source_error(tmp_path, "odd.arrow", stream(table), cast={"label": "int64"})
    assert problem.where == "data.cast.label"
    assert "is of type date32[day], which does not convert to int64: choose string" in problem.message
    advice = source_error(tmp_path, "odd.arrow", stream(table)).message
    assert advice.endswith("to convert it, set data.cast.label: string.")
    assert column(read(tmp_path, "odd.arrow", stream(table), cast={"label": "string"}), "label") == ["2026-01-31"]
    nested = source_error(tmp_path, "odd.arrow", stream(table), label="all")
    assert nested.message.endswith("it must hold text or whole numbers.")


@pytest.mark.parametrize("name", FORMS)
def test_lists_and_objects_with_a_key_that_is_always_null_are_read(name: str, tmp_path: Path) -> None:
    """As programs write `tool_calls` of conversations that have none."""
    said = [[("user", "one"), ("assistant", "two")], [("user", "three"), ("assistant", "four")]]
    rows = [[{"role": role, "content": text, "calls": None, "all": [None]} for role, text in row] for row in said]
    made = read(
        tmp_path, name, FORMS[name](pa.table({"messages": rows})), SupervisedFineTuning(), text=None, label=None
    )
    assert list(map(json.loads, column(made, "messages"))) == rows


def test_a_column_of_nothing_but_nulls_compares_and_casts(tmp_path: Path) -> None:
    content = stream(pa.table({**GOOD, "stars": pa.nulls(3)}))
    assert len(column(read(tmp_path, "null.arrow", content, filter="not (stars >= 2) or stars is None"))) == 3
    assert column(read(tmp_path, "null.arrow", content, label="stars", cast={"stars": "int64"}), "label") == [None] * 3


def test_texts_become_whole_numbers_as_those_of_json_do(tmp_path: Path) -> None:
    spelt = ["7", "+5", "-05", "", "0x1F", "1_000", "٣", "5.0", "99999999999999999999"]
    content = stream(pa.table({"text": ["t"] * 9, "label": spelt}))
    made = read(tmp_path, "numbers.arrow", content, cast={"label": "int64"})
    assert column(made, "label") == ["7", "5", "-5", None, "5"]
    assert [row for row, _, _ in problems(made)] == [5, 6, 7, 9]
    assert problems(made)[0][2] == "holds no int64 in column 'label': '0x1F'"


def with_metadata(stored: str) -> bytes:
    table = pa.table({"text": ["one", "two"], "label": [0, 1]})
    return parquet(table.replace_schema_metadata({"huggingface": stored}))


NAMES = json.dumps({"info": {"features": {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}}})


@pytest.mark.parametrize(
    "stored",
    [
        "{",
        "[]",
        '{"info": null}',
        '{"info": {"features": []}}',
        '{"info": {"features": {"label": [{"_type": "ClassLabel"}]}}}',
        '{"info": {"features": {"label": {"_type": "ClassLabel", "names": null}}}}',
        '{"info": {"features": {"label": {"_type": "ClassLabel", "names": [1, 2]}}}}',
    ],
)
def test_metadata_that_names_no_labels_is_ignored(stored: str, tmp_path: Path) -> None:
    (made,) = read(tmp_path, "rows.parquet", with_metadata(stored))
    assert made.block.label_names == ()


def test_names_of_labels_do_not_apply_once_the_labels_are_cast(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(with_metadata(NAMES))
    data = recipe("train.parquet", cast={"label": "string"})
    files = {split: [str(tmp_path / "train.parquet")] for split in ("train", "validation")}
    load(data, CLASSIFICATION, files, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "labels.json").read_text()) == ["0", "1"]


def test_nothing_counts_that_stands_behind_the_last_row_of_the_limit(tmp_path: Path) -> None:
    rows = {"text": ["t"] * 6, "label": ["1", "bad", "2", "0", "3", "worse"]}
    wanted = {"cast": {"label": "int64"}, "filter": "label > 1", "limit": 1}
    (made,) = read(tmp_path, "rows.parquet", parquet(pa.table(rows)), **wanted)
    assert made.block.rows.column("label").to_pylist() == ["2"]
    assert made.filtered == 1
    assert [row for row, _, _ in problems([made])] == [2]
