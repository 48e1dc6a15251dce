"""Kills of a sweep: of its flow, the fork server, a trial's supervisor, launcher or rank.

The trials, their figures and the released model must be those of an undisturbed sweep.
"""

from __future__ import annotations

import os
import random
import signal
import time
from itertools import cycle
from pathlib import Path
from typing import Any

import yaml

from tests.drill.ground import Ground, Run, victims
from tests.drill.watch import Watch

PARTS = ("flow", "fork server", "supervisor", "launcher", "rank")
PROCESSES = (1, 2)
"""Of each training, in turn."""
SWEEP = {
    "space": {
        "training.learning_rate": {"log": [1e-3, 2e-2]},
        "training.per_device_train_batch_size": {"choice": [8, 16]},
        "training.num_train_epochs": {"range": [6, 12]},
    },
    "trials": 7,
    "pruner": "asha",
    "seed": 5,
}
END_WITHIN_S = 900.0
KILLS_OF_A_HOME = 5


class SweepKills:
    """Sweeps, one home after the other, each with some kills on its way.

    Args:
        ground: where they run.
        seed: draws the instants and the victims.
    """

    def __init__(self, ground: Ground, watch: Watch, seed: int) -> None:
        self._ground, self._watch, self._draw = ground, watch, random.Random(seed)
        self._file = _write_sweep(ground)
        self._expected: dict[int, dict[str, Any]] = {}
        """The outcome of the undisturbed sweep, by the number of processes of a training."""
        self._seconds: dict[int, float] = {}
        self.killed = 0
        self.results: dict[str, str] = {}

    def play(self, kills: int) -> None:
        """Runs the undisturbed sweeps, and then sweeps in turn until all kills are spent."""
        for processes in PROCESSES:
            run = self._start(self._ground.folder / f"undisturbed-{processes}", processes)
            if run.ended_within(END_WITHIN_S):
                raise RuntimeError(f"the undisturbed sweep failed: {run.ending()}")
            self._expected[processes], self._seconds[processes] = _left(run), time.monotonic() - run.started
            states = [trial["state"] for trial in self._expected[processes]["trials"]]
            model = self._expected[processes]["model"]
            print(
                f"undisturbed, {processes} processes: {self._seconds[processes]:.1f} s, {states}, {model}", flush=True
            )
        for number, processes in enumerate(cycle(PROCESSES), 1):
            if self.killed == kills:
                return
            self._survive(f"sweep {number}", processes, min(KILLS_OF_A_HOME, kills - self.killed))

    def _survive(self, name: str, processes: int, kills: int) -> None:
        home = self._ground.folder / name.replace(" ", "-")
        run, parts, spent = self._start(home, processes), 0, 0
        while True:
            delay_s = self._draw.random() ** 1.5 * self._seconds[processes] if spent < kills else END_WITHIN_S
            if not self._watch.look_until(time.monotonic() + delay_s, run):
                break
            if spent == kills:
                os.kill(run.process.pid, signal.SIGKILL)
                self._end(name, spent, f"no end within {END_WITHIN_S:g} s")
                return
            # A job that is killed again and again under one run is given up: its flow is killed in between.
            part = "flow" if parts else self._draw.choice(PARTS)
            pids = victims(run.process.pid)
            part = part if part in pids else "flow"
            os.kill(self._draw.choice(pids[part]), signal.SIGKILL)
            spent, self.killed, parts = spent + 1, self.killed + 1, parts + (part != "flow")
            print(
                f"{self.killed:5}  {name}: {part} killed {time.monotonic() - run.started:.1f} s after the start",
                flush=True,
            )
            if part == "flow":
                run.process.wait()
                self._watch.condemn(run)
                run, parts = self._start(home, processes), 0
        self._watch.condemn(run)
        if run.process.returncode:
            self._end(name, spent, f"exit status {run.process.returncode}: {run.ending()}")
            return
        left = _left(run)
        expected = self._expected[processes]
        differences = [part for part in expected if left[part] != expected[part]]
        self._end(name, spent, f"other {', '.join(differences)}: {left}" if differences else "")

    def _end(self, name: str, kills: int, fault: str) -> None:
        self.results[name] = f"FAULT: {fault}" if fault else f"as promised: the same after {kills} kills"
        print(f"       {name}: {self.results[name]}", flush=True)

    def _start(self, home: Path, processes: int) -> Run:
        return self._ground.start(home, f"compute.num_processes={processes}", verb="sweep", file=self._file)


def _write_sweep(ground: Ground) -> Path:
    document = yaml.safe_load(ground.file.read_text())
    recipe = document["deployments"][0]["parameters"]["recipe"]
    entry = {"name": "small", "entrypoint": "flows.sweep:sweep", "parameters": {"recipe": recipe, "sweep": SWEEP}}
    file = ground.file.with_name("sweep.yaml")
    file.write_text(yaml.safe_dump({"deployments": [entry]}))
    return file


def _left(run: Run) -> dict[str, Any]:
    result = run.result()
    trials = [{**trial, "seconds": 0, "flow_run_id": ""} for trial in result["trials"]]
    return {"trials": trials, "best": result["best"]["number"], "model": result["run"]["model"]["sha256"]}
