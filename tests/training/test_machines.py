"""One training on two machines, which are two launchers on this one: the same bytes, also when a process is lost."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from tasks.runtime.jobs import run_child
from tasks.runtime.launch import Machines, accelerate_argv, accelerate_environment
from tasks.runtime.machines import Helper, Leader, Said, gather
from tasks.runtime.refs import Ref
from tasks.runtime.stage import Row, Work
from tests.training import tiny
from tests.training.forks import events, finish, weights
from training.protocol import Job, sha256

SHORT = {"num_train_epochs": 1, "gradient_accumulation_steps": 2, "checkpoint_interval_s": 0.05}


class KillOnce:
    """A watcher that kills rank 1 at the first checkpoint."""

    def __init__(self) -> None:
        self.rank1: list[int] = []
        self.warnings: list[str] = []

    def stage_events(self, stage: str, events: list[dict[str, object]]) -> None:
        for event in events:
            if event["kind"] == "started" and event["rank"] == 1:
                self.rank1.append(int(str(event["pid"])))
            if event["kind"] == "checkpoint" and len(self.rank1) == 1:
                os.kill(self.rank1[0], signal.SIGKILL)
            if event["kind"] == "warning":
                self.warnings.append(str(event["message"]))


def rendezvous() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


def test_two_machines_train_the_bytes_of_one_though_a_process_is_lost_and_the_helper_ends_with_the_training(
    world: Path, home: Path, tmp_path: Path
) -> None:
    undisturbed = tiny.fit_job(world, tmp_path / "undisturbed", processes=2, **SHORT)
    assert finish(undisturbed).state == "finished"
    place = rendezvous()
    first, second = Machines(2, 0, place), Machines(2, 1, place)
    leader, helper, said = Leader(first, "run"), Helper(second), []
    helping = threading.Thread(target=lambda: said.append(helper.help(60.0, lambda text: None)), daemon=True)
    helping.start()
    watcher = KillOnce()
    work = Work("k" * 40, tmp_path / "out", "run", (watcher,), "fit")  # type: ignore[arg-type]
    work.out.mkdir()
    asked = Job.read(tiny.fit_job(world, work.job, processes=2, **SHORT))
    run_child(
        work,
        "training.fit",
        accelerate_argv("training.fit", num_processes=2, mixed_precision="no", use_cpu=True, machines=first),
        env=accelerate_environment(num_processes=2, use_cpu=True, machines=first),
        settings=asked.settings,
        inputs={name: Path(path) for name, path in asked.inputs.items()},
        stall_timeout_s=100.0,
        before_try=lambda: gather(first, work, 60.0),
    )
    assert len(watcher.rank1) == 2 and any("killed" in warning for warning in watcher.warnings)
    assert sha256(work.out / "model/model.safetensors") == weights(undisturbed)
    assert [event["step"] for event in events(work.job, "metrics")] == [
        event["step"] for event in events(undisturbed, "metrics")
    ]
    leader.stage_ended(Row("fit", work.key, "ran", 1.0), Ref(kind="fit", key=work.key, digest="d"))
    helping.join(30.0)
    assert [(told.ended, Path(told.message).parts[-3:]) for told in said] == [("completed", ("fit", "k" * 40, "model"))]
