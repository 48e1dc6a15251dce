"""Files of rows for prediction, read and written with the predictions."""

from __future__ import annotations

import csv
import datetime
import gzip
import json
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from training.data.prediction_files import BATCH_ROWS, READ, WRITTEN, Writer, read
from training.problems import UserError

DELIMITERS = {".csv": ",", ".tsv": "\t"}
LABELS = ["neg", "pos"]
ADDED = {
    "label": pa.string(),
    "probability": pa.float64(),
    "probabilities": pa.struct([(label, pa.float64()) for label in LABELS]),
}


def answer(text: str) -> dict[str, float]:
    return {"neg": 0.25, "pos": 0.75} if "good" in text else {"neg": 0.875, "pos": 0.125}


def whole(text: str) -> dict[str, Any]:
    every = answer(text)
    label = max(every, key=every.__getitem__)
    return {"label": label, "probability": every[label], "probabilities": every}


def answered(file: Path, out: Path, columns: Iterable[str] = ("text",)) -> Path:
    """The file with the predictions of a model that recognizes one word."""
    with Writer(out, out, ADDED) as writer:
        for rows, texts, _ in read(file, dict.fromkeys(columns, "text"), ADDED):
            writer.write(rows, [whole(text[0]) if text else None for text in texts])
    return out


def rows_in(file: Path) -> list[dict[str, Any]]:
    if file.suffix in DELIMITERS:
        with file.open(newline="") as lines:
            return list(csv.DictReader(lines, delimiter=DELIMITERS[file.suffix]))
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text().splitlines()]
    return pq.read_table(file).to_pylist()


@pytest.mark.parametrize("suffix", WRITTEN)
def test_texts_of_a_text_file_get_their_answers_in_order(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "in.txt").write_text("\ufeffa good one, “really”\r\n\nbad\x0bone\nno end")
    rows = rows_in(answered(tmp_path / "in.txt", tmp_path / f"out{suffix}"))
    assert [row["text"] for row in rows] == ["a good one, “really”", "", "bad\x0bone", "no end"]
    assert [row["label"] or None for row in rows] == ["pos", None, "neg", "neg"]
    assert [float(row["probability"] or 0) for row in rows] == [0.75, 0, 0.875, 0.875]
    if suffix not in DELIMITERS:
        assert rows[0]["probabilities"] == {"neg": 0.25, "pos": 0.75} and rows[1]["probabilities"] is None


@pytest.mark.parametrize("suffix", WRITTEN)
def test_every_other_column_of_a_csv_file_comes_along_as_it_is(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "in.csv").write_text('id,text,note\n007,good,"two\nlines, ""quoted"""\n\n1.0,bad,NA\n')
    rows = rows_in(answered(tmp_path / "in.csv", tmp_path / f"out{suffix}"))
    assert [row["id"] for row in rows] == ["007", "1.0"]
    assert [row["note"] for row in rows] == ['two\nlines, "quoted"', "NA"]
    assert [row["label"] for row in rows] == ["pos", "neg"]


def test_values_of_json_lines_stay_what_they_are_and_rows_may_differ(tmp_path: Path) -> None:
    lines = ['{"text": "good", "n": 1, "deep": {"a": [1, null]}}', "", '{"x": "é\\ud800", "text": null, "n": 1.5}']
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    first, second = rows_in(answered(tmp_path / "in.jsonl", tmp_path / "out.jsonl"))
    assert first == json.loads(lines[0]) | {"label": "pos", "probability": 0.75, "probabilities": answer("good")}
    assert second == json.loads(lines[2]) | {"label": None, "probability": None, "probabilities": None}
    cells = rows_in(answered(tmp_path / "in.jsonl", tmp_path / "out.csv"))
    assert [row["deep"] for row in cells] == ['{"a": [1, null]}', ""]


def test_types_and_metadata_of_parquet_stay_what_they_are(tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": pa.array(["good", None, "bad"]).dictionary_encode(),
            "when": pa.array([1, None, 3], pa.timestamp("ns", "UTC")),
            "vector": pa.array([[1.5], [], None], pa.list_(pa.float32())),
        }
    ).replace_schema_metadata({"made": "by hand"})
    pq.write_table(table, tmp_path / "in.parquet")
    found = pq.read_table(answered(tmp_path / "in.parquet", tmp_path / "out.parquet"))
    assert found.select(table.schema.names).equals(table) and found.schema.metadata[b"made"] == b"by hand"
    assert found["label"].to_pylist() == ["pos", None, "neg"]
    rows = rows_in(answered(tmp_path / "in.parquet", tmp_path / "out.jsonl"))
    assert rows[0]["vector"] == [1.5] and datetime.datetime.fromisoformat(rows[0]["when"]).year == 1970


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("in.csv", "id,txt\n1,good\n", "has no column 'text': it has id, txt. Did you mean 'txt'?"),
        (
            "in.csv",
            "text,label,predicted_label\ngood,1,1\n",
            "has a column 'predicted_label', which is the name of a prediction",
        ),
        ("in.csv", "text,text\na,b\n", "has two columns 'text': rename one."),
        ("in.csv", "text,n\na,1\nb\n", "has 1 fields where the header has 2: correct or remove it."),
        ("in.csv", 'text\n"a\n', "has a quotation mark that is never closed"),
        ("in.csv", "text\n", "holds no rows."),
        ("in.csv", b"text\n\xff\n", "is not UTF-8 text: correct or remove it."),
        ("in.txt", "", "holds no rows."),
        ("in.jsonl", '{"text": "a"}\n[1]\n', "is no object: [1]: correct or remove it."),
        ("in.jsonl", '{"text": "a"}\nnull\n', "is no object: None"),
        ("in.jsonl", '{"text": "a"}\n\n{"text": 3}\n', "row 3 has 3 in column 'text', where a text belongs."),
        ("in.jsonl", '{"text": "a"\n', "is not JSON"),
        ("in.jsonl", '{"text": "\\ud800"}\n', "row 1 has '\\ud800' in column 'text'"),
        ("in.parquet", "PAR1", "is not readable as Parquet"),
    ],
)
def test_a_file_that_cannot_be_predicted_is_reported_in_one_message(
    tmp_path: Path, name: str, content: str | bytes, words: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as raised:
        list(read(file, {"text": "text"}, ADDED))
    (problem,) = raised.value.problems
    assert problem.where.removesuffix(f" row {problem.where[-1]}") == str(file) and words in problem.message


def test_a_row_that_does_not_fit_the_columns_of_the_first_ones_names_the_format_that_takes_it(tmp_path: Path) -> None:
    def write(last: str) -> None:
        (tmp_path / "in.jsonl").write_text('{"text": "a", "n": 1}\n' * BATCH_ROWS + last)

    write('{"text": "a", "new": 1}')
    for suffix in (".csv", ".parquet"):
        with pytest.raises(UserError, match=r"'new' is in none of the first 2,048 rows.* write a .jsonl\."):
            answered(tmp_path / "in.jsonl", tmp_path / f"out{suffix}")
    write('{"text": "a", "n": "one"}')
    with pytest.raises(UserError, match="no type holds all values of a column"):
        answered(tmp_path / "in.jsonl", tmp_path / "out.parquet")
    assert len(rows_in(answered(tmp_path / "in.jsonl", tmp_path / "out.jsonl"))) == BATCH_ROWS + 1


def test_pairs_of_texts_are_taken_in_the_models_order_and_a_text_a_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("b,a\nsecond,first\n,only\n")
    (batch,) = read(tmp_path / "in.csv", {"a": "text", "b": "text"}, ADDED)
    assert batch.inputs == [("first", "second"), None]
    (tmp_path / "in.txt").write_text("a\n")
    with pytest.raises(UserError, match=r"the model takes 2 values: give a and b as columns of a .csv"):
        list(read(tmp_path / "in.txt", {"a": "text", "b": "text"}, ADDED))


@pytest.mark.parametrize("name", ["in.csv.gz", "in.jsonl.zst", "in.json", "in.arrow"])
def test_every_format_of_training_data_is_read(tmp_path: Path, name: str) -> None:
    assert any(name.endswith(suffix) for suffix in READ)
    rows = [{"id": "1", "text": "good"}, {"id": "2", "text": "bad"}]
    if name == "in.arrow":
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_file(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    elif name == "in.csv.gz":
        (tmp_path / name).write_bytes(gzip.compress(b"id,text\n1,good\n2,bad\n"))
    elif name == "in.json":
        (tmp_path / name).write_text(json.dumps(rows))
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name).write_bytes(pa.compress(lines.encode(), "zstd", asbytes=True))
    found = rows_in(answered(tmp_path / name, tmp_path / "out.jsonl"))
    assert [(row["id"], row["text"], row["label"]) for row in found] == [("1", "good", "pos"), ("2", "bad", "neg")]


def test_all_rows_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b"id,text\n1,good,more\n2,\xff\n3,bad\n4\n")
    with pytest.raises(UserError) as raised:
        list(read(tmp_path / "in.csv", {"text": "text"}, ADDED))
    assert {problem.where.rpartition("row ")[2]: problem.message for problem in raised.value.problems} == {
        "2": "has 3 fields where the header has 2: correct or remove it.",
        "3": "is not UTF-8 text: correct or remove it.",
        "5": "has 1 fields where the header has 2: correct or remove it.",
    }


def test_typed_texts_that_are_not_utf_8_are_reported(tmp_path: Path) -> None:
    raw = pa.array([b"fine", b"\xff"])
    texts = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    pq.write_table(pa.table({"text": texts}), tmp_path / "in.parquet")
    with pytest.raises(UserError, match="is not UTF-8 text in a row from 1 to 2"):
        list(read(tmp_path / "in.parquet", {"text": "text"}, ADDED))


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_quotation_marks_of_a_text_are_never_dropped_without_a_word(tmp_path: Path, suffix: str) -> None:
    delimiter = DELIMITERS[suffix]
    (tmp_path / f"in{suffix}").write_text(
        f'id{delimiter}text\n1{delimiter}"so" he said\n2{delimiter}"a ""good"" one"\n'
    )
    with pytest.raises(UserError) as raised:
        list(read(tmp_path / f"in{suffix}", {"text": "text"}, ADDED))
    (problem,) = raised.value.problems
    assert problem.where.endswith(f"in{suffix} row 2")
    assert problem.message.startswith(
        "has a quoted field whose quotation marks may belong to the text: '\"so\" he said'"
    )


@pytest.mark.parametrize("suffix", WRITTEN)
def test_rows_with_a_label_of_their_own_get_the_predicted_one_in_another_column(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "in.tsv").write_text('text\tlabel\n"good, really"\tpos\nbad\tpos\n')
    rows = rows_in(answered(tmp_path / "in.tsv", tmp_path / f"out{suffix}"))
    assert [row["text"] for row in rows] == ["good, really", "bad"]
    assert [(row["label"], row["predicted_label"]) for row in rows] == [("pos", "pos"), ("pos", "neg")]
    assert {"probability", *(["probabilities"] if suffix not in DELIMITERS else [])} <= rows[0].keys()


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_column_that_is_optional_may_be_absent(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"in{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table({"ask": ["a"]}), file)
    else:
        file.write_text('{"ask": "a"}\n' if suffix == ".jsonl" else "ask\na\n")
    forms: dict[str, Any] = {"ask": "text", "more": "text"}
    (batch,) = read(file, forms, ADDED, blank={"more"}, optional={"more"})
    assert batch.inputs == [("a", "")]
    with pytest.raises(UserError, match="has no column 'more'"):
        list(read(file, forms, ADDED, blank={"more"}))


def test_a_row_may_have_nothing_where_its_column_may_be_blank(tmp_path: Path) -> None:
    file = tmp_path / "in.csv"
    file.write_text('asked,more\na,\n"",b\nc,d\n')
    (batch,) = read(file, {"asked": "text", "more": "text"}, (), blank={"more"})
    assert batch.inputs == [("a", ""), None, ("c", "d")]


@pytest.mark.parametrize("suffix", WRITTEN)
def test_lists_are_spelt_as_json_in_csv_and_are_lists_elsewhere(tmp_path: Path, suffix: str) -> None:
    words = [["EU", "rejects"], ["it"]]
    for name, delimiter in DELIMITERS.items():
        with (tmp_path / f"in{name}").open("w", newline="") as file:
            table = [["words"], *([json.dumps(row)] for row in words), ["[]"], [""]]
            csv.writer(file, delimiter=delimiter).writerows(table)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"words": row}) + "\n" for row in [*words, [], None]))
    pq.write_table(pa.table({"words": [*words, [], None]}), tmp_path / "in.parquet")
    (batch,) = read(tmp_path / f"in{suffix}", {"words": "texts"}, ())
    assert batch.inputs == [(words[0],), (words[1],), None, None]
    (tmp_path / "in.csv").write_text("words\nEU rejects\n")
    with pytest.raises(UserError, match=r"row 2 has 'EU rejects' in column 'words', where such as \[.EU., .rejects.\]"):
        list(read(tmp_path / "in.csv", {"words": "texts"}, ()))


@pytest.mark.parametrize("suffix", WRITTEN)
def test_more_rows_need_no_more_memory(tmp_path: Path, suffix: str) -> None:
    def peak(rows: int) -> int:
        line = json.dumps({"text": "a good text of some length"}) + "\n"
        (tmp_path / "in.jsonl").write_text(line * rows)
        allocated = 0
        tracemalloc.start()
        with Writer(tmp_path / "out", tmp_path / f"out{suffix}", ADDED) as writer:
            for batch in read(tmp_path / "in.jsonl", {"text": "text"}, ADDED):
                writer.write(batch.rows, [whole("good")] * len(batch.inputs))
                allocated = max(allocated, pa.total_allocated_bytes())
        peak = tracemalloc.get_traced_memory()[1] + allocated
        tracemalloc.stop()
        return peak

    assert peak(5 * BATCH_ROWS) < 1.2 * peak(2 * BATCH_ROWS)
