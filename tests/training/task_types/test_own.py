"""A user's Trainer, callbacks and collators: found, used, and as exact as the project's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training import tiny
from tests.training.forks import assert_same, checkpoints_written, events, finish, kill_when, weights
from training.batching.random_states import SeededBatch
from training.engine.collation import TrainingCollator
from training.jobs.protocol import Outcome

OWN: dict[str, Any] = {
    "collator": "tests.training.own:Masked",
    "callbacks": ["tests.training.own:Slower"],
    "trainer": "tests.training.own:Doubled",
    "loss": "tests.training.own:hinge",
    "num_train_epochs": 2,
    "gradient_accumulation_steps": 3,
    "logging_steps": 1,
}


@pytest.fixture(scope="module")
def undisturbed(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    job_dir = tiny.fit_job(world, tmp_path_factory.mktemp("jobs") / "undisturbed", **OWN)
    outcome = finish(job_dir)
    assert outcome.state == "finished", outcome
    return job_dir


def problem(outcome: Outcome) -> tuple[str, str]:
    assert outcome.failure is not None and outcome.failure.kind == "user_error", outcome
    (found,) = outcome.failure.problems
    return found.where, found.message


@pytest.mark.slow
def test_random_batches_own_loss_callback_with_state_and_trainer_end_with_the_same_bytes_after_kills(
    world: Path, undisturbed: Path, tmp_path: Path
) -> None:
    job_dir = tiny.fit_job(world, tmp_path / "killed", **OWN, checkpoint_interval_s=0.02)
    kills = sum(kill_when(job_dir, lambda count=count: checkpoints_written(job_dir) >= count) for count in (2, 9, 11))
    assert finish(job_dir).state == "finished"
    assert kills >= 2 and checkpoints_written(undisturbed) == 14
    assert_same(job_dir, undisturbed)
    middle = [event["message"] for event in events(job_dir, "note") if event["message"].startswith("resuming from")]
    assert any(not message.endswith(("-7", "-14")) for message in middle)  # an epoch has 7 steps


@pytest.mark.slow
def test_workers_draw_the_same_random_batches_as_the_process_itself(
    world: Path, undisturbed: Path, tmp_path: Path
) -> None:
    # As in a job of its own; in a fork of the tests', each worker would first import all libraries.
    workers = {"dataloader_num_workers": 2, "dataloader_multiprocessing_context": "fork"}
    job_dir = tiny.fit_job(world, tmp_path / "workers", **OWN, extra=workers)
    assert finish(job_dir).state == "finished"
    assert_same(job_dir, undisturbed)


@pytest.mark.slow
def test_random_batches_of_two_ranks_are_the_same_after_a_kill(world: Path, tmp_path: Path) -> None:
    settings = OWN | {"per_device_train_batch_size": 4, "num_train_epochs": 1}
    jobs = [tiny.fit_job(world, tmp_path / name, processes=2, **settings) for name in ("whole", "killed")]
    assert kill_when(jobs[1], lambda: checkpoints_written(jobs[1]) >= 3, victim=1)
    for job_dir in jobs:
        assert finish(job_dir).state == "finished"
    assert_same(jobs[1], jobs[0])


@pytest.mark.slow
def test_each_of_them_acts(world: Path, undisturbed: Path, tmp_path: Path) -> None:
    """Left out one by one, the weights are others."""
    seen = {weights(undisturbed)}
    for left_out, usual in {"collator": None, "callbacks": [], "trainer": None, "loss": "cross_entropy"}.items():
        job_dir = tiny.fit_job(world, tmp_path / left_out, **OWN | {left_out: usual})
        assert finish(job_dir).state == "finished"
        seen.add(weights(job_dir))
    assert len(seen) == 5


def test_a_trainers_own_dataloader_of_evaluations_gives_the_same_figures(world: Path, tmp_path: Path) -> None:
    quick = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 16}
    usual, own = (
        tiny.fit_job(world, tmp_path / name, trainer=trainer, **quick)
        for name, trainer in {"usual": None, "own": "tests.training.own:OwnEvaluation"}.items()
    )
    for job_dir in (usual, own):
        assert finish(job_dir).state == "finished"
    assert_same(own, usual)


def test_a_callback_finds_a_whole_checkpoint_when_it_is_saved(world: Path, tmp_path: Path) -> None:
    often = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    job_dir = tiny.fit_job(world, tmp_path / "job", callbacks=["tests.training.own:Copies"], **often)
    outcome = finish(job_dir)
    assert outcome.state == "finished", outcome
    for step in (2, 4):
        copied = job_dir / f"checkpoint-{step}.json"
        assert copied.read_bytes() == (job_dir / f"checkpoints/checkpoint-{step}/manifest.json").read_bytes()


def test_evaluation_during_training_uses_the_collator_of_predictions() -> None:
    collate = TrainingCollator(lambda features: {"labels": torch.ones(2)}, lambda features: {"labels": torch.zeros(2)})
    assert collate([{}, {}])["labels"].tolist() == [0, 0]
    assert collate(SeededBatch([{}, {}], (1, 2)))["labels"].tolist() == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "where", "message"),
    [
        ({"trainer": "tests.training.own:Masked"}, "training.trainer",
         "is the class Masked: it must be a subclass of training.engine.trainer.ExactTrainer."),
        ({"trainer": "tests.training.own:Lonely"}, "training.trainer", "got an unexpected keyword argument 'model'"),
        ({"trainer": "tests.training.own:Fixed"}, "training.trainer",
         "get_train_dataloader (a resumed training has the same rows in the same order; name your collator in "
         "training.collator); evaluation_loop (each row counts once over all processes"),
        ({"trainer": "tests.training.own:OtherRows"}, "training.trainer",
         "gives 7 rows where the evaluation has 60: give its DataLoader `batch_sampler=self.evaluation_batches("),
        ({"callbacks": ["tests.training.own:Slow"]}, "training.callbacks[0]", "Did you mean 'Slower'?"),
        ({"callbacks": ["tests.training.own:NeedsMore"]}, "training.callbacks[0]", "created without arguments"),
        ({"collator": "tests.training.own:twice"}, "training.collator", "returned 16 rows for 8"),
        ({"collator": "tests.training.owns:twice"}, "training.collator",
         "there is no module 'tests.training.owns' here or installed. Did you mean 'own'?"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_the_users_mistake(
    world: Path, tmp_path: Path, settings: dict[str, Any], where: str, message: str
) -> None:
    reported = problem(finish(tiny.fit_job(world, tmp_path / "wrong", **settings)))
    assert reported[0] == where and message in reported[1]
