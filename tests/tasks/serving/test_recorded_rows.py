"""Recorded rows: in the folder that was named, and in no file that another user has put there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.serving.recorded_rows import RecordedRows


def recorder(folder: Path, most_rows: int = 100) -> RecordedRows:
    """A recorder of all rows, which fails if a row cannot be written."""

    def fail(rows: int, reason: str) -> None:
        raise AssertionError(f"{rows} rows: {reason}")

    return RecordedRows(folder, "small", 1.0, most_rows, fail, {"text": "text"})


def record(recorded: RecordedRows, text: str) -> None:
    recorded.add_predictions([{"text": text}], [{"label": "good"}], "1")


def texts(folder: Path) -> dict[str, list[str]]:
    """The texts in each file."""
    lines = {file.name: file.read_text().splitlines() for file in sorted(folder.iterdir()) if not file.is_symlink()}
    return {name: [json.loads(line)["text"] for line in rows] for name, rows in lines.items()}


def test_a_link_with_the_name_of_the_next_file_is_passed_over(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "served", tmp_path / ".bash_profile"
    recorded = recorder(folder)
    (folder / "served-00000001.jsonl").symlink_to(elsewhere)
    record(recorded, "one")
    assert not elsewhere.exists()
    assert texts(folder) == {"served-00000002.jsonl": ["one"]}


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    folder, elsewhere, failed = tmp_path / "served", tmp_path / "elsewhere", list[int]()
    recorded = RecordedRows(folder, "small", 1.0, 100, lambda rows, reason: failed.append(rows), {})
    record(recorded, "one")
    (folder / "served-00000001.jsonl").unlink()
    (folder / "served-00000001.jsonl").symlink_to(elsewhere)
    record(recorded, "two")
    assert failed == [1] and not elsewhere.exists()


def test_servers_that_record_into_one_folder_write_files_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    first, second = recorder(folder), recorder(folder)
    for text in ("one", "two"):
        record(first, text)
        record(second, text)
    assert texts(folder) == {f"served-0000000{number}.jsonl": ["one", "two"] for number in (1, 2)}


@pytest.mark.parametrize(
    ("columns", "names"),
    [
        ({"messages": "talk", "tools": "functions"}, ("talk", "functions")),
        ({"messages": "messages"}, ("messages", "served_tools")),
        ({"prompt": "input"}, ("input", "served_tools")),
    ],
)
def test_conversations_are_recorded_in_the_columns_that_the_model_reads(
    tmp_path: Path, columns: dict[str, str], names: tuple[str, str]
) -> None:
    recorded = RecordedRows(tmp_path / "served", "small", 1.0, 100, lambda rows, reason: None, columns)
    part = {"type": "text", "text": "Hi"}
    asked = {"messages": [{"role": "developer", "content": [part]}], "tools": [{"type": "function"}], "text": None}
    recorded.add_answer(asked, "Hello", "3")
    row = json.loads((tmp_path / "served" / "served-00000001.jsonl").read_text())
    assert [row[name] for name in names] == [[{"role": "system", "content": "Hi"}], asked["tools"]]
    assert row["prediction"] == "Hello" and row["served_by"] == "small/3"


@pytest.mark.parametrize("open_one", ["served", "above"])
def test_a_folder_in_which_others_may_put_files_is_refused(tmp_path: Path, open_one: str) -> None:
    folder = tmp_path / "above" / "served"
    folder.mkdir(parents=True)
    next(path for path in (folder, folder.parent) if path.name == open_one).chmod(0o777)
    with pytest.raises(PermissionError, match=f"{open_one} belongs to another user or may be written by others"):
        recorder(folder)
