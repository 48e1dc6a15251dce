"""Rows to predict: each row of a file once, in order, with its inputs or its error."""

from __future__ import annotations

import csv
import gzip
import json
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from training import task_types
from training.data.arrow_files import BLOCK_ROWS
from training.data.prediction_rows import (
    READ,
    RowReader,
    Rows,
    digest_all,
    digest_inputs,
)
from training.problems import UserError

TEXT = {"text": "text"}


def reader(
    task: str = "sequence-classification", columns: Mapping[str, str] = TEXT, kept: Sequence[str] = ()
) -> RowReader:
    return RowReader(task_types.load(task), columns, kept)


def read(file: Path, **options: Any) -> Rows:
    """All rows of a file."""
    (rows,) = reader(**options).shards(str(file), 10**6)
    return rows


def errors(rows: Rows) -> dict[int, str]:
    return {number: str(error) for number, error in zip(rows.numbers, rows.errors, strict=True) if error}


def test_texts_of_a_text_file_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("\ufeffa good one, “really”\r\n\nbad\x0bone\nno end")
    rows = read(tmp_path / "in.txt")
    assert rows.inputs == [("a good one, “really”",), None, ("bad\x0bone",), ("no end",)]
    assert errors(rows) == {2: "has no text in column 'text'"}


def test_each_row_of_a_csv_file_comes_once_and_in_order_with_its_error(tmp_path: Path) -> None:
    lines = ["id,text", "1,good,more", "2,\xff", "3,bad", "4", "5,", "", '6,"so" he said', "7,fine"]
    (tmp_path / "in.csv").write_bytes("\n".join(lines).encode("latin-1"))
    rows = read(tmp_path / "in.csv", kept=["id"])
    assert rows.numbers == [2, 3, 4, 5, 6, 8, 9] and rows.usable() == [("bad",), ("so he said",), ("fine",)]
    found = errors(rows)
    assert found[2] == "has 3 fields where the header has 2" and found[5] == "has 1 fields where the header has 2"
    assert found[3] == "is not UTF-8 text (column 'text')" and found[6] == "has no text in column 'text'"
    assert rows.kept["id"] == [None, "2", "3", None, "5", "6", "7"]


def test_rows_of_json_lines_may_differ_and_their_values_stay_as_they_are(tmp_path: Path) -> None:
    lines = ['{"text": "a", "n": {"b": [1]}}', "", '{"text": "c"}', "[1]", '{"text": 3}', '{"text": "\\ud800"}', "{"]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    rows = read(tmp_path / "in.jsonl", kept=["n"])
    assert rows.inputs == [("a",), ("c",), None, None, None, None]
    assert rows.kept["n"] == [{"b": [1]}, None, None, None, None, None] and rows.numbers == [1, 3, 4, 5, 6, 7]
    found = errors(rows)
    assert found[4].startswith("is no mapping of columns to values") and found[7].startswith("is not JSON")
    assert found[5] == "holds int in column 'text' where a text belongs: 3" and 6 in found


def test_columns_of_parquet_keep_their_types_and_a_text_that_is_no_utf_8_is_an_error(tmp_path: Path) -> None:
    raw = pa.array([b"fine", b"\xff", b"x"])
    texts = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    when = pa.array([1, None, 3], pa.timestamp("ns", "UTC"))
    pq.write_table(pa.table({"text": texts, "when": when}), tmp_path / "in.parquet")
    rows = read(tmp_path / "in.parquet", kept=["when"])
    assert rows.inputs == [("fine",), None, ("x",)] and rows.numbers == [1, 2, 3]
    assert isinstance(rows.kept["when"], pa.Array) and rows.kept["when"].equals(when)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("in.csv", "id,txt\n1,good\n", "has no column 'text': it has id, txt. Did you mean 'txt'?"),
        ("in.csv", "text,text\na,b\n", "has 2 columns called 'text': rename all but one."),
        ("in.csv", "text,n\na,1\n", "has no column 'id': it has text, n."),
        ("in.parquet", "PAR1", "is not readable as Parquet"),
        ("in.json", '[{"text": "a", "id": 1},', "is not a JSON array to its end"),
    ],
)
def test_a_file_that_cannot_be_read_as_a_whole_is_one_message(
    tmp_path: Path, name: str, content: str, words: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as raised:
        read(tmp_path / name, kept=["id"])
    assert words in str(raised.value) and str(tmp_path / name) in str(raised.value)


def test_pairs_of_texts_are_taken_in_the_models_order_and_a_text_a_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("b,a\nsecond,first\n,only\n")
    rows = read(tmp_path / "in.csv", columns={"text": "a", "text_pair": "b"})
    assert rows.inputs == [("first", "second"), None]
    (tmp_path / "in.txt").write_text("a\n")
    with pytest.raises(UserError, match=r"the model takes 2 values: give a and b as columns of a .csv"):
        read(tmp_path / "in.txt", columns={"text": "a", "text_pair": "b"})


@pytest.mark.parametrize("name", ["in.csv.gz", "in.jsonl.zst", "in.json", "in.arrow"])
def test_every_format_of_training_data_is_read_and_equal_rows_have_one_digest(tmp_path: Path, name: str) -> None:
    assert any(name.endswith(suffix) for suffix in READ)
    rows = [{"id": "1", "text": "good"}, {"id": "2", "text": "bad é"}]
    if name == "in.arrow":
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_file(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    elif name == "in.csv.gz":
        (tmp_path / name).write_bytes(gzip.compress("id,text\n1,good\n2,bad é\n".encode()))
    elif name == "in.json":
        (tmp_path / name).write_text(json.dumps(rows))
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name).write_bytes(pa.compress(lines.encode(), "zstd", asbytes=True))
    (tmp_path / "plain.csv").write_text("note,text\nx,good\ny,bad é\n")
    found, plain = read(tmp_path / name, kept=["id"]), read(tmp_path / "plain.csv")
    assert found.inputs == [("good",), ("bad é",)]
    assert digest_inputs(found) == digest_inputs(plain) and digest_all(found) != digest_all(plain)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_column_that_is_optional_may_be_absent_and_may_be_empty(tmp_path: Path, suffix: str) -> None:
    columns, file = {"instruction": "ask", "input": "more"}, tmp_path / f"in{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table({"ask": ["a"]}), file)
    else:
        file.write_text('{"ask": "a"}\n' if suffix == ".jsonl" else "ask\na\n")
    rows = read(file, task="sft", columns=columns, kept=["ask", "more"])
    assert rows.inputs == [("a", "")] and len(rows.kept["more"]) == 1
    (tmp_path / "more.csv").write_text('ask,more\na,\n"",b\nc,d\n')
    assert read(tmp_path / "more.csv", task="sft", columns=columns).inputs == [("a", ""), None, ("c", "d")]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_lists_are_json_in_csv_and_lists_elsewhere(tmp_path: Path, suffix: str) -> None:
    words, file = [["EU", "rejects"], ["it"], [], None], tmp_path / f"in{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table({"words": words}), file)
    elif suffix == ".jsonl":
        file.write_text("".join(json.dumps({"words": row}) + "\n" for row in words))
    else:
        with file.open("w", newline="") as out:
            table = [["words", "n"], *([json.dumps(row) if row is not None else "", "1"] for row in words)]
            csv.writer(out, delimiter="\t" if suffix == ".tsv" else ",").writerows(table)
    rows = read(file, task="token-classification", columns={"text": "words"})
    assert rows.inputs[:2] == [(["EU", "rejects"],), (["it"],)] and rows.inputs[2:] == [None, None]


def test_rows_that_are_no_conversation_have_the_reason_and_the_others_stay_in_order(tmp_path: Path) -> None:
    good, bad = [{"role": "user", "content": "2 + 2?"}], [{"role": "bot", "content": "4"}]
    talks = [good, bad, None, [], good]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"spoken": talk}) + "\n" for talk in talks))
    rows = read(tmp_path / "in.jsonl", task="sft", columns={"messages": "spoken"})
    assert [row is not None for row in rows.inputs] == [True, False, False, False, True]
    assert "roles are system, user, assistant" in errors(rows)[2] and len(errors(rows)) == 3


def test_requests_of_batch_files_are_rows_with_their_custom_id(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "2 + 2?"}]
    whole = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": talk}}
    lines = [whole, {"custom_id": "b", "messages": talk}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = read(tmp_path / "in.jsonl", task="sft", columns={"messages": "spoken"}, kept=["custom_id"])
    assert rows.kept["custom_id"] == ["a", "b"] and [json.loads(row[0]) for row in rows.usable()] == [talk, talk]


def test_a_request_that_wants_another_answer_has_an_error_and_its_custom_id(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "2 + 2?"}]
    text = {"type": "text", "text": "2 + 2?"}
    parts = [{"role": "developer", "content": "Add."}, {"role": "user", "content": [text]}]
    plain = {"n": 1, "tools": [], "stop": None, "stream": False, "response_format": {"type": "text"}, "temperature": 0}
    bodies: list[dict[str, Any]] = [{"messages": talk, **plain}, {"messages": parts}, {"prompt": "2 + 2?"}]
    bodies += [{"messages": talk, name: value} for name, value in (("n", 2), ("tools", [{}]), ("stop", "\n"))]
    requests = [{"custom_id": number, "body": body} for number, body in enumerate(bodies)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in requests))
    own = reader(task="sft", columns={"messages": "spoken"}, kept=["custom_id"])
    (rows,) = own.shards(str(tmp_path / "in.jsonl"), 10)
    first, second = (json.loads(row[0]) for row in rows.usable())
    assert first == talk and second == [{"role": "system", "content": "Add."}, *talk]
    assert rows.kept["custom_id"] == [*range(6)] and own.ignored_fields == set()
    found = errors(rows)
    assert found[3] == "has no messages in its request"
    assert found[4] == "wants another answer than one whole text, by `n`: 2" and "`stop`: " in found[6]
    sampled = {"custom_id": "a", "body": {"messages": talk, "max_tokens": 9, "temperature": 1}}
    (tmp_path / "in.jsonl").write_text(json.dumps(sampled))
    assert len([*own.shards(str(tmp_path / "in.jsonl"), 10)]) == 1
    assert own.ignored_fields == {"max_tokens", "temperature"}


def test_shards_of_a_file_stay_the_same_when_rows_are_appended(tmp_path: Path) -> None:
    file = tmp_path / "in.csv"
    texts = [f"{number},text {number}" if number % 7 else f"{number}" for number in range(6244)]

    def digests(rows: int) -> list[tuple[int, str]]:
        file.write_text("\n".join(["id,text", *texts[:rows]]) + "\n")
        return [(len(part.numbers), digest_all(part)) for part in reader(kept=["id"]).shards(str(file), 1000)]

    few, many = digests(5500), digests(len(texts))
    assert [rows for rows, _ in few] == [1000] * 5 + [500] and many[:5] == few[:5] and many[5] != few[5]
    assert sum(rows for rows, _ in many) == len(texts)


def test_more_rows_need_no_more_memory(tmp_path: Path) -> None:
    def peak(rows: int) -> int:
        line = json.dumps({"text": "a good text of some length"}) + "\n"
        (tmp_path / "in.jsonl").write_text(line * rows)
        tracemalloc.start()
        for part in reader().shards(str(tmp_path / "in.jsonl"), 1000):
            digest_all(part)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    assert peak(5 * BLOCK_ROWS) < 1.2 * peak(2 * BLOCK_ROWS)
