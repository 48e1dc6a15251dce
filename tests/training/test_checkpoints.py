"""Complete or absent, verified, and rotated."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from training import checkpoints


def write(folder: Path, step: int, content: str = "weights", needs: Sequence[str] = ()) -> Path:
    final = folder / checkpoints.name(step)
    with checkpoints.writing(final, needs) as aside:
        (aside / "deep").mkdir()
        (aside / "deep/file").write_text(content)
    return final


def newest(folder: Path) -> tuple[str | None, list[str]]:
    """The name of the newest good one, and what was said on the way to it."""
    said: list[str] = []
    found = checkpoints.newest_good(folder, said.append)
    return found.name if found else None, said


def test_checkpoint_is_not_there_before_it_is_whole(tmp_path: Path) -> None:
    with checkpoints.writing(tmp_path / "checkpoint-1") as aside:
        (aside / "file").write_text("half")
        assert not (tmp_path / "checkpoint-1").exists()
    assert checkpoints.damage_of(tmp_path / "checkpoint-1") is None


def test_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"), checkpoints.writing(tmp_path / "checkpoint-1"):
        raise OSError("disk full")
    assert list(tmp_path.iterdir()) == []


def test_newest_is_by_step_and_not_by_name(tmp_path: Path) -> None:
    for step in (9, 10, 8):
        write(tmp_path, step)
    assert newest(tmp_path) == ("checkpoint-10", [])


def test_no_checkpoint_is_none_and_no_folder_neither(tmp_path: Path) -> None:
    assert newest(tmp_path) == newest(tmp_path / "nowhere") == (None, [])


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "manifest", "torn manifest"])
def test_damaged_checkpoint_is_put_aside_for_the_one_before(tmp_path: Path, damage: str) -> None:
    write(tmp_path, 1)
    file = write(tmp_path, 2) / "deep/file"
    manifest = tmp_path / "checkpoint-2/manifest.json"
    match damage:
        case "flip":
            file.write_text("weightz")
        case "truncate":
            file.write_text("")
        case "delete":
            file.unlink()
        case "manifest":
            manifest.unlink()
        case "torn manifest":
            manifest.write_bytes(manifest.read_bytes()[:20])
    found, (said,) = newest(tmp_path)
    assert found == "checkpoint-1"
    assert "checkpoint-2 cannot be used" in said
    [kept] = (tmp_path / "quarantine").iterdir()
    assert kept.name.endswith("-checkpoint-2")
    write(tmp_path, 2)
    assert newest(tmp_path) == ("checkpoint-2", [])


def test_checkpoint_is_of_no_use_without_the_one_that_it_needs(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    write(tmp_path, 3, needs=["checkpoint-2"])
    (tmp_path / "checkpoint-2/deep/file").unlink()
    assert newest(tmp_path)[0] == "checkpoint-1"


def test_what_dead_writers_left_is_removed(tmp_path: Path) -> None:
    for leftover in (".writing-checkpoint-2", ".removing-checkpoint-1"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "file").touch()
    assert newest(tmp_path) == (None, [])
    assert list(tmp_path.iterdir()) == []


def test_rotation_keeps_the_newest_two_and_those_that_they_need(tmp_path: Path) -> None:
    needs = {1: [], 2: [], 3: [], 9: ["checkpoint-2"], 10: ["checkpoint-9"]}
    for step, others in needs.items():
        write(tmp_path, step, needs=others)
    checkpoints.rotate(tmp_path)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["checkpoint-10", "checkpoint-2", "checkpoint-9"]


@pytest.mark.parametrize("stray", [".nfs000000000123", ".DS_Store", "notes.txt"])
def test_stray_file_among_checkpoints_is_left_alone(tmp_path: Path, stray: str) -> None:
    write(tmp_path, 1)
    (tmp_path / stray).write_text("not a checkpoint")
    assert newest(tmp_path) == ("checkpoint-1", [])
    checkpoints.rotate(tmp_path, newest=1)
    assert (tmp_path / stray).is_file()


def test_leftover_that_cannot_be_deleted_does_not_stop_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS keeps a file that a process still has open, and with it the folder."""
    write(tmp_path, 1)
    (tmp_path / ".writing-checkpoint-2").mkdir()
    (tmp_path / ".writing-checkpoint-2/.nfs1").write_text("still open")
    monkeypatch.setattr(os, "unlink", _busy)
    assert newest(tmp_path) == ("checkpoint-1", [])
    write(tmp_path, 2)
    assert newest(tmp_path) == ("checkpoint-2", [])


def _busy(*_: object, **__: object) -> None:
    raise OSError(errno.EBUSY, "Device or resource busy")
