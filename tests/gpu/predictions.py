"""Predictions by the project, by a raw forward pass and by the plain Trainer: `python -m tests.gpu.predictions JOB`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training.jobs.program import run_program
from training.jobs.protocol import Events, Job

ROUNDS = 3


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Tokens per second of `project`, `raw` and `plain` on the validation rows, each the best of some rounds; and the
    project's hardware_share."""
    import torch
    from transformers import Trainer

    from tests.gpu.plain_trainer import plain_arguments
    from training.batching.batches import EvaluationBatches
    from training.engine.fit_settings import FitSettings
    from training.engine.inference import predict
    from training.engine.task_setup import make_task
    from training.engine.throughput import flops, hardware_limit
    from training.models.loading import DTYPES

    task = make_task(FitSettings.model_validate(job.settings), job.inputs, job_dir, events)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network, rows, size = task.model.to(device).eval(), task.validation, task.training.per_device_eval_batch_size
    precision = task.compute.mixed_precision
    batches = [
        {name: tensor.to(device) for name, tensor in task.collate([rows[number] for number in numbers]).items()}
        for numbers in EvaluationBatches(rows.lengths, size)
    ]
    trainer = Trainer(model=network, args=plain_arguments(task, job_dir), data_collator=task.collate)

    def raw() -> None:
        with torch.inference_mode(), torch.autocast(device.type, DTYPES[precision], enabled=precision != "no"):
            for batch in batches:
                task.task_type.forward(network, batch)["logits"].float().cpu()

    ways: dict[str, Callable[[], Any]] = {
        "project": lambda: predict(task.task_type, network, rows, task.collate, size, precision),
        "raw": raw,
        "plain": lambda: trainer.predict(rows),
    }
    tokens = int(rows.lengths.sum())
    rates = {name: tokens / min(_seconds(way) for _ in range(ROUNDS)) for name, way in ways.items()}
    per_token, per_pair = (operations / 3 for operations in flops(network))  # of the forward pass alone
    operations = per_token * tokens + per_pair * float((rows.lengths.astype("int64") ** 2).sum())
    limit = hardware_limit(device, DTYPES[precision])
    return {**rates, "hardware_share": operations / tokens * rates["project"] / limit}


def _seconds(run: Callable[[], Any]) -> float:
    import torch

    began = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    run_program(main)
