"""The program that computes log-probabilities under the base model, the reference of a loss: `python -m
training.programs.reference_logprobs JOB`, usually through `accelerate launch`.

inputs     model, tokenizer (the base model's folders), tokens (SPLIT.arrow)
settings   training.programs.predict.ForwardSettings
output     SPLIT.arrow: the token rows with the task type's reference_columns
result     training.programs.predict.BlocksResult

The rows are computed in blocks (training/jobs/blocks.py). One process writes the same bytes as several with as many
threads each.
"""

from __future__ import annotations

import time
from functools import cache
from itertools import accumulate
from pathlib import Path

import pyarrow as pa

from training import task_types
from training.data.ipc_files import read_table, write_table
from training.jobs.blocks import BLOCKS, ROWS_IN_BLOCK, compute_files
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, rank
from training.programs.predict import BlocksResult, ForwardSettings, progress_of_rows
from training.task_types.task_type import BaseReference


def main(job_dir: Path, job: Job, events: Events) -> BlocksResult:
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
    load_network = cache(lambda: loading.load_trained(task_type, folder).to(device))
    splits = {file.stem: TokenRows(file).table for file in sorted(Path(job.inputs["tokens"]).glob("*.arrow"))}
    total, computed, began = sum(map(len, splits.values())), 0, time.monotonic()
    before = dict(zip(splits, accumulate(map(len, splits.values()), initial=0), strict=False))
    batch_size, precision = settings.rows_at_once, settings.mixed_precision

    def compute(split: str, first: int, rows: pa.Table) -> pa.Table | None:
        nonlocal computed
        report = progress_of_rows(events, split, before[split] + first, total)
        found = predict(task_type, load_network(), TokenRows(rows), collate, batch_size, precision, report)
        computed += len(rows)
        return None if rank() else pa.table(dict(task_type.reference_columns(found)))

    for split, blocks in compute_files(job_dir / BLOCKS, splits, compute, ROWS_IN_BLOCK).items():
        rows, columns = splits[split], pa.concat_tables(map(read_table, blocks))
        for name in columns.column_names:
            rows = rows.append_column(name, columns[name])
        write_table(job_dir / OUTPUT / f"{split}.arrow", rows.to_batches(), rows.schema)
    ranks.leave_group()
    rate = computed / (time.monotonic() - began)
    return BlocksResult(rows=total, rows_per_second=round(rate, 1), computed=computed)


if __name__ == "__main__":
    run_program(main)
