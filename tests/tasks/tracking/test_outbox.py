"""The outbox of a run: records for MLflow, kept until they are delivered."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tasks.tracking.outbox import OUTBOX, Outbox, find_undelivered


def entries(outbox: Outbox) -> list[str]:
    return [entry["entry"] for entry, _ in outbox.read_undelivered()]


def begun(run: str = "run") -> Outbox:
    outbox = Outbox(run)
    outbox.put("start", experiment="recipe")
    return outbox


def test_entries_wait_in_order_until_they_are_marked(home: Path) -> None:
    outbox = begun()
    outbox.put("tags", values={"a": "1"})
    assert entries(outbox) == ["start", "tags"]
    outbox.mark_delivered(outbox.read_undelivered()[0][1])
    assert entries(Outbox("run")) == ["tags"]
    outbox.mark_delivered(outbox.read_undelivered()[0][1])
    assert entries(outbox) == []


def test_a_lost_or_damaged_mark_delivers_again_and_loses_nothing(home: Path) -> None:
    outbox = begun()
    outbox.mark_delivered(outbox.read_undelivered()[-1][1])
    (outbox.folder / "delivered").write_text("x")
    assert entries(outbox) == ["start"]


def test_a_run_is_open_from_its_start_to_its_end_and_again_when_it_is_retried(home: Path) -> None:
    outbox = Outbox("run")
    assert not outbox.is_open()
    outbox.put("start", experiment="recipe")
    assert outbox.is_open()
    outbox.put("end", status="FAILED")
    assert not outbox.is_open()
    outbox.put("start", experiment="recipe")
    assert outbox.is_open()


def test_nothing_comes_after_the_end_of_a_run_until_it_is_retried(home: Path) -> None:
    outbox = begun()
    outbox.put("end", status="FINISHED")
    outbox.put("metrics", points=[])
    assert entries(outbox) == ["start", "end"] and not outbox.is_open()
    outbox.put("start", experiment="recipe")
    outbox.put("metrics", points=[])
    assert entries(outbox) == ["start", "end", "start", "metrics"]


def test_a_last_entry_of_any_size_shows_whether_the_run_is_open(home: Path) -> None:
    outbox = begun()
    outbox.put("metrics", points=["x" * 100_000])
    assert outbox.is_open()


@pytest.mark.parametrize("torn", [b'{"entry": "tags", "val', b"{"])
def test_a_line_torn_by_a_kill_takes_no_later_entry_along(home: Path, torn: bytes) -> None:
    outbox = begun()
    with (outbox.folder / OUTBOX).open("ab") as file:
        file.write(torn)
    assert entries(outbox) == ["start"] and outbox.is_open()
    with outbox.claim_run() as mine:
        assert mine
        outbox.put("end", status="KILLED")
    assert entries(outbox) == ["start", "end"] and not outbox.is_open()


def test_an_entry_that_is_being_written_is_read_when_it_is_whole(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two halves were skipped as two damaged lines, and it never arrived."""
    outbox, parse = begun(), json.loads
    first, second = b'{"entry": "tags", "val', b'ues": {"a": "1"}}\n{"entry": "end", "status": "FINISHED"}\n'

    def write(content: bytes) -> None:
        with (outbox.folder / OUTBOX).open("ab") as file:
            file.write(content)

    def parse_while_it_is_written(line: bytes) -> Any:
        if line == first:
            write(second)
        return parse(line)

    write(first)
    monkeypatch.setattr(json, "loads", parse_while_it_is_written)
    (started,) = outbox.read_undelivered()
    monkeypatch.undo()
    outbox.mark_delivered(started[1])
    write(second)
    assert entries(outbox) == ["tags", "end"]


def test_a_run_killed_within_its_first_line_is_no_run(home: Path) -> None:
    outbox = Outbox("run")
    (outbox.folder / OUTBOX).write_text('{"entry": "sta')
    assert not outbox.is_open() and find_undelivered("another") == []
    with outbox.claim_run():
        outbox.put("start", experiment="recipe")
    assert outbox.read_start()["experiment"] == "recipe"


def test_entries_that_a_full_disk_refuses_or_cuts_are_written_when_there_is_room_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, write = begun(), os.write
    takes = [20, OSError(errno.ENOSPC, "full"), 0]

    def almost_full(descriptor: int, content: bytes) -> int:
        taken = takes.pop(0)
        if isinstance(taken, OSError):
            raise taken
        return write(descriptor, content[:taken])

    monkeypatch.setattr(os, "write", almost_full)
    for name in ("a", "b", "c"):
        outbox.put("tags", values={name: "1"})
    assert entries(outbox) == ["start"] and outbox.unwritten
    monkeypatch.undo()
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    outbox.put("end", status="FINISHED")
    assert [entry.get("values") for entry, _ in outbox.read_undelivered()] == [
        None,
        {"a": "1"},
        {"b": "1"},
        {"c": "1"},
        None,
    ]
    assert not outbox.unwritten and not outbox.is_open()


def test_an_outbox_is_claimed_by_one_at_a_time(home: Path) -> None:
    with Outbox("run").claim_run() as mine, Outbox("run").claim_run(wait_s=0.1) as other:
        assert (mine, other) == (True, False)
    with Outbox("run").claim_run() as mine:
        assert mine


def test_a_claim_is_not_handed_on_to_children(home: Path) -> None:
    with Outbox("run").claim_run():
        held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _inheritable(int(fd))]
    assert not any(str(home) in path for path in held)


def _inheritable(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False


def test_no_run_is_undelivered_where_the_folder_of_the_runs_was_removed(home: Path) -> None:
    begun()
    shutil.rmtree(home / "runs")
    assert find_undelivered() == []


def test_others_left_what_waits_or_was_never_ended(home: Path) -> None:
    begun("mine")
    begun("open").mark_delivered(10_000)
    done = begun("done")
    done.put("end", status="FINISHED")
    done.mark_delivered((done.folder / OUTBOX).stat().st_size)
    begun("waiting").put("end", status="FINISHED")
    (home / "runs" / "lock only").mkdir()
    assert [box.run for box in find_undelivered("mine")] == ["open", "waiting"]


def kinds(outbox: Outbox) -> list[str]:
    return [entry["entry"] for entry in outbox.read_entries("start", "tags", "end")]


def test_a_delivered_run_keeps_its_first_start_its_last_tags_and_its_end(home: Path) -> None:
    outbox = begun()
    began = outbox.read_start()["time"]
    outbox.put("tags", values={"fit.key": "k1", "fit.state": "failed"})
    outbox.put("text", name="problems.json", content="[]")
    outbox.put("end", status="FAILED")
    outbox.put("start", experiment="recipe")
    outbox.put("tags", values={"fit.key": "k2"})
    outbox.put("end", status="FINISHED")
    outbox.mark_delivered(outbox.read_undelivered()[-1][1], ended=True)
    outbox.trim()
    assert kinds(outbox) == ["start", "tags", "end"] and not outbox.is_open() and entries(outbox) == []
    start, tags, end = outbox.read_entries("start", "tags", "end")
    assert (start["time"], tags["values"]) == (began, {"fit.key": "k2", "fit.state": "failed"})
    assert end["status"] == "FINISHED" and b"problems.json" not in (outbox.folder / OUTBOX).read_bytes()
    assert find_undelivered() == []


def test_a_run_with_a_delivered_end_is_looked_at_again_only_after_another_entry(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = begun()
    outbox.put("end", status="FAILED")
    outbox.mark_delivered(outbox.read_undelivered()[-1][1], ended=True)
    with monkeypatch.context() as patched:
        patched.setattr(Outbox, "read_undelivered", None)  # its outbox is not read
        assert find_undelivered() == []
    outbox.put("start", experiment="recipe")
    assert [box.run for box in find_undelivered()] == ["run"]


def test_figures_of_a_delivered_run_are_dropped_and_a_retry_goes_on_behind(home: Path) -> None:
    outbox = begun()
    outbox.put("metrics", points=[["fit/loss", 0.5, 0, 1]])
    outbox.put("tags", values={"fit.key": "k"})
    outbox.put("end", status="FAILED")
    outbox.trim()
    assert entries(outbox) == ["start", "metrics", "tags", "end"], "not delivered yet"
    outbox.mark_delivered(outbox.read_undelivered()[-1][1])
    outbox.trim()
    assert entries(outbox) == []
    assert b"metrics" not in (outbox.folder / OUTBOX).read_bytes()
    outbox.put("start", experiment="recipe")
    assert kinds(outbox) == ["start", "tags", "end", "start"]
    assert entries(outbox) == ["start"]
    outbox.put("metrics", points=[["fit/loss", 0.25, 0, 2]])
    outbox.mark_delivered(outbox.read_undelivered()[-1][1])
    outbox.trim()
    assert b"metrics" in (outbox.folder / OUTBOX).read_bytes(), "the run goes on"
