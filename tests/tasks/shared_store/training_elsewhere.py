"""A training in a process of its own, whose home a test deletes: imports no S3 server."""

from __future__ import annotations

import os
from pathlib import Path

from tasks.cache.stage import Work
from tasks.home import signing_key
from tasks.jobs.commands import accelerate_argv, accelerate_environment, python_argv
from tasks.jobs.retries import BatchDivision, run_child
from tasks.shared_store import shared_checkpoints as shared_checkpoints
from tasks.shared_store.bucket import Bucket
from tests.fork_server import PAUSE
from tests.tasks.watching import Heard
from tests.training import tiny
from training.engine import checkpoints
from training.jobs.protocol import Job

KEY = "k" * 40


def train(home: Path, url: str | None, world: Path, out: Path, processes: int, pause_s: float) -> tuple[str, list[str]]:
    """Trains in this home, and returns the state of the stage and its notes and warnings. With a URL, the checkpoints
    are shared, and each is uploaded at once."""
    os.environ |= {"FINETUNE_HOME": str(home), PAUSE: str(pause_s)}
    shared_checkpoints.PAUSE = 0.0
    heard = Heard()
    out.mkdir(parents=True)
    work = Work(KEY, out, "run", (heard,), "fit")
    job = Job.read(
        tiny.fit_job(
            world,
            home / "written",
            processes=processes,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            checkpoint_interval_s=0.05,
        )
    )
    settings = {name: value for name, value in job.settings.items() if name != "micro_batch_divisor"}
    argv = python_argv("training.programs.fit")
    env = accelerate_environment(num_processes=processes, use_cpu=True)
    if processes > 1:
        argv = accelerate_argv("training.programs.fit", num_processes=2, mixed_precision="no", use_cpu=True)
    batches = BatchDivision(4, world / "base/model")
    if url is not None and not any(Bucket(url).names(f"checkpoints/{KEY}")):
        batches.divisor = 2  # found by this machine alone
    elif url is None:
        batches.divisor = 2

    def run() -> None:
        run_child(
            work,
            "training.programs.fit",
            argv,
            env=env | {checkpoints.SIGNING_KEY: str(signing_key())},
            settings=settings,
            inputs={name: Path(path) for name, path in job.inputs.items()},
            batches=batches,
        )

    if url is None:
        run()
    else:
        with shared_checkpoints.share_checkpoints(Bucket(url), work, signing_key(), None):
            run()
    return work.state, [event["message"] for event in heard.events if event["kind"] in ("note", "warning")]
