"""The plain Trainer of transformers on the rows of a job: `python -m tests.gpu.plain_trainer JOB`.

Rows are in random order and padded to the longest of a batch, as in transformers' examples; those of a causal language
model are packed already.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from training.jobs.program import run_program
from training.jobs.protocol import Events, Job

WARM_UP = 20
"""The first steps, which load libraries and are not counted."""


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Trains for the steps of the job. The figure is tokens_per_second, without padding and without the first steps."""
    import torch
    from transformers import Trainer, TrainerCallback

    from training.engine.fit_settings import FitSettings
    from training.engine.task_setup import make_task

    task = make_task(FitSettings.model_validate(job.settings), job.inputs, job_dir, events)
    tokens: list[int] = []

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        tokens.append(sum(len(row["input_ids"]) for row in rows))
        return dict(task.collate(rows))

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == WARM_UP:
                _wait()
                self.began = time.monotonic()

    clock = Clock()
    arguments = plain_arguments(task, job_dir)
    trainer = Trainer(
        model=task.model, args=arguments, train_dataset=task.train, data_collator=collate, callbacks=[clock]
    )
    trainer.train()
    _wait()
    seconds = time.monotonic() - clock.began
    return {"tokens_per_second": sum(tokens[WARM_UP : trainer.state.global_step]) / seconds}


def plain_arguments(task: Any, job_dir: Path) -> Any:
    """The job's batch sizes and precision, and transformers' defaults for everything else."""
    import torch
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(job_dir / "plain"),
        max_steps=task.training.max_steps,
        learning_rate=task.training.learning_rate,
        per_device_train_batch_size=task.training.per_device_train_batch_size,
        per_device_eval_batch_size=task.training.per_device_eval_batch_size,
        bf16=task.compute.mixed_precision == "bf16",
        use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=task.training.logging_steps,
    )


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    run_program(main)
