"""The program that predicts shards of files of rows: `python -m training.programs.predict_shards JOB`.

inputs     model, tokenizer (folders, which may be one)
settings   PredictShardsSettings, below
output     none; shards/DIGEST.parquet in the job's folder for each shard, as soon as it is predicted, with the task
           type's columns of `record_types`, a line for each usable row, in their order
events     `shard` for each: digest, and the fields of ShardResult
result     PredictResult of all shards

The files are read again here, so that rows need not be copied. Rows that have changed since they were listed end the
job: they would be stored under the key of others.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow.parquet as pq
from pydantic import Field

from training import task_types
from training.data.casting import to_batch
from training.data.prediction_rows import RowReader, WantedShard, read_shards
from training.data.vectors import parquet_options
from training.evaluation.stored_calibration import Calibration
from training.jobs.program import run_program
from training.jobs.protocol import PROGRESS_EVERY_S, Events, Job, TaskSettings
from training.programs.predict import PredictResult
from training.recipe.reading_rules import ReadingRules

if TYPE_CHECKING:
    import pyarrow as pa

    from training.engine.predictor import TokenizedRows

SHARDS = "shards"
"""The folder of the predicted shards in the job's folder."""


class ShardResult(PredictResult):
    """The work of one shard."""

    predicted_at_s: int
    """Unix time."""


class PredictShardsSettings(TaskSettings):
    """The settings of a job of this program."""

    columns: dict[str, str]
    """The rows' names for the columns that the model reads, by the task type's."""
    reading: dict[str, Any] = Field(default_factory=dict)
    """How rows are read: training.recipe.reading_rules.ReadingRules."""
    shards: list[WantedShard]
    """The shards to predict, file by file."""
    shard_rows: int
    max_length: int
    """Tokens a row."""
    batch_size: int
    """Rows in one forward pass."""
    mixed_precision: Literal["no", "bf16", "fp16"]
    micro_batch_divisor: int = 1
    """Divides the batch size, so that a batch fits into memory."""
    calibration: Calibration | None = None


def main(job_dir: Path, job: Job, events: Events) -> PredictResult:
    """Predicts the shards in their order."""
    import torch

    from training.engine.predictor import Predictor
    from training.models import loading

    loading.make_deterministic()
    settings = PredictShardsSettings.model_validate(job.settings)
    task_type = task_types.load(settings.task, settings.options)
    predictor = Predictor(
        task_type,
        Path(job.inputs["model"]),
        Path(job.inputs["tokenizer"]),
        settings.max_length,
        batch_rows=-(-settings.batch_size // settings.micro_batch_divisor),
        mixed_precision=settings.mixed_precision,
        calibration=settings.calibration,
        device="cuda" if torch.cuda.is_available() else "cpu",
    )
    (job_dir / SHARDS).mkdir(exist_ok=True)
    progress, began = _Progress(events), time.monotonic()
    reader = RowReader(task_type, settings.columns, rules=ReadingRules.model_validate(settings.reading))
    shards = read_shards(reader, settings.shards, settings.shard_rows)

    def read_next() -> tuple[str, TokenizedRows] | None:
        for digest, rows in shards:
            return digest, predictor.tokenize(to_batch(task_type, settings.columns, rows.usable()))
        return None

    def store(digest: str, predictions: pa.Table, seconds: float) -> None:
        write(job_dir / SHARDS / f"{digest}.parquet", predictions)
        rows = len(predictions)
        done = ShardResult(rows=rows, rows_per_second=rate(rows, seconds), predicted_at_s=int(time.time()))
        events.write("shard", digest=digest, **done.model_dump())

    # While the model predicts a shard, a thread stores the one before it and tokenizes the one after it.
    with ThreadPoolExecutor(1) as beside:
        ahead, stored, ended = beside.submit(read_next), beside.submit(lambda: None), began
        while found := ahead.result():
            ahead, (digest, tokenized) = beside.submit(read_next), found
            predictions = predictor.predict_table(tokenized, progress.report)
            progress.end_shard(len(predictions))
            stored.result()
            now = time.monotonic()
            stored, ended = beside.submit(store, digest, predictions, now - ended), now
        stored.result()
    for message in predictor.warnings():
        events.warning(message)
    return PredictResult(rows=progress.before, rows_per_second=rate(progress.before, time.monotonic() - began))


def write(file: Path, predictions: pa.Table) -> None:
    """Writes a file of predictions, which appears whole."""
    aside = file.with_suffix(".aside")
    pq.write_table(predictions, aside, **parquet_options(predictions.schema))
    os.replace(aside, file)


def rate(rows: int, seconds: float) -> float:
    """Rows a second."""
    return round(rows / max(seconds, 1e-3), 1)


class _Progress:
    """Reports the number of predicted rows, at most once a second."""

    def __init__(self, events: Events) -> None:
        self._events, self._reported_at = events, 0.0
        self.before = 0
        """The rows of earlier shards."""

    def report(self, done: int) -> None:
        """`done` rows of the present shard are predicted."""
        if time.monotonic() - self._reported_at >= PROGRESS_EVERY_S:
            self._reported_at = time.monotonic()
            self._events.write("predicted", done=self.before + done)

    def end_shard(self, rows: int) -> None:
        """A shard of so many rows is predicted."""
        self.before += rows
        self.report(0)


if __name__ == "__main__":
    run_program(main)
