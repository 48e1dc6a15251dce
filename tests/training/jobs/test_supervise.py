"""Real process trees, really killed: a supervisor, a launcher without signal handlers, and ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import training
from tests.waiting import wait_until
from training.engine.checkpoints import staging_folder
from training.jobs.processes import start_ticks
from training.jobs.protocol import CHECKPOINTS, Job, read_events, read_outcome, write_atomically

ROOT = str(Path(training.__path__[0]).parent)
ENDED_WITHIN_S = 5.0

# Starts the ranks as accelerate and torch do: numbered, other files closed, sessions of their own.
LAUNCHER = """
import os, subprocess, sys
argv = [sys.executable, sys.argv[1], sys.argv[-1]]
environments = [{**os.environ, "RANK": str(rank)} for rank in range(2)]
ranks = [subprocess.Popen(argv, env=environment, start_new_session=True) for environment in environments]
sys.exit(max(rank.wait() for rank in ranks) != 0)
"""

# Writes where it is at work every 10 ms, and has a child in a session of its own that heeds no SIGTERM.
RANK = """
import os, signal, subprocess, time
from training.jobs.program import Interrupted, run_program, stop_requested

def main(job_dir, job, events):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    helper = subprocess.Popen([__import__("sys").executable, "-c", code], start_new_session=True)
    events.write("at work", pids=[os.getppid(), os.getpid(), helper.pid])
    while not stop_requested():
        time.sleep(0.01)
        events.progress()
    time.sleep(job.settings["saving_s"])
    (job_dir / "checkpoints" / str(os.getpid())).touch()
    raise Interrupted

run_program(main, stops_itself=True)
"""


class Tree:
    """A started supervisor and the pids that its ranks reported."""

    def __init__(self, job: Path, argv: list[str], *, grace_s: float = 10.0) -> None:
        self.job = job
        self.supervisor = subprocess.Popen(
            [sys.executable, "-m", "training.jobs.supervise", "--grace-s", str(grace_s), str(job), "--", *argv],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": ROOT},
            start_new_session=True,
        )
        self.pids: list[int] = []

    def wait_for_work(self) -> None:
        wait_until(lambda: len(self.events("at work")) == 2)
        for event in self.events("at work"):
            self.pids += event["pids"]

    def events(self, kind: str) -> list[dict[str, list[int]]]:
        return [event for event in read_events(self.job / "events.jsonl", 0)[0] if event["kind"] == kind]

    @property
    def launcher(self) -> int:
        return self.pids[0]

    @property
    def rank(self) -> int:
        return self.pids[1]

    def alive(self) -> list[int]:
        return [pid for pid in self.pids if start_ticks(pid)]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "rank.py").write_text(RANK)
    Job(program="test", key="k", settings={"saving_s": 0.3}).write(tmp_path / "job")
    return tmp_path / "job"


@pytest.fixture
def tree(job: Path) -> Iterator[Tree]:
    argv = [sys.executable, str(job.parent / "launcher.py"), str(job.parent / "rank.py"), str(job)]
    tree = Tree(job, argv)
    tree.wait_for_work()
    assert len(tree.alive()) == 6
    yield tree
    for pid in tree.alive():
        os.kill(pid, signal.SIGKILL)
    tree.supervisor.kill()
    tree.supervisor.wait()


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_when_a_part_of_it_is_killed_nothing_is_left(tree: Tree, victim: str) -> None:
    # The launcher must notice a killed rank; this one waits for all ranks, so it receives a stop signal.
    os.kill(tree.launcher if victim == "launcher" else tree.rank, signal.SIGKILL)
    if victim == "rank":
        tree.supervisor.send_signal(signal.SIGTERM)
    wait_until(lambda: not tree.alive(), ENDED_WITHIN_S)
    assert tree.supervisor.wait(ENDED_WITHIN_S) == (128 + signal.SIGKILL if victim == "launcher" else 1)


def test_when_its_starter_dies_no_process_is_left(tree: Tree) -> None:
    assert tree.supervisor.stdin is not None
    tree.supervisor.stdin.close()
    wait_until(lambda: not tree.alive(), ENDED_WITHIN_S)
    tree.supervisor.wait(ENDED_WITHIN_S)


def test_when_it_is_killed_itself_its_ranks_go_with_it_and_the_rest_before_the_next_begins(
    tree: Tree,
) -> None:
    tree.supervisor.kill()
    helpers = tree.pids[2::3]
    wait_until(lambda: tree.alive() == helpers, ENDED_WITHIN_S)
    following = Tree(tree.job, python("pass"))
    assert following.supervisor.wait(ENDED_WITHIN_S) == 0
    assert tree.alive() == []


def test_after_a_stop_signal_the_ranks_may_save_although_the_launcher_ignores_it(tree: Tree) -> None:
    tree.supervisor.send_signal(signal.SIGTERM)
    assert tree.supervisor.wait(60) == 1
    assert tree.alive() == []
    assert len(list((tree.job / "checkpoints").iterdir())) == 2
    outcome = read_outcome(tree.job)
    assert outcome is not None and outcome.failure is not None and outcome.failure.kind == "interrupted"


def test_a_second_stop_signal_kills_at_once(job: Path, tree: Tree) -> None:
    os.kill(tree.rank, signal.SIGSTOP)  # a rank that hangs
    tree.supervisor.send_signal(signal.SIGTERM)
    wait_until(lambda: [*(job / "checkpoints").iterdir()])  # of the other rank
    assert tree.supervisor.poll() is None
    tree.supervisor.send_signal(signal.SIGTERM)
    assert tree.supervisor.wait(ENDED_WITHIN_S) == 128 + signal.SIGKILL
    assert tree.alive() == []


def test_after_the_grace_what_hangs_is_killed(job: Path) -> None:
    tree = Tree(job, python("import time; print('up', flush=True); time.sleep(60)"), grace_s=0.5)
    wait_until(lambda: (job / "logs" / "1.log").exists() and (job / "logs" / "1.log").read_text() == "up\n")
    tree.supervisor.send_signal(signal.SIGTERM)
    assert tree.supervisor.wait(60) == 128 + signal.SIGKILL


def test_the_next_supervisor_starts_only_after_the_last_writer_of_a_killed_one_has_ended(job: Path) -> None:
    # The writer is an orphan that cannot be recognized as the job's: its environment is empty.
    writer = (
        "import sys, time\n"
        "for _ in range(150): print(time.monotonic(), file=open(sys.argv[1], 'a')); time.sleep(0.01)\n"
    )
    written = job / "written"
    launcher = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {writer!r}, {str(written)!r}], env={{}})\n"
        "time.sleep(60)\n"
    )
    first = Tree(job, python(launcher))
    wait_until(lambda: written.exists() and written.read_text())
    first.supervisor.kill()
    first.supervisor.wait()
    second = Tree(job, python("import time; print(time.monotonic())"))
    assert second.supervisor.wait(60) == 0
    assert float((job / "logs" / "2.log").read_text()) > float(written.read_text().split()[-1])
    assert len(second.events("note")) == 1


def test_one_that_waits_for_the_lock_can_be_stopped(job: Path) -> None:
    first = Tree(job, python("import time; time.sleep(60)"))
    wait_until((job / "logs" / "1.log").exists)
    second = Tree(job, python("print('never')"))
    wait_until(lambda: len(second.events("note")) == 1)
    second.supervisor.send_signal(signal.SIGTERM)
    assert second.supervisor.wait(60) == 128 + signal.SIGTERM
    assert not (job / "logs" / "2.log").exists()
    first.supervisor.kill()
    first.supervisor.wait()


def test_it_gives_the_exit_status_and_keeps_a_log_of_every_try(job: Path) -> None:
    for number in (3, 0):
        code = f"import sys; print('out', {number}); print('err', file=sys.stderr); sys.exit({number})"
        assert Tree(job, python(code)).supervisor.wait(60) == number
    assert sorted((job / "logs" / "1.log").read_text().split()) == ["3", "err", "out"]
    assert sorted((job / "logs" / "2.log").read_text().split()) == ["0", "err", "out"]


def test_outcomes_of_an_earlier_try_are_deleted_before_the_next_begins(job: Path) -> None:
    for name in ("outcome.json", "outcome.rank1.json"):
        write_atomically(job / name, b'{"state": "finished"}')
    assert Tree(job, python("pass")).supervisor.wait(60) == 0
    assert read_outcome(job) is None


def test_half_written_checkpoints_go_with_their_last_writer(job: Path) -> None:
    checkpoints, half = job / CHECKPOINTS, staging_folder(job / CHECKPOINTS / "checkpoint-2")
    for folder in (half, checkpoints / "checkpoint-1"):
        folder.mkdir(parents=True)
    write = f"open({str(half / 'weights')!r}, 'w').write('half'); os.kill(os.getpid(), signal.SIGKILL)"
    assert Tree(job, python(f"import os, signal; {write}")).supervisor.wait(60) == 128 + signal.SIGKILL
    assert [path.name for path in checkpoints.iterdir()] == ["checkpoint-1"]


def test_its_descendants_read_nothing_from_standard_input(job: Path) -> None:
    assert Tree(job, python("import sys; print(repr(sys.stdin.read()))")).supervisor.wait(60) == 0
    assert (job / "logs" / "1.log").read_text() == "''\n"


def test_it_loads_the_standard_library_only() -> None:
    code = "import sys, training.jobs.supervise; print(*{'pydantic', 'numpy', 'torch'}.intersection(sys.modules))"
    plain = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert plain.stdout.split() == []
