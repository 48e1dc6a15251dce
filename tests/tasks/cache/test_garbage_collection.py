"""The files that the home keeps, with the reason, and the removal of the others."""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import IO

import pytest

from tasks.cache import garbage_collection, store
from tasks.cache.garbage_collection import RECORDS, Piece, bytes_on_disk, find_pieces, in_use
from tasks.cache.history import History
from tasks.home import home
from tasks.locks import is_held
from tasks.registry.retention import find_needs
from tasks.tracking.connection import connect
from tasks.tracking.outbox import Outbox
from tasks.tracking.tracker import VERSION_TAG
from training.problems import UserError

# No model is registered, and MLflow is not imported to say so: that takes seconds.
REMOVING = """
import contextlib, os, signal, sys
from pathlib import Path
from tasks.cache import garbage_collection
from tasks.registry import retention
retention.mlflow_errors, retention.connect = contextlib.nullcontext, lambda: None
retention._list_aliased = retention._list_unfinished = lambda *given: []
calls, at = [], int(sys.argv[2])
owner = {"rename": (Path, "rename"), "rmtree": (garbage_collection.shutil, "rmtree")}[sys.argv[1]]
original = getattr(*owner)
def killed(place, *others, **named):
    calls.append(place)
    if len(calls) == at:
        if sys.argv[1] == "rmtree":
            next(file for file in place.rglob("*") if file.is_file()).unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return original(place, *others, **named)
setattr(*owner, killed)
find_needs = retention.find_needs
garbage_collection.remove({piece.path for piece in garbage_collection.find_pieces(find_needs())}, find_needs)
"""


def look(given_up: Collection[str] = ()) -> list[Piece]:
    return find_pieces(find_needs(given_up))


def remove(folders: Collection[Path]) -> tuple[int, int]:
    return garbage_collection.remove(folders, find_needs)


def made(stage: str, key: str, size: int = 5000) -> str:
    """An artifact of this many bytes; gives its key, which begins so."""
    key = key.ljust(40, "0")
    with store.filling(stage, key) as aside:
        (aside / "content").write_bytes(os.urandom(size))
        store.publish(aside, stage, key, {}, {})
    return key


def ran(run: str, keys: Mapping[str, str], status: str | None = "FINISHED", version: str | None = None) -> None:
    """The records of a run of the recipe `small`; without a status, of one that was killed."""
    outbox = Outbox(run)
    outbox.put("start", experiment="small")
    outbox.put("tags", values={f"{stage}.key": key for stage, key in keys.items()})
    outbox.put("metrics", points=[["fit/loss", 0.5, 0, 1]])
    if version:
        outbox.put("tags", values={VERSION_TAG: version})
    if status:
        outbox.put("end", status=status)
    outbox.mark_delivered((outbox.folder / "outbox.jsonl").stat().st_size)


def job(key: str, age_s: float = 0.0) -> Path:
    folder = home() / "jobs" / key
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "weights").write_bytes(b"w" * 9000)
    for path in (folder / "checkpoints" / "weights", folder / "checkpoints", folder):
        os.utime(path, (path.stat().st_mtime - age_s,) * 2)
    return folder


def needed(pieces: Iterable[Piece]) -> dict[str, tuple[str, ...]]:
    """Who needs what, by the beginnings of names."""
    return {piece.path.name.rstrip("0"): piece.needed_by for piece in pieces}


def test_champions_last_runs_and_runs_to_go_on_are_needed_and_nothing_else_is(tracked: Path) -> None:
    rows, old, new, of_killed, tried = (
        made(stage, key)
        for stage, key in (("load_data", "a1"), ("fit", "b1"), ("fit", "b2"), ("tokenize", "c1"), ("fit", "d1"))
    )
    made("fit", "e1")
    ran("11111111-champion", {"load_data": rows, "fit": old}, version="small/1")
    ran("22222222-last", {"load_data": rows, "fit": new})
    ran("33333333-killed", {"load_data": rows, "tokenize": of_killed, "fit": "f1"}, status=None)
    ran("44444444-failed-but-done-since", {"load_data": rows, "fit": new}, status="FAILED")
    ran("55555555-done-before", {"fit": tried})
    ran("66666666-failed-at-another-gate", {"resolve": "06", "fit": new, "gate": "07"}, status="FAILED")
    client = connect()
    client.create_registered_model("small")
    tags = {"finetune.flow_run_id": "11111111-champion", "finetune.fit.key": old}
    client.create_model_version("small", "file:///nowhere", tags=tags)
    client.set_registered_model_alias("small", "champion", "1")
    History("small").remember_completed({"stages": [{"name": "fit", "key": new}, {"name": "gate", "key": None}]})
    History("small").remember_key("load_data", rows)
    job("f1")
    last, killed = "last run of small", "run 33333333 of small, to resume"
    assert needed(look()) == {
        "a1": ("small@champion", last, killed),
        "b1": ("small@champion",),
        "b2": (last,),
        "c1": (killed,),
        "d1": (),
        "e1": (),
        "f1": (killed,),
    }
    given_up = needed(look(["3333"]))
    assert given_up["c1"] == given_up["f1"] == () and given_up["a1"] == ("small@champion", last)
    with pytest.raises(UserError, match="'77' begins the id of 0 runs"):
        look(["77"])


def test_record_of_a_run_goes_once_nothing_of_it_is_left(tracked: Path) -> None:
    ran("11111111-gone", {"fit": "a1"})
    ran("22222222-stored", {"fit": made("fit", "b1")})
    ran("33333333-to-go-on", {"fit": "c1"}, status=None)
    Outbox("44444444-undelivered").put("start", experiment="small")
    ran("55555555-pending", {"fit": "d1"})
    (tracked / "runs/55555555-pending/pending_state").write_text("COMPLETED")
    records = [piece.path for piece in look() if piece.sort == RECORDS]
    assert records == [tracked / "runs/11111111-gone"]
    remove(records)
    assert not records[0].exists() and (tracked / "runs/22222222-stored").is_dir()


def test_artifacts_of_undelivered_runs_and_of_other_registries_are_needed(tracked: Path) -> None:
    waiting, elsewhere = made("score", "a1"), made("fit", "b1")
    ran("11111111", {"score": waiting})
    (Outbox("11111111").folder / "delivered").write_text("0")
    ran("22222222", {"fit": elsewhere}, version="small/7")
    assert needed(look()) == {
        "a1": ("run 11111111 of small, to deliver to MLflow",),
        "b1": ("run 22222222 of small, whose small/7 is registered elsewhere or was deleted; --give-up RUN if it was",),
    }
    assert needed(look(["2222"]))["b1"] == ()


def test_a_job_that_runs_or_is_of_today_is_kept_though_no_run_records_it(tracked: Path) -> None:
    running, today, old = job("a1", 1e6), job("b1"), job("c1", 1e6)
    with (running / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(running / "lock", (0, 0))
        os.utime(running, (0, 0))
        assert needed(look()) == {"a1": ("a program that is running",), "b1": ("work of the last day",), "c1": ()}
        assert remove({running, today, old})[0] == 1
    assert running.is_dir() and today.is_dir() and not old.exists()


def test_the_freed_bytes_are_those_that_were_announced_and_a_file_with_two_names_counts_once(
    tracked: Path,
) -> None:
    key = made("fit", "a1", 100_000)
    folder, kept = job("b1"), made("fit", "c1", 70_000)
    ran("11111111", {"fit": "b1"})
    History("small").remember_key("fit", kept)
    os.link(store.folder("fit", key) / "content", folder / "output")
    os.link(store.folder("fit", kept) / "content", folder / "linked")
    (home() / "quarantine").mkdir()
    store.discard("fit", made("fit", "d1", 30_000), "damaged")
    going = [piece.path for piece in look() if not piece.needed_by]
    before = bytes_on_disk([tracked])
    announced = bytes_on_disk(going, freed=True)
    # The difference is the file that has a name in an artifact too.
    assert 130_000 < announced < 200_000 and bytes_on_disk(going) - announced >= 70_000
    assert remove(set(going)) == (3, announced)
    assert before - bytes_on_disk([tracked]) == announced
    assert store.find("fit", kept) is not None


@pytest.mark.parametrize("sent", [0, 20])
def test_sizes_are_right_although_the_process_that_measures_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    def dump_and_die(sizes: garbage_collection.Sizes, pipe: IO[bytes]) -> None:
        pipe.write(pickle.dumps(sizes)[:sent])
        pipe.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    (tmp_path / "file").write_bytes(b"a" * 10_000)
    monkeypatch.setattr(pickle, "dump", dump_and_die)
    assert garbage_collection.measure(tmp_path)().of([tmp_path]) == bytes_on_disk([tmp_path]) > 10_000


def test_nothing_is_removed_while_a_run_goes_on_which_waits_for_no_removal_but_the_moment(
    tracked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.cache.garbage_collection.LOCK_WAIT_S", 0.1)
    key = made("fit", "a1")
    outbox = Outbox("11111111")
    with in_use(), in_use(), outbox.claim_run(), pytest.raises(UserError, match=r"a run is running .*11111111"):
        remove({store.folder("fit", key)})
    assert store.find("fit", key) is not None
    assert remove({store.folder("fit", key)})[0] == 1


def test_a_run_that_waits_for_a_removal_reports_it_and_removed_files_are_measured_after_it(
    tracked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free: list[bool] = []
    monkeypatch.setattr(
        "tasks.cache.garbage_collection.Sizes.of", lambda *given, **named: free.append(not is_held(lock)) or 0
    )
    lock, waited = home() / "locks/home.lock", threading.Event()
    assert remove({store.folder("fit", made("fit", "a1"))})[0] == 1 and free == [True]
    with in_use(waited.set):
        assert not waited.is_set()

    def run() -> None:
        with in_use(waited.set):
            pass

    waiting = threading.Thread(target=run, daemon=True)
    with lock.open("w") as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)
        waiting.start()
        assert waited.wait(60) and waiting.is_alive()
    waiting.join(60)
    assert not waiting.is_alive()


def test_an_artifact_that_is_needed_since_it_was_listed_stays(tracked: Path) -> None:
    key = made("fit", "a1")
    removable = {piece.path for piece in look() if not piece.needed_by}
    History("small").remember_key("fit", key)
    assert remove(removable) == (0, 0)


@pytest.mark.parametrize(("during", "call", "left_whole"), [("rename", 3, 1), ("rmtree", 1, 0)])
def test_a_removal_killed_leaves_nothing_half_there_and_the_next_one_ends_it(
    tracked: Path, during: str, call: int, left_whole: int
) -> None:
    keys = [made("fit", name) for name in ("a1", "b1", "c1")]
    kept = made("fit", "d1")
    History("small").remember_key("fit", kept)
    child = subprocess.run([sys.executable, "-c", REMOVING, during, str(call)], capture_output=True, text=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert sum(store.find("fit", key) is not None for key in keys) == left_whole  # raises for what is half there
    assert len(list(home().glob(".removed-*"))) == 1
    assert remove({piece.path for piece in look()})[0] == left_whole + 1
    assert [path.name for path in home().iterdir() if path.name.startswith(".removed")] == []
    assert [path.name for path in (home() / "artifacts/fit").iterdir()] == [kept]
