"""The state check finds state that was restored wrongly, and names it."""

from __future__ import annotations

import copy
import re
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import Trainer

from tests.training import tiny
from tests.training.forks import batches, checkpoints_written, finish, kill_when, run_fit
from training.engine.trainer import ExactTrainer

EPOCHS = {"gradient_accumulation_steps": 3, "checkpoint_interval_s": 0.02, "num_train_epochs": 2}


def restores_a_wrong_state() -> None:
    """Has the restoring of each part go wrong, in this process."""
    trainer, theirs = cast(Any, ExactTrainer), cast(Any, Trainer)
    weights, stepping = theirs._load_from_checkpoint, theirs._load_optimizer_and_scheduler

    def other_weights(self: Any, checkpoint: str, model: Any = None) -> None:
        weights(self, checkpoint, model)
        with torch.no_grad():
            next(self.model.parameters())[0, 0] += 1e-6

    def new_optimizer_and_next_rate(self: Any, checkpoint: str | None) -> None:
        before = copy.deepcopy(self.optimizer.state_dict())
        stepping(self, checkpoint)
        if checkpoint:
            self.optimizer.load_state_dict(before)
            self.lr_scheduler.last_epoch += 1

    theirs._load_rng_state = lambda self, checkpoint: None
    theirs._load_from_checkpoint = other_weights
    theirs._load_optimizer_and_scheduler = new_optimizer_and_next_rate
    trainer._restore_loss_sum = lambda self: None


def skips_a_batch_too_many() -> None:
    trainer: Any = ExactTrainer
    run = trainer._run_epoch

    def one_too_far(self: Any, *, steps_trained_in_current_epoch: int, **rest: Any) -> None:
        run(self, steps_trained_in_current_epoch=steps_trained_in_current_epoch + 1, **rest)

    trainer._run_epoch = one_too_far


def run_damaged(job_dir: str, rank: dict[str, str]) -> None:
    (skips_a_batch_too_many if Path(job_dir).name == "sampler" else restores_a_wrong_state)()
    run_fit(job_dir, rank)


@pytest.fixture(scope="module")
def killed(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    job_dir = tiny.fit_job(world, tmp_path_factory.mktemp("jobs") / "killed", **EPOCHS)
    assert kill_when(job_dir, lambda: checkpoints_written(job_dir) >= 3)
    return job_dir


@pytest.mark.parametrize(
    ("name", "parts"),
    [("state", ["model", "optimizer", "scheduler", "rng", "trainer"]), ("sampler", ["sampler"])],
)
def test_every_part_that_is_restored_wrongly_is_named_before_the_first_step(
    killed: Path, tmp_path: Path, name: str, parts: list[str]
) -> None:
    job_dir = shutil.copytree(killed, tmp_path / name)
    failure = finish(job_dir, program=run_damaged).failure
    assert failure is not None and failure.kind == "internal"
    differences = failure.message.partition("differs from the saved one: ")[2]
    assert re.findall(r"(\w+) \(\d+ of", differences) == parts, failure


def test_a_batch_that_was_trained_otherwise_is_reported(killed: Path, tmp_path: Path) -> None:
    job_dir = shutil.copytree(killed, tmp_path / "batches")
    assert batches(job_dir)
    with (job_dir / "logs/batches.rank0.jsonl").open("a") as file:
        file.write('{"step": 0, "micro": 0, "rows": [1], "batch": "other"}\n')
    with pytest.raises(AssertionError, match="came in place of"):
        batches(job_dir)
