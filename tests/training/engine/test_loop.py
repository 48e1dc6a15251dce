"""The plain loop: the Trainer's bytes where both can be had, the same bytes after kills, and refusals for the rest."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.arrow import read_arrow
from tests.fork_server import call
from tests.training import tiny
from tests.training.forks import (
    END_WITHIN_S,
    assert_same,
    curve,
    events,
    finish,
    kill_when,
    run_fit,
    start,
    weights,
)
from training.batching.batches import TokenRows
from training.engine import task_setup
from training.engine.checkpoints import find_damage
from training.jobs.protocol import read_outcome
from training.problems import UserError
from training.recipe import Training, parse
from training.recipe.extra_arguments import ACCEPTED, arguments, fits
from training.recipe.tables.engines import ENGINES
from training.recipe.tables.optimizers import OPTIMIZERS

LIMITS = ENGINES["accelerate"].limits
assert LIMITS is not None

# Dropout is on. 150 rows: 6 full steps an epoch, and one of 6 rows that makes fewer and unequal micro-batches.
ASKED: dict[str, Any] = {
    "engine": "accelerate",
    "collator": "tests.training.own:Masked",
    "gradient_accumulation_steps": 3,
    "per_device_eval_batch_size": 16,
    "class_weights": {"tool": 2.0},
    "weight_decay": 0.1,
    "warmup_steps": 3,
    "metric_for_best_model": "calibration_error",
}
TWO: dict[str, Any] = {
    "engine": "accelerate",
    "num_train_epochs": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 3,
    "label_smoothing_factor": 0.1,
    "load_best_model_at_end": False,
    "per_device_eval_batch_size": 7,  # 60 rows: neither ranks nor batches of equal size
}


def dying(job_dir: str, rank: dict[str, str], phase: str, step: int, victim: int) -> None:
    """Trains, and dies of SIGKILL in the middle of a step's `train`, `evaluate` or `save`, or in `complete`: while a
    thread completes the checkpoint of the step. A victim of rank 0 has completed the checkpoint before."""
    from training.batching import random_states as drawing
    from training.engine import checkpoints
    from training.engine.loop import Loop

    compute, states, calls = Loop.loss_and_outputs, drawing.random_states, Counter[str]()
    write_manifest = checkpoints._write_manifest
    here: list[Loop] = []

    def die(now: str) -> None:
        if now == phase and here[0].progress.step == step and rank.get("RANK", "0") == str(victim):
            here[0].task._completing.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    def complete(staging: Path, *given: Any) -> None:
        if phase == "complete" and staging.name.endswith(f"-{step}"):
            os.kill(os.getpid(), signal.SIGKILL)
        write_manifest(staging, *given)

    def loss_and_outputs(self: Loop, *given: Any) -> Any:
        here[:] = [self]
        found = compute(self, *given)
        now = "train" if torch.is_grad_enabled() else "evaluate"
        calls[f"{now} {self.progress.step}"] += 1
        if calls[f"{now} {self.progress.step}"] == 2:
            die(now)
        return found

    def random_states() -> dict[str, Any]:
        die("save")
        return states()

    Loop.loss_and_outputs, drawing.random_states = loss_and_outputs, random_states  # type: ignore[method-assign]
    checkpoints._write_manifest = complete
    run_fit(job_dir, rank)


def die_in(job_dir: Path, phase: str, step: int, victim: int = 0) -> None:
    processes = start(job_dir, program=partial(dying, phase=phase, step=step, victim=victim))
    for process in processes:
        process.join(END_WITHIN_S)
    assert processes[victim].exitcode == -signal.SIGKILL


def started_from(job_dir: Path) -> list[int]:
    """The steps of the checkpoints that its tries went on from."""
    notes = [event["message"] for event in events(job_dir, "note")]
    return [int(note.rpartition("-")[2]) for note in notes if note.startswith("resuming from")]


def finished(job_dir: Path) -> dict[str, Any]:
    outcome = finish(job_dir)
    assert outcome.state == "finished", outcome
    return outcome.result


ROUNDED = ("eval_loss", "eval_calibration_error")
"""Means over the validation rows, whose last digits hang on the rows' order."""


def points(job_dir: Path) -> dict[int, dict[str, float]]:
    return {step: {k: v for k, v in point.items() if k not in ROUNDED} for step, point in curve(job_dir).items()}


def evaluated(job_dir: Path, name: str) -> dict[int, float]:
    return {step: point[name] for step, point in curve(job_dir).items() if name in point}


@pytest.fixture(scope="module")
def undisturbed(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    job_dir = tiny.fit_job(world, tmp_path_factory.mktemp("jobs") / "undisturbed", **ASKED)
    finished(job_dir)
    return job_dir


MEASURED = {
    *("train_rows_per_second", "train_tokens_per_second", "hardware_share"),
    *("estimated_memory_mb", "peak_memory_mb"),
}


@pytest.mark.slow
def test_its_weights_curve_and_figures_are_those_of_the_trainer_to_the_byte(
    world: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """With random batches and dropout; where less of the metric that chooses the best model is better."""
    trainer = tiny.fit_job(world, tmp_path / "trainer", **ASKED | {"engine": "trainer"})
    theirs, ours = finished(trainer), (read_outcome(undisturbed) or pytest.fail()).result
    assert weights(undisturbed) == weights(trainer)
    assert points(undisturbed) == points(trainer)
    for name in ROUNDED:
        assert evaluated(undisturbed, name) == pytest.approx(evaluated(trainer, name), rel=1e-5)
    for figures, job_dir in ((theirs, trainer), (ours, undisturbed)):
        errors = evaluated(job_dir, "eval_calibration_error")
        assert (figures["best_metric"], figures["best_step"]) == min((error, step) for step, error in errors.items())
    learnt = {name: value for name, value in theirs.items() if name not in MEASURED}
    assert learnt == {name: ours[name] for name in learnt} | {"best_metric": theirs["best_metric"]}
    done = events(undisturbed, "progress")[-1]
    assert events(trainer, "progress")[-1].keys() == done.keys()
    assert (done["done"], done["total"], done["phase"]) == (21, 21, "train")


@pytest.mark.slow
def test_killed_within_steps_evaluations_and_saves_it_ends_with_the_same_bytes(
    world: Path, undisturbed: Path, tmp_path: Path
) -> None:
    job_dir = tiny.fit_job(world, tmp_path / "killed", **ASKED, checkpoint_interval_s=1e-9)
    for phase, step in (("evaluate", 7), ("train", 7), ("save", 10), ("train", 12), ("evaluate", 14), ("save", 21)):
        die_in(job_dir, phase, step)
    die_in(job_dir, "complete", 21)
    finished(job_dir)
    assert started_from(job_dir) == [6, 7, 9, 12, 13, 20, 20]
    assert_same(job_dir, undisturbed)
    assert all(find_damage(checkpoint) is None for checkpoint in (job_dir / "checkpoints").iterdir())

    shutil.rmtree(job_dir / "output")  # as if killed between the last step and the export
    assert finished(job_dir)["steps"] == 21
    assert_same(job_dir, undisturbed)


@pytest.mark.slow
def test_patience_is_remembered_over_a_kill(world: Path, tmp_path: Path) -> None:
    settings = {"engine": "accelerate", "num_train_epochs": 6, "learning_rate": 1e-9, "per_device_train_batch_size": 50}
    settings |= {"metric_for_best_model": "accuracy", "early_stopping_patience": 2}
    settings |= {"per_device_eval_batch_size": 20}
    job_dir = tiny.fit_job(world, tmp_path / "patience", **settings)
    die_in(job_dir, "evaluate", 9)
    figures = finished(job_dir)
    assert (figures["steps"], figures["best_step"]) == (9, 3)  # the best epoch, and two that are no better
    assert finished(job_dir)["steps"] == 9  # and remembered when it is over


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["accelerate", "trainer"])
def test_a_metric_without_a_value_chooses_no_checkpoint_and_stops_no_training(
    world: Path, tmp_path: Path, engine: str
) -> None:
    tokens = shutil.copytree(world / "tokens", tmp_path / "tokens")
    table = read_arrow(world / "tokens/validation.arrow")
    rows = [row for row in table.to_pylist() if row["label"] < 2]  # none has label 2
    tiny.write_tokens(tokens, [row["input_ids"] for row in rows], [row["label"] for row in rows], "validation")
    settings = {"metric_for_best_model": "roc_auc", "early_stopping_patience": 1, "per_device_train_batch_size": 50}
    settings |= {"engine": engine, "lr_scheduler_type": "reduce_lr_on_plateau", "num_train_epochs": 4}
    settings |= {"extra": {"lr_scheduler_kwargs": {"patience": 0}}} if engine == "trainer" else {}
    job_dir = tiny.fit_job(world, tmp_path / "job", tokens=str(tokens), settings={"metrics": ["roc_auc"]}, **settings)
    figures = finished(job_dir)
    assert (figures["steps"], figures["best_step"], figures["best_metric"]) == (12, None, None)
    found = [event["message"] for event in events(job_dir, "warning")]
    assert sum("roc_auc has no value in this evaluation" in message for message in found) == 4
    assert "no evaluation gave roc_auc a value: the last weights are exported, not the best ones." in found
    rates = {point["learning_rate"] for point in curve(job_dir).values() if "learning_rate" in point}
    assert len(rates) <= 1  # no evaluation lowered it


@pytest.fixture(scope="module")
def two_ranks(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    job_dir = tiny.fit_job(world, tmp_path_factory.mktemp("jobs") / "two", processes=2, **TWO)
    finished(job_dir)
    return job_dir


@pytest.mark.slow
def test_two_ranks_train_to_the_bytes_of_the_trainers_two(world: Path, two_ranks: Path, tmp_path: Path) -> None:
    trainer = tiny.fit_job(world, tmp_path / "trainer", processes=2, **TWO | {"engine": "trainer"})
    finished(trainer)
    assert weights(two_ranks) == weights(trainer)
    for step, point in curve(trainer).items():
        assert curve(two_ranks)[step].get("train_loss") == point.get("train_loss")


def test_two_ranks_evaluate_each_row_once(world: Path, two_ranks: Path) -> None:
    rows = TokenRows(world / "tokens/validation.arrow")
    model = AutoModelForSequenceClassification.from_pretrained(two_ranks / "output/model").eval()
    with torch.no_grad():
        logits = torch.cat(
            [model(torch.tensor(row["input_ids"].tolist())[None]).logits for row in map(rows.__getitem__, range(60))]
        )
    labels = torch.from_numpy(rows.labels.copy())
    last = curve(two_ranks)[max(curve(two_ranks))]
    loss = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    assert last["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert last["eval_accuracy"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item())


@pytest.mark.slow
def test_two_ranks_stopped_or_killed_end_with_the_same_bytes(world: Path, two_ranks: Path, tmp_path: Path) -> None:
    job_dir = tiny.fit_job(world, tmp_path / "killed", processes=2, **TWO)
    assert kill_when(job_dir, lambda: bool(events(job_dir, "metrics")), signal.SIGTERM, victim=1)
    stopped = read_outcome(job_dir)
    assert stopped is not None and stopped.failure is not None and stopped.failure.kind == "interrupted"
    (checkpoint,) = (job_dir / "checkpoints").glob("checkpoint-*")
    assert find_damage(checkpoint) is None

    shutil.rmtree(checkpoint)
    settings = tiny.fit_job(world, job_dir, processes=2, **TWO, checkpoint_interval_s=1e-9)
    for phase, step, victim in (("evaluate", 7, 1), ("save", 9, 1), ("train", 10, 0), ("complete", 12, 0)):
        die_in(settings, phase, step, victim)
    finished(job_dir)
    assert started_from(job_dir) == [6, 8, 10, 11]
    assert_same(job_dir, two_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["trainer", "accelerate"])
def test_mistakes_that_both_engines_refuse_while_they_train(world: Path, tmp_path: Path, engine: str) -> None:
    settings = {"engine": engine, "max_steps": 3, "logging_steps": 1, "per_device_eval_batch_size": 60}
    diverges = {"optim": "sgd", "learning_rate": 1e30, "max_grad_norm": 0.0}
    for wrong, where, message in (
        (diverges, "learning_rate", "tensors NaN or infinite: "),
        ({"metric_for_best_model": "f2"}, "metric_for_best_model", "'f2' is not evaluated: choose from accuracy, f1,"),
    ):
        job_dir = tiny.fit_job(world, tmp_path / where, **settings | wrong)
        failure = finish(job_dir).failure
        assert failure is not None and failure.kind == "user_error", failure
        (problem,) = failure.problems
        assert problem.where == f"training.{where}" and message in problem.message
    warnings = [one["message"] for one in events(tmp_path / "learning_rate", "warning")]
    assert sum(one.startswith("The training loss is nan at step ") for one in warnings) == 1


# What it takes notice of


def recording(job_dir: str, rank: dict[str, str]) -> None:
    """Trains, and keeps the names of the settings that were read."""

    class Read(Training):
        def __getattribute__(self, name: str) -> Any:
            if name in Training.model_fields:
                with open(Path(job_dir, "read.txt"), "a") as file:
                    print(name, file=file)
            return super().__getattribute__(name)

        def model_dump(self, *, include: Any = None, **rest: Any) -> dict[str, Any]:
            return {name: getattr(self, name) for name in include or Training.model_fields}

    divided = task_setup.with_micro_batches
    task_setup.with_micro_batches = lambda *given: Read.model_construct(**dict(divided(*given)))
    run_fit(job_dir, rank)


def test_the_settings_that_it_takes_are_those_that_it_reads(world: Path, tmp_path: Path) -> None:
    settings = {"engine": "accelerate", "loss": "focal", "max_steps": 2, "logging_steps": 1}
    job_dir = tiny.fit_job(world, tmp_path / "read", **settings)
    assert finish(job_dir, program=recording).state == "finished"
    read = set((job_dir / "read.txt").read_text().split())
    before = {
        "collator",
        "resume_from_checkpoint",
        "trust_checkpoint",
        "inexact_resume",
        "report_to",
    }  # or where there is a checkpoint, or in the flow
    assert read | before == set(LIMITS.training)


def made(job_dir: str, settings: list[dict[str, Any]]) -> list[Any]:
    """The effect of each of the settings."""
    from training.engine.loop import Loop
    from training.models import loading as model

    model.make_deterministic()
    task, found = tiny.task_of(Path(job_dir)), []
    for training in settings:
        loop = Loop(replace(task, training=task.training.model_copy(update=training)))
        first, *_ = loop.optimizer.param_groups
        loop.optimizer.step()
        for _ in range(20):
            loop.scheduler.step()
        seen = {name: first[name] for name in ("lr", "betas", "eps", "momentum") if name in first}
        found.append((seen, torch.is_deterministic_algorithms_warn_only_enabled()))
    return found


def test_each_of_the_extra_settings_acts(world: Path, tmp_path: Path) -> None:
    adam = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6}
    cycles = {"lr_scheduler_type": "cosine_with_restarts", "extra": {"lr_scheduler_kwargs": {"num_cycles": 5}}}
    momentum = {"optim": "sgd", "extra": {"optim_args": "momentum=0.9", "full_determinism": True}}
    settings = [{"extra": adam}, cycles, {"lr_scheduler_type": "cosine_with_restarts"}, momentum]
    assert {name for one in settings for name in one.get("extra", {})} == set(LIMITS.extra) <= ACCEPTED.keys()
    job_dir = tiny.fit_job(world, tmp_path / "made")
    (adam_seen, warns), (five, _), (one, _), (sgd, warns_still) = call(made, str(job_dir), settings)
    assert (adam_seen["betas"], adam_seen["eps"]) == ((0.8, 0.95), 1e-6)
    assert five["lr"] != one["lr"]
    assert sgd["momentum"] == 0.9
    assert (warns, warns_still) == (True, False)


def refused(**training: Any) -> dict[str, str]:
    recipe: dict[str, Any] = {
        "name": "reviews",
        "task": "sequence-classification",
        "data": {"source": "csv", "path": "reviews", "text": ["text"], "label": "label"},
        "model": {"source": "folder", "path": "models/small"},
        "compute": training.pop("compute", {}),
    }
    try:
        parse({**recipe, "training": {"engine": "accelerate", **training}})
    except UserError as error:
        return {problem.where: problem.message for problem in error.problems}
    return {}


def test_settings_that_only_the_trainer_has_are_refused_by_name() -> None:
    assert not refused(extra={"adam_beta1": 0.8, "full_determinism": True}, lr_scheduler_type="cosine")
    other = {"callbacks": ["mine:Mine"], "trainer": "mine:Mine"}
    assert Training.model_fields.keys() == {*LIMITS.training, *other}
    for name, value in other.items():
        assert refused(**{name: value})[f"training.{name}"].endswith("leave it out, or use `engine: trainer`.")
    for name in ACCEPTED.keys() - set(LIMITS.extra):
        value = next(value for value in (True, 1, 1.0, "no", {}) if fits(value, arguments()[name]))
        assert "`engine: accelerate` does not read this field" in refused(extra={name: value})[f"training.extra.{name}"]
    for name in OPTIMIZERS.keys() - set(LIMITS.optimizers):
        assert "training.optim" in refused(optim=name)
    sharded = refused(compute={"strategy": "fsdp", "num_processes": 2})
    assert "choose from ddp, or use `engine: trainer`" in sharded["compute.strategy"]
    assert not refused(engine="trainer", callbacks=["mine:Mine"], extra={"neftune_noise_alpha": 1.0})
    assert refused(extra={"adam_beta": 1.0, "neftune_noise_alpha": 1.0}).keys() == {"training.extra.adam_beta"}
    assert "choose from trainer, accelerate, or name" in refused(engine="acelerate")["training.engine"]


def test_a_checkpoint_of_the_other_engine_is_refused(world: Path, tmp_path: Path) -> None:
    shared = {"max_steps": 2, "logging_steps": 1}
    theirs = tiny.fit_job(world, tmp_path / "theirs", **shared)
    finished(theirs)
    checkpoint = theirs / "checkpoints/checkpoint-2"
    named = {"engine": "accelerate", "resume_from_checkpoint": str(checkpoint)}
    ours = tiny.fit_job(world, tmp_path / "ours", **shared | named)
    failure = finish(ours).failure
    assert failure is not None and failure.problems[0].where == "training.resume_from_checkpoint"
    assert "engine trainer (here accelerate)" in failure.message
