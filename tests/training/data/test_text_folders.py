"""Folders of texts: a row a file, whose label is its folder."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tasks.stages.resolve import pin_data
from tests.arrow import read_arrow
from tests.raised import raised_problems
from training.data.listing import Listing, list_texts
from training.data.load_rows import load
from training.data.prediction_rows import RowReader
from training.data.sources import find_split_files
from training.recipe import Data, parse
from training.recipe.reading_rules import ReadingRules
from training.task_types.sequence_classification import SequenceClassification

MAILS = {
    "spam/1.txt": "cheap pills\n",
    "spam/2.txt": "cheap watches, two lines\nof them\r\n",
    "spam/2024/Käse, 3.TXT": "a prize",
    "ham/1.txt": "lunch at noon?",
    "ham/notes.json": "{}",
    "ham/.hidden.txt": "nothing",
    "__MACOSX/ham/1.txt": "nothing",
}


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    """Writes files by name."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def data_of(folder: Path, **fields: Any) -> Data:
    checks = dict.fromkeys(("duplicates", "shared_rows", "absent_label"), "ignore") | fields.pop("checks", {})
    section = {"source": "textfolder", "path": str(folder), "text": ["text"], "label": "label", "checks": checks}
    return Data.model_validate({**section, **fields})


def read(folder: Path, **fields: Any) -> list[tuple[str, str]]:
    """The texts and labels of train; validation has the same rows."""
    pinned = {split: [str(folder)] for split in ("train", "validation")}
    load(data_of(folder, **fields), SequenceClassification(), pinned, folder.parent / "out")
    names = json.loads((folder.parent / "out" / "labels.json").read_text())
    rows = read_arrow(folder.parent / "out" / "train.arrow").to_pylist()
    return [(row["text"], names[row["label"]]) for row in rows]


def messages(folder: Path) -> list[str]:
    problems = json.loads((folder.parent / "out" / "log" / "report.json").read_text())["problems"]
    return [problem["message"] for problem in problems]


def test_each_file_is_a_row_with_the_name_of_its_folder_as_label(tmp_path: Path) -> None:
    folder = write(tmp_path / "mails", MAILS)
    assert read(folder) == [
        ("lunch at noon?", "ham"),
        ("cheap pills", "spam"),
        ("cheap watches, two lines\nof them", "spam"),
        ("a prize", "spam"),
    ]
    assert [Path(file.file).name for file in list_texts(str(folder))[1]] == ["notes.json"]


def test_files_of_any_name_are_read_if_none_ends_in_txt(tmp_path: Path) -> None:
    folder = write(tmp_path / "news", {"sport/49960": "a goal", "rec.autos/00001.7848dde1": "a car"})
    assert read(folder) == [("a car", "rec.autos"), ("a goal", "sport")]


def test_a_file_that_is_no_text_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    bad = {
        "spam/empty.txt": "",
        "ham/latin.txt": b"caf\xe9",
        "ham/picture.txt": b"GIF\0\0",
        "ham/long.txt": "x" * 2**25,
    }
    folder = write(tmp_path / "mails", {**MAILS, **bad, "ham/utf16.txt": "\ufeffcafé".encode("utf-16-le")})
    levels = dict.fromkeys(("blank_text", "encoding", "long_text"), "warning")
    assert len(read(folder, checks=levels)) == 5 and ("café", "ham") in read(folder, checks=levels)
    assert {message.partition(")")[0] for message in messages(folder)} >= {
        "is an empty file (spam/empty.txt",
        "is not UTF-8 text (ham/latin.txt, byte 0xe9",
        "has NUL characters, which no text has (ham/picture.txt",
        "has more than 16 MiB (ham/long.txt",
    }
    assert ("café", "ham") in read(folder, checks=levels, encoding="cp1252")


def test_a_file_outside_of_the_labels_folders_has_no_label(tmp_path: Path) -> None:
    folder = write(tmp_path / "mails", {**MAILS, "README.txt": "about these mails"})
    (problem,) = raised_problems(read, folder)
    assert "has no label in column 'label'" in problem.message


def test_folders_named_like_splits_are_the_splits(tmp_path: Path) -> None:
    files = {f"{split}/{label}/1.txt": f"{split} {label}" for split in ("train", "test", "extra") for label in "ab"}
    folder = write(tmp_path / "reviews", {**files, "train/urls.txt": "http://x"})
    splits, _, beside = find_split_files(data_of(folder))
    assert {split: [file.name for file in files] for split, files in splits.items()} == {
        "train": ["train"],
        "test": ["test"],
    }
    assert beside == ["extra"]
    named = data_of(folder, splits={"train": ["train", "extra"], "test": "test"})
    assert [file.name for file in find_split_files(named)[0]["train"]] == ["train", "extra"]


@pytest.mark.parametrize(
    ("path", "splits", "message"),
    [
        ("s3://bucket/mails", None, "folders of texts are read on this machine"),
        ("mails/spam/1.txt", None, "is a file: name the folder"),
        ("mials", None, "Did you mean 'mails'?"),
        ("mails", {"train": "span"}, "has no text file: the folders here are ham, spam. Did you mean 'spam'?"),
    ],
)
def test_a_place_without_texts_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, splits: dict[str, str] | None, message: str
) -> None:
    write(tmp_path / "mails", MAILS)
    monkeypatch.chdir(tmp_path)
    (problem,) = raised_problems(find_split_files, data_of(Path("-"), splits=splits).model_copy(update={"path": path}))
    assert message in problem.message


def test_links_to_folders_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "mails", MAILS)
    os.symlink(tmp_path, folder / "spam" / "more")
    (problem,) = raised_problems(list_texts, str(folder))
    assert "is a link to a folder" in problem.message


def test_folders_in_one_another_without_end_are_one_message(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    try:
        for look in (list_texts, lambda folder: Listing().find_files(f"{folder}/**/*", (".csv",))):
            (problem,) = raised_problems(look, str(tmp_path))
            assert problem.message.startswith("has too many folders in one another to be read")
        assert Listing().unread_folders(str(tmp_path), (".csv",)) == []
    finally:
        subprocess.run(["rm", "-r", tmp_path / "d"], check=True)  # shutil.rmtree fails as well


def test_the_digest_of_a_folder_changes_with_a_label_and_not_with_its_place(tmp_path: Path, home: Path) -> None:
    def digest(folder: Path) -> str:
        recipe = {"name": "mails", "task": "sequence-classification", "data": data_of(folder).model_dump()}
        model = {"source": "scratch", "config": {"model_type": "bert", "vocab_size": 100}}
        (pin,) = pin_data(parse({**recipe, "model": model})).data_files["train"]
        return pin.sha256

    folder = write(tmp_path / "mails", MAILS)
    before = digest(folder)
    folder.rename(tmp_path / "moved")
    assert digest(tmp_path / "moved") == before
    (tmp_path / "moved" / "ham").rename(tmp_path / "moved" / "good")
    assert digest(tmp_path / "moved") != before


def test_predictions_read_a_folder_as_training_did_with_the_name_of_each_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "inbox", {"b.txt": "one\ntext\n", "a.txt": b"\xff", "c.txt": "other"})
    rules = ReadingRules.of(data_of(folder))
    reader = RowReader(SequenceClassification(), {"text": "text"}, ["file_name"], rules)
    (rows,) = reader.shards(str(folder), 100)
    assert rows.inputs == [None, ("one\ntext",), ("other",)] and rows.kept["file_name"][1:] == ["b.txt", "c.txt"]
    assert str(rows.errors[0]) == "is not UTF-8 text (a.txt, byte 0xff)"
    (rows,) = reader.shards(str(folder / "b.txt"), 100)
    assert rows.inputs == [("one\ntext",)]
