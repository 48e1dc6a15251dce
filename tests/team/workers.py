"""Machines of a team: each has a worker and a home of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.flows.slowly import QUICK
from tests.flows.small import command
from tests.machine import ROOT, of_home
from tests.team.servers import Service, clean_environment, command_of_unit, read_environment_file
from tests.waiting import wait_until

UNIT = "finetune-worker@"
RUN = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Machine:
    """A machine with a worker.

    Args:
        name: the worker's name.
        folder: for its home and its log.
        file: the environment file of workers.
    """

    def __init__(self, name: str, folder: Path, file: Path) -> None:
        self.name, self.home = name, folder / name
        self._file = file
        own = {"FINETUNE_HOME": str(self.home), "PREFECT_HOME": f"{self.home}-prefect", "PYTHONPATH": str(ROOT)}
        argv, env = command_of_unit(UNIT, file, {"${POOL}": "finetune", "%H-%i": name})
        self._env = {**clean_environment(), **read_environment_file(file), **own}
        self._worker = Service(name, folder, argv, env | own)

    def start_worker(self) -> None:
        """Starts the worker."""
        self._worker.start()

    def stop_worker(self) -> None:
        """Ends the worker, which has no run."""
        self._worker.stop()

    def burn_down(self) -> int:
        """Kills every process of the machine and removes its home. Returns the number of processes."""
        killed = self.kill()
        for folder in (self.home, Path(f"{self.home}-prefect")):
            shutil.rmtree(folder)
        return killed

    def kill(self) -> int:
        """Kills every process of the machine. Returns their number."""
        killed: set[int] = set()
        while pids := {*of_home(self.home)} - {os.getpid()}:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed |= pids
            time.sleep(0.05)
        self._worker.stop(signal.SIGKILL)
        return len(killed)

    def train_quickly(self) -> None:
        """Ends the waits of the slow training."""
        self.home.mkdir(mode=0o700, exist_ok=True)
        (self.home / QUICK).touch()

    def processes_left(self) -> int:
        """The number of processes of this machine, after they had time to end."""
        try:
            wait_until(lambda: not of_home(self.home), 20.0)
        except AssertionError:
            return len(of_home(self.home))
        return 0

    def finetune(self, *arguments: str, status: int = 0) -> str:
        """Runs a command of `finetune` here, and returns what it printed."""
        return self._run(command(*arguments), status)

    def prefect(self, *arguments: str) -> str:
        """Runs a command of `prefect` here, and returns what it printed."""
        return self._run([str(Path(sys.executable).parent / "prefect"), "--no-prompt", *arguments], 0)

    def download(self, model: str) -> Path:
        """Downloads a registered model by MLflow, and returns the folder."""
        folder = Path(f"{self.home}-downloaded")
        program = str(Path(sys.executable).parent / "mlflow")
        self._run([program, "artifacts", "download", "--artifact-uri", model, "--dst-path", str(folder)], 0)
        return folder

    def start_run(self, deployment: str, *arguments: str) -> str:
        """Has a worker run the deployment. Returns the flow run."""
        printed = self.prefect("deployment", "run", deployment, *arguments)
        found = RUN.search(printed)
        assert found is not None, printed
        return found.group()

    def _run(self, argv: list[str], status: int) -> str:
        env = {**self._env, "COLUMNS": "200"}
        run = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert run.returncode == status, f"{' '.join(argv[3:])} exits with {run.returncode}\n{run.stdout}{run.stderr}"
        return run.stdout + run.stderr
