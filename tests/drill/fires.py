"""Named fires: each damages one thing in a run of its own and reports broken promises."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from mlflow import MlflowClient

from tests.drill.compare import Left, left_by, tracking_faults
from tests.drill.full_disk import SmallDisk, why_not
from tests.drill.ground import ROOT, WAYS, Ground, Run, checkpoints, newest_checkpoint, victims, wait_until
from tests.drill.promises import Skipped, judge, require
from tests.drill.watch import Watch

END_WITHIN_S = 600.0
STALL_S = 30
"""Longer than the imports before the first sign of life take on a busy machine."""
LAUNCHERS_PORT = 29500
UNREGISTERED = "release.registry=null"


class Fires:
    """Lights fires by name and keeps what came of each.

    Args:
        whole: what an undisturbed run of the recipe leaves, and `finished`, its home.
        way: how it trains.
    """

    def __init__(self, ground: Ground, watch: Watch, whole: Left, finished: Path, way: str) -> None:
        self.ground, self.watch, self.whole = ground, watch, whole
        self.results: dict[str, str] = {}
        self.way, self._finished = way, finished

    def light(self, name: str) -> None:
        """Runs one fire to its end."""
        home = self.ground.prepared(f"fire-{name}", self._finished)
        self.results[name] = judge(f"fire   {name}", lambda: FIRES[name](self, home))

    def start(self, home: Path, *settings: str, inside: tuple[str, ...] = (), **more: str) -> Run:
        """Starts a run that registers nothing."""
        return self.ground.start(home, *WAYS[self.way], UNREGISTERED, *settings, inside=inside, **more)

    def exit_status(self, run: Run) -> int:
        """Watches the run to its end; nothing of it may be left soon after."""
        return self.watch.exit_status(run, END_WITHIN_S)

    def same_bytes(self, run: Run, fit: str) -> None:
        """The run completes with the undisturbed run's artifacts, and `fit` was ran, resumed or cached."""
        require(self.exit_status(run) == 0, f"exit status {run.process.returncode}: {run.ending()}")
        left = left_by(run.home, run.result())
        differences = [line for line in self.whole.differences(left) if not line.startswith("registered")]
        require(not differences, "; ".join(differences))
        faults = tracking_faults(run.home, run.result(), left.curve)
        require(not faults, "; ".join(faults))
        state = next(stage["state"] for stage in run.result()["stages"] if stage["name"] == "fit")
        require(state == fit, f"fit is reported as {state}, not {fit}")

    def kill_after_checkpoints(self, home: Path, count: int) -> None:
        """A run that writes so many checkpoints more and is killed."""
        before = newest_checkpoint(home)
        run = self.start(home)
        wait_until(lambda: newest_checkpoint(home) > before and len(checkpoints(home)) >= count, run)
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        self.watch.condemn(run)
        self.watch.settle()


def sigterm(fires: Fires, home: Path) -> None:
    """After SIGTERM a run saves a checkpoint, exits with 130 and can be resumed."""
    run = fires.start(home, "training.checkpoint_interval_s=600")
    wait_until(lambda: '"metrics"' in _events(home), run)
    before = newest_checkpoint(home)
    os.kill(run.process.pid, signal.SIGTERM)
    require(fires.exit_status(run) == 130, f"exit status {run.process.returncode}: {run.ending()}")
    require("Run the same command again" in run.printed(), f"it does not say what to do: {run.ending()}")
    require("Traceback" not in run.printed(), f"a traceback: {run.ending()}")
    require(newest_checkpoint(home) > before, "no checkpoint was saved")
    fires.same_bytes(fires.start(home), fit="resumed")


def stalled(fires: Fires, home: Path) -> None:
    """A rank that hangs is stopped after the stall time-out, and training goes on from its checkpoint."""
    run = fires.start(home, f"compute.stall_timeout_s={STALL_S}")
    wait_until(lambda: newest_checkpoint(home) > 0, run)
    os.kill(victims(run.process.pid)["rank"][-1], signal.SIGSTOP)
    fires.same_bytes(run, fit="resumed")
    require(f"No sign of life for {STALL_S} s" in run.printed(), f"no message about it: {run.ending()}")


def full_disk(fires: Fires, home: Path) -> None:
    """A disk that fills up while training ends the run with one message; with room again, it goes on."""
    if reason := why_not():
        raise Skipped(reason)
    with SmallDisk(home, megabytes=200) as disk:
        run = fires.start(home, inside=disk.inside)
        wait_until(lambda: newest_checkpoint(disk.seen) > 0, run)
        disk.fill()
        require(fires.exit_status(run) == 1, f"exit status {run.process.returncode}: {run.ending()}")
        lines = [line for line in run.printed().splitlines() if "the disk is full" in line]
        require(
            len(lines) == 1 and str(home) in lines[0] and "Traceback" not in run.printed(),
            f"not one message that names the folder: {run.ending()}",
        )
        require(newest_checkpoint(disk.seen) > 0, "no checkpoint was kept")
        half = list(disk.seen.glob("jobs/*/checkpoints/.writing-*"))
        require(not half, f"half written: {half}")
        disk.resize(200)
        again = fires.start(home, inside=disk.inside)
        require(fires.exit_status(again) == 0, f"exit status {again.process.returncode}: {again.ending()}")
        differences = fires.whole.differences(left_by(disk.seen, again.result()))
        require(not [line for line in differences if not line.startswith("registered")], "; ".join(differences))


def damaged_checkpoints(fires: Fires, home: Path) -> None:
    """A truncated checkpoint, then one with a flipped bit, are put aside for the one before."""
    for harm, file in ((_truncate, "optimizer.pt"), (_flip_one_bit, "model.safetensors")):
        fires.kill_after_checkpoints(home, 2)
        harm(_newest(home) / file)
    run = fires.start(home)
    fires.same_bytes(run, fit="resumed")
    require("was moved to quarantine" in run.printed(), f"the run did not report the damage: {run.ending()}")


def no_good_checkpoint(fires: Fires, home: Path) -> None:
    """When all checkpoints are bad, training begins again."""
    fires.kill_after_checkpoints(home, 2)
    for checkpoint in checkpoints(home):
        _truncate(next(checkpoint.glob("rng_state*.pth")))
    fires.same_bytes(fires.start(home), fit="resumed")


def abort_at_exit(fires: Fires, home: Path) -> None:
    """A program that reported its success has finished, although it dies at its exit."""
    run = fires.start(home, **_fault("abort-at-exit"))
    fires.same_bytes(run, fit="ran")
    require((home / "aborted-at-exit").exists(), "it did not abort")
    require("Trying again" not in run.printed(), f"it was run twice: {run.ending()}")


def exit_0_early(fires: Fires, home: Path) -> None:
    """A program that leaves with status 0 before the last step has failed, and is tried again."""
    run = fires.start(home, **_fault("exit-0-early"))
    fires.same_bytes(run, fit="resumed")
    require("Trying again" in run.printed(), f"no message about it: {run.ending()}")


def two_of_the_same(fires: Fires, home: Path) -> None:
    """Of two runs of one recipe at once, one trains and the other waits for it and takes it."""
    both = [fires.start(home), fires.start(home)]
    for run in both:
        require(fires.exit_status(run) == 0, f"exit status {run.process.returncode}: {run.ending()}")
    states = sorted(stage["state"] for run in both for stage in run.result()["stages"] if stage["name"] == "fit")
    require(states == ["cached", "ran"], f"fit was {states}")
    for run in both:
        fires.same_bytes(run, fit=next(s["state"] for s in run.result()["stages"] if s["name"] == "fit"))


def two_recipes(fires: Fires, home: Path) -> None:
    """Two recipes at once in one home end as each does alone."""
    other = ("training.seed=7", "training.num_train_epochs=20")
    alone = fires.start(fires.ground.folder / "fire-alone", *other)
    require(fires.exit_status(alone) == 0, f"exit status {alone.process.returncode}: {alone.ending()}")
    both = [fires.start(home), fires.start(home, *other)]
    require([fires.exit_status(run) for run in both] == [0, 0], f"failed: {both[0].ending()}{both[1].ending()}")
    fires.same_bytes(both[0], fit="ran")
    differences = left_by(alone.home, alone.result()).differences(left_by(home, both[1].result()))
    require(not differences, "; ".join(differences))


def stale_mlflow_run(fires: Fires, home: Path) -> None:
    """The MLflow run of a run that was killed stays open until the next run closes it as KILLED."""
    fires.kill_after_checkpoints(home, 1)
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")

    def statuses() -> list[str]:
        return sorted(
            run.info.status for run in client.search_runs([client.get_experiment_by_name("small").experiment_id])
        )

    require(statuses() == ["RUNNING"], f"after the kill MLflow has {statuses()}")
    following = fires.start(home)
    wait_until(lambda: "KILLED" in statuses(), following)
    fires.same_bytes(following, fit="resumed")
    require(statuses() == ["FINISHED", "KILLED"], f"at the end MLflow has {statuses()}")


def taken_port(fires: Fires, home: Path) -> None:
    """The ranks find each other although the default port of launchers is taken."""
    if fires.way == "1":
        raise Skipped("a single process needs no port")
    with socket.create_server(("", LAUNCHERS_PORT)):
        fires.same_bytes(fires.start(home), fit="ran")


FIRES: dict[str, Callable[[Fires, Path], None]] = {
    "sigterm": sigterm,
    "stalled": stalled,
    "full-disk": full_disk,
    "damaged-checkpoints": damaged_checkpoints,
    "no-good-checkpoint": no_good_checkpoint,
    "abort-at-exit": abort_at_exit,
    "exit-0-early": exit_0_early,
    "two-of-the-same": two_of_the_same,
    "two-recipes": two_recipes,
    "stale-mlflow-run": stale_mlflow_run,
    "taken-port": taken_port,
}


def _fault(name: str) -> dict[str, str]:
    return {"FINETUNE_FAULT": name, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "faults"), str(ROOT)])}


def _events(home: Path) -> str:
    return "".join(path.read_text() for path in home.glob("jobs/*/events.jsonl"))


def _newest(home: Path) -> Path:
    return max(checkpoints(home), key=lambda path: int(path.name.split("-")[1]))


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _flip_one_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
