"""Complete or absent, verified, and rotated."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from training.engine import checkpoints
from training.engine.training_task import Task
from training.jobs.protocol import Events, read_events
from training.problems import UserError
from training.recipe import ResolvedCompute, Training


def write(folder: Path, step: int, content: str = "weights", needs: Sequence[str] = ()) -> Path:
    final = folder / checkpoints.name(step)
    with checkpoints.write(final, needs) as aside:
        (aside / "deep").mkdir()
        (aside / "deep/file").write_text(content)
    return final


def newest(folder: Path) -> tuple[str | None, list[str]]:
    """The name of the newest intact checkpoint, and the warnings on the way to it."""
    warnings: list[str] = []
    found = checkpoints.find_newest_intact(folder, warnings.append)
    return found.name if found else None, warnings


def resolved(strategy: str) -> ResolvedCompute:
    return ResolvedCompute.model_validate({"strategy": strategy, "num_processes": 1, "mixed_precision": "no"})


def task_in(job: Path, compute: ResolvedCompute | None = None, named: Path | None = None) -> Task:
    """A task without a model and rows, which writes and reads checkpoints only."""
    (job / "checkpoints").mkdir(parents=True)
    return Task(
        **dict.fromkeys(("model", "validation", "collate", "loss", "task_type", "metrics")),  # type: ignore[arg-type]
        train=range(8),  # type: ignore[arg-type]
        events=Events(job / "events.jsonl"),
        training=Training(),
        compute=compute or resolved("ddp"),
        global_batch_size=1,
        checkpoints=job / "checkpoints",
        named_checkpoint=named,
    )


def test_checkpoint_is_not_there_before_it_is_whole(tmp_path: Path) -> None:
    with checkpoints.write(tmp_path / "checkpoint-1") as aside:
        (aside / "file").write_text("half")
        assert not (tmp_path / "checkpoint-1").exists()
    assert checkpoints.find_damage(tmp_path / "checkpoint-1") is None


def test_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"), checkpoints.write(tmp_path / "checkpoint-1"):
        raise OSError("disk full")
    assert list(tmp_path.iterdir()) == []


def test_training_goes_on_while_a_checkpoint_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, released, synced = task_in(tmp_path), threading.Event(), checkpoints.fsync
    monkeypatch.setattr(checkpoints, "fsync", lambda path: (released.wait(30), synced(path)))
    with task.write_checkpoint(1, []) as folder:
        (folder / "file").write_text("weights")
    assert not (task.checkpoints / "checkpoint-1").exists()  # its disk has not answered yet, and training goes on
    released.set()
    with task.write_checkpoint(2, []) as folder:
        assert checkpoints.find_damage(task.checkpoints / "checkpoint-1") is None  # one is written at a time
    task.finish_checkpoint()
    assert newest(task.checkpoints) == ("checkpoint-2", [])
    saved = read_events(tmp_path / "events.jsonl", 0)[0]
    assert [(event["kind"], event["step"]) for event in saved] == [("checkpoint", 1), ("checkpoint", 2)]
    assert all(event["paused"] <= event["seconds"] for event in saved)


def test_checkpoint_that_could_not_be_completed_is_reported_at_the_next(tmp_path: Path) -> None:
    task = task_in(tmp_path)

    def write_over(step: int) -> None:
        with task.write_checkpoint(step, []) as folder:
            (folder / "file").write_text("weights")
            (task.checkpoints / checkpoints.name(step)).mkdir()
            (task.checkpoints / checkpoints.name(step) / "in the way").touch()

    write_over(1)
    while not task.has_lost_checkpoint:
        time.sleep(0.001)
    with pytest.raises(OSError, match="not empty"):
        write_over(2)
    task.finish_checkpoint()  # an error is raised once
    assert [path.name for path in task.checkpoints.iterdir()] == ["checkpoint-1"]
    write_over(3)
    with pytest.raises(OSError, match="not empty"), task.finishing_checkpoint():
        pass
    with pytest.raises(MemoryError), task.finishing_checkpoint():  # the error of training matters more
        write_over(4)
        raise MemoryError


def test_a_damaged_checkpoint_before_the_newest_does_not_keep_the_next_from_being_written(tmp_path: Path) -> None:
    task = task_in(tmp_path)
    for step in (1, 2):
        write(task.checkpoints, step)
    (task.checkpoints / "checkpoint-1" / checkpoints.MANIFEST).write_text("{")
    for step in (3, 4):
        with task.write_checkpoint(step, []) as folder:
            (folder / "file").write_text("weights")
    task.finish_checkpoint()
    assert {path.name for path in task.checkpoints.iterdir()} == {"checkpoint-2", "checkpoint-3", "checkpoint-4"}


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
    found, (warning,) = newest(tmp_path)
    assert found == "checkpoint-1"
    assert "checkpoint-2 cannot be used" in warning
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


def test_leftovers_of_dead_writers_are_removed(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_copied_checkpoint_holds_no_file_from_elsewhere(tmp_path: Path, kind: str) -> None:
    named, copies, secret = write(tmp_path / "theirs", 1), tmp_path / "ours", tmp_path / "password"
    secret.write_text("secret")
    checkpoints.adopt(write(tmp_path / "theirs", 2), copies)
    assert (copies / "checkpoint-2" / "deep" / "file").read_text() == "weights"
    if kind == "link":
        (named / "deep" / "more").symlink_to(secret)
    else:
        os.mkfifo(named / "deep" / "more")
    with pytest.raises(UserError, match=f"more: is a {kind}"):
        checkpoints.adopt(named, copies)
    assert not (copies / "checkpoint-1").exists()


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


class Payload:
    """Writes a file where it is unpickled."""

    def __init__(self, writes: Path) -> None:
        self.writes = writes

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.writes,)


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The key of a home, by which checkpoints are signed as they are written."""
    file = tmp_path / "signing.key"
    file.write_bytes(b"k" * 32)
    monkeypatch.setenv(checkpoints.SIGNING_KEY, str(file))
    return file


def test_a_checkpoint_of_this_home_is_accepted_wherever_it_lies(tmp_path: Path, key: Path) -> None:
    write(tmp_path / "job", 1)
    write(tmp_path / "job", 2, needs=["checkpoint-1"])
    copied = shutil.copytree(tmp_path / "job", tmp_path / "elsewhere")
    checkpoints.require_own(copied / "checkpoint-2", key)


@pytest.mark.parametrize("forged", ["unsigned", "other key", "manifest", "changed", "added", "link", "needed"])
def test_a_checkpoint_that_this_home_did_not_write_is_refused(tmp_path: Path, key: Path, forged: str) -> None:
    write(tmp_path, 1)
    folder = write(tmp_path, 2, needs=["checkpoint-1"])
    match forged:
        case "unsigned":
            (folder / checkpoints.SIGNATURE).unlink()
        case "other key":
            key.write_bytes(b"x" * 32)
        case "manifest":
            manifest = folder / checkpoints.MANIFEST
            manifest.write_text(manifest.read_text() + "\n")
        case "changed":
            (folder / "deep/file").write_text("pickle!")
        case "added":
            (folder / "deep/.metadata").write_text("pickle")
        case "link":
            (folder / "linked").symlink_to(tmp_path)
        case "needed":
            (tmp_path / "checkpoint-1/deep/file").write_text("pickle!")
    with pytest.raises(UserError, match=r"was not written by this home.*trust_checkpoint: true"):
        checkpoints.require_own(folder, key)


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed-zero1", "deepspeed-zero2", "deepspeed-zero3"])
def test_a_training_unpickles_no_checkpoint_from_elsewhere_without_consent(
    tmp_path: Path, strategy: str, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "written"
    with monkeypatch.context() as elsewhere, checkpoints.write(tmp_path / "foreign/checkpoint-2") as aside:
        elsewhere.delenv(checkpoints.SIGNING_KEY)
        (aside / "pytorch_model_fsdp_0").mkdir()
        (aside / "pytorch_model_fsdp_0/.metadata").write_bytes(pickle.dumps(Payload(written)))
    with contextlib.suppress(Exception):
        FileSystemReader(tmp_path / "foreign/checkpoint-2/pytorch_model_fsdp_0").read_metadata()
    assert written.exists()  # it is code to torch

    training, compute = Training(), resolved(strategy)
    task = task_in(tmp_path / "job", compute, tmp_path / "foreign/checkpoint-2")
    with pytest.raises(UserError, match="was not written by this home"):
        task.begin()
    assert list(task.checkpoints.iterdir()) == []
    assert not checkpoints.needs_own_checkpoint(training.model_copy(update={"trust_checkpoint": True}), compute)
    assert not checkpoints.needs_own_checkpoint(training, resolved("ddp"))
    assert checkpoints.needs_own_checkpoint(training.model_copy(update={"engine": "my:engine"}), resolved("ddp"))
