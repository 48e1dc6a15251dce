"""The fork server: a program that is its fork does what a new process does."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.jobs import fork_client
from tasks.jobs.commands import accelerate_argv
from tasks.jobs.engines.local import LOCAL
from tasks.jobs.launch import run_job
from tests import fork_server
from tests.fork_server import NEW_PYTHON
from tests.waiting import wait_until
from training.jobs.processes import descendants, start_ticks
from training.jobs.protocol import Failure, Job, read_events

PRELOADED = "preloaded_module"
"""A module that nothing imports by itself."""
PROGRAM = f"""
import os, signal, sys, time
from pathlib import Path
from training.jobs.program import run_program
import training.jobs.protocol

def main(job_dir, job, events):
    events.note(str(job.settings.get("note")))
    exec(job.settings["code"], globals() | locals())
    return {{
        "forked": {PRELOADED!r} in sys.modules,
        "secret": os.environ.get("SECRET"),
        "argv": Path("/proc/self/cmdline").read_text().split("\\0")[1:4],
        "threads": len(os.listdir("/proc/self/task")),
    }}

if __name__ == "__main__":
    run_program(main)
"""


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fork server for the module `own_program`."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "own_program.py").write_text(PROGRAM)
    (tmp_path / "modules" / f"{PRELOADED}.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setattr(fork_client, "MODULES", (PRELOADED,))
    monkeypatch.setattr(sys, "executable", NEW_PYTHON)
    with fork_client.forked_programs():
        yield


def argv() -> list[str]:
    return [sys.executable, "-m", "own_program"]


def write_job(folder: Path, code: str = "") -> Path:
    job = folder / "jobs" / str(len(list(folder.glob("jobs/*"))))
    Job(program="own", key="k", settings={"code": code}).write(job)
    return job


def run(folder: Path, code: str = "", **env: str) -> dict[str, Any] | Failure:
    outcome = run_job(write_job(folder, code), argv(), env=env, stall_timeout_s=60, poll_s=0.02)
    return outcome.failure or outcome.result


def is_forked(ended: dict[str, Any] | Failure) -> bool:
    assert isinstance(ended, dict), ended
    return bool(ended["forked"])


def server_pid() -> int:
    process = fork_client._current
    assert process is not None
    return process.pid


def pid_at_work(job: Path) -> int:
    wait_until(lambda: read_events(job / "events.jsonl", 0, ["note"])[0])
    return int(read_events(job / "events.jsonl", 0, ["started"])[0][0]["pid"])


def test_a_program_finds_the_modules_imported_and_is_shown_by_its_own_command(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    figures = run_job(job, argv(), stall_timeout_s=60, poll_s=0.02).result
    assert figures == {"forked": True, "secret": None, "argv": ["-m", "own_program", str(job)], "threads": 1}


def test_each_program_has_its_own_environment(tmp_path: Path) -> None:
    first, second = run(tmp_path, SECRET="planted"), run(tmp_path)
    assert isinstance(first, dict) and isinstance(second, dict)
    assert (first["secret"], second["secret"]) == ("planted", None)


def test_a_variable_that_libraries_read_on_import_makes_a_new_process(tmp_path: Path) -> None:
    assert not is_forked(run(tmp_path, OMP_NUM_THREADS="7"))


def test_after_a_change_of_an_imported_module_programs_are_new_processes(tmp_path: Path) -> None:
    assert is_forked(run(tmp_path))
    (tmp_path / "modules" / f"{PRELOADED}.py").write_text("changed = True")
    assert not is_forked(run(tmp_path))


def test_outside_a_run_programs_are_new_processes(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_client, "_allowed", False)
        assert not is_forked(run(tmp_path))


def test_a_program_ends_after_all_exit_handlers_without_freeing_its_objects(tmp_path: Path) -> None:
    (tmp_path / "modules" / f"{PRELOADED}.py").write_text(
        "import atexit, pathlib, sys\natexit.register(lambda: pathlib.Path(sys.argv[1], 'handled').touch())"
    )
    job = write_job(
        tmp_path, "training.kept = type('Kept', (), {'__del__': lambda kept: (job_dir / 'freed').touch()})()"
    )
    outcome = run_job(job, argv(), stall_timeout_s=60, poll_s=0.02)
    assert outcome.result["forked"]
    assert (job / "handled").exists() and not (job / "freed").exists()


def test_a_crash_in_native_code_ends_that_program_alone(tmp_path: Path) -> None:
    failure = run(tmp_path, "os.abort()")
    assert isinstance(failure, Failure) and "crashed in native code" in failure.message
    assert is_forked(run(tmp_path))


def test_a_job_outlives_the_fork_server_and_the_next_one_is_a_new_process(tmp_path: Path) -> None:
    job = write_job(tmp_path, "time.sleep(60)")
    handle = LOCAL.start(job, argv(), {})
    pid = pid_at_work(job)
    os.kill(server_pid(), signal.SIGKILL)
    wait_until(lambda: not start_ticks(server_pid()))
    assert not is_forked(run(tmp_path))
    assert LOCAL.poll(handle) and start_ticks(pid)
    LOCAL.stop(handle, 5)
    assert not start_ticks(pid)


class LosesAnswers:
    """The connection to a fork server whose answers are lost, as if it were killed after it has forked."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pids: list[int] = []

    def recv(self, *arguments: int) -> bytes:
        self.pids.append(int(self._connection.recv(*arguments)))
        return b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def test_a_job_runs_once_even_if_the_fork_server_dies_before_it_answers(tmp_path: Path) -> None:
    assert is_forked(run(tmp_path))
    process = fork_client._current
    assert process is not None
    process._connection = connection = LosesAnswers(process._connection)  # type: ignore[assignment]
    job = write_job(tmp_path, "open(job_dir / 'runs', 'a').write('once ')")
    outcome = run_job(job, argv(), stall_timeout_s=60, poll_s=0.02)
    assert outcome.failure is None and not outcome.result["forked"]
    (unknown,) = connection.pids
    wait_until(lambda: not start_ticks(unknown))
    assert (job / "runs").read_text() == "once "


def test_a_program_dies_with_its_supervisor_and_the_next_try_starts_at_once(tmp_path: Path) -> None:
    job = write_job(tmp_path, "if not os.fork(): time.sleep(60)\ntime.sleep(60)")
    handle = LOCAL.start(job, argv(), {})
    pid = pid_at_work(job)
    wait_until(lambda: descendants(pid))
    (orphan,) = descendants(pid)
    os.kill(handle.pid, signal.SIGKILL)
    wait_until(lambda: not start_ticks(pid))
    Job(program="own", key="k", settings={"code": ""}).write(job)
    outcome = run_job(job, argv(), stall_timeout_s=60, poll_s=0.02)
    assert outcome.result["forked"] and not start_ticks(orphan)


def test_the_fork_server_ends_with_the_run(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_client, "_allowed", False)
        patch.setattr(fork_client, "_current", None)
        with fork_client.forked_programs():
            fork_client.start()
            pid = server_pid()
            assert start_ticks(pid)
        assert not start_ticks(pid)


def launch_beside_a_gpu(argv: list[str]) -> list[str]:
    """The program that the launcher starts, in a process that sees a GPU and must not use it."""
    import torch
    from accelerate.commands import launch

    from training.programs import accelerate_launch

    started = list[str]()

    class Popen:
        returncode = 0

        def __init__(self, argv: list[str], env: dict[str, str]) -> None:
            started.extend(argv)

        def wait(self) -> None:
            pass

    def start_cuda() -> None:
        raise AssertionError("CUDA was started")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "_lazy_init", start_cuda)
        patch.setattr(launch.subprocess, "Popen", Popen)
        patch.setattr(sys, "argv", argv[2:])
        accelerate_launch.main()
    return started


def test_the_launcher_leaves_the_gpu_to_the_program_because_cuda_does_not_survive_a_fork() -> None:
    argv = accelerate_argv("own_program", num_processes=1, mixed_precision="bf16", use_cpu=False)
    assert fork_server.call(launch_beside_a_gpu, argv)[1:] == ["-m", "own_program"]
