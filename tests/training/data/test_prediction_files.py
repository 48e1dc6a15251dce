"""Files of predictions: every row, with what travels along, its prediction or its error, and its model."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from training.data.prediction_files import STAMPS, KeptColumns, Stamp, Writer
from training.data.prediction_rows import Rows
from training.data.row_problems import RowProblem

STAMP = Stamp("reviews", "3", "d1ge57", 1_700_000_000, "in.jsonl")
ADDED = pa.schema({"label": pa.string(), "probabilities": pa.struct([("no", pa.float64()), ("yes", pa.float64())])})


def some_rows(count: int, **kept: Any) -> Rows:
    """Rows of which the second cannot be used."""
    usable = [place != 1 for place in range(count)]
    inputs = [(f"text {place}",) if fine else None for place, fine in enumerate(usable)]
    return Rows(
        [*range(2, 2 + count)],
        inputs,
        [None if fine else RowProblem(2, "malformed", "is bad", ": x") for fine in usable],
        kept,
    )


def predictions(rows: Rows) -> pa.Table:
    return pa.Table.from_pylist(
        [{"label": values[0], "probabilities": {"no": 0.25, "yes": 0.75}} for values in rows.usable()], ADDED
    )


def write(file: Path, form: str, parts: Sequence[Rows], delimiter: str = ",") -> list[dict[str, Any]]:
    kept = KeptColumns()
    for rows in parts:
        kept = kept.seen(rows)
    with Writer(file, form, kept, delimiter) as writer:
        for rows in parts:
            writer.write(rows, predictions(rows), STAMP)
    if form == "csv":
        with file.open(newline="") as lines:
            return list(csv.DictReader(lines, delimiter=delimiter))
    if form == "parquet":
        return pq.read_table(file).to_pylist()
    return [json.loads(line) for line in file.read_text().splitlines()]


def values_of(column: Any) -> list[Any]:
    return list(column.to_pylist() if isinstance(column, pa.Array) else column)


@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl"])
def test_each_row_has_its_prediction_or_its_error_and_the_model_behind_it(tmp_path: Path, form: str) -> None:
    found = write(tmp_path / "out", form, [some_rows(3, id=["a", "b", "c"])])
    assert [row["id"] for row in found] == ["a", "b", "c"]
    assert [row["label"] or None for row in found] == ["text 0", None, "text 2"]
    assert [row["error"] or None for row in found] == [None, "is bad: x", None]
    assert [(row["model"], row["version"], row["model_digest"]) for row in found] == [("reviews", "3", "d1ge57")] * 3
    assert [int(row["input_row"]) for row in found] == [2, 3, 4] and found[0]["input_file"] == "in.jsonl"
    assert str(found[0]["predicted_at"]).startswith("2023-11-14")
    assert ("probabilities" in found[0]) == (form != "csv")


def test_a_row_without_a_prediction_has_the_reason(tmp_path: Path) -> None:
    rows = some_rows(3)
    found = [*predictions(rows).slice(0, 1).to_pylist(), dict.fromkeys(ADDED.names)]
    with Writer(tmp_path / "out", "jsonl", KeptColumns()) as writer:
        writer.write(rows, pa.Table.from_pylist(found, ADDED), STAMP)
    errors = [json.loads(line)["error"] for line in (tmp_path / "out").read_text().splitlines()]
    assert errors[:2] == [None, "is bad: x"] and errors[2].startswith("has tokens that the model does not have")


@pytest.mark.parametrize("escape_formulas", [False, True])
def test_formulas_in_csv_are_escaped_if_asked_for(tmp_path: Path, escape_formulas: bool) -> None:
    texts = ["=1+1", "+1", "-1", "@a", "\tx", "\rx", "a=b", ""]
    rows = some_rows(len(texts), **{"=id": texts, "n": [-1] * len(texts)})
    kept = KeptColumns().seen(rows)
    with Writer(tmp_path / "out.csv", "csv", kept, escape_formulas=escape_formulas) as writer:
        writer.write(rows, predictions(rows), STAMP)
    with (tmp_path / "out.csv").open(newline="") as lines:
        head, *found = csv.reader(lines)
    mark = "'" if escape_formulas else ""
    assert head[0] == f"{mark}=id"
    assert [line[0] for line in found] == [*(f"{mark}{text}" for text in texts[:6]), "a=b", ""]
    assert {line[1] for line in found} == {"-1"}


def test_a_predicted_column_whose_name_travels_along_gets_another_name(tmp_path: Path) -> None:
    (first, *_) = write(tmp_path / "out", "jsonl", [some_rows(2, label=["own", "own"])])
    assert first["label"] == "own" and first["predicted_label"] == "text 0"


def test_columns_have_one_type_in_all_parts_whatever_their_files_hold(tmp_path: Path) -> None:
    typed = pa.array([1, 2], pa.int32())
    parts = [
        some_rows(2, n=[1, 2], mixed=[1, None], nested=[{"a": [1]}, None], same=typed),
        some_rows(2, n=[0.5, None], mixed=["x", "y"], nested=[None, None], same=typed),
    ]
    kept = KeptColumns().seen(parts[0]).seen(parts[1])
    assert kept.described() == {"n": "double", "mixed": "string", "nested": "string", "same": "int32"}
    found = write(tmp_path / "out.parquet", "parquet", parts)
    assert [row["n"] for row in found] == [1.0, 2.0, 0.5, None]
    assert [row["mixed"] for row in found] == ["1", None, "x", "y"] and found[0]["nested"] == '{"a":[1]}'
    lines = write(tmp_path / "out.jsonl", "jsonl", parts)
    assert lines[0]["nested"] == {"a": [1]} and lines[0]["mixed"] == 1


@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl"])
@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (pa.array([2**53 + 1, 7]), pa.array([0.5, None]), "string"),
        (pa.array([3, 7]), pa.array([0.5, None]), "double"),
        (pa.array([3, 7], pa.int32()), pa.array([2**40, None]), "int64"),
        (pa.array([2**63 + 1, 7], pa.uint64()), pa.array([5, None]), "string"),
        (pa.array([0.25, 7], pa.float32()), [2**60, None], "string"),
    ],
)
def test_numbers_of_two_files_keep_their_values_in_one_type_that_is_known_before_anything_is_written(
    tmp_path: Path, form: str, first: Any, second: Any, kind: str
) -> None:
    one, other = some_rows(2, id=first), some_rows(2, id=second)
    for parts in ([one, other], [other, one]):
        kept = KeptColumns()
        for rows in parts:
            kept = kept.seen(rows)
        assert kept.described() == {"id": kind}
        given = [value for rows in parts for value in values_of(rows.kept["id"])]
        found = [row["id"] for row in write(tmp_path / "out", form, parts)]
        assert [float(value) if value else None for value in found] == [
            None if value is None else float(value) for value in given
        ]
        assert kind != "string" or str(max(filter(None, given))) in map(str, found)


def test_a_file_without_any_usable_row_has_all_columns(tmp_path: Path) -> None:
    rows = Rows([2], [None], [RowProblem(2, "malformed", "is bad")], {"id": [None]})
    write(tmp_path / "out", "parquet", [rows])
    assert pq.read_schema(tmp_path / "out").names == ["id", *ADDED.names, *STAMPS]


def test_json_lines_hold_null_for_a_number_that_json_cannot_hold(tmp_path: Path) -> None:
    (first, second) = write(tmp_path / "out", "jsonl", [some_rows(2, n=pa.array([float("nan"), 0.5]))])
    assert first["n"] is None and second["n"] == 0.5


def test_texts_that_no_encoding_holds_are_written_as_their_escapes(tmp_path: Path) -> None:
    rows = some_rows(2, note=["half \ud800", "\u00e9"])
    assert write(tmp_path / "a", "jsonl", [rows])[0]["note"] == b"half \\ud800".decode("unicode-escape")
    assert write(tmp_path / "b", "parquet", [rows])[0]["note"] == "half \\ud800"
    assert write(tmp_path / "c", "csv", [rows], "\t")[1]["note"] == "\u00e9"


def test_answers_to_requests_have_the_form_of_openais_output(tmp_path: Path) -> None:
    rows = some_rows(3, custom_id=["a", "b", "c"])
    counts = {"prompt_tokens": [7, 8], "generated_tokens": [2, 3], "finish_reason": ["stop", "length"]}
    answers = pa.table({"generated_text": ["4", "5"], **counts})
    with Writer(tmp_path / "out", "openai", KeptColumns().seen(rows)) as writer:
        writer.write(rows, answers, STAMP)
    first, second, third = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert first["custom_id"] == "a" and first["error"] is None and first["response"]["status_code"] == 200
    body = first["response"]["body"]
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "4"} and body["model"] == "reviews/3"
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert second["response"]["status_code"] == 400 and "choices" not in second["response"]["body"]
    assert second["error"]["message"] == "row 3 is bad: x"
    (choice,) = third["response"]["body"]["choices"]
    assert choice["message"]["content"] == "5" and choice["finish_reason"] == "length"
    lines = (first, second, third)
    assert len({line["id"] for line in lines} | {line["response"]["request_id"] for line in lines}) == 6
