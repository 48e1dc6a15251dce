"""Digests of files, and when they are taken from memory."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from tasks.cache.digests import SETTLED_S, Digests, digest_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text("text,label\nfine,1\n")
    time.sleep(SETTLED_S * 2)
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def poison(home: Path) -> None:
    """Makes every remembered digest recognisable as remembered."""
    import sqlite3

    with sqlite3.connect(home / "digests.db") as memory:
        memory.execute("UPDATE digests SET sha256 = 'remembered'")


def test_an_unchanged_file_is_not_read_twice(tmp_path: Path, file: Path) -> None:
    assert Digests(tmp_path).of(file) == sha256(file)
    poison(tmp_path)
    assert Digests(tmp_path).of(file) == "remembered"


def test_a_file_in_a_moved_folder_is_not_read_again(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "rows.csv").write_text("text,label\nfine,1\n")
    time.sleep(SETTLED_S * 2)
    Digests(tmp_path).of(tmp_path / "before" / "rows.csv")
    poison(tmp_path)
    (tmp_path / "before").rename(tmp_path / "after")
    assert Digests(tmp_path).of(tmp_path / "after" / "rows.csv") == "remembered"


def test_an_edit_that_keeps_size_and_mtime_is_noticed(tmp_path: Path, file: Path) -> None:
    digests = Digests(tmp_path)
    before, status = digests.of(file), file.stat()
    file.write_text("text,label\nfine,0\n")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size and file.stat().st_mtime_ns == status.st_mtime_ns
    assert digests.of(file) == sha256(file) != before


def test_a_file_written_this_very_moment_is_not_remembered(tmp_path: Path) -> None:
    file = tmp_path / "new.csv"
    file.write_text("a")
    Digests(tmp_path).of(file)
    poison(tmp_path)
    assert Digests(tmp_path).of(file) == sha256(file)


def test_a_broken_memory_costs_time_and_nothing_else(tmp_path: Path, file: Path) -> None:
    (tmp_path / "digests.db").write_bytes(b"not a database, at all" * 100)
    assert Digests(tmp_path).of(file) == sha256(file)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Digests(tmp_path).of(tmp_path / "absent")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError) as raised:
        Digests(tmp_path).of(Path("/proc/self/mem"))
    assert raised.value.filename == "/proc/self/mem"


def test_a_pipe_in_the_place_of_a_file_is_an_error_that_names_it_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.csv")
    with pytest.raises(OSError, match=r"rows\.csv"):
        Digests(tmp_path).of(tmp_path / "rows.csv")


def test_the_digest_of_a_file_elsewhere_is_known_for_as_long_as_its_state_is_the_same(tmp_path: Path) -> None:
    digests = Digests(tmp_path)
    digests.remember("s3://rows/train.csv", "1", "abc")
    assert digests.recalled("s3://rows/train.csv", "1") == "abc"
    assert digests.recalled("s3://rows/train.csv", "2") is None
    assert digests.recalled("s3://rows/dev.csv", "1") is None


def test_equal_values_have_equal_digests_in_any_order() -> None:
    assert digest_of({"a": 1, "b": [True, None]}) == digest_of({"b": [True, None], "a": 1})
    assert digest_of({"a": 1}) != digest_of({"a": 1.5})


@pytest.mark.parametrize("harm", ["not a database", "torn"])
def test_damaged_memory_is_replaced(tmp_path: Path, file: Path, harm: str) -> None:
    Digests(tmp_path).of(file)
    database = tmp_path / "digests.db"
    with database.open("r+b") as opened:
        opened.seek(0 if harm == "not a database" else 100)
        opened.write(b"\xff" * 8000)
    assert Digests(tmp_path).of(file) == sha256(file)
    Digests(tmp_path).of(file)
    poison(tmp_path)
    assert Digests(tmp_path).of(file) == "remembered"
