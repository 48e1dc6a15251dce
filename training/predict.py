"""The program that predicts: `python -m training.predict JOB`, usually through `accelerate launch`.

inputs     model (what training.fit put out), tokens (SPLIT.arrow)
settings   kind, splits, batch_size (rows), mixed_precision (no, bf16 or fp16), batch_division (cuts the batches)
output     SPLIT.parquet, a row for a row of the split, in its order: row, label, prediction, logits, tokens (how many)
figures    rows and rows_per_second of all splits together

The processes take the batches in turns, and which rows make a batch does not hang on their number: one writes the same
bytes as several, given as many threads each.

N rows, L labels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.program import run_program
from training.protocol import OUTPUT, Events, Job, rank

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedModel

    from training.batching import PadToLongest, TokenRows

PROGRESS_EVERY_S = 1.0


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Predict every row of the splits; gives the figures."""
    from training import kinds, model, ranks
    from training.batching import TokenRows

    device = ranks.meet()
    model.make_deterministic()
    kind = kinds.load(job.settings["kind"])
    folder = Path(job.inputs["model"])
    collate = kind.collator(model.load_tokenizer(folder), model.padding_multiple())
    network = model.load_trained(kind, folder).to(device)
    splits = {split: TokenRows(Path(job.inputs["tokens"]) / f"{split}.arrow") for split in job.settings["splits"]}
    total, before = sum(map(len, splits.values())), 0
    batch_size = -(-job.settings["batch_size"] // job.settings["batch_division"])
    began = time.monotonic()
    for split, rows in splits.items():
        tell = told_now_and_then(events, split, before, total)
        logits = predict(network, rows, collate, batch_size, job.settings["mixed_precision"], tell)
        if rank() == 0:
            file = job_dir / OUTPUT / f"{split}.parquet"
            write(file, rows.labels, kind.predictions(logits), logits, rows.lengths)
        before += len(rows)
    ranks.part()
    return {"rows": total, "rows_per_second": round(total / (time.monotonic() - began), 1)}


def predict(
    network: PreTrainedModel,
    rows: TokenRows,
    collate: PadToLongest,
    batch_size: int,
    mixed_precision: str,
    tell: Callable[[int], None] = lambda done: None,
) -> npt.NDArray[np.float32]:
    """(N, L) logits, row by row as `rows` has them; longest rows first on the way there.

    Every rank calls it, and rank 0 alone gets them: the others get (0, L). `tell` hears on rank 0 how many are done.
    """
    import numpy as np
    import torch

    from training import ranks
    from training.batching import LongestFirst

    order = LongestFirst(rows.lengths).order
    starts, world = range(0, len(order), batch_size), ranks.joined()
    dtype = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[mixed_precision]
    found = [np.empty((0, network.config.num_labels), dtype=np.float32)]
    with torch.inference_mode(), torch.autocast(network.device.type, dtype, enabled=mixed_precision != "no"):
        for start in starts[rank() :: world]:
            if rank() == 0:
                tell(start)
            batch = collate([rows[number] for number in order[start : start + batch_size]])
            del batch["labels"]
            answer = network(**{name: tensor.to(network.device) for name, tensor in batch.items()})
            found.append(answer.logits.float().cpu().numpy())
    shares = ranks.to_first(np.concatenate(found))
    logits = np.empty((len(rows) if shares else 0, network.config.num_labels), dtype=np.float32)
    for place, share in enumerate(shares):
        logits[[number for start in starts[place::world] for number in order[start : start + batch_size]]] = share
    if shares:
        tell(len(rows))
    return logits


def write(
    file: Path,
    labels: npt.NDArray[np.int64],
    predictions: npt.NDArray[np.int64],
    logits: npt.NDArray[np.float32],
    tokens: npt.NDArray[np.int32],
) -> None:
    """Store (N,) labels, (N,) predictions, (N, L) logits and (N,) numbers of tokens as Parquet, numbered from 0."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows, width = logits.shape
    offsets = np.arange(0, (rows + 1) * width, width, dtype=np.int32)
    table = pa.table(
        {
            "row": np.arange(rows),
            "label": labels,
            "prediction": predictions,
            "logits": pa.ListArray.from_arrays(offsets, logits.reshape(-1)),
            "tokens": tokens,
        }
    )
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
