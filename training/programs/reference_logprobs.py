"""The program that computes log-probabilities under the base model, the reference of a loss: `python -m
training.programs.reference_logprobs JOB`, usually through `accelerate launch`.

inputs     model, tokenizer (the base model's folders), tokens (SPLIT.arrow)
settings   training.programs.predict.ForwardSettings
output     SPLIT.arrow: the token rows with the task type's reference_columns
result     training.programs.predict.PredictResult

One process writes the same bytes as several with as many threads each.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from training import task_types
from training.data.ipc_files import in_blocks, ipc_writer
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, rank
from training.programs.predict import ForwardSettings, PredictResult, progress_of_rows
from training.task_types.task_type import BaseReference

if TYPE_CHECKING:
    import pyarrow as pa

    from training.batching.batches import TokenRows


def main(job_dir: Path, job: Job, events: Events) -> PredictResult:
    """Predicts every token row with the base model."""
    from training.batching.batches import TokenRows
    from training.distributed import ranks
    from training.engine.inference import predict
    from training.models import loading

    device = ranks.join_group()
    loading.make_deterministic()
    settings = ForwardSettings.model_validate(job.settings)
    task_type = task_types.load(settings.task, settings.options)
    assert isinstance(task_type, BaseReference)
    folder = Path(job.inputs["model"])
    tokenizer = loading.load_tokenizer(Path(job.inputs["tokenizer"]), folder)
    collate = task_type.collator(tokenizer, loading.padding_multiple())
    network = loading.load_trained(task_type, folder).to(device)
    splits = {file.stem: TokenRows(file) for file in sorted(Path(job.inputs["tokens"]).glob("*.arrow"))}
    total, done = sum(map(len, splits.values())), 0
    batch_size = -(-settings.batch_size // settings.micro_batch_divisor)
    began = time.monotonic()
    for split, rows in splits.items():
        report = progress_of_rows(events, split, done, total)
        predictions = predict(task_type, network, rows, collate, batch_size, settings.mixed_precision, report)
        if rank() == 0:
            _write(job_dir / OUTPUT / f"{split}.arrow", rows, task_type.reference_columns(predictions))
        done += len(rows)
    ranks.leave_group()
    return PredictResult(rows=total, rows_per_second=round(total / (time.monotonic() - began), 1))


def _write(file: Path, rows: TokenRows, columns: Mapping[str, pa.ChunkedArray]) -> None:
    """Stores the token rows with more columns."""

    table = rows.table
    for name, values in columns.items():
        table = table.append_column(name, values)
    with ipc_writer(file, table.schema) as writer:
        for block in in_blocks(table.to_batches(), table.schema):
            writer.write(block)


if __name__ == "__main__":
    run_program(main)
