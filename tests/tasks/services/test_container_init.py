"""The first process of a container: it reaps, stops runs first, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine import ROOT
from tests.processes import argv
from tests.waiting import wait_until
from training.jobs.processes import descendants, start_ticks

INIT = [sys.executable, "-m", "tasks.services.container_init"]
WORKER = """
import os, pathlib, signal, subprocess, sys, time
seen = pathlib.Path("seen")
def stop(number, frame):
    with seen.open("a") as file:
        file.write(sys.argv[1] + " ")
    if "--deaf" not in sys.argv:
        sys.exit(3)
signal.signal(signal.SIGTERM, stop)
if sys.argv[1] == "worker":
    run = dict(os.environ, PREFECT__FLOW_RUN_ID="a-run")
    subprocess.Popen([sys.executable, __file__, "run", *sys.argv[2:]], env=run)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).touch()
while True:
    time.sleep(0.05)
"""


def start(folder: Path, *command: str, before: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([*before, *INIT, *command], cwd=folder, env=env, stdin=subprocess.DEVNULL)


def start_worker(folder: Path, *options: str, before: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    (folder / "worker.py").write_text(WORKER)
    init = start(folder, sys.executable, "worker.py", "worker", *options, before=before)
    wait_until(lambda: (folder / "worker").exists() and (folder / "run").exists())
    return init


@pytest.mark.parametrize(("code", "status"), [("exit 7", 7), ("kill -9 $$", 137), ("no-such-program", 127)])
def test_container_ends_with_the_status_of_its_command(tmp_path: Path, code: str, status: int) -> None:
    command = [code] if status == 127 else ["sh", "-c", code]
    assert start(tmp_path, *command).wait(60) == status


def test_sigterm_stops_runs_first_and_leaves_no_process(tmp_path: Path) -> None:
    init = start_worker(tmp_path)
    processes = descendants(init.pid)
    init.send_signal(signal.SIGTERM)
    assert init.wait(60) == 3
    assert (tmp_path / "seen").read_text().split() == ["run", "worker"]
    assert len(processes) == 3 and [pid for pid in processes if start_ticks(pid)] == []


def test_second_signal_kills_a_command_that_ignores_the_first(tmp_path: Path) -> None:
    init = start(tmp_path, "sh", "-c", "trap 'touch seen' TERM; touch ready; while :; do sleep 0.05; done")
    wait_until((tmp_path / "ready").exists)
    init.send_signal(signal.SIGTERM)
    wait_until((tmp_path / "seen").exists)
    init.send_signal(signal.SIGTERM)
    assert init.wait(60) == 128 + signal.SIGKILL


def test_second_signal_does_not_wait_for_runs(tmp_path: Path) -> None:
    init = start_worker(tmp_path, "--deaf")
    processes = descendants(init.pid)
    init.send_signal(signal.SIGTERM)
    wait_until((tmp_path / "seen").exists)
    init.send_signal(signal.SIGTERM)
    assert init.wait(60) == 128 + signal.SIGKILL
    assert [pid for pid in processes if start_ticks(pid)] == []


def test_orphans_are_reaped_while_the_command_runs(tmp_path: Path) -> None:
    init = start(tmp_path, "sh", "-c", "(setsid sh -c 'echo $$ > orphan' &); while :; do sleep 0.05; done")
    wait_until(lambda: (tmp_path / "orphan").exists() and (tmp_path / "orphan").read_text() != "")
    wait_until(lambda: not Path("/proc", (tmp_path / "orphan").read_text().strip()).exists())
    init.send_signal(signal.SIGTERM)
    init.wait(60)


def test_as_process_one_it_stops_like_anywhere_else(tmp_path: Path) -> None:
    unshare = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make a PID namespace")
    outer = start_worker(tmp_path, before=unshare)
    (first,) = [pid for pid in descendants(outer.pid) if "tasks.services.container_init" in argv(pid)]
    os.kill(first, signal.SIGTERM)
    assert outer.wait(60) == 3
    assert (tmp_path / "seen").read_text().split() == ["run", "worker"]
