"""The early launcher: a program that starts before its job is known does what one does that starts with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.jobs import fork_client
from tasks.jobs.commands import accelerate_argv, accelerate_environment
from tasks.jobs.engines.engine import Program
from tasks.jobs.engines.local import LOCAL, early_launches
from tasks.jobs.launch import run_job
from tests.drill.ground import victims
from tests.fork_server import NEW_PYTHON
from tests.waiting import wait_until
from training.jobs.processes import descendants, find_readers, start_ticks
from training.jobs.protocol import Imports, Job, read_events
from training.recipe import ResolvedCompute

ROOT = Path(__file__).resolve().parents[3]
PRELOADED = "preloaded_module"
"""A module that nothing imports by itself."""
PROGRAM = f"""
import os, sys, time
from pathlib import Path
from training.jobs.program import run_program
import training.jobs.protocol, training.jobs.search_path

def main(job_dir, job, events):
    events.note("at work")
    exec(job.settings["code"], globals() | locals())
    preloaded = sys.modules.get({PRELOADED!r})
    return {{"early": "waiting" in sys.argv[1], "imported": getattr(preloaded, "VERSION", None)}}

if __name__ == "__main__":
    if "CLOCK_IS_BEHIND" in os.environ:
        training.jobs.search_path._STARTED = 0.0
    run_program(main)
"""


def preloaded(version: int) -> str:
    return f"VERSION = {version}\nopen(f'{{__file__}}.imported', 'w').close()"


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the modules `own_program` and PRELOADED."""
    folder = tmp_path / "modules"
    folder.mkdir()
    home.mkdir()
    (folder / "own_program.py").write_text(PROGRAM)
    (folder / f"{PRELOADED}.py").write_text(preloaded(version=1))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setattr(fork_client, "MODULES", ())
    monkeypatch.setattr(sys, "executable", NEW_PYTHON)
    with early_launches():
        yield folder


def argv() -> list[str]:
    return [sys.executable, "-m", "own_program"]


def program(command: list[str], env: dict[str, str], imports: Imports) -> Program:
    return Program("own_program", command, env, ResolvedCompute(num_processes=1, mixed_precision="no"), imports)


def launch_early(command: list[str] | None = None, **env: str) -> tuple[int, int]:
    """Starts the program early. Returns the pids of the supervisor and of the program, which has imported PRELOADED."""
    imported = Path(os.environ["PYTHONPATH"], f"{PRELOADED}.py.imported")
    imported.unlink(missing_ok=True)
    LOCAL.start_early(program(command or argv(), env, Imports(modules=[PRELOADED])))
    early = LOCAL._early
    assert early is not None
    wait_until(imported.exists)
    assert early._handle is not None
    return early._handle.pid, descendants(early._handle.pid)[-1]


def write_job(home: Path, code: str = "", **fields: Any) -> Path:
    job = home / "jobs" / "one"
    Job(program="own", key="k", settings={"code": code}).write(job)
    return job


def run(home: Path, code: str = "", command: list[str] | None = None, **env: str) -> dict[str, Any]:
    outcome = run_job(write_job(home, code), command or argv(), env=env, stall_timeout_s=60, poll_s=0.02)
    assert outcome.failure is None, outcome.failure
    return outcome.result


def kill_supervisor(home: Path) -> int:
    """Starts the job, kills its supervisor, and returns a process that is left of it."""
    job = write_job(home, "if not os.fork(): time.sleep(60)\ntime.sleep(60)")
    handle = LOCAL.start(job, argv(), {})
    wait_until(lambda: at_work(job) and len(descendants(handle.pid)) == 2)
    orphan = descendants(handle.pid)[-1]
    os.kill(handle.pid, signal.SIGKILL)
    wait_until(lambda: not LOCAL.poll(handle))
    return orphan


def at_work(job: Path) -> bool:
    return bool(read_events(job / "events.jsonl", 0, ["note"])[0])


def test_a_program_that_waits_has_imported_its_modules_when_its_job_comes(home: Path) -> None:
    launch_early()
    assert run(home) == {"early": True, "imported": 1}
    job = home / "jobs" / "one"
    assert (job / "logs" / "1.log").is_file() and find_readers(job / "lock") == []


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_under_accelerate_every_rank_gets_the_job(home: Path, processes: int) -> None:
    command = accelerate_argv("own_program", num_processes=processes, mixed_precision="no", use_cpu=True)
    env = accelerate_environment(num_processes=processes, use_cpu=True)
    launch_early(command, **env)
    assert run(home, "events.note(os.environ.get('RANK', '0'))", command, **env)["early"]
    notes = {event["message"] for event in read_events(home / "jobs" / "one" / "events.jsonl", 0, ["note"])[0]}
    assert notes == {"at work", *map(str, range(processes))}


def test_a_job_with_another_command_or_environment_ends_the_one_that_waits(home: Path) -> None:
    supervisor, program = launch_early(NAME="a")
    assert not run(home, NAME="b")["early"]
    assert not start_ticks(supervisor) and not start_ticks(program)


@pytest.mark.parametrize("part", ["supervisor", "program"])
def test_one_that_was_killed_while_it_waited_costs_nothing_but_its_start(home: Path, part: str) -> None:
    supervisor, program = launch_early()
    os.kill(supervisor if part == "supervisor" else program, signal.SIGKILL)
    wait_until(lambda: not start_ticks(supervisor))
    assert not run(home)["early"]


def test_a_module_that_changed_while_the_program_waited_is_imported_as_it_is_now(home: Path, modules: Path) -> None:
    launch_early()
    # Of another size: Python takes byte code of a file for its own if second and size are the same.
    (modules / f"{PRELOADED}.py").write_text(preloaded(version=10))
    assert run(home, f"import {PRELOADED}") == {"early": True, "imported": 10}


def test_files_that_are_newer_than_the_clock_start_a_program_anew_only_once(home: Path) -> None:
    launch_early(CLOCK_IS_BEHIND="1")
    assert run(home, CLOCK_IS_BEHIND="1")["early"]


def test_the_drill_finds_the_launcher_that_waits(home: Path) -> None:
    pids = launch_early()
    assert {*pids} <= {*victims(os.getpid())["waiting launcher"]}
    run(home)
    assert "waiting launcher" not in victims(os.getpid())


def test_a_run_that_ends_before_leaves_no_process_and_no_folder(home: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LOCAL, "_early", None)
        with early_launches():
            pids = launch_early()
        assert not any(map(start_ticks, pids)) and list((home / "waiting").iterdir()) == []


@pytest.mark.slow
def test_when_the_run_is_killed_the_program_that_waits_ends_and_the_next_run_removes_its_folder(home: Path) -> None:
    code = (
        "import sys, time; from tests.tasks.jobs.test_early_launch import program; "
        "from tasks.jobs.engines.local import LOCAL, early_launches; from training.jobs.protocol import Imports\n"
        "with early_launches():\n"
        "    LOCAL.start_early(program(sys.argv[1:], {}, Imports(modules=[])))\n"
        "    LOCAL._early._thread.join()\n"
        "    print(LOCAL._early._handle.pid, flush=True); time.sleep(60)"
    )
    follower = subprocess.Popen([NEW_PYTHON, "-c", code, *argv()], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert follower.stdout is not None
    supervisor = int(follower.stdout.readline())
    wait_until(lambda: descendants(supervisor))
    pids = [supervisor, *descendants(supervisor)]
    follower.kill()
    follower.wait()
    wait_until(lambda: not any(map(start_ticks, pids)))
    (left,) = (home / "waiting").iterdir()
    launch_early()
    assert not left.exists()


def test_a_taken_job_waits_for_the_last_writer_of_an_earlier_try(home: Path) -> None:
    orphan = kill_supervisor(home)
    launch_early()
    assert run(home)["early"]
    assert not start_ticks(orphan)


def test_the_next_try_kills_what_a_killed_early_one_has_left(home: Path) -> None:
    launch_early()
    orphan = kill_supervisor(home)
    assert not run(home)["early"]
    assert not start_ticks(orphan)


def test_a_supervisor_that_is_killed_before_it_takes_the_job_leaves_a_log_of_the_try(home: Path) -> None:
    supervisor, _ = launch_early()
    os.kill(supervisor, signal.SIGSTOP)
    handle = LOCAL.start(write_job(home), argv(), {})
    assert handle.pid == supervisor
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: not LOCAL.poll(handle))
    assert LOCAL.logs(handle).name == "supervisor.log"


def test_a_taken_job_can_be_stopped(home: Path) -> None:
    launch_early()
    job = write_job(home, "time.sleep(60)")
    handle = LOCAL.start(job, argv(), {})
    wait_until(lambda: at_work(job))
    LOCAL.stop(handle, 10)
    assert not LOCAL.poll(handle) and find_readers(job / "lock") == []
