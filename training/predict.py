"""The program that predicts: `python -m training.predict JOB`, usually through `accelerate launch`.

inputs     model (what training.fit put out), tokens (SPLIT.arrow)
settings   kind, options, splits, batch_size (rows), mixed_precision (no, bf16 or fp16), batch_division (cuts the
           batches)
output     SPLIT.parquet, a row for a row of the split, in its order: row, label as the tokens have it, what the kind's
           `answers` are, tokens (how many)
figures    rows and rows_per_second of all splits together

The processes take the batches in turns, and which rows make a batch does not hang on their number: one writes the same
bytes as several, given as many threads each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.program import run_program
from training.protocol import OUTPUT, Events, Job, rank

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedModel

    from training.batching import TokenRows
    from training.drawing import Collate
    from training.evaluating import Batch
    from training.kinds.base import Kind

PROGRESS_EVERY_S = 1.0


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Predict every row of the splits; gives the figures."""
    from training import kinds, model, ranks
    from training.batching import TokenRows

    device = ranks.meet()
    model.make_deterministic()
    kind = kinds.of(job.settings)
    folder = Path(job.inputs["model"])
    tokenizer = model.load_tokenizer(folder)
    collate = kind.collator(tokenizer, model.padding_multiple())
    network = model.load_trained(kind, folder).to(device)
    splits = {split: TokenRows(Path(job.inputs["tokens"]) / f"{split}.arrow") for split in job.settings["splits"]}
    total, before = sum(map(len, splits.values())), 0
    batch_size = -(-job.settings["batch_size"] // job.settings["batch_division"])
    began = time.monotonic()
    for split, rows in splits.items():
        tell = told_now_and_then(events, split, before, total)
        answers = predict(kind, network, rows, collate, batch_size, job.settings["mixed_precision"], tell)
        if rank() == 0:
            write(job_dir / OUTPUT / f"{split}.parquet", kind.worded(answers, tokenizer), rows)
        before += len(rows)
    ranks.part()
    return {"rows": total, "rows_per_second": round(total / (time.monotonic() - began), 1)}


def predict(
    kind: Kind,
    network: PreTrainedModel,
    rows: TokenRows,
    collate: Collate,
    batch_size: int,
    mixed_precision: str,
    tell: Callable[[int], None] = lambda done: None,
) -> pa.Table:
    """The kind's answers and `label`, row by row as `rows` has them.

    Every rank calls it, and rank 0 alone gets them. `tell` hears on rank 0 how many are done.
    """
    import torch

    from training import ranks
    from training.batching import EvaluationBatches
    from training.evaluating import evaluate
    from training.speed import DTYPES

    plan = EvaluationBatches(rows.lengths, batch_size, world=ranks.joined(), rank=rank())
    dtype = DTYPES[mixed_precision]

    def answer(batch: Batch) -> tuple[None, int, pa.RecordBatch]:
        inputs = {name: tensor.to(network.device) for name, tensor in batch.items()}
        return None, 1, kind.answers(network, kind.forward(network, inputs), inputs)

    with torch.inference_mode(), torch.autocast(network.device.type, dtype, enabled=mixed_precision != "no"):
        batches = (collate([rows[number] for number in numbers]) for numbers in plan)
        answers = evaluate(batches, plan, answer, tell if rank() == 0 else lambda done: None).answers
    return answers if rank() else rows.labelled(answers)


def write(file: Path, answers: pa.Table, rows: TokenRows) -> None:
    """Store what `predict` gives of these rows as Parquet, numbered from 0, with the number of tokens of each."""
    import numpy as np
    import pyarrow.parquet as pq

    table = answers.add_column(0, "row", [np.arange(len(rows))]).append_column("tokens", [rows.lengths])
    pq.write_table(table, file, compression="zstd")


def told_now_and_then(events: Events, split: str, before: int, total: int) -> Callable[[int], None]:
    """What tells how many of `total` rows are done, given those of this split; `before` are those of earlier ones."""
    told_at = 0.0

    def tell(done: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= PROGRESS_EVERY_S or before + done == total:
            told_at = time.monotonic()
            events.progress(phase="predict", split=split, done=before + done, total=total)

    return tell


if __name__ == "__main__":
    run_program(main)
