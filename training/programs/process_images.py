"""The program that prepares images for a model: `python -m training.programs.process_images JOB`.

inputs     data (SPLIT.arrow, with images as training.data.images stores them), tokenizer (the folder of the model's
           image processor)
settings   TaskSettings
output     SPLIT.arrow, the task type's features of each row
result     ProcessImagesResult, below

Images are processed in blocks (training/jobs/blocks.py), which do not depend on labels: an image that is appended, or a
label that is corrected, costs a block at most. Memory: some blocks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from training import task_types
from training.data.ipc_files import IMAGES_IN_BLOCK, ipc_writer, read_table
from training.jobs.blocks import BLOCKS, compute_files
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, Result, TaskSettings


class ProcessImagesResult(Result):
    """The work of this program."""

    rows: int
    """Of all splits together."""
    computed: int
    """The rows of blocks that this run has processed; it found the others."""
    height: int
    """Pixels of a processed image."""
    width: int
    """Pixels of a processed image."""
    rows_per_second: float


def main(job_dir: Path, job: Job, events: Events) -> ProcessImagesResult:
    """Processes the images of every split."""
    events.progress(phase="image processor")
    settings, data = TaskSettings.model_validate(job.settings), Path(job.inputs["data"])
    task_type = task_types.load(settings.task, settings.options)
    preprocessor = task_type.preprocessor(Path(job.inputs["tokenizer"]))
    assert preprocessor is not None
    splits = {file.stem: read_table(file) for file in sorted(data.glob("*.arrow"))}
    inputs = [name for name, column in task_type.columns.items() if not column.target and name != "label"]
    images = {split: rows.select(inputs) for split, rows in splits.items()}
    total, computed, began = sum(map(len, splits.values())), 0, time.monotonic()

    def compute(split: str, first: int, rows: pa.Table) -> pa.Table:
        nonlocal computed
        (batch,) = rows.combine_chunks().to_batches()
        features = task_type.features(preprocessor, batch).rows
        computed += len(rows)
        events.progress(done=computed, total=total)
        return pa.Table.from_batches([features])

    files = compute_files(job_dir / BLOCKS, images, compute, IMAGES_IN_BLOCK)
    (job_dir / OUTPUT).mkdir(exist_ok=True)
    for split, blocks in files.items():
        _write(job_dir / OUTPUT / f"{split}.arrow", _with_labels(blocks, splits[split]))
    _, height, width = preprocessor.shape
    rate = computed / (time.monotonic() - began)
    return ProcessImagesResult(
        rows=total, computed=computed, height=height, width=width, rows_per_second=round(rate, 1)
    )


def _with_labels(blocks: list[Path], rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """The features of a split's blocks, one after another, with the rows' labels."""
    first = 0
    for block in map(read_table, blocks):
        if "label" in rows.column_names:
            block = block.append_column("label", rows["label"].slice(first, len(block)))
        first += len(block)
        (batch,) = block.combine_chunks().to_batches()
        yield batch


def _write(file: Path, batches: Iterator[pa.RecordBatch]) -> None:
    first = next(batches)
    with ipc_writer(file, first.schema) as writer:
        writer.write(first)
        for batch in batches:
            writer.write(batch)


if __name__ == "__main__":
    run_program(main)
