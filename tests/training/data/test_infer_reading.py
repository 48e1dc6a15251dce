"""How files are read, inferred from the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from training.data.infer_reading import SAMPLE_ROWS, sample_rows
from training.problems import UserError

TEXTS = [f"the printer on floor {number} is broken" for number in range(40)]
TEAMS = ["hardware", "billing"] * 20


def table(delimiter: str = ",", header: str = "text,team", text: str = "{}") -> str:
    """The rows as CSV."""
    lines = [f"{text.format(text_)}{delimiter}{team}" for text_, team in zip(TEXTS, TEAMS, strict=True)]
    return "\n".join([*([header.replace(",", delimiter)] if header else []), *lines]) + "\n"


@pytest.mark.parametrize(
    ("name", "content", "encoding", "fields"),
    [
        ("rows.csv", table(), "utf-8", {}),
        ("rows.csv", table(";"), "utf-8", {"delimiter": ";"}),
        ("rows.csv", table("\t"), "utf-8", {"delimiter": "\t"}),
        ("rows.tsv", table("\t"), "utf-8", {}),
        ("rows.csv", table(text='"{}, or not"'), "utf-8", {}),
        ("rows.csv", table(text='"{} ""x"", or"'), "utf-8", {}),
        ("rows.csv", table(text='"{}\n"'), "utf-8", {}),
        ("rows.tsv", table("\t", text='"{} he said'), "utf-8", {"quoting": "none"}),
        ("rows.csv", table(header="text,team").replace("printer", "Gerät"), "cp1252", {"encoding": "cp1252"}),
        ("rows.csv", table().replace("printer", "принтер на этаже сломан"), "cp1251", {"encoding": "cp1251"}),
        ("rows.csv", table().replace("printer", "Gerät"), "utf-16", {"encoding": "utf-16"}),
    ],
)
def test_the_dialect_of_a_csv_file_is_inferred(
    tmp_path: Path, name: str, content: str, encoding: str, fields: dict[str, Any]
) -> None:
    file = tmp_path / name
    file.write_text(content, encoding=encoding)
    sample = sample_rows(str(file))
    assert sample.data == {"source": "csv", "path": str(file), **fields}
    assert (sample.rows, sample.columns["team"]) == (40, TEAMS)


def test_a_first_row_of_values_is_no_header(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(table(header=""))
    sample = sample_rows(str(tmp_path / "rows.csv"))
    assert sample.data["header"] == ["column_1", "column_2"] and not sample.has_names
    assert sample.columns == {"column_1": TEXTS, "column_2": TEAMS}


@pytest.mark.parametrize("header", ["0,team", "2018,team", "Is the printer on your floor broken?,team"])
def test_numbers_and_questions_may_be_names_of_columns(tmp_path: Path, header: str) -> None:
    (tmp_path / "rows.csv").write_text(table(header=header))
    sample = sample_rows(str(tmp_path / "rows.csv"))
    assert [*sample.columns] == header.split(",") and "header" not in sample.data


def test_rows_with_problems_are_counted(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(table() + "a,b,c\n" * 3)
    assert sample_rows(str(tmp_path / "rows.csv")).unreadable == 3


def test_lines_that_begin_with_a_label_are_split_once(tmp_path: Path) -> None:
    lines = [f"{team.upper()}:other {text}" for team, text in zip(TEAMS, TEXTS, strict=True)]
    (tmp_path / "rows.txt").write_text("\n".join(lines))
    sample = sample_rows(str(tmp_path / "rows.txt"))
    assert sample.data | {"path": ""} == {
        **{"source": "csv", "path": "", "delimiter": " ", "maxsplit": 1, "quoting": "none"},
        "header": ["label", "text"],
    }
    assert sample.columns["text"] == TEXTS


def test_lines_of_plain_text_are_one_column(tmp_path: Path) -> None:
    lines = [f'Line {number} "it says{", and" * (number % 7)} more' for number in range(40)]
    (tmp_path / "rows.txt").write_text("\n".join(lines))
    assert sample_rows(str(tmp_path / "rows.txt")).columns == {"text": lines}


def test_words_and_tags_between_blank_lines_are_conll(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("EU B-ORG\nrejects O\n\nPeter B-PER\n\n" * 10)
    sample = sample_rows(str(tmp_path / "rows.txt"))
    assert sample.data["source"] == "conll"
    assert sample.columns["tags"] == [["B-ORG", "O"], ["B-PER"]] * 10


def test_all_columns_are_read_also_those_of_late_rows(tmp_path: Path) -> None:
    rows = [{"text": text} for text in TEXTS] + [{"text": "last", "label": "late"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert sample_rows(str(tmp_path / "rows.jsonl")).columns == {
        "text": [*TEXTS, "last"],
        "label": [None] * 40 + ["late"],
    }


def test_a_folder_has_the_splits_of_its_files(tmp_path: Path) -> None:
    for name in ("train", "test"):
        pq.write_table(pa.table({"text": TEXTS, "label": TEAMS}), tmp_path / f"{name}.parquet")
    sample = sample_rows(str(tmp_path))
    assert (sample.data["source"], sample.splits) == ("parquet", ["train", "test"])
    assert sample.columns == {"text": TEXTS, "label": TEAMS}


def test_of_a_large_file_the_first_rows_are_read(tmp_path: Path) -> None:
    numbers = [*range(100_000)]
    pq.write_table(pa.table({"text": numbers}), tmp_path / "rows.parquet", row_group_size=1000)
    sample = sample_rows(str(tmp_path / "rows.parquet"))
    assert sample.columns == {"text": numbers[:SAMPLE_ROWS]}


@pytest.mark.parametrize("name", ["missing.csv", "empty", "header.csv"])
def test_nothing_to_read_is_one_message_that_names_the_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "header.csv").write_text("text,label\n")
    with pytest.raises(UserError, match=name):
        sample_rows(str(tmp_path / name))
