"""The oracle sees what was restored wrongly, and names it."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training import tiny
from tests.training.forks import batches, checkpoints_written, finish, kill_when, run_fit
from training.trainer import ExactTrainer

EPOCHS = {"gradient_accumulation_steps": 3, "checkpoint_interval_s": 0.02, "num_train_epochs": 2}


def damaged(part: str) -> None:
    """Has the restoring go wrong in one part, in this process."""
    trainer: Any = ExactTrainer

    if part == "rng":
        trainer.__mro__[1]._load_rng_state = lambda self, checkpoint: None
    elif part == "model":
        restore = trainer.__mro__[1]._load_from_checkpoint

        def other_weights(self: Any, checkpoint: str, model: Any = None) -> None:
            restore(self, checkpoint, model)
            with torch.no_grad():
                next(self.model.parameters())[0, 0] += 1e-6

        trainer._load_from_checkpoint = other_weights
    elif part in ("optimizer", "scheduler"):
        load = trainer.__mro__[1]._load_optimizer_and_scheduler

        def half(self: Any, checkpoint: str | None) -> None:
            before = copy.deepcopy(self.optimizer.state_dict())
            load(self, checkpoint)
            if part == "scheduler" and checkpoint:
                self.lr_scheduler.last_epoch += 1
            elif checkpoint:
                self.optimizer.load_state_dict(before)

        trainer._load_optimizer_and_scheduler = half
    elif part == "sampler":
        run = trainer._run_epoch

        def one_too_far(self: Any, *, steps_trained_in_current_epoch: int, **rest: Any) -> None:
            run(self, steps_trained_in_current_epoch=steps_trained_in_current_epoch + 1, **rest)

        trainer._run_epoch = one_too_far
    else:
        trainer.restore_loss_sum = lambda self: None


def run_damaged(job_dir: str, rank: dict[str, str]) -> None:
    damaged(Path(job_dir).name)
    run_fit(job_dir, rank)


@pytest.fixture(scope="module")
def killed(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    job_dir = tiny.fit_job(world, tmp_path_factory.mktemp("jobs") / "killed", **EPOCHS)
    assert kill_when(job_dir, lambda: checkpoints_written(job_dir) >= 3)
    return job_dir


@pytest.mark.parametrize("part", ["model", "optimizer", "scheduler", "rng", "sampler", "trainer"])
def test_a_part_that_is_restored_wrongly_is_named_before_the_first_step(
    killed: Path, tmp_path: Path, part: str
) -> None:
    job_dir = shutil.copytree(killed, tmp_path / part)
    failure = finish(job_dir, program=run_damaged).failure
    assert failure is not None and failure.kind == "internal"
    assert f"is not what it had saved: {part} (" in failure.message, failure


def test_a_batch_that_was_trained_otherwise_is_told(killed: Path, tmp_path: Path) -> None:
    job_dir = shutil.copytree(killed, tmp_path / "batches")
    with (job_dir / "logs/batches.rank0.jsonl").open("a") as file:
        file.write('{"step": 0, "micro": 0, "rows": [1], "batch": "other"}\n')
    with pytest.raises(AssertionError, match="came in place of"):
        batches(job_dir)
