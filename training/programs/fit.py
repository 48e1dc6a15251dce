"""The program that trains: `python -m training.programs.fit JOB`, usually through `accelerate launch`.

inputs     model (config.json and safetensors), tokenizer, tokens (train.arrow, validation.arrow); perhaps checkpoint;
           folds (folds.arrow) for the training of a fold; teacher (the output of training.programs.teacher_outputs or
           teacher_tokens) and unlabelled (train.arrow)
settings   training.engine.fit_settings.FitSettings
output     model/: config.json, with what the task type calibrates after training, safetensors and the tokenizer's
           files; with adapters, which are added to its weights, adapter/ in peft's form; log/loss.png: the curves;
           log/environment.json: hardware, processes and library versions of the training
result     training.engine.fit_settings.FitResult
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.engine import training_environment
from training.engine.fit_settings import FitResult, FitSettings
from training.jobs.program import restart_with, restore_garbage_collection, run_program
from training.jobs.protocol import EVENTS, OUTPUT, Events, Job, rank, read_events
from training.jobs.search_path import hide_package

if TYPE_CHECKING:
    from training.engine.training_task import Task


def main(job_dir: Path, job: Job, events: Events) -> FitResult:
    """Trains or resumes, exports the model, and returns the numbers of the training."""
    settings = FitSettings.model_validate(job.settings)
    # If deepspeed is installed, accelerate imports it with its dependencies, MLflow among them, which takes seconds. So
    # does transformers with peft.
    needed = {
        "deepspeed": settings.compute.strategy.startswith("deepspeed"),
        "peft": settings.training.lora is not None,
    }
    restart_with([package for package in needed if needed[package]])
    with contextlib.ExitStack() as without:
        for package in needed:
            if not needed[package]:
                without.enter_context(hide_package(package))
        return _train(job_dir, job, settings, events)


def _train(job_dir: Path, job: Job, settings: FitSettings, events: Events) -> FitResult:
    import torch

    from training.distributed import one_machine, ranks
    from training.engine import estimation, export, throughput, training_task
    from training.engine.task_setup import make_task
    from training.models import loading

    loading.make_deterministic()
    torch.serialization.set_crc32_options(False)  # a checkpoint's manifest has the SHA-256 of each file
    one_machine.use_store()
    task = make_task(settings, job.inputs, job_dir, events)
    train = training_task.load(task.training.engine)
    restore_garbage_collection()
    estimation.report_estimate(task, job_dir)
    with task.finishing_checkpoint():
        trained = train(task)
    export.require_more_steps(task, trained.steps)
    export.require_finite_weights(task, trained)
    chosen, training = settings.training.metric_for_best_model, settings.training
    chooses = chosen and training.load_best_model_at_end and training.eval_strategy != "no"
    if chooses and trained.best_step is None and rank() == 0:
        events.warning(f"no evaluation gave {chosen} a value: the last weights are exported, not the best ones.")
    output = job_dir / OUTPUT
    if rank() == 0:
        export.export(task, settings, job.inputs, output, trained.weights)
    export.fit_head(task, settings.labels, output / "model", trained.steps)
    export.calibrate(task, settings.labels, output / "model", trained.steps)
    reported = read_events(job_dir / EVENTS, 0, ["metrics", "speed", "estimate"])[0] if rank() == 0 else []
    if rank() == 0:
        _write_log(task, reported, output / "log")
    peak = max(ranks.all_gather(estimation.peak_bytes()))
    ranks.leave_group()
    estimate = estimation.latest_estimate(reported)
    return FitResult(
        trainable_parameters=estimate.get("trainable"),
        micro_batch_size=task.training.per_device_train_batch_size,
        steps=trained.steps,
        epochs=round(trained.epochs, 4),
        train_loss=trained.train_loss,
        best_step=trained.best_step,
        best_metric=trained.best_metric,
        train_rows_per_second=round(trained.rows_per_second, 3),
        estimated_memory_mb=estimate.get("memory_mb"),
        peak_memory_mb=round(peak / 1e6),
        missing_weights=task.missing_weights,
        **throughput.overall_rates(reported),
    )


def _write_log(task: Task, reported: list[dict[str, Any]], log: Path) -> None:
    from training.evaluation import plots

    plots.draw_curves(reported, log / "loss.png")
    (log / "environment.json").write_text(
        json.dumps({**training_environment.machine(), **task.environment()}, indent=1)
    )


if __name__ == "__main__":
    run_program(main, stops_itself=True)
