"""Text in another encoding than the recipe names, and text that an earlier program garbled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.raised import raised_problems
from tests.training.data.task_types import CLASSIFICATION
from training.data.load_rows import load
from training.data.mojibake import garbled_texts, is_single_byte, misread_texts
from training.problems import UserError
from training.recipe import Data

ROWS = "text,label\nEin schöner Tag,gut\nÜbel und böse,schlecht\nplain,gut\n"


def read(folder: Path, files: dict[str, bytes], **data: Any) -> list[str]:
    """The problems of the rows of these files."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    checks = dict.fromkeys(("duplicates", "shared_rows", "absent_label"), "ignore") | data.pop("checks", {})
    pinned = {"train": [str(folder / name) for name in files], "validation": [str(folder / next(iter(files)))]}
    wanted = Data(source="csv", path="-", text=["text"], label="label", checks=checks, **data)
    load(wanted, CLASSIFICATION, pinned, folder / "out")
    report = json.loads((folder / "out" / "log" / "report.json").read_text())
    return [f"{one['where']}: {one['message']}".replace(f"{folder}/", "") for one in report["problems"]]


def test_utf_8_in_a_folder_of_another_encoding_is_refused_with_its_file_and_rows(tmp_path: Path) -> None:
    files = {"one.csv": ROWS.encode("cp1252"), "two.csv": ROWS.encode()}
    (problem,) = raised_problems(read, tmp_path, files, encoding="cp1252")
    assert problem.where == f"{tmp_path / 'two.csv'} row 2" and problem.check == "encoding"
    assert "is UTF-8, not cp1252 (column 'text': 'Ein schöner Tag') (2 rows like this: 2, 3)" in problem.message
    with pytest.raises(UserError, match=r"one\.csv row 2: is not UTF-8 text"):
        read(tmp_path, files)
    with pytest.raises(UserError) as alone:  # and a train split without a row left is no second problem
        read(tmp_path, {"two.csv": ROWS.encode()}, encoding="cp1252")
    assert [problem.check for problem in alone.value.problems if problem.level == "error"] == ["encoding"]


def test_rows_in_the_encoding_that_the_recipe_names_have_no_problem(tmp_path: Path) -> None:
    for encoding in ("cp1252", "latin-1", "iso-8859-15", "mac-roman", "utf-16", "utf-8"):
        assert read(tmp_path, {"rows.csv": ROWS.encode(encoding)}, encoding=encoding) == []


def test_text_that_was_garbled_before_is_a_warning_with_an_example(tmp_path: Path) -> None:
    garbled = ROWS.encode().decode("cp1252").encode()
    damaged = "text,label\nfor\N{ZERO WIDTH NO-BREAK SPACE}got,gut\nGr\N{REPLACEMENT CHARACTER}n,schlecht\n".encode()
    found = read(tmp_path, {"one.csv": ROWS.encode(), "two.csv": garbled, "three.csv": damaged})
    assert len(found) == 3 and found[0].startswith(
        "two.csv row 2: has UTF-8 text that was read as cp1252 in column 'text': 'schÃ¶ner' for 'schöner' "
        "(2 rows like this: 2, 3): write these rows anew from their source"
    )
    assert "three.csv row 2: has a byte order mark (U+FEFF) within the text in column 'text'" in found[1]
    assert "three.csv row 3: has characters that an earlier program could not read (U+FFFD)" in found[2]


@pytest.mark.parametrize(
    "text",
    [
        "„Spaß“ am Fuß»",
        "déjà»… voilà",
        "NÃO É ASSIM",
        "СССР», «С» и №5",  # noqa: RUF001
        "Ä",
        "日本語のテキスト",
        "ภาษาไทย",
        "עברית",
        "naïve café",
        "👍🏽",
    ],
)
def test_text_of_any_language_is_not_taken_for_garbled(text: str) -> None:
    assert list(garbled_texts(pa.array([text]))) == []


@pytest.mark.parametrize(
    "text", ["Café", "don\N{RIGHT SINGLE QUOTATION MARK}t — really", "Привет, мир", "日本語", "naïve 😀", "Größe"]
)
def test_text_garbled_by_any_usual_encoding_is_found(text: str) -> None:
    raw = text.encode()
    assert misread_texts(pa.array([raw.decode("latin-1"), text]), "latin-1") == {0: text}
    found = list(garbled_texts(pa.array([raw.decode("latin-1"), None, "plain"])))
    assert len(found) == 1 and found[0][0] == 0


def test_encodings_in_which_any_file_can_be_read_are_known() -> None:
    assert all(map(is_single_byte, ("cp1252", "latin-1", "cp1251", "koi8-r", "iso-8859-7", "mac-roman")))
    assert not any(map(is_single_byte, ("utf-8", "utf-8-sig", "utf-16", "ascii", "gbk", "big5", "shift-jis", "euc-kr")))
