"""What `finetune up` keeps is killed, one after another, each while a deployment's run trains under its worker."""

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

from flows.tables import aligned
from tasks.runtime.connection import FLOW_RUN_TAG
from tests.drill.compare import tracking_faults
from tests.drill.fires import Fires, require
from tests.drill.ground import SETTINGS, WAYS, argv
from tests.flows.slowly import QUICK
from tests.machine import Machine, of_home, wait_until
from training.recipe import parse_set

DEPLOYMENT = "finetune/small"
CRASHED_WITHIN_S = 120.0
END_WITHIN_S = 300.0
HEAD = ["killed", "what happens", "what is done", "states of the flow run", "weights"]


class Scene(NamedTuple):
    """A machine at whose worker this flow run trains."""

    machine: Machine
    flow_run: str

    def kill(self, *words: str) -> None:
        """Kills the service that was started by these words."""
        pids = [pid for pid in of_home(self.machine.home) if argv(pid)[1 : 2 + len(words)] == ["-m", *words]]
        require(len(pids) == 1, f"{' '.join(words)} has the processes {pids}")
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
        """Whether `finetune status` says so."""
        return self.machine.finetune("status").returncode == 0

    def resume(self) -> str:
        """Goes on with the run; gives how."""
        run = self.machine.finetune("resume", self.flow_run)
        require(run.returncode == 0, f"it is not gone on with: {run.stdout}{run.stderr}")
        return "`finetune resume`"


def worker(scene: Scene) -> tuple[str, str]:
    """The run dies with it, and is crashed."""
    scene.kill("prefect", "--no-prompt", "worker")
    seconds = wait_until(scene.is_in("Crashed"), CRASHED_WITHIN_S)
    return f"the run ends with it, and is Crashed after {seconds:.0f} s; a new worker starts", scene.resume()


def prefect(scene: Scene) -> tuple[str, str]:
    """The run goes on without it."""
    scene.kill("prefect", "server", "start")
    time.sleep(2)  # for the worker to notice
    return f"it is back after {2 + wait_until(scene.all_answer):.0f} s; the run trains on", "nothing"


def mlflow(scene: Scene) -> tuple[str, str]:
    """The run goes on without it, and delivers what it missed."""
    scene.kill("mlflow", "server")
    time.sleep(2)
    return f"it is back after {2 + wait_until(scene.all_answer):.0f} s; what it missed is delivered", "nothing"


def keeper(scene: Scene) -> tuple[str, str]:
    """All that it keeps ends with it, the run too."""
    scene.kill("tasks.programs.keeper")
    seconds = wait_until(lambda: not of_home(scene.machine.home))
    scene.machine.up()
    wait_until(scene.is_in("Crashed"), CRASHED_WITHIN_S)
    return (
        f"all ends within {seconds:.0f} s; the next `up` tells that the run Crashed",
        f"`finetune up`, {scene.resume()}",
    )


VICTIMS = {"worker": worker, "Prefect server": prefect, "MLflow server": mlflow, "keeper": keeper}


def killed_one_by_one(fires: Fires, home: Path) -> str:
    """Prints a table, a line a victim. Raises Broken where a run does not end as if nothing had been killed."""
    machine = Machine(home)
    slowly = {"training.callbacks": ["tests.flows.slowly:Slowly"]}
    overrides = {**parse_set([*SETTINGS, *WAYS[fires.way]]), **slowly}
    table = [HEAD]
    try:
        machine.up()
        machine.deploy(fires.ground.file)
        for name, kill in VICTIMS.items():
            (home / QUICK).unlink(missing_ok=True)
            shutil.rmtree(home / "artifacts" / "fit", ignore_errors=True)  # or there were nothing to train
            scene = Scene(machine, machine.start(DEPLOYMENT, overrides))
            wait_until(machine.trains, END_WITHIN_S)
            happened, done = kill(scene)
            (home / QUICK).touch()
            wait_until(scene.is_in("Completed"), END_WITHIN_S)
            table.append([name, happened, done, _states(scene), _weights(fires, scene)])
            print(aligned(table)[-1], flush=True)
    finally:
        machine.finetune("down")
    require(not of_home(home), f"down leaves {of_home(home)}")
    print(*aligned(table), sep="\n", flush=True)
    return f"as promised, of {', '.join(VICTIMS)}"


def _states(scene: Scene) -> str:
    """The names of the states that the flow run went through, from Running on."""
    states = scene.machine.api(f"flow_run_states/?flow_run_id={scene.flow_run}")
    names = [str(state["name"]) for state in sorted(states, key=lambda state: str(state["timestamp"]))]
    return " ".join(names[names.index("Running") :])


def _weights(fires: Fires, scene: Scene) -> str:
    """That they are the undisturbed run's; and so is all that MLflow has of the run."""
    home = scene.machine.home
    (weights,) = home.glob("artifacts/fit/*/model/model.safetensors")
    found = sha256(weights.read_bytes()).hexdigest()
    require(found == fires.whole.model, f"the weights are {found}, not {fires.whole.model}")
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("small")
    runs = client.search_runs([experiment.experiment_id], f"tags.`{FLOW_RUN_TAG}` = '{scene.flow_run}'")
    require(len(runs) == 1, f"MLflow has {len(runs)} runs of the flow run")
    model = {"registered": "small/1"}
    result = {"flow_run_id": scene.flow_run, "mlflow_run_id": runs[0].info.run_id, "model": model}
    faults = tracking_faults(home, result, fires.whole.curve)
    require(not faults, "; ".join(faults))
    return "the same bytes"
