"""Rows of every source become the same Arrow files, or a list of all that is wrong with them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.arrow import read_arrow
from tests.raised import raised_problems
from tests.training.data.task_types import CLASSIFICATION
from training.data.casting import cast_blocks
from training.data.decoding import open_text
from training.data.hub_datasets import from_dataset, hub_splits
from training.data.json_files import json_values
from training.data.label_indices import label_places
from training.data.load_rows import load
from training.data.row_problems import RowProblem
from training.data.slice_columns import SliceColumns
from training.data.sources import find_split_files, load_object
from training.problems import Problem, UserError
from training.recipe import Data
from training.recipe.source_columns import SourceColumns
from training.recipe.task_specification import specification

ROWS: dict[str, list[tuple[str, str]]] = {
    "train": [("good, really", "pos"), ("NA", "neg"), ('say "no"\nand leave', "neg"), ("1.0", "pos")],
    "validation": [("fine", "pos"), ("äußerst schlecht", "neg")],
}


WANTED = SourceColumns(Data(source="json", path="-", text=["text"], label="label"), CLASSIFICATION)


def find_files(data: Data) -> dict[str, list[str]]:
    """The files of each split."""
    return {split: [found.file for found in files] for split, files in find_split_files(data)[0].items()}


def write_csv(folder: Path, rows: dict[str, list[tuple[str, str]]] = ROWS) -> Path:
    for split, pairs in rows.items():
        lines = [",".join(f'"{value.replace(chr(34), chr(34) * 2)}"' for value in pair) for pair in pairs]
        (folder / f"{split}.csv").write_text("\n".join(["text,label", *lines]) + "\n", encoding="utf-8")
    return folder


def write_json(folder: Path, rows: dict[str, list[tuple[Any, Any]]]) -> Path:
    for split, pairs in rows.items():
        lines = [json.dumps({"text": text, "label": label}) + "\n" for text, label in pairs]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def write_parquet(
    folder: Path, rows: dict[str, list[tuple[Any, Any]]], names: list[str] | None = None, **options: Any
) -> Path:
    for split, pairs in rows.items():
        table = pa.table({"text": [text for text, _ in pairs], "label": [label for _, label in pairs]})
        if names:
            features = {"label": {"names": names, "_type": "ClassLabel"}}
            table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        pq.write_table(table, folder / f"{split}.parquet", **options)
    return folder


def recipe(source: str, path: Path | str, **more: Any) -> Data:
    return Data(**{"source": source, "path": str(path), "text": ["text"], "label": "label", **more})


def run(data: Data, out: Path) -> dict[str, int]:
    pinned = {split: [str(file) for file in files] for split, files in find_files(data).items()}
    return load(data, CLASSIFICATION, pinned, out)


def problems(data: Data, out: Path) -> tuple[Problem, ...]:
    return tuple(problem for problem in raised_problems(run, data, out) if problem.level == "error")


def contents(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(out.iterdir()) if file.is_file()}


def report_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "log" / "report.json").read_text())


def rows_of(out: Path, split: str = "train") -> list[dict[str, Any]]:
    return read_arrow(out / f"{split}.arrow").to_pylist()


def labels_of(out: Path, split: str = "train") -> list[str]:
    names = json.loads((out / "labels.json").read_text())
    return [names[row["label"]] for row in rows_of(out, split)]


def folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.fixture
def mixed(tmp_path: Path) -> dict[str, Data]:
    """The same rows in four sources."""
    module = tmp_path / f"rows_{tmp_path.name}.py"
    module.write_text(
        f"ROWS = {ROWS!r}\n"
        "def rows(split):\n"
        "    for text, label in ROWS[split]:\n"
        "        yield {'text': text, 'label': label}\n"
    )
    return {
        "csv": recipe("csv", write_csv(folder(tmp_path / "csv"))),
        "json": recipe("json", write_json(folder(tmp_path / "json"), ROWS)),
        "parquet": recipe("parquet", write_parquet(folder(tmp_path / "parquet"), ROWS)),
        "python": recipe("python", f"{module.stem}:rows"),
    }


def test_a_function_is_called_for_each_split_that_is_evaluated_unless_it_is_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / f"asked_{tmp_path.name}.py"
    module.write_text(
        "calls = []\n"
        "def rows(split):\n"
        "    calls.append(split)\n"
        "    return [{'text': f'{split} {n}', 'label': 'pos' if n % 2 else 'neg'} for n in range(40)]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def called(data: Data, *evaluated: str) -> tuple[list[str], list[str]]:
        """The splits for which it is called, and those that are stored."""
        load(data, CLASSIFICATION, {}, tmp_path / "out", evaluated=evaluated)
        found, calls = load_object(data.path), sys.modules[module.stem].calls
        assert found is sys.modules[module.stem].rows
        names, calls[:] = list(calls), []
        stored = sorted(file.stem for file in (tmp_path / "out").glob("*.arrow") if "." not in file.stem)
        shutil.rmtree(tmp_path / "out")
        return names, stored

    plain, held = (recipe("python", f"{module.stem}:rows", test_size=size) for size in (0.0, 0.3))
    assert called(plain, "validation") == (["train", "validation"], ["train", "validation"])
    assert called(plain, "validation", "test") == (["train", "validation", "test"], ["test", "train", "validation"])
    assert called(held, "test") == (["train", "validation"], ["test", "train", "validation"])


def test_a_test_split_of_the_hub_is_read_if_it_is_there_and_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"train": 1, "test": 1, "unsupervised": 1}
    builder = SimpleNamespace(info=SimpleNamespace(splits=there))
    monkeypatch.setattr("training.data.hub_datasets._find_builder", lambda data, pinned: builder)

    def read(*evaluated: str, **more: Any) -> list[str]:
        return list(hub_splits(SourceColumns(recipe("hub", "me/rows", **more), CLASSIFICATION, evaluated), {}))

    assert read("validation") == ["train"] and read("validation", "test") == ["train", "test"]
    assert read("test", test_size=0.1) == ["train"]
    assert read("validation", splits={"train": "unsupervised", "test": "test"}) == ["train", "test"]
    del there["test"]
    assert read("validation", "test") == ["train"]


def test_the_same_rows_give_the_same_bytes_from_every_source(
    mixed: dict[str, Data], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    load(mixed["python"], CLASSIFICATION, {}, tmp_path / "from-python")
    for source in ("csv", "json", "parquet"):
        run(mixed[source], tmp_path / f"from-{source}")
        assert contents(tmp_path / f"from-{source}") == contents(tmp_path / "from-python"), source
    assert list(contents(tmp_path / "from-csv")) == [
        "labels.json",
        "slices.json",
        "train.arrow",
        "validation.arrow",
    ]


def test_csv_values_stay_the_text_they_are(tmp_path: Path) -> None:
    run(recipe("csv", write_csv(folder(tmp_path / "in"))), tmp_path / "out")
    assert [row["text"] for row in rows_of(tmp_path / "out")] == [text for text, _ in ROWS["train"]]


def test_the_report_counts_rows_labels_and_characters(tmp_path: Path) -> None:
    found = run(recipe("csv", write_csv(folder(tmp_path / "in"))), tmp_path / "out")
    assert (found.rows, found.labels, found.warnings) == ({"train": 4, "validation": 2}, 2, 2)
    report = report_of(tmp_path / "out")
    assert report["rows"] == {"train": 4, "validation": 2}
    assert report["labels"] == {"train": {"neg": 2, "pos": 2}, "validation": {"neg": 1, "pos": 1}}
    assert report["characters"]["train"].items() >= {"min": 2, "median": 3, "max": 18}.items()
    assert report["characters"]["validation"].items() >= {"min": 4, "median": 4, "max": 16}.items()
    assert sum(report["characters"]["train"]["histogram"]["counts"]) == 4
    assert [problem["check"] for problem in report["problems"]] == ["line_breaks", "missing_word"]


def test_record_batches_hold_ten_thousand_rows_whatever_the_row_groups(tmp_path: Path) -> None:
    many = {"train": [(f"text {i}", i % 3) for i in range(25_001)], "validation": [("a", 0), ("b", 1)]}
    for size in (700, 30_000):
        run(
            recipe("parquet", write_parquet(folder(tmp_path / f"in{size}"), many, row_group_size=size)),
            tmp_path / f"out{size}",
        )
    assert contents(tmp_path / "out700") == contents(tmp_path / "out30000")
    reader = pa.ipc.open_file(tmp_path / "out700" / "train.arrow")
    assert [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)] == [10_000, 10_000, 5_001]


def test_a_pair_has_two_text_columns(tmp_path: Path) -> None:
    source = folder(tmp_path / "in")
    for split in ("train", "validation"):
        (source / f"{split}.csv").write_text("a,b,y\none,two,1\nthree,four,0\n")
    run(recipe("csv", source, text=["a", "b"], label="y"), tmp_path / "out")
    assert rows_of(tmp_path / "out") == [
        {"text": "one", "text_pair": "two", "label": 1},
        {"text": "three", "text_pair": "four", "label": 0},
    ]


def test_the_names_in_parquet_metadata_are_kept_in_their_order(tmp_path: Path) -> None:
    rows = {"train": [("a", 0), ("b", 1)], "validation": [("c", 1)]}
    run(
        recipe("parquet", write_parquet(folder(tmp_path / "in"), rows, names=["zebra", "ape"])),
        tmp_path / "out",
    )
    assert json.loads((tmp_path / "out" / "labels.json").read_text()) == ["zebra", "ape"]
    assert labels_of(tmp_path / "out", "validation") == ["ape"]


def test_splits_that_number_their_names_differently_are_distinguished(tmp_path: Path) -> None:
    source = folder(tmp_path / "in")
    write_parquet(source, {"train": [("a", 0), ("b", 1)]}, names=["no", "yes"])
    write_parquet(source, {"validation": [("c", 0)]}, names=["yes", "no"])
    run(recipe("parquet", source), tmp_path / "out")
    assert labels_of(tmp_path / "out", "validation") == ["yes"]


def test_a_dataset_of_the_hub_brings_its_label_names(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        text=datasets.Value("string"),
        label=datasets.ClassLabel(names=["bad", "good"]),
        id=datasets.Value("int64"),
    )
    rows = datasets.Dataset.from_dict({"text": ["x", "y"], "label": [1, 0], "id": [7, 8]}, features=features)
    data = recipe("hub", "somebody/something")
    wanted = SourceColumns(data, CLASSIFICATION)
    (made,) = cast_blocks(
        from_dataset(rows, wanted, "somebody/something (train)", SliceColumns(wanted, tmp_path)), wanted
    )
    block = made.block
    assert block.rows.to_pydict() == {"text": ["x", "y"], "label": ["good", "bad"]}
    assert block.label_names == ("bad", "good")


def test_a_folder_is_never_taken_for_a_dataset_of_the_hub(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="choose the source csv, json, parquet or arrow"):
        load(recipe("hub", tmp_path), CLASSIFICATION, {"commit": "0" * 40}, tmp_path / "out")


@pytest.mark.parametrize(
    ("wanted", "stored", "seen", "names", "places"),
    [
        (None, [], ["b", "a"], ["a", "b"], {"a": 0, "b": 1}),
        (None, [], ["10", "9"], ["9", "10"], {"9": 0, "10": 1}),
        (None, ["b", "a"], ["a"], ["b", "a"], {"b": 0, "a": 1}),
        (["b", "a"], [], ["a", "b"], ["b", "a"], {"b": 0, "a": 1}),
        (["no", "yes"], ["yes", "no"], ["no"], ["no", "yes"], {"no": 0, "yes": 1}),
        (["no", "maybe", "yes"], [], ["2", "0"], ["no", "maybe", "yes"], {"0": 0, "1": 1, "2": 2}),
        (["bad", "good"], [], ["-1", "1"], ["bad", "good"], {"-1": 0, "1": 1}),
        (["bad", "good"], [], ["ugly", "good"], ["bad", "good"], {"bad": 0, "good": 1}),
    ],
)
def test_labels_find_their_places(
    wanted: list[str] | None, stored: list[str], seen: list[str], names: list[str], places: dict[str, int]
) -> None:
    assert label_places(wanted, stored, dict.fromkeys(seen, 1)) == (names, places)


def test_json_lines_that_were_joined_with_their_byte_order_marks_are_read(tmp_path: Path) -> None:
    write_json(tmp_path, {"validation": [("a", "x"), ("b", "y")]})
    lines = (tmp_path / "validation.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text(f"\N{ZERO WIDTH NO-BREAK SPACE}{lines}" * 2)
    assert run(recipe("json", tmp_path), tmp_path / "out").train_rows == 4


def test_a_missing_label_that_python_wrote_as_nan_is_no_reason_against_the_labels_after_it(tmp_path: Path) -> None:
    rows = [("one", float("nan")), ("two", "a"), ("three", "b")]
    write_json(tmp_path, {"train": rows, "validation": rows[1:]})
    (problem,) = problems(recipe("json", tmp_path), tmp_path / "out")
    assert (
        problem.where.endswith("train.jsonl row 1") and "where a text or whole number belongs: nan" in problem.message
    )


def test_all_problems_of_all_splits_are_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.csv").write_bytes(
        b'text,label\nfine,pos\n  ,neg\nbad\xe9,neg\ntoo,many,fields\nno label,\n"",pos\ngood,neg\n'
    )
    (tmp_path / "dev.csv").write_text("text,label\nodd,posi\n")
    found = {problem.where: problem.message for problem in problems(recipe("csv", "."), tmp_path / "out")}
    assert found == {
        "train.csv row 3": "has no text in column 'text' (2 rows like this: 3, 7): correct or remove them, "
        "or leave them out: data.checks.blank_text: warning.",
        "train.csv row 4": "is not UTF-8 text (column 'text'): set data.encoding to what the file is written in, "
        "correct or remove it, or leave it out: data.checks.encoding: warning.",
        "train.csv row 5": "has 3 fields where the header has 2: correct or remove it, "
        "or leave it out: data.checks.ragged: warning.",
        "train.csv row 6": "has no label in column 'label': correct or remove it, "
        "or leave it out: data.checks.missing_label: warning.",
        "dev.csv row 2": "label 'posi' (1 row of validation) is unknown: choose from neg, pos.",
    }


def test_a_quotation_mark_that_is_never_closed_is_named(tmp_path: Path) -> None:
    write_csv(tmp_path)
    (tmp_path / "train.csv").write_text('text,label\nfine,a\n"open,b\nmore,c\n')
    assert "never closed" in problems(recipe("csv", tmp_path), tmp_path / "out")[0].message


def test_rows_are_numbered_as_the_file_has_them_with_its_blank_lines(tmp_path: Path) -> None:
    write_csv(tmp_path)
    (tmp_path / "train.csv").write_text("\n\ntext,label\none,a\ntoo,many,fields\n\ntwo,b\n,\nthree,\n")
    found = problems(recipe("csv", tmp_path), tmp_path / "out")
    assert [(problem.check, problem.where.rpartition(" ")[2]) for problem in found] == [
        ("ragged", "5"),
        ("missing_label", "9"),
        ("unknown_label", "2"),
        ("unknown_label", "3"),
    ]


def test_many_rows_with_one_problem_are_one_problem(tmp_path: Path) -> None:
    write_json(tmp_path, {"train": [("", "a")] * 9 + [("x", "b")], "validation": [("x", "a")]})
    (problem,) = problems(recipe("json", tmp_path), tmp_path / "out")
    assert "(9 rows like this: 1, 2, 3, …)" in problem.message


def test_missing_columns_name_what_is_there_and_the_nearest(tmp_path: Path) -> None:
    data = recipe("csv", write_csv(tmp_path), text=["texts"], label="lable")
    found = problems(data, tmp_path / "out")
    assert [problem.where for problem in found] == ["data.text", "data.label"] * 2
    assert "it has text, label. Did you mean 'text'?" in found[0].message


def test_json_lines_that_cannot_be_read_are_named_by_their_line(tmp_path: Path) -> None:
    write_json(tmp_path, ROWS)
    lines = [
        b'{"text": "a", "label": 1}',
        b"",
        b'{"text": "b", label}',
        b'["c", 0]',
        b'{"text": 5, "label": 0}',
        b'{"text": "d", "label": 0.5}',
        b'{"text": "\\ud800", "label": 0}',
        b'{"text": "e", "label": true}',
    ]
    (tmp_path / "train.jsonl").write_bytes(b"\n".join(lines))
    whats = {p.where.rpartition(" ")[2]: p.message for p in problems(recipe("json", tmp_path), tmp_path / "out")}
    assert "is not JSON" in whats["3"]
    assert "of type list" in whats["4"]
    assert "holds int in column 'text'" in whats["5"]
    assert "holds float in column 'label'" in whats["6"]
    assert "holds half a character" in whats["7"] and "encoding" not in whats["7"]


@pytest.mark.parametrize("is_array", [False, True])
def test_a_name_that_a_json_object_has_twice_is_reported_with_its_row(tmp_path: Path, is_array: bool) -> None:
    """Python would keep the last of the values."""
    lines = ['{"text": "a", "label": 1}', '{"text": "b", "label": 0, "label": 1}', '{"text": "c", "label": 0}']
    (tmp_path / "train.jsonl").write_text(f"[{', '.join(lines)}]" if is_array else "\n".join(lines))
    (tmp_path / "validation.jsonl").write_text("\n".join(lines[::2]))
    (problem,) = problems(recipe("json", tmp_path), tmp_path / "out")
    assert problem.check == "malformed" and problem.where.endswith("train.jsonl row 2")
    assert problem.message.startswith("has an object with one name twice ('label'): ")


def test_a_repeated_name_among_very_many_is_found_in_seconds(tmp_path: Path) -> None:
    names = ", ".join(f'"k{number}": 1' for number in range(100_000))
    (tmp_path / "train.jsonl").write_text(f'{{{names}, "z": 1, "z": 2}}\n{{"text": "a", "label": 1}}')
    (tmp_path / "validation.jsonl").write_text('{"text": "a", "label": 1}')
    started = time.monotonic()
    (problem,) = problems(recipe("json", tmp_path), tmp_path / "out")
    assert "one name twice ('z')" in problem.message
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("depth", [2_000, 20_000])
def test_brackets_in_brackets_are_refused_at_a_depth_in_arrays_and_a_faulty_row_in_lines(
    tmp_path: Path, depth: int
) -> None:
    row = b'{"text": "[[", "more": ' + b"[" * depth + b"]" * depth + b"}"
    (tmp_path / "rows.json").write_bytes(b'[{"text": "\\"[", "more": [[]]}, ' + row + b"]")
    too_deep = pytest.raises(UserError, match=r"^rows\.json: has brackets in brackets, more than 100 deep")
    with too_deep, open_text(str(tmp_path / "rows.json"), Data(source="json", path="-")) as file:
        list(json_values(file, "rows.json", WANTED))
    (tmp_path / "rows.jsonl").write_bytes(row + b'\n{"text": "x"}\n')
    with open_text(str(tmp_path / "rows.jsonl"), Data(source="json", path="-")) as file:
        (_, problem), (_, good) = json_values(file, "rows.jsonl", WANTED)
    assert problem.description == "has brackets in brackets" and good == {"text": "x"}


def test_a_name_twice_in_a_nested_object_is_reported_for_arrays_and_lines(tmp_path: Path) -> None:
    row = '{"text": "b", "label": 1, "more": [{"a": {"x": 1, "x": 2}}]}'
    for name, content in (("a.json", f"[{row}]"), ("b.jsonl", row)):
        (tmp_path / name).write_text(content)
        with open_text(str(tmp_path / name), Data(source="json", path="-")) as file:
            ((number, problem),) = json_values(file, name, WANTED)
        assert number == 1 and isinstance(problem, RowProblem) and problem.value == " ('x')"


def test_a_json_array_gives_the_rows_that_json_lines_give(tmp_path: Path) -> None:
    run(recipe("json", write_json(folder(tmp_path / "lines"), ROWS)), tmp_path / "from-lines")
    arrays = folder(tmp_path / "arrays")
    for split, pairs in ROWS.items():
        rows = [{"text": text, "label": label} for text, label in pairs]
        (arrays / f"{split}.json").write_text(json.dumps(rows, indent=2), encoding="utf-8")
    run(recipe("json", arrays), tmp_path / "from-arrays")
    assert contents(tmp_path / "from-arrays") == contents(tmp_path / "from-lines")


def test_a_column_of_the_wrong_type_is_refused(tmp_path: Path) -> None:
    rows: dict[str, list[tuple[Any, Any]]] = {"train": [("a", 0.0), ("b", None)], "validation": [("a", 1.0)]}
    found = problems(recipe("parquet", write_parquet(tmp_path, rows)), tmp_path / "out")
    assert "is of type double: it must hold text or whole numbers" in found[0].message


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path, ROWS)
    (tmp_path / "train.parquet").write_text("text,label\n")
    (problem,) = problems(recipe("parquet", tmp_path), tmp_path / "out")
    assert "not readable as Parquet" in problem.message


def test_one_label_alone_and_an_empty_split_are_refused(tmp_path: Path) -> None:
    write_json(tmp_path, {"train": [("a", "x"), ("b", "x")], "validation": []})
    found = {problem.where: problem.message for problem in problems(recipe("json", tmp_path), tmp_path / "out")}
    assert "only the label 'x'" in found["data.label"]
    assert "no rows" in found["data.splits.validation"]


def test_labels_the_hub_keeps_back_are_explained(tmp_path: Path) -> None:
    rows = {"train": [("a", 0), ("b", 1)], "validation": [("c", 0)], "test": [("d", -1)]}
    data = recipe("parquet", write_parquet(tmp_path, rows, names=["no", "yes"]))
    (problem,) = problems(data, tmp_path / "out")
    assert problem.message.endswith("marks rows whose labels are withheld: leave this split out.")


def test_a_column_of_texts_is_not_taken_for_labels(tmp_path: Path) -> None:
    rows = {"train": [("a", f"text {i}") for i in range(10_001)], "validation": [("a", "b")]}
    found = problems(recipe("parquet", write_parquet(tmp_path, rows)), tmp_path / "out")
    assert "is it the column of labels?" in found[0].message


def test_reading_imports_no_heavy_library() -> None:
    heavy = "{'torch', 'transformers', 'datasets', 'evaluate'}"
    code = (
        f"import sys, training.data.load_rows, training.tokenization.encoder; print(sorted({heavy} & set(sys.modules)))"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "[]"


def test_the_number_of_reported_problems_is_limited(tmp_path: Path) -> None:
    files = [tmp_path / f"train-{number:03}.jsonl" for number in range(250)]
    for number, file in enumerate(files):
        file.write_text(json.dumps({"text": "", "label": "ab"[number % 2]}))
    write_json(tmp_path, {"validation": [("x", "a"), ("y", "b")]})
    found = problems(recipe("json", tmp_path), tmp_path / "out")
    assert len(found) == 201
    assert found[-1].message == "… and 50 more problems: fix these, and check again."


def evaluated(folder: Path, rows: list[tuple[Any, Any]], names: list[str], **more: Any) -> tuple[list[int], int]:
    """The labels of rows that are judged by the labels of a version, and the number of warnings."""
    write_json(folder, {"test": rows})
    checks = dict.fromkeys(("absent_label", "duplicates"), "ignore")
    data = recipe("json", folder, label_names=names, checks=checks)
    files = {"test": [str(folder / "test.jsonl")]}
    found = load(data, CLASSIFICATION, files, folder / "out", evaluated=["test"], only="test", **more)
    labels: list[int] = read_arrow(folder / "out" / "test.arrow")["label"].to_pylist()
    assert found.test_rows == len(labels) and not (folder / "out" / "validation.arrow").exists()
    return labels, found.warnings


@pytest.mark.parametrize("rows", [1, 2, 7, 60])
def test_rows_to_evaluate_are_one_split_whole_whatever_their_number_and_labels(tmp_path: Path, rows: int) -> None:
    """The audit of last week's "fraud": a tenth of them was held out, and one label alone was refused."""
    found = evaluated(tmp_path, [(f"text {number}", "fraud") for number in range(rows)], ["fair", "fraud"])
    assert found == ([1] * rows, 0)


def test_numbers_of_rows_to_evaluate_are_the_labels_that_they_were_in_training(tmp_path: Path) -> None:
    write_json(tmp_path, {"train": [("a", 1), ("b", 2), ("c", 1)], "validation": [("d", 1), ("e", 2)]})
    run(recipe("json", tmp_path, label_names=["fair", "fraud"]), tmp_path / "trained")
    report = json.loads((tmp_path / "trained" / "log" / "report.json").read_text())
    assert report["spelt"] == {"1": 0, "2": 1}
    rows = [("x", 2), ("y", 2)]
    assert evaluated(tmp_path, rows, ["fair", "fraud"], spelt=report["spelt"])[0] == [1, 1]
    with pytest.raises(UserError, match="label '3'"):
        evaluated(tmp_path, [("x", 2), ("y", 3)], ["fair", "fraud"], spelt=report["spelt"])


PAIRS = [{"text": "a", "label": "x"}, {"text": "b {", "label": "y"}, {"text": "c", "label": "x"}]
MANY = [{"text": f"text {number} " + "x" * 90, "label": "xy"[number % 2]} for number in range(20_000)]


def json_rows(path: Path, content: str, wanted: SourceColumns = WANTED) -> list[Any]:
    path.write_text(content)
    with open_text(str(path), wanted.data) as file:
        return [row for _, row in json_values(file, path.name, wanted)]


@pytest.mark.parametrize(
    "content",
    [
        "".join(json.dumps(row) for row in PAIRS),  # on one line
        " ".join(json.dumps(row) for row in PAIRS) + "\n",
        "\n".join(json.dumps(row, indent=2) for row in PAIRS),
        "".join(json.dumps(row) + ",\n" for row in PAIRS),
        json.dumps({"data": PAIRS}),
        json.dumps({"schema": {"fields": []}, "data": PAIRS}, indent=1),
    ],
)
def test_objects_one_after_another_and_in_the_one_list_of_an_object_are_rows(tmp_path: Path, content: str) -> None:
    assert json_rows(tmp_path / "rows.json", content) == PAIRS


@pytest.mark.parametrize("indent", [None, 1])
def test_long_files_of_such_objects_are_read_piece_by_piece(tmp_path: Path, indent: int | None) -> None:
    assert json_rows(tmp_path / "a.json", json.dumps({"data": MANY}, indent=indent)) == MANY
    assert json_rows(tmp_path / "b.json", "".join(json.dumps(row, indent=indent) for row in MANY)) == MANY


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"text": {"0": "a", "1": "b"}, "label": {"0": "x", "1": "y"}}, "holds its table by columns: write it with"),
        ({"text": ["a", "b"], "label": ["x", "y"]}, "holds its table by columns: write it with"),
        ({"columns": ["text", "label"], "index": [0], "data": [["a", "x"]]}, "holds its columns' names apart"),
        ({"0": PAIRS[0], "1": PAIRS[1]}, "holds its rows by index"),
        ([["a", "x"], ["b", "y"]], "holds rows as lists without names"),
        ({"train": [["a", "x"]], "val": [["b", "y"]]}, "holds rows as lists without names"),
        ({"train": [["a", "x"]] * 50_000}, "holds rows as lists without names"),
        ({"train": PAIRS, "test": PAIRS}, "holds lists of rows under several names (train, test)"),
    ],
)
def test_a_table_in_another_shape_is_one_message_with_the_way_out(tmp_path: Path, content: Any, words: str) -> None:
    for indent in (None, 2):
        (tmp_path / "train.json").write_text(json.dumps(content, indent=indent))
        found = problems(recipe("json", tmp_path / "train.json"), tmp_path / "out")
        assert [words in f"{problem.message}" for problem in found] == [True], found
        assert any(way_out in found[0].message for way_out in ("orient", "file of its own"))


def test_a_row_that_holds_objects_is_a_row(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Hi"}]
    data = Data(source="json", path="-", columns={"messages": "messages"})
    wanted = SourceColumns(data, specification("sft", {}))
    for row in ({"messages": talk}, {"custom_id": "a", "messages": talk}, {"custom_id": "a", "body": {"x": talk}}):
        assert json_rows(tmp_path / "one.jsonl", json.dumps(row), wanted) == [row]
    faulty = '{"meta": [{"text": 1}], "text": "broken}\n' + json.dumps(PAIRS[0])
    assert json_rows(tmp_path / "two.jsonl", faulty)[1:] == PAIRS[:1]
