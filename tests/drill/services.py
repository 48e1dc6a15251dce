"""What `finetune up` keeps is killed, one after another, each while a deployment's run trains under its worker.

The first run is left alone; what the others leave must be what it left.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from mlflow import MlflowClient

from flows.reports.tables import align
from tasks.services import mlflow_server, prefect_server, process_manager
from tasks.tracking.connection import FLOW_RUN_TAG
from tests.drill.compare import curve_of, tracking_faults
from tests.drill.promises import require
from tests.flows.slowly import QUICK
from tests.flows.small import write_project
from tests.machine import Machine, of_home, wait_until
from tests.processes import argv

CRASHED_WITHIN_S = 120.0
BACK_WITHIN_S = 180.0
END_WITHIN_S = 900.0
HEAD = ["killed", "what happens", "then", "the flow run is", "weights"]
MOMENTS = {"AwaitingRetry", "Pending", "Submitting"}
"""States on the way to Running."""
SLOWLY = {"training.callbacks": ["tests.flows.slowly:Slowly"]}


class Training(NamedTuple):
    """A machine at whose worker this flow run trains."""

    machine: Machine
    flow_run: str

    def kill(self, *words: str) -> None:
        """Kills the service that was started by these words."""
        pids = [pid for pid in of_home(self.machine.home) if argv(pid)[1 : 2 + len(words)] == ["-m", *words]]
        assert len(pids) == 1, f"{' '.join(words)} has the processes {pids}"
        os.kill(pids[0], signal.SIGKILL)

    def is_in(self, state: str) -> Callable[[], bool]:
        """Whether the flow run is, as a condition to wait for; a server that is away does not tell."""

        def condition() -> bool:
            try:
                return self.machine.state_of(self.flow_run) == state
            except OSError:
                return False

        return condition

    def all_answer(self) -> bool:
        """Whether `finetune status` exits with 0."""
        return self.machine.finetune("status").returncode == 0

    def resume(self) -> str:
        """Goes on with the run; gives how."""
        run = self.machine.finetune("resume", self.flow_run)
        assert run.returncode == 0, run.stdout + run.stderr
        return "finetune resume"


def kill_worker(training: Training) -> tuple[str, str]:
    """The run dies with it, and is crashed."""
    training.kill("prefect", "--no-prompt", "worker")
    seconds = wait_until(training.is_in("Crashed"), CRASHED_WITHIN_S)
    return f"Crashed after {seconds:.0f} s", training.resume()


def kill_prefect(training: Training) -> tuple[str, str]:
    """The run goes on without it."""
    training.kill(prefect_server.__name__)
    time.sleep(2)  # for the worker to notice
    seconds = 2 + wait_until(training.all_answer, BACK_WITHIN_S)
    return f"it is back after {seconds:.0f} s", ""


def kill_mlflow(training: Training) -> tuple[str, str]:
    """The run goes on without it, and delivers what it missed."""
    training.kill(mlflow_server.__name__)
    time.sleep(2)
    seconds = 2 + wait_until(training.all_answer, BACK_WITHIN_S)
    return f"it is back after {seconds:.0f} s", ""


def kill_process_manager(training: Training) -> tuple[str, str]:
    """All that it keeps ends with it, the run too."""
    training.kill(process_manager.__name__)
    seconds = wait_until(lambda: not of_home(training.machine.home))
    training.machine.up()
    wait_until(training.is_in("Crashed"), CRASHED_WITHIN_S)
    return f"all ends within {seconds:.0f} s", f"finetune up, {training.resume()}"


def kill_nothing(training: Training) -> tuple[str, str]:
    """The run that the others are held against."""
    return "", ""


VICTIMS = {
    "nothing": kill_nothing,
    "worker": kill_worker,
    "Prefect server": kill_prefect,
    "MLflow server": kill_mlflow,
    "process manager": kill_process_manager,
}


def kill_services(machine: Machine) -> None:
    """A line a victim. Raises Broken with all that was not as it would be, had nothing been killed."""
    home, table, faults, weights = machine.home, [HEAD], list[str](), list[str]()
    machine.up()
    machine.deploy(write_project(home.parent / "project"))
    for name, kill in VICTIMS.items():
        (home / QUICK).unlink(missing_ok=True)
        shutil.rmtree(home / "artifacts" / "fit", ignore_errors=True)  # or there were nothing to train
        training = Training(machine, machine.start("finetune/small", SLOWLY))
        wait_until(machine.trains, END_WITHIN_S)
        happened, done = kill(training)
        (home / QUICK).touch()
        wait_until(training.is_in("Completed"), END_WITHIN_S)
        weights.append(_weights(home))
        comparison = "the same bytes" if weights[-1] == weights[0] else "OTHER BYTES"
        found = [] if weights[-1] == weights[0] else [f"the weights are {weights[-1]}, not {weights[0]}"]
        faults += [f"{name} killed: {fault}" for fault in (*found, *_tracking_faults(training))]
        table.append([name, happened, done, _states(training), comparison])
        print(align(table)[-1], flush=True)
    print(*align(table), sep="\n", flush=True)
    require(not faults, "; ".join(faults))


def _states(training: Training) -> str:
    """The states that the flow run went through, from Running on, by name."""
    states = training.machine.api(f"flow_run_states/?flow_run_id={training.flow_run}")
    names = [str(state["name"]) for state in sorted(states, key=lambda state: str(state["timestamp"]))]
    return ", ".join(name for name in names[names.index("Running") :] if name not in MOMENTS)


def _weights(home: Path) -> str:
    (weights,) = home.glob("artifacts/fit/*/model/model.safetensors")
    return sha256(weights.read_bytes()).hexdigest()


def _tracking_faults(training: Training) -> list[str]:
    """Mistakes in MLflow: expected are one closed run a flow run, each point of this one once, and one version."""
    home = training.machine.home
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("small")
    runs = client.search_runs([experiment.experiment_id], f"tags.`{FLOW_RUN_TAG}` = '{training.flow_run}'")
    if len(runs) != 1:
        return [f"MLflow has {len(runs)} runs of the flow run"]
    (events,) = home.glob("artifacts/fit/*/log/events.jsonl")
    result = {"flow_run_id": training.flow_run, "mlflow_run_id": runs[0].info.run_id}
    return tracking_faults(home, {**result, "model": {"registered": "small/1"}}, curve_of(events))
