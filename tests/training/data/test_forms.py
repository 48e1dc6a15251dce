"""Columns of every form from every source: the stored values, and the messages about wrong ones."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import yaml

from tests.arrow import read_arrow, write_arrow
from tests.raised import raised_problems
from tests.training.data.task_types import CLASSIFICATION, Chat, Rating, Tags
from training.data.load_rows import load
from training.evaluation.plots import draw_rows
from training.problems import Problem, UserError
from training.recipe import Data
from training.recipe.column_types import RowSpecification
from training.task_types.kto import Kto
from training.task_types.multi_label_classification import MultiLabelClassification
from training.task_types.preference import Preference
from training.task_types.regression import Regression
from training.task_types.reward_modeling import RewardModeling
from training.task_types.seq2seq import Seq2Seq
from training.task_types.sft import SupervisedFineTuning

Row = dict[str, Any]
TAGS: list[Row] = [
    {"words": ["EU", "rejects", 'a "call"'], "tags": ["B", "O", "O"]},
    {"words": ["Peter", "größt"], "tags": ["B", "O"]},
    {"words": ["No"], "tags": ["O"]},
]
CHATS: list[Row] = [
    {"messages": [{"role": "user", "content": 'Say "hé"'}, {"role": "assistant", "content": "hé"}]},
    {"messages": [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "no"}]},
]


def json_lines(file: Path, rows: list[Row]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def csv_cells(file: Path, rows: list[Row]) -> str:
    cells = [[json.dumps(value).replace('"', '""') for value in row.values()] for row in rows]
    file.write_text("\n".join([",".join(rows[0]), *('"' + '","'.join(row) + '"' for row in cells)]) + "\n")
    return str(file)


def run(task: RowSpecification, file: str, out: Path, source: str = "json", **data: Any) -> dict[str, Any]:
    """The report on the rows of a file, which are train and validation alike."""
    data["checks"] = {"shared_rows": "ignore"} | data.get("checks", {})
    made = Data(source=source, path=file if source == "python" else "-", **data)
    files = {}
    if source != "python":
        other = Path(file).with_stem("validation")
        other.write_bytes(Path(file).read_bytes())
        files = {"train": [file], "validation": [str(other)]}
    load(made, task, files, out)
    report: dict[str, Any] = json.loads((out / "log" / "report.json").read_text())
    return report


def problems_of(task: RowSpecification, rows: list[Row], folder: Path, **data: Any) -> list[str]:
    """The problems of rows of JSON: check, row and message without the next step."""
    try:
        found = [Problem(**one) for one in run(task, json_lines(folder / "r.jsonl", rows), folder, **data)["problems"]]
    except UserError as error:
        found = list(error.problems)
    messages = (
        f"{one.check} {one.where.partition(' ')[2]}: {one.message}" for one in found if "validation" not in one.where
    )
    return [re.sub(": (set|correct|left out).*", "", one) for one in messages]


def stored(out: Path) -> pa.Table:
    return read_arrow(out / "train.arrow")


def contents(out: Path) -> dict[str, bytes]:
    return {name: (out / name).read_bytes() for name in ("train.arrow", "labels.json")}


@pytest.fixture
def tagged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The same words and tags in every source: its file, or function."""
    numbers = [{**row, "tags": [["O", "B"].index(tag) for tag in row["tags"]]} for row in TAGS]
    feature = {"feature": {"names": ["O", "B"], "_type": "ClassLabel"}, "_type": "List"}
    named = {"huggingface": json.dumps({"info": {"features": {"tags": feature}}})}
    table = pa.Table.from_pylist(numbers).replace_schema_metadata(named)
    pq.write_table(table, tmp_path / "t.parquet")
    coded = pa.ListArray.from_arrays([0, 3, 5, 6], table["words"].combine_chunks().flatten().dictionary_encode())
    table = table.set_column(0, "words", coded)
    write_arrow(tmp_path / "t.arrow", table)
    lines = ["import numpy as np", f"ROWS = {TAGS!r}", "def rows(split):", "    for row in ROWS:"]
    lines += ["        yield {'words': np.array(row['words']), 'tags': tuple(row['tags'])}"]
    lines += ["def dataset(split):", "    import datasets as d", "    tags = d.ClassLabel(names=['O', 'B'])"]
    lines += ["    features = d.Features({'words': d.List(d.Value('string')), 'tags': d.List(tags)})"]
    lines += ["    return d.Dataset.from_list(ROWS, features)"]
    (tmp_path / "tagged_rows.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    return {
        "csv": csv_cells(tmp_path / "t.csv", TAGS),
        "json": json_lines(tmp_path / "t.jsonl", TAGS),
        "python": "tagged_rows:rows",
        "dataset": "tagged_rows:dataset",
        "parquet": str(tmp_path / "t.parquet"),
        "arrow": str(tmp_path / "t.arrow"),
    }


def test_lists_of_words_and_tags_are_stored_alike_from_every_source(tmp_path: Path, tagged: dict[str, str]) -> None:
    found = {}
    for source, file in tagged.items():
        assert run(Tags(), file, tmp_path / source, "python" if source == "dataset" else source)["problems"] == []
        found[source] = contents(tmp_path / source)
    assert json.loads(found["csv"]["labels.json"]) == ["O", "B"]
    table = stored(tmp_path / "csv")
    assert table.schema == pa.schema({"words": pa.list_(pa.string()), "tags": pa.list_(pa.int64())})
    assert table.to_pylist() == [{**row, "tags": [["O", "B"].index(tag) for tag in row["tags"]]} for row in TAGS]
    assert all(one == found["csv"] for one in found.values())


def test_a_list_of_labels_counts_each_of_them(tmp_path: Path) -> None:
    report = run(Tags(), json_lines(tmp_path / "t.jsonl", TAGS), tmp_path / "out")
    assert report["rows"] == {"train": 3, "validation": 3}
    assert report["labels"]["train"] == {"O": 4, "B": 2}
    assert (report["characters"]["train"]["min"], report["characters"]["train"]["max"]) == (2, 17)


def test_mistakes_in_lists_are_reported_with_the_row(tmp_path: Path) -> None:
    bad = [
        {"words": [], "tags": []},
        {"words": ["a", " "], "tags": ["O", "O"]},
        {"words": ["a"], "tags": [""]},
        {"words": ["a"], "tags": None},
        {"words": "a b", "tags": ["O"]},
        {"words": ["a", 1], "tags": ["O", "O"]},
        {"words": ["a"], "tags": [1.5]},
        {"words": ["a"], "tags": ["O", "O"]},
        {"words": ["\ud800"], "tags": ["O"]},
    ]
    found = problems_of(Tags(), [*TAGS, *bad], tmp_path)
    assert found == [
        "malformed row 12: holds half a character (such as \\ud83d without its other half) in column 'words'",
        "type row 8: holds no list of texts in column 'words': 'a b' (2 rows like this: 8, 9)",
        "type row 10: holds no list of labels, which are texts or whole numbers, in column 'tags': [1.5]",
        "blank_text row 4: has no texts in column 'words'",
        "blank_text row 5: has an empty text in column 'words'",
        "missing_label row 7: has no label in column 'tags'",
        "missing_label row 6: has an empty label in column 'tags'",
        "uneven row 11: has more or fewer tags than words",
    ]
    checks = dict.fromkeys(["type", "malformed", "blank_text", "missing_label", "uneven"], "warning")
    report = run(Tags(), str(tmp_path / "r.jsonl"), tmp_path / "out", checks=checks)
    assert report["left_out"] == {"train": 9, "validation": 9}
    assert stored(tmp_path / "out")["words"].to_pylist() == [row["words"] for row in TAGS]


def test_cells_that_are_no_json_are_reported_with_an_example(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text('words,tags\n"[""a""]","[""O""]"\na b,"[""O""]"\n')
    problem = raised_problems(run, Tags(), str(file), tmp_path, "csv")[0]
    assert (problem.check, problem.where) == ("malformed", f"{file} row 3")
    assert """holds no JSON such as ["EU", "rejects"] in column 'words': 'a b': correct""" in problem.message


def test_a_parquet_column_of_another_type_is_reported_before_it_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"words": ["a b"], "tags": [[0.5]]}), tmp_path / "t.parquet")
    problems = raised_problems(run, Tags(), str(tmp_path / "t.parquet"), tmp_path, "parquet")
    assert {one.where: one.message.partition("is of type ")[2] for one in problems} == {
        "data.columns.words": "string: it must hold lists of text.",
        "data.columns.tags": "list<element: double>: it must hold lists of text or of whole numbers.",
    }


def test_bytes_in_a_list_that_are_no_text_are_reported_with_the_row(tmp_path: Path) -> None:
    words = pa.ListArray.from_arrays([0, 1, 2], pa.array([b"ok", b"\xff"]).view(pa.string()))
    table = pa.table({"words": words, "tags": [["O"], ["B"]]})
    write_arrow(tmp_path / "t.arrow", table)
    problem = raised_problems(run, Tags(), str(tmp_path / "t.arrow"), tmp_path, "arrow")[0]
    assert (problem.check, problem.where) == ("encoding", f"{tmp_path / 't.arrow'} row 2")


def test_a_row_with_an_unknown_label_among_others_is_left_out_and_no_longer_counted(tmp_path: Path) -> None:
    rows = [*TAGS, {"words": ["x", "y", "z"], "tags": ["B", "I", "C"]}]
    checks = {"unknown_label": "warning"}
    report = run(Tags(), json_lines(tmp_path / "t.jsonl", rows), tmp_path, label_names=["O", "B", "C"], checks=checks)
    assert report["labels"]["train"] == {"O": 4, "B": 2, "C": 0}
    assert (report["rows"]["train"], report["left_out"]["train"], stored(tmp_path).num_rows) == (3, 1, 3)
    assert "label 'I' (1 row of train) is unknown" in report["problems"][0]["message"]


def test_equal_words_with_other_tags_are_a_conflict(tmp_path: Path) -> None:
    found = problems_of(Tags(), [*TAGS, {"words": ["No"], "tags": ["B"]}], tmp_path)
    assert found[0].startswith("duplicates row 4: 1 row of train repeats the text of an earlier row")
    assert "(['B'] here, ['O'] in row 3: ['No'])" in found[1]


def test_numbers_are_stored_as_such_and_none_counts_as_a_label(tmp_path: Path) -> None:
    (tmp_path / "r.csv").write_text("text,stars\none,3\ntwo,-0.25\nthree,1e3\n")
    report = run(Rating(), str(tmp_path / "r.csv"), tmp_path, "csv", text=["text"], label="stars")
    assert stored(tmp_path).schema == pa.schema({"text": pa.string(), "label": pa.float64()})
    assert stored(tmp_path)["label"].to_pylist() == [3.0, -0.25, 1000.0]
    assert (report["labels"], report["problems"]) == ({"train": {}, "validation": {}}, [])
    assert json.loads((tmp_path / "labels.json").read_text()) == []
    draw_rows(report, tmp_path / "drawn")
    assert [file.name for file in (tmp_path / "drawn").iterdir()] == ["lengths.png"]


def test_a_label_that_is_no_finite_number_is_reported_with_the_row(tmp_path: Path) -> None:
    values = [1.5, float("nan"), "much", None, 2, "7"]
    rows = [{"text": f"t{n}", "label": value} for n, value in enumerate(values)]
    found = problems_of(Rating(), rows, tmp_path, text=["text"], label="label")
    assert found == [
        "type row 3: holds no finite number in column 'label': 'much' (2 rows like this: 3, 2)",
        "missing_label row 4: has no label in column 'label'",
    ]


def test_a_number_beyond_the_floats_of_a_model_is_reported_with_the_row(tmp_path: Path) -> None:
    rows = [{"text": f"t{n}", "label": value} for n, value in enumerate([1.5, 1e39, 3.4e38, "-1e39"])]
    (found,) = problems_of(Rating(), rows, tmp_path, text=["text"], label="label")
    assert "type row 2: holds a number beyond ±3.4e+38, the range of 32-bit floats" in found and "2, 4" in found


@pytest.mark.parametrize(
    ("numbers", "counted"),
    [
        ("2.155 6 19.470 +546", " (2 rows like this: 2, 4)"),
        ("2.155 6.5 19.470 546", None),  # a point before one digit is a decimal point
        ("0.155 6 19.470 546", None),
        ("2.155 6 19.470 1546", None),  # a thousand without a point
        ("2.155 7.250 19.470 1.546", None),  # all in one form
    ],
)
def test_points_that_may_separate_thousands_are_reported(tmp_path: Path, numbers: str, counted: str | None) -> None:
    rows = "".join(f"t{place};{number}\n" for place, number in enumerate(numbers.split()))
    (tmp_path / "t.csv").write_text(f"text;label\n{rows}")
    report = run(Rating(), str(tmp_path / "t.csv"), tmp_path, "csv", text=["text"], label="label", delimiter=";")
    messages = [problem["message"] for problem in report["problems"] if problem["check"] == "thousands"]
    if counted is None:
        assert not messages
    else:
        assert f": '2.155' is read as 2.155, next to numbers without a point{counted}" in messages[0]


def test_values_are_stored_as_their_json_and_equal_ones_found(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(CHATS), tmp_path / "c.parquet")
    sources = {"json": json_lines(tmp_path / "c.jsonl", CHATS), "parquet": str(tmp_path / "c.parquet")}
    sources["csv"] = csv_cells(tmp_path / "c.csv", CHATS)
    for source, file in sources.items():
        assert run(Chat(), file, tmp_path / source, source)["problems"] == []
    expected = '[{"role":"user","content":"Say \\"hé\\""},{"role":"assistant","content":"hé"}]'
    assert stored(tmp_path / "csv")["messages"][0].as_py() == expected
    assert contents(tmp_path / "json") == contents(tmp_path / "csv") == contents(tmp_path / "parquet")
    found = problems_of(Chat(), [*CHATS, {"messages": None}, CHATS[0]], tmp_path, checks={"blank_text": "warning"})
    assert found[0].startswith("blank_text row 3: has no value in column 'messages'")
    assert found[1].startswith("duplicates row 4: 1 row of train repeats the text of an earlier row")


def test_the_recipes_columns_choose_among_the_kinds_sets_and_blank_ones_may_be_empty(tmp_path: Path) -> None:
    rows = [{"q": "Add", "input": "1 2", "output": "3"}, {"q": "Hi", "input": None, "output": "Hello"}]
    names = {"instruction": "q", "input": "input"}
    run(Chat(), json_lines(tmp_path / "c.jsonl", rows), tmp_path, columns=names)
    assert stored(tmp_path).to_pylist() == [
        {"instruction": "Add", "input": "1 2", "output": "3"},
        {"instruction": "Hi", "input": "", "output": "Hello"},
    ]
    other = {"columns": {"instruction": "q"}, "rename": {"input": "other"}}
    run(Chat(), str(tmp_path / "c.jsonl"), tmp_path, **other)
    assert stored(tmp_path).schema.names == ["instruction", "output"]
    with pytest.raises(
        UserError, match=r"data\.columns\.input: .* has a column 'input', which the recipe does not name"
    ):
        run(Chat(), str(tmp_path / "c.jsonl"), tmp_path, columns={"instruction": "q"})


def test_a_column_that_has_an_effect_elsewhere_and_none_here_is_refused_unless_it_is_renamed(tmp_path: Path) -> None:
    message = "data.columns: .* has a column 'system', which would have no effect: write its text as the first message"
    rows = [{"system": "Be brief.", "q": "Add", "output": "3"}, {"system": "", "q": "Hi", "output": "Hello"}]
    asked = [{"system": "", "prompt": [{"role": "user", "content": q}], "chosen": "a", "rejected": "b"} for q in "cd"]
    for task, given, columns in (
        (SupervisedFineTuning(), rows, {"instruction": "q"}),
        (Preference(), asked, {}),
        (RewardModeling(), asked, {}),
        (Kto(), [{**row, "completion": "a", "label": True} for row in asked], {}),
    ):
        label = {"label": "label"} if "label" in task.columns else {}
        with pytest.raises(UserError, match=message):
            run(task, json_lines(tmp_path / "c.jsonl", given), tmp_path, columns=columns, **label)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    with pytest.raises(UserError, match=message):
        run(SupervisedFineTuning(), str(tmp_path / "c.parquet"), tmp_path, "parquet", columns={"instruction": "q"})
    file = json_lines(tmp_path / "c.jsonl", rows)
    run(SupervisedFineTuning(), file, tmp_path, rename={"system": "source"}, columns={"instruction": "q"})


@pytest.mark.parametrize("vectors", [[[0, 1, 0], [1, 0, 1]], [[1, 0], [0, 1]], [["no", "yes"], ["yes", "no"]]])
def test_vectors_with_a_value_for_each_label_are_refused_and_lists_of_labels_are_not(
    vectors: list[list[Any]], tmp_path: Path
) -> None:
    rows = [{"text": f"a {number}", "labels": vectors[number % 2]} for number in range(6)]
    kind = MultiLabelClassification()
    names = {"text": ["text"], "label": "labels"}
    (found,) = problems_of(kind, rows, tmp_path, **names)
    assert found.startswith("label_vectors row 1: has a value for each label, such as 0 or 1: list the labels")
    assert problems_of(kind, [*rows, {"text": "b", "labels": vectors[0][:1]}], tmp_path, **names) == []


INSTRUCTIONS: list[Row] = [{"q": f"Add {n}", "output": str(n)} for n in range(10)]


@pytest.mark.parametrize("source", ["lines", "array", "python", "generator"])
def test_a_key_that_only_the_last_rows_have_is_a_column(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.data.row_dicts.BLOCK_ROWS", 3)  # rows are read in blocks of 10,000

    def read(**data: Any) -> dict[str, Any]:
        rows = [*INSTRUCTIONS, {"q": "Add up", "output": "3", "input": "1 2", "level": 3}]
        if source in ("python", "generator"):
            module = ModuleType("late_rows")
            given: Any = (lambda split: iter(rows)) if source == "generator" else {"train": rows, "validation": rows}
            module.rows = given  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, "late_rows", module)
            return run(Chat(), "late_rows:rows", tmp_path, "python", **data)
        file = tmp_path / "rows.json"
        file.write_text(json.dumps(rows) if source == "array" else "".join(json.dumps(row) + "\n" for row in rows))
        return run(Chat(), str(file), tmp_path, **data)

    instruction = {"instruction": "q"}
    with pytest.raises(UserError, match="has a column 'input', which the recipe does not name"):
        read(columns=instruction)
    for names, rename in (({"input": "input"}, {}), ({"input": "more"}, {"input": "more"})):
        read(columns=instruction | names, rename=rename)
        assert stored(tmp_path)["input"].to_pylist() == [""] * 10 + ["1 2"]
        assert json.loads((tmp_path / "slices.json").read_text())["kept"] == ["level"]
        levels = read_arrow(tmp_path / "validation.slices.arrow")["level"].to_pylist()
        assert levels == [None] * 10 + ["3"]
    read(columns=instruction | {"input": "input"}, filter="level is None or level != 3")
    assert stored(tmp_path)["input"].to_pylist() == [""] * 10


def test_a_column_that_no_row_has_is_the_only_problem_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.data.row_dicts.BLOCK_ROWS", 3)
    rows = [*INSTRUCTIONS, {"q": 3, "output": "3"}]
    for limit in (None, 4):
        with pytest.raises(UserError) as raised:
            names = {"instruction": "q", "output": "outputs"}
            run(Chat(), json_lines(tmp_path / "r.jsonl", rows), tmp_path, columns=names, limit=limit)
        found = [str(problem.message) for problem in raised.value.problems if "validation" not in problem.message]
        missing = "has no column 'outputs': it has q, output. Did you mean 'output'?"
        assert [message.partition(" ")[2] for message in found if "no column" in message] == [missing]
        assert len([problem for problem in raised.value.problems if problem.check == "type"]) == (0 if limit else 2)
        assert not [problem for problem in raised.value.problems if problem.check not in (None, "type")]


def test_of_objects_with_keys_of_their_own_the_named_ones_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.data.row_dicts.BLOCK_ROWS", 3)
    monkeypatch.setattr("training.data.row_dicts.MAX_KEYS", 5)
    rows = [row | {f"key {n}": n} for n, row in enumerate(INSTRUCTIONS)] + [{"q": "x", "output": "y", "input": "z"}]
    run(Chat(), json_lines(tmp_path / "r.jsonl", rows), tmp_path, columns={"instruction": "q", "input": "input"})
    assert stored(tmp_path)["input"].to_pylist() == [""] * 10 + ["z"]


def test_columns_of_another_layout_are_reported_with_the_fields_that_select_them(tmp_path: Path) -> None:
    rows = [{"instruction": "Add", "output": "3"}]
    with pytest.raises(UserError, match=r"For rows of instruction and output, set data\.columns: {instruction: inst"):
        run(Chat(), json_lines(tmp_path / "c.jsonl", rows), tmp_path)


def test_the_advised_fields_for_columns_of_another_layout_are_accepted(tmp_path: Path) -> None:
    rows = [{"instruction": "Add", "input": "1 2", "output": "3"}, {"instruction": "Hi", "input": "", "output": "You"}]
    file = json_lines(tmp_path / "c.jsonl", rows)
    with pytest.raises(UserError) as source_error:
        run(Chat(), file, tmp_path)
    advised = yaml.safe_load(str(source_error.value).rpartition("set data.columns: ")[2].rstrip("."))
    assert advised == {"instruction": "instruction", "input": "input"}
    run(Chat(), file, tmp_path, columns=advised)


def test_columns_of_the_kind_are_no_slices(tmp_path: Path) -> None:
    rows = [{**row, "source": "news"} for row in TAGS]
    run(Tags(), json_lines(tmp_path / "t.jsonl", rows), tmp_path)
    assert json.loads((tmp_path / "slices.json").read_text()) == {"kept": ["source"], "left_out": {}}


def test_rows_of_texts_and_labels_are_as_they_were(tmp_path: Path) -> None:
    rows = [{"text": "one", "label": 1}, {"text": "two", "label": 0}]
    run(CLASSIFICATION, json_lines(tmp_path / "t.jsonl", rows), tmp_path, text=["text"], label="label")
    assert stored(tmp_path).to_pylist() == rows


def test_a_text_that_the_model_shall_write_is_checked_like_one_that_it_is_shown_and_makes_no_row_equal(
    tmp_path: Path,
) -> None:
    texts = [("a dog", "ein Hund"), ("a cat", " "), ("a dog", "der Hund"), ("three", "null")]
    rows = [{"en": source, "de": target} for source, target in texts]
    columns = {"columns": {"source": "en", "target": "de"}}
    found = problems_of(Seq2Seq(), rows, tmp_path, **columns)
    assert found[0] == "blank_text row 2: has no text in column 'de'"
    assert [one.partition(" ")[0] for one in found[1:]] == ["missing_word", "duplicates"]
    problems_of(Seq2Seq(), rows, tmp_path, **columns, checks={"blank_text": "warning"})
    assert stored(tmp_path).to_pylist()[1] == {"source": "a dog", "target": "der Hund"}


@pytest.mark.parametrize("source", ["csv", "json", "parquet", "python"])
def test_labels_in_one_cell_are_separated(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"text": ["one", "two", "three", "four"], "label": ["4,27", "4", " 0 , 4 ", "10,0"]}
    table = pa.table(cells)
    file = tmp_path / f"rows_{tmp_path.name}.{'py' if source == 'python' else source}"
    if source == "csv":
        pa_csv.write_csv(table, file)
    elif source == "parquet":
        pq.write_table(table, file)
    elif source == "json":
        json_lines(file, table.to_pylist())
    else:
        file.write_text(f"rows = {{'train': {table.to_pylist()!r}, 'validation': {table.to_pylist()!r}}}\n")
        monkeypatch.syspath_prepend(tmp_path)
    names = [f"label {number}" for number in range(28)]
    given = {"text": ["text"], "label": "label", "label_separator": ",", "label_names": names}
    path = f"{file.stem}:rows" if source == "python" else str(file)
    run(MultiLabelClassification(), path, tmp_path / "out", source, **given)
    assert stored(tmp_path / "out").column("label").to_pylist() == [[4, 27], [4], [0, 4], [10, 0]]


def test_an_empty_cell_and_an_empty_label_among_others_are_reported(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": "x,y"}, {"text": "b", "label": " "}, {"text": "c", "label": "x,"}]
    given = {"text": ["text"], "label": "label", "label_separator": ","}
    found = problems_of(MultiLabelClassification(), rows, tmp_path, **given)
    assert [one.partition(":")[0] for one in found if "missing_label" in one][:2] == [
        "missing_label row 2",
        "missing_label row 3",
    ]


@pytest.mark.parametrize("source", ["csv", "json"])
def test_a_list_in_brackets_is_not_split_at_a_separator(tmp_path: Path, source: str) -> None:
    cells = ["['x', 'y']", '["x","y"]', "[]", "[1, 2]", "x,y", "[x],[y]", "[draft],x"]
    rows = [{"text": f"t{number}", "label": cell} for number, cell in enumerate(cells)]
    file = tmp_path / f"rows.{source}"
    if source == "csv":
        pa_csv.write_csv(pa.Table.from_pylist(rows), file)
    else:
        json_lines(file, rows)
    given = {"text": ["text"], "label": "label", "label_separator": ",", "checks": {"malformed": "warning"}}
    report = run(MultiLabelClassification(), str(file), tmp_path / "out", source, **given)
    (found,) = [one["message"] for one in report["problems"] if one.get("check") == "malformed"][:1]
    assert "holds a list in brackets in column 'label', where data.label_separator ',' splits" in found
    assert set(json.loads((tmp_path / "out" / "labels.json").read_text())) == {"x", "y", "[x]", "[y]", "[draft]"}


def test_numbers_to_predict_that_are_all_alike_are_an_error(tmp_path: Path) -> None:
    rows: list[Row] = [{"text": f"t{n}", "label": 3} for n in range(20_000)]
    given = {"text": ["text"], "label": "label", "checks": {"duplicates": "ignore"}}
    found = problems_of(Regression(), rows, tmp_path, **given)
    assert found == [
        "single_label : the train split has only the number 3: it needs rows of at least two different numbers."
    ]
    assert problems_of(Regression(), [*rows, {"text": "x", "label": 3.5}], tmp_path, **given) == []
