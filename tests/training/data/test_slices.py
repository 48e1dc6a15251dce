"""Columns besides texts and label: which of them are kept for validation and test, and why others are left out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from tests.arrow import read_arrow
from tests.training.data.task_types import CLASSIFICATION
from training.data.load_rows import load
from training.data.slice_columns import MAX_COLUMNS, SliceColumns
from training.recipe import Data
from training.recipe.source_columns import SourceColumns

TRAIN = {"text": ["good", "bad"], "label": ["a", "b"]}
ROWS = 1200
JUDGED: dict[str, list[Any]] = {
    "text": [f"text {n}" for n in range(ROWS)],
    "genre": [None if n % 5 == 0 else f"genre {n % 3}" for n in range(ROWS)],
    "label": ["ab"[n % 2] for n in range(ROWS)],
    "stars": [n % 4 - 1 for n in range(ROWS)],
    "seen": [n % 3 == 0 for n in range(ROWS)],
    "id": list(range(ROWS)),
    "body": ["long " * 60] * ROWS,
    "none": [None] * ROWS,
}
"""Of types that every source has."""
GROUPS = {
    "genre": JUDGED["genre"],
    "stars": [str(value) for value in JUDGED["stars"]],
    "seen": [str(value).lower() for value in JUDGED["seen"]],
}
LEFT_OUT = {
    "id": "has more than 1,000 different values",
    "body": "has values of more than 256 bytes",
    "none": "holds no value",
}

Rows = dict[str, list[Any]]


def recipe(source: str, path: Path | str, **more: Any) -> Data:
    return Data(**{"source": source, "path": str(path), "text": ["text"], "label": "label", **more})


def listed(columns: Rows) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def write_csv(file: Path, columns: Rows) -> None:
    rows = pa.table({name: pa.array(values).cast(pa.string()) for name, values in columns.items()})
    pyarrow.csv.write_csv(rows, file)


def write_lines(file: Path, columns: Rows) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in listed(columns)))


def write_array(file: Path, columns: Rows) -> None:
    file.write_text(json.dumps(listed(columns)))


def write_parquet(file: Path, columns: Rows) -> None:
    pq.write_table(pa.table(columns), file, row_group_size=500)


def write_arrow(file: Path, columns: Rows) -> None:
    table = pa.table(columns)
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, 700)


def write_stream(file: Path, columns: Rows) -> None:
    table = pa.table(columns)
    table = table.set_column(1, "genre", table["genre"].dictionary_encode())
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, 700)


WRITERS: dict[str, tuple[str, Callable[[Path, Rows], None]]] = {
    "rows.csv": ("csv", write_csv),
    "rows.jsonl": ("json", write_lines),
    "rows.json": ("json", write_array),
    "rows.parquet": ("parquet", write_parquet),
    "rows.arrow": ("arrow", write_arrow),
    "stream.arrow": ("arrow", write_stream),
}


def read(folder: Path, source: str, file: Path, splits: Mapping[str, Path] | None = None, **more: Any) -> Path:
    """The output of `load` for a file of validation."""
    train = folder / f"train-{file.name}"
    if not train.exists():
        next(write for name, (task, write) in WRITERS.items() if task == source)(train, TRAIN)
    out = folder / f"out-{file.name}"
    data = recipe(source, folder, **more)
    load(data, CLASSIFICATION, {"train": [str(train)], "validation": [str(file)], **(splits or {})}, out)
    return out


def from_object(monkeypatch: pytest.MonkeyPatch, out: Path, validation: Any, **more: Any) -> Path:
    """The output of `load` for an object's rows."""
    module = type(sys)("rows_of_slices")
    module.splits = {"train": TRAIN, "validation": validation}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rows_of_slices", module)
    load(recipe("python", "rows_of_slices:splits", **more), CLASSIFICATION, {}, out)
    return out


def summary(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "slices.json").read_text())
    return found


def slices(out: Path, split: str = "validation") -> Rows:
    with pa.ipc.open_file(out / f"{split}.slices.arrow") as file:
        assert set(file.schema.types) == {pa.dictionary(pa.int32(), pa.string())}
        found: Rows = file.read_all().to_pydict()
    return found


def texts(out: Path, split: str = "validation") -> list[str]:
    found: list[str] = read_arrow(out / f"{split}.arrow")["text"].to_pylist()
    return found


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_of_any_format_keeps_the_same_columns_of_the_same_rows(name: str, tmp_path: Path) -> None:
    source, write = WRITERS[name]
    file, alone = tmp_path / name, tmp_path / f"alone-{name}"
    write(file, JUDGED)
    out = read(tmp_path, source, file)
    assert slices(out) == GROUPS
    assert summary(out) == {"kept": list(GROUPS), "left_out": LEFT_OUT}
    write(alone, {column: JUDGED[column] for column in ("text", "genre", "label")})
    for made in ("train.arrow", "validation.arrow", "labels.json"):
        assert (read(tmp_path, source, alone) / made).read_bytes() == (out / made).read_bytes()
    assert not (out / "train.slices.arrow").exists()


def test_an_object_of_any_library_keeps_the_same_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import pandas

    objects: dict[str, Any] = {
        "columns": JUDGED,
        "rows": (row for row in listed(JUDGED)),
        "frame": pandas.DataFrame(JUDGED).astype({"genre": "category"}),
        "table": pa.table(JUDGED),
        "dataset": datasets.Dataset.from_dict(JUDGED),
        "numpy": {**JUDGED, "stars": np.array(JUDGED["stars"], np.int8)},
        "views": pa.table({**JUDGED, "text": pa.array(JUDGED["text"], pa.string_view())}),
    }
    made = {name: from_object(monkeypatch, tmp_path / name, rows) for name, rows in objects.items()}
    for name, out in made.items():
        assert slices(out) == GROUPS, name
        assert summary(out) == {"kept": list(GROUPS), "left_out": LEFT_OUT}, name
        whole = {file.name: file.read_bytes() for file in out.iterdir() if file.is_file()}
        assert whole == {file.name: file.read_bytes() for file in made["columns"].iterdir() if file.is_file()}, name
    filtered = from_object(monkeypatch, tmp_path / "filtered", objects["views"], filter="text != 'text 1'")
    assert slices(filtered) == {name: [values[0], *values[2:]] for name, values in GROUPS.items()}


def test_numbers_that_the_source_has_names_for_are_kept_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    text, named = datasets.Value("string"), datasets.ClassLabel(names=["war", "peace"])
    columns = {"text": ["one", "two", "three", "four"], "label": ["a", "b", "a", "b"], "genre": [1, 0, -1, None]}
    features = datasets.Features({"text": text, "label": text, "genre": named})
    dataset = datasets.Dataset.from_dict(columns, features=features)
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    made = [
        from_object(monkeypatch, tmp_path / "object", dataset),
        read(tmp_path, "parquet", tmp_path / "rows.parquet"),
        read(tmp_path, "arrow", tmp_path / "saved" / "data-00000-of-00001.arrow"),
    ]
    for out in made:
        assert slices(out) == {"genre": ["peace", "war", "-1", None]}


def test_columns_whose_type_is_none_of_these_are_not_read(tmp_path: Path) -> None:
    typed = pa.table(
        {
            "text": ["one", "", "two"],
            "label": ["a", "a", "b"],
            "price": [1.5, 2.5, 3.5],
            "day": [date(2026, 1, 1)] * 3,
            "tags": [["x"], ["y"], []],
            "picture": [b"x", b"y", b"z"],
            "size": pa.array([1, 2, 2**64 - 1], pa.uint64()),
            "view": pa.array(["x", "y", "z"], pa.string_view()),
            "long view": pa.array(["x", "y", "z" * 10**6], pa.string_view()),
        }
    )
    left_out = {"price": "is of type double", "day": "is of type date32[day]", "tags": "is of type list"}
    pq.write_table(typed, tmp_path / "rows.parquet")
    write_parquet(tmp_path / "train-rows.parquet", {**TRAIN, "size": [1, 2]})
    left_out |= {"picture": "is of type binary", "long view": LEFT_OUT["body"]}
    out = read(
        tmp_path, "parquet", tmp_path / "rows.parquet", rename={"size": "bytes"}, checks={"blank_text": "warning"}
    )
    assert summary(out) == {"kept": ["bytes", "view"], "left_out": left_out}
    assert slices(out) == {"bytes": ["1", str(2**64 - 1)], "view": ["x", "z"]}


def test_kept_columns_stay_aligned_with_their_rows_through_casts_filters_limits_cuts_and_labels_that_are_left_out(
    tmp_path: Path,
) -> None:
    """Every row's text repeats the values of its other columns."""
    number = np.arange(15_000)
    rows = {
        "text": [f"text {n}" for n in number],
        "label": ["ab"[n % 2] for n in number],
        "stars": ["none" if n % 11 == 0 else str(n % 5) for n in number],
        "by": [f"by {n % 7}" for n in number],
    }
    judged = {**rows, "label": ["abc"[n % 3] for n in number], "text": [f"judged {n}" for n in number]}
    for source, suffix, write in (("parquet", "parquet", write_parquet), ("csv", "csv", write_csv)):
        folder = tmp_path / source
        folder.mkdir()
        write(folder / f"train.{suffix}", rows)
        write(folder / f"validation.{suffix}", judged)
        checks = {"type": "warning", "unknown_label": "warning"}
        more = {"cast": {"stars": "int64"}, "filter": "stars != 3", "limit": 11_000, "test_size": 0.2, "checks": checks}
        pinned = {split: [str(folder / f"{split}.{suffix}")] for split in ("train", "validation")}
        load(recipe(source, folder, **more), CLASSIFICATION, pinned, folder / "out")
        for split, fewest in (("validation", 5_000), ("test", 2_000)):
            found, numbers = (
                slices(folder / "out", split),
                [int(text.split()[1]) for text in texts(folder / "out", split)],
            )
            assert len(numbers) > fewest
            assert found["by"] == [f"by {n % 7}" for n in numbers]
            assert found["stars"] == [str(n % 5) for n in numbers]
        values = pa.ipc.open_file(folder / "out" / "validation.slices.arrow").get_batch(0).column("stars").dictionary
        assert values.to_pylist() == ["0", "1", "2", "4"]  # nothing that stood in rows that were left out only


def test_texts_of_typed_files_that_are_none_and_values_that_unpack_to_any_size_are_left_out(tmp_path: Path) -> None:
    bad = pa.array([b"fine", b"\xff\xfe", None]).cast(pa.large_binary())
    columns = {
        "text": pa.array(["one", "two", "three"]),
        "label": pa.array(["a", "b", "a"]),
        "bad": bad.view(pa.large_string()),
        "coded": pa.DictionaryArray.from_arrays(
            pa.array([0, 1, 0], pa.int8()), bad.slice(0, 2).view(pa.large_string())
        ),
        "long": pa.DictionaryArray.from_arrays(pa.array([0, 1, 1], pa.int8()), pa.array(["x", "y" * 10**7])),
        "good": pa.DictionaryArray.from_arrays(pa.array([0, 1, None], pa.int8()), pa.array(["x", "y"])),
    }
    table, encoding = pa.table(columns), "holds text that is not UTF-8"
    left_out = {"bad": encoding, "coded": encoding, "long": "has values of more than 256 bytes"}
    pq.write_table(table, tmp_path / "rows.parquet", store_schema=False)
    with pa.ipc.new_stream(tmp_path / "rows.arrow", table.schema) as writer:
        writer.write_table(table)
    for source in ("parquet", "arrow"):
        out = read(tmp_path, source, tmp_path / f"rows.{source}")
        assert slices(out) == {"good": ["x", "y", None]}
        assert summary(out)["left_out"] == left_out


def test_csv_whose_other_columns_are_no_text_or_badly_named_is_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(
        b"text,label,caf\xe9,name,twice,twice,,good\none,a,x,caf\xe9,1,2,3,x\ntwo,b,y,,1,2,3, \n,,z,,1,2,3,4\n"
    )
    out = read(tmp_path, "csv", file)
    assert texts(out) == ["one", "two"]
    assert slices(out) == {"good": ["x", None]}
    nameless = "has no name that is text"
    reasons = {"name": "holds text that is not UTF-8", "twice": "occurs more than once", "": nameless}
    assert summary(out)["left_out"] == {"caf\ufffd": nameless, **reasons}


def test_json_whose_other_columns_are_of_any_type_is_read(tmp_path: Path) -> None:
    first = {"text": "one", "label": "a", "mixed": 1, "small": -1, "large": 1}
    rows = [
        first | {"nested": {"a": 1}, "part": 1.5, "none": None, "truth": True, "good": "x"},
        {"text": "two", "label": "b", "mixed": "1", "truth": 0, "large": 2**63 - 1, "late": "y"},
    ]
    wild = [row | {"large": 2**70, "half": "\ud800", "\ud800": 1} for row in rows]  # which ijson does not read so
    for name, content in (
        ("rows.json", json.dumps(rows)),
        ("rows.jsonl", "\n".join(map(json.dumps, rows))),
        ("wild.jsonl", "\n".join(map(json.dumps, wild))),
    ):
        (tmp_path / name).write_text(content)
        out = read(tmp_path, "json", tmp_path / name)
        more = {} if name == "wild.jsonl" else {"large": ["1", str(2**63 - 1)]}
        assert slices(out) == {"small": ["-1", None], **more, "good": ["x", None], "late": [None, "y"]}
        worse = {
            "large": "does not hold values of one type",
            "half": "holds text that is not UTF-8",
            "\\ud800": "has no name that is text",
        }
        assert summary(out)["left_out"] == ({} if more else worse) | {
            "mixed": "does not hold values of one type",
            "nested": "is of type struct",
            "part": "is of type double",
            "none": "holds no value",
            "truth": "does not hold values of one type",
        }


def test_values_of_numpy_in_rows_of_an_object_group_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"good": np.str_("x"), "stars": np.int8(3), "odd": object()}
    rows = [{"text": "one", "label": "a"} | values, {"text": "two", "label": "b"} | values]
    out = from_object(monkeypatch, tmp_path / "rows", rows)
    assert slices(out) == {"good": ["x", "x"], "stars": ["3", "3"]}
    assert summary(out)["left_out"] == {"odd": "does not hold values of one type"}


def test_a_column_of_some_files_of_a_split_only_is_left_out_and_one_of_some_splits_only_kept(tmp_path: Path) -> None:
    rows = {"text": ["one", "two"], "label": ["a", "b"], "both": [1, 2]}
    for source, suffix, write in (
        ("csv", "csv", write_csv),
        ("json", "jsonl", write_lines),
        ("parquet", "parquet", write_parquet),
    ):
        folder = tmp_path / source
        folder.mkdir()
        write(folder / f"train.{suffix}", {**rows, "train": [1, 2]})
        write(folder / f"first.{suffix}", {**rows, "first": [1, 2]})
        write(folder / f"second.{suffix}", {**rows, "second": [1, 2], "text": ["three", "four"]})
        write(folder / f"test.{suffix}", {**rows, "test": ["x", "y"], "both": ["x", "y"], "text": ["five", "six"]})
        files = {"train": ["train"], "validation": ["first", "second"], "test": ["test"]}
        pinned = {split: [str(folder / f"{name}.{suffix}") for name in names] for split, names in files.items()}
        load(recipe(source, folder), CLASSIFICATION, pinned, folder / "out")
        assert slices(folder / "out") == {"both": ["1", "2", "1", "2"]}
        assert slices(folder / "out", "test") == {"test": ["x", "y"], "both": ["x", "y"]}
        only = "is in some files of validation only"
        assert summary(folder / "out")["left_out"] == {"train": "is in train only", "first": only, "second": only}


def test_of_train_no_column_is_read_that_the_recipe_does_not_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = type(sys)("rows_of_slices")
    module.splits = {"train": {**TRAIN, "more": [1, 2]}, "validation": JUDGED}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rows_of_slices", module)
    load(recipe("python", "rows_of_slices:splits"), CLASSIFICATION, {}, tmp_path / "out")
    assert summary(tmp_path / "out")["left_out"] == {"more": "is in train only", **LEFT_OUT}
    wanted = SliceColumns(SourceColumns(recipe("csv", "-"), CLASSIFICATION), tmp_path)
    wanted.begin("train", [])
    assert wanted.of_file(["text", "label", "genre"]) == {}
    wanted.begin("train", ["validation"])
    assert wanted.of_file(["text", "label", "genre"]) == {"genre": "genre"}


def test_of_very_many_columns_the_first_are_kept(tmp_path: Path) -> None:
    columns = {f"column {n}": ["x", "y"] for n in range(MAX_COLUMNS + 5)}
    write_csv(tmp_path / "rows.csv", {**TRAIN, **columns})
    out = summary(read(tmp_path, "csv", tmp_path / "rows.csv"))
    assert out["kept"] == list(columns)[:MAX_COLUMNS]
    assert out["left_out"] == dict.fromkeys(list(columns)[MAX_COLUMNS:], "comes after 100 other columns")
