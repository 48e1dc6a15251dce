"""Rows to predict: each row of a file once, in order, with its inputs or its error."""

from __future__ import annotations

import csv
import gzip
import json
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from tests.arrow import write_arrow
from tests.raised import raised_problems
from training import task_types
from training.data.ipc_files import BLOCK_ROWS
from training.data.prediction_rows import (
    RowReader,
    Rows,
    digest_all,
    digest_inputs,
)
from training.data.readers import Block, match_columns
from training.problems import UserError
from training.recipe import Data
from training.recipe.reading_rules import ReadingRules
from training.recipe.tables import formats

TEXT = {"text": "text"}


def reader(
    task: str = "sequence-classification",
    columns: Mapping[str, str] = TEXT,
    kept: Sequence[str] = (),
    needs_filter: bool = False,
    **data: Any,
) -> RowReader:
    """The reader for a model whose recipe has these fields of `data`."""
    rules = ReadingRules.of(Data.model_validate({"source": "csv", "path": "rows", "text": ["text"], **data}))
    return RowReader(task_types.load(task), columns, kept, rules, needs_filter=needs_filter)


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


@pytest.mark.slow
def test_a_table_of_very_many_columns_is_read_in_time_that_grows_with_them(tmp_path: Path) -> None:
    file = tmp_path / "wide.csv"
    file.write_text(f"text,{','.join(f'c{number}' for number in range(100_000))}\nfirst{',' * 100_000}\n")
    assert read(file).inputs == [("first",)]


def test_rows_of_json_lines_may_differ_and_their_values_stay_as_they_are(tmp_path: Path) -> None:
    lines = ['{"text": "a", "n": {"b": [1]}}', "", '{"text": "c"}', "[1]", '{"text": 3}', '{"text": "\\ud800"}', "{"]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    rows = read(tmp_path / "in.jsonl", kept=["n"])
    assert rows.inputs == [("a",), ("c",), None, None, None, None]
    assert rows.kept["n"] == [{"b": [1]}, None, None, None, None, None] and rows.numbers == [1, 3, 4, 5, 6, 7]
    found = errors(rows)
    assert found[4].startswith("is no mapping of columns to values") and found[7].startswith("is not JSON")
    assert found[5] == "holds int in column 'text' where a text belongs: 3" and 6 in found


def test_a_column_that_later_rows_of_json_begin_with_is_empty_before(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "a"} | ({"id": place} if place > 700 else {})) for place in range(1500)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    rows = read(tmp_path / "in.jsonl", kept=["id"])
    assert rows.kept["id"] == [None] * 701 + [*range(701, 1500)] and rows.numbers == [*range(1, 1501)]


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
    problems = raised_problems(read, tmp_path / name, kept=["id"])
    lines = [f"{problem.where}: {problem.message}" for problem in problems]
    assert any(str(tmp_path / name) in line and words in line for line in lines), lines


def test_pairs_of_texts_are_taken_in_the_models_order_and_a_text_a_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("b,a\nsecond,first\n,only\n")
    rows = read(tmp_path / "in.csv", columns={"text": "a", "text_pair": "b"})
    assert rows.inputs == [("first", "second"), None]
    (tmp_path / "in.txt").write_text("a\n")
    with pytest.raises(UserError, match=r"the model takes 2 values: give a and b as columns of a .csv"):
        read(tmp_path / "in.txt", columns={"text": "a", "text_pair": "b"})


@pytest.mark.parametrize("name", ["in.csv.gz", "in.jsonl.zst", "in.json", "in.arrow"])
def test_every_format_of_training_data_is_read_and_equal_rows_have_one_digest(tmp_path: Path, name: str) -> None:
    assert any(name.endswith(suffix) for suffix in ReadingRules().suffixes)
    rows = [{"id": "1", "text": "good"}, {"id": "2", "text": "bad é"}]
    if name == "in.arrow":
        table = pa.Table.from_pylist(rows)
        write_arrow(tmp_path / name, table)
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


def test_requests_with_tools_are_rows_of_a_model_with_a_column_of_tools(tmp_path: Path) -> None:
    talk, tools = [{"role": "user", "content": "2 + 2?"}], [{"type": "function", "function": {"name": "add"}}]
    bodies = [{"messages": talk, "tools": tools, **more} for more in ({}, {"tool_choice": "none"})]
    requests = [{"custom_id": number, "body": body} for number, body in enumerate([*bodies, {"messages": talk}])]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in requests))
    for rename in ({}, {"functions": "tools", "talk": "messages"}):
        columns = {"messages": "messages", "tools": "tools"}
        rows = read(tmp_path / "in.jsonl", task="sft", columns=columns, kept=["custom_id"], rename=rename)
        given = [[value and json.loads(value) for value in row] for row in rows.usable()]
        assert given == [[talk, tools], [talk, None], [talk, None]] and rows.kept["custom_id"] == [0, 1, 2]


@pytest.mark.parametrize("column", ["messages", "spoken"])
def test_fields_of_a_flat_request_are_honoured_or_refused_by_name_whatever_the_models_column(
    tmp_path: Path, column: str
) -> None:
    talk, tools = [{"role": "user", "content": "2 + 2?"}], [{"name": "add"}]
    fields: list[dict[str, Any]] = [{"note": "x"}, {"n": 2}, {"stop": "."}, {"max_tokens": 9}]
    fields += [{"tools": tools}, {"functions": tools}, {"tools": tools, "tool_choice": "none"}]
    fields += [{"functions": tools, "function_call": {"name": "add"}}]
    requests = [{"custom_id": number, "messages": talk, **more} for number, more in enumerate(fields)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in requests))
    own = reader(task="sft", columns={"messages": column, "tools": "tools"}, kept=["custom_id", "note"])
    (rows,) = own.shards(str(tmp_path / "in.jsonl"), 10)
    found = errors(rows)
    assert found.keys() == {2, 3, 8} and "`n`: 2" in found[2] and "`stop`" in found[3] and "`function_call`" in found[8]
    given = [None if values is None else values[1] for values in rows.inputs]
    assert [bool(one) for one in given] == [False, False, False, False, True, True, False, False]
    assert rows.kept == {"custom_id": [*range(8)], "note": ["x", *[None] * 7]} and own.ignored_fields == {"max_tokens"}


def test_a_request_that_wants_another_answer_has_an_error_and_its_custom_id(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "2 + 2?"}]
    text = {"type": "text", "text": "2 + 2?"}
    parts = [{"role": "developer", "content": "Add."}, {"role": "user", "content": [text]}]
    plain = {"n": 1, "tools": [], "stop": None, "stream": False, "response_format": {"type": "text"}, "temperature": 0}
    bodies: list[dict[str, Any]] = [{"messages": talk, **plain}, {"messages": parts}, {"prompt": "2 + 2?"}]
    bodies += [{"messages": talk, name: value} for name, value in (("n", 2), ("tools", [{}]), ("stop", "\n"))]
    bodies += [{"messages": talk, "tool_choice": "required"}]
    requests = [{"custom_id": number, "body": body} for number, body in enumerate(bodies)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in requests))
    own = reader(task="sft", columns={"messages": "spoken"}, kept=["custom_id"])
    (rows,) = own.shards(str(tmp_path / "in.jsonl"), 10)
    first, second = (json.loads(row[0]) for row in rows.usable())
    assert first == talk and second == [{"role": "system", "content": "Add."}, *talk]
    assert rows.kept["custom_id"] == [*range(7)] and own.ignored_fields == set()
    found = errors(rows)
    assert found[3] == "has no messages in its request"
    assert found[4] == "wants another answer than one whole text, by `n`: 2" and "`stop`: " in found[6]
    assert found[5].startswith("has `tools`, and the model was trained without a column data.columns.tools: ")
    assert "`tool_choice`: 'required'" in found[7]
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("data", "name", "content", "texts"),
    [
        ({"delimiter": ";"}, "in.csv", "id;text\n1;good, really\n", ["good, really"]),
        ({"quoting": "none"}, "in.tsv", 'id\ttext\n1\t"so" he said\n2\t"fine"\n', ['"so" he said', '"fine"']),
        ({"encoding": "cp1252"}, "in.csv", "id,text\n1,caf\xe9\n".encode("cp1252"), ["caf\xe9"]),
        ({"header": ["text", "label"]}, "in.tsv", "one\tspam\ntwo\tham\n", ["one", "two"]),
        ({"header": ["id", "text", "label"]}, "in.tsv", "1\tone\n2\ttwo\n", ["one", "two"]),
        ({"rename": {"body": "text", "stars": "label"}}, "in.csv", "id,body\n1,one\n", ["one"]),
        ({"rename": {"body": "text"}}, "in.csv", "id,text\n1,one\n", ["one"]),
        ({"rename": {"body": "text"}}, "in.jsonl", '{"body": "one"}\n{"text": "two"}\n', ["one", "two"]),
        ({"source": "parquet", "cast": {"text": "string", "n": "int64"}}, "in.parquet", {"text": [7, 8]}, ["7", "8"]),
        ({"source": "json", "cast": {"text": "string"}}, "in.jsonl", '{"text": 7}\n{"text": "b"}\n', ["7", "b"]),
    ],
)
def test_rows_to_predict_are_read_as_the_recipe_read_its_rows(
    tmp_path: Path, data: dict[str, Any], name: str, content: Any, texts: list[str]
) -> None:
    if isinstance(content, dict):
        pq.write_table(pa.table(content), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    rows = read(tmp_path / name, **data)
    assert [values and values[0] for values in rows.inputs] == texts and not any(rows.errors)


def test_a_text_file_is_a_table_for_a_model_that_was_trained_on_such_tables(tmp_path: Path) -> None:
    """Line by line, the label would be a part of the text."""
    (tmp_path / "new.txt").write_text("one\tspam\ntwo\tham\n")
    table = {"header": ["text", "label"], "delimiter": "\t"}
    assert read(tmp_path / "new.txt", path="rows/train.txt", **table).inputs == [("one",), ("two",)]
    assert read(tmp_path / "new.txt", path="rows", splits={"train": "train.txt"}, **table).inputs[0] == ("one",)
    assert read(tmp_path / "new.txt", path="rows/train.csv", **table).inputs[0] == ("one\tspam",)


def test_fields_about_the_bytes_of_a_format_do_not_hold_for_another(tmp_path: Path) -> None:
    """UTF-8 read as cp1252 is garbled without a word."""
    (tmp_path / "in.jsonl").write_text('{"text": "caf\xe9"}\n', encoding="utf-8")
    (tmp_path / "in.txt").write_text("caf\xe9\n", encoding="utf-8")
    for name in ("in.jsonl", "in.txt"):
        assert read(tmp_path / name, encoding="cp1252").inputs == [("caf\xe9",)]


@pytest.mark.parametrize(
    ("header", "line"),
    [(["label", "text"], "one\n"), (["id", "label", "text"], "7\tone\n")],
)
def test_a_headerless_file_that_may_lack_any_column_is_one_message(
    tmp_path: Path, header: list[str], line: str
) -> None:
    (tmp_path / "in.tsv").write_text(line * 3)
    with pytest.raises(UserError, match=r"data\.header: names .* columns .* name the columns of these rows") as raised:
        read(tmp_path / "in.tsv", header=header)
    assert len(raised.value.problems) == 1


def test_what_training_refuses_in_a_row_is_its_error_and_what_it_warns_of_is_said_once_with_the_count(
    tmp_path: Path,
) -> None:
    lines = ["id,text", '1,"so" he said', '2,"well" she said', "id,text", "3,", '4,"a\nb"', "5,plain"]
    (tmp_path / "in.csv").write_text("\n".join(lines) + "\n")
    own, file = reader(kept=["id"]), str(tmp_path / "in.csv")
    (rows,) = own.shards(file, 10**6)
    assert errors(rows) == {4: "repeats the header", 5: "has no text in column 'text'"}
    assert rows.kept["id"] == ["1", "2", "id", "3", "4", "5"]
    stray, breaks = (next(text for text in own.warnings[file] if word in text) for word in ("marks may", "line breaks"))
    assert "(2 rows like this: 2, 3)" in stray and "row 6" in breaks and len(own.warnings[file]) == 2
    strict = reader(checks={"stray_quotes": "error", "line_breaks": "ignore", "header_row": "ignore"})
    (rows,) = strict.shards(file, 10**6)
    assert sorted(errors(rows)) == [2, 3, 5] and strict.warnings[file] == []


def test_rows_that_a_stray_quotation_mark_swallows_are_an_error(tmp_path: Path) -> None:
    swallowed = "".join(f"{number},text {number}\n" for number in range(3, 20))
    (tmp_path / "in.csv").write_text('id,text\n1,good\n2,"never closed\n' + swallowed)
    rows = read(tmp_path / "in.csv")
    assert rows.usable() == [("good",)] and "never closed" in errors(rows)[3]


def test_the_filter_marks_rows_and_every_row_is_predicted(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("lang,text\nen,one\nde,zwei\nen,\nen,three\n")
    rows = read(tmp_path / "in.csv", filter='lang == "en"')
    assert len(rows.usable()) == 3 and rows.filtered == {3}
    assert rows.like_training_rows() == [("one",), None, ("three",)]
    assert rows.like_training_rows(start=1) == [None, ("three",)]


@pytest.mark.parametrize("name", ["in.csv", "in.jsonl"])
def test_a_filter_on_a_column_that_new_rows_lack_is_named_and_stops_only_what_needs_it(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("text\none\n" if name == "in.csv" else '{"text": "one"}\n')
    own = reader(filter='label != "unsure"')
    (rows,) = own.shards(str(tmp_path / name), 10)
    assert rows.usable() == [("one",)] and not rows.filtered
    assert "has no label, which data.filter reads" in own.unfiltered[str(tmp_path / name)]
    with pytest.raises(UserError, match=r"data\.filter: .* has no column 'label'"):
        read(tmp_path / name, filter='label != "unsure"', needs_filter=True)


def test_a_format_that_is_added_to_the_table_is_read_and_another_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orc.write_table(pa.table({"text": ["one", "two"], "id": [1, 2]}), tmp_path / "in.orc")
    with pytest.raises(UserError, match=r"in\.orc: has an unknown format: choose from \.txt, \.csv"):
        read(tmp_path / "in.orc")
    added = formats.RowSource(f"{__name__}:read_orc", (".orc",))
    monkeypatch.setitem(formats.SOURCES, "arrow", added)  # in its place, since the recipe knows the names of formats
    monkeypatch.setitem(formats.FORMATS, "arrow", added)
    rows = read(tmp_path / "in.orc", kept=["id"])
    assert rows.inputs == [("one",), ("two",)] and rows.kept["id"].to_pylist() == [1, 2]


def read_orc(wanted: Any, split: str, pinned: Mapping[str, Any], slices: Any) -> Any:
    """A reader as a contributor adds it."""
    for file in pinned[split]:
        table = orc.read_table(file)
        columns = match_columns(wanted, table.column_names, file)
        others = slices.of_file(table.column_names, table.schema.types)
        for batch in table.to_batches():
            rows = pa.RecordBatch.from_pydict({name: batch.column(theirs) for name, theirs in columns.items()})
            kept = {name: slices.of_array(batch.column(theirs), ()) for name, theirs in others.items()}
            yield Block(file, rows, np.arange(1, 1 + batch.num_rows), slices=kept)
