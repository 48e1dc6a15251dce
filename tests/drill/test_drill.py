"""The drill sees what it looks for."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

from tasks.jobs.retries import TRIES
from tests.drill import kills as killing
from tests.drill import watch as watching
from tests.drill.compare import Left
from tests.drill.ground import MARK, Ground, Run
from tests.drill.kills import PARTS, Kills, Planned, Training, Undisturbed, not_to_be_given_up, plan
from tests.drill.report import summary
from tests.drill.store import damage, is_named_as_missing
from tests.drill.watch import Watch


def asleep(number: int, stdin: IO[str] | None = None) -> subprocess.Popen[bytes]:
    """A process of this drill's run of that number."""
    argv = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    env = {**os.environ, MARK: f"{os.getpid()}-{number}"}
    process = subprocess.Popen(argv, env=env, stdin=stdin, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_seed_always_draws_the_same_kills() -> None:
    assert plan(50, seed=3) == plan(50, seed=3) != plan(50, seed=4)
    assert {kill.part for kill in plan(50, seed=3)} == set(PARTS)
    assert max(kill.after for kill in plan(50, seed=3)) > 0.9


def test_a_process_that_outlives_its_run_is_reported_and_ended_and_that_of_the_next_run_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "ENDED_WITHIN_S", 0.0)
    survivor, following, watch = asleep(1), asleep(2), Watch()
    watch.condemn(Run(f"{os.getpid()}-1", tmp_path, tmp_path, survivor))
    watch.settle()
    (fault,) = watch.faults
    assert watch.left == 1 and f"process {survivor.pid} outlived its run" in fault
    assert survivor.wait(5) == -9 and following.poll() is None
    following.kill()
    following.wait()


def test_a_writer_in_a_job_whose_lock_another_holds_is_a_fault_and_two_with_one_lock_are_not(tmp_path: Path) -> None:
    job, watch = tmp_path / "jobs" / "k", Watch()
    job.mkdir(parents=True)
    with open(job / "lock", "w") as held, open(job / "lock") as other:
        fcntl.flock(held, fcntl.LOCK_EX)
        writers = [asleep(1, stdin=held) for _ in range(2)]
        watch.look()
        assert watch.faults == []
        writers.append(asleep(2, stdin=other))
    watch.look()
    (fault,) = watch.faults
    assert fault == f"process {writers[-1].pid} writes to {job}, whose lock another supervisor holds"
    for writer in writers:
        writer.kill()
        writer.wait()


def test_whatever_differs_is_named() -> None:
    whole = Left("sha", "small/1", {"fit": ["key", "digest"]}, {"validation": {"f1": 1.0}}, {"loss": [(1, 0.5)]})
    assert whole.differences(Left(**vars(whole))) == []
    other = Left("other", "small/1", {"fit": ["key", "x"]}, {}, {"loss": [(1, 0.5), (1, 0.5)], "f1": []})
    assert [line.split(":")[0] for line in whole.differences(other)] == [
        "model",
        "artifacts.fit",
        "metrics.validation",
        "curve.loss",
        "curve.f1",
    ]


def ended(folder: Path, status: int, *problems: str) -> Run:
    """A run that has ended with this status and reported problems of these kinds."""
    process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({status})"])
    process.wait()
    for name in ("stdout", "stderr"):
        (folder / name).touch()
    run = Run(f"{os.getpid()}-1", folder, folder, process)
    if problems:
        run.out.write_text(json.dumps({"problems": [{"kind": kind} for kind in problems]}))
    return run


@pytest.mark.parametrize(
    ("status", "problems", "kills", "rightly"),
    [
        (1, ["interrupted"], TRIES, True),
        (1, ["lost_rank", "stalled"], TRIES + 1, True),
        (1, ["interrupted"], TRIES - 1, False),
        (1, ["internal"], TRIES, False),
        (1, ["interrupted", "internal"], TRIES, False),
        (1, [], TRIES, False),
        (2, ["interrupted"], TRIES, False),
    ],
)
def test_a_run_may_give_up_only_after_as_many_kills_as_it_has_tries_and_only_for_them(
    tmp_path: Path, status: int, problems: list[str], kills: int, rightly: bool
) -> None:
    assert (not_to_be_given_up(ended(tmp_path, status, *problems), kills) is None) == rightly


class Given(Ground):
    """Its only run is there already."""

    def __init__(self, run: Run) -> None:
        self.folder, self.run = run.home, run

    def start(self, home: Path, *settings: str, **more: Any) -> Run:
        return self.run


def training(run: Run, watch: Watch, done: Kills) -> Training:
    return Training(Given(run), watch, Undisturbed(Left("sha", None, {}, {}, {}), 1.0), "1", done)


def test_a_process_that_outlives_a_run_that_ended_by_itself_is_reported_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "ENDED_WITHIN_S", 0.0)
    survivor, watch, done = asleep(1), Watch(), Kills()
    training(ended(tmp_path, 1, "internal"), watch, done).survive([])
    watch.settle()
    assert "exit status 1 after 0 kills" in done.faults[0] and watch.left == 1
    assert survivor.wait(5) == -9


def test_a_victim_that_has_ended_in_between_is_no_kill_and_the_next_look_finds_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_pid, flow, rank, done = ended(tmp_path, 0).process.pid, asleep(1), asleep(1), Kills()
    looks = iter([ended_pid, rank.pid])
    monkeypatch.setattr(killing, "victims", lambda pid: {"flow": [pid], "rank": [next(looks)]})
    run = Run(f"{os.getpid()}-1", tmp_path, tmp_path, flow)
    assert training(run, Watch(), done)._kill(run, Planned("rank", 0.0, 0.0)) == "rank"
    assert rank.wait(5) == -9 and flow.poll() is None and done.by_stage.total() == 1
    flow.kill()
    flow.wait()
    assert training(run, Watch(), done)._kill(run, Planned("flow", 0.0, 0.0)) is None
    assert done.by_stage.total() == 1


def test_the_summary_has_the_number_of_jobs_that_were_given_up() -> None:
    kills = Kills(given_up=[3, 4, 3])
    kills.by_stage["rank", "fit"] = kills.by_way["rank", "1"] = 10
    lines = summary(kills, {}, Watch(), 1.0)
    assert "given up after 3 kills: 2 times" in lines and "given up after 4 kills: 1 time" in lines


def test_an_artifact_that_is_lost_in_the_bucket_is_seen_unless_its_run_says_so() -> None:
    sha256 = hashlib.sha256(b"rows").hexdigest()
    manifest = json.dumps({"files": [{"path": "rows", "sha256": sha256}]}).encode()
    whole = {"artifacts/fit/k.json": manifest, f"objects/{sha256[:2]}/{sha256}": b"rows"}
    assert damage(whole, "fit", "k") is None
    assert "lost" in str(damage({}, "fit", "k"))
    assert "lost" in str(damage({"artifacts/fit/k.json": manifest}, "fit", "k"))
    name = f"objects/{sha256[:2]}/{sha256}"
    assert "wrong bytes" in str(damage(whole | {name: b"other"}, "fit", "k"))
    assert damage(whole | {name: b"other"}, "fit", "k", unread=[name]) is None
    assert is_named_as_missing("Not in s3://rows/it yet: load_data j, fit k. The next run", "fit", "k")
    assert not is_named_as_missing("Model: /home/artifacts/fit/k/model", "fit", "k")
