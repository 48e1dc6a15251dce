"""The program that observes rows by a trained model, for drift reports: `python -m training.programs.observe JOB`.

inputs     model, tokenizer (folders, which may be one); rows (SPLIT.arrow and labels.json of load_data), or sample
           (sample.jsonl with a line for each row: the values of the columns that the model reads, or null for a row
           that it cannot predict)
settings   ObserveSettings, below
output     observations.parquet, a row for each observed row in a random order: `text` (all texts of its inputs, without
           the answer of a conversation), and, for rows with a prediction, the columns of
           training.engine.observation.Observer and `label`, the name of the row's label, if load_data stored the rows
           with one
result     ObserveResult, below
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from training import task_types
from training.data.casting import to_batch
from training.data.ipc_files import read_labels, read_table
from training.data.vectors import parquet_options
from training.evaluation.drift.sampling import Reservoir
from training.evaluation.stored_calibration import Calibration
from training.evaluation.text_statistics import join_texts
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, NotInKey, Result, TaskSettings
from training.tokenization.features import RefusedRows

if TYPE_CHECKING:
    from training.task_types.task_type import TaskType

SAMPLE = "sample.jsonl"
PART_ROWS = 4096
"""Rows that are read at once."""
Row = tuple[str, tuple[Any, ...] | None, str | None]
"""Its text, its inputs (None if it has no prediction), and its label."""


class ObserveResult(Result):
    """Numbers of rows."""

    rows: int
    """All rows, from which the observed ones were drawn."""
    observed: int
    without_prediction: int
    """Of the observed rows."""


class ObserveSettings(TaskSettings):
    """The settings of a job of this program."""

    columns: dict[str, str]
    """The names of the model's input columns in files, by the task type's names."""
    max_length: int
    """Tokens a row."""
    max_rows: int
    """Rows that are observed; of more rows, so many are drawn at random."""
    split: str | None = None
    """The split of `rows`; None for a sample."""
    rows: int | None = None
    """The rows that a sample was drawn from."""
    batch_size: int
    """Rows in one forward pass."""
    micro_batch_divisor: Annotated[int, NotInKey("its parts have the same rows")] = 1
    """Divides the batch size, so that a batch fits into memory."""
    calibration: Calibration | None = None


def main(job_dir: Path, job: Job, events: Events) -> ObserveResult:
    """Observes at most `max_rows` rows, drawn at random."""
    from training.engine.observation import Observer
    from training.models import loading

    settings = ObserveSettings.model_validate(job.settings)
    task_type = task_types.load(settings.task, settings.options)
    if settings.split is None:
        read = _read_sample(Path(job.inputs["sample"], SAMPLE))
    else:
        read = _read_split(Path(job.inputs["rows"]), settings.split, settings.columns)
    reservoir = Reservoir[Row](settings.max_rows)
    while part := list(islice(read, PART_ROWS)):
        reservoir.add(part)
    total, rows = reservoir.total, reservoir.draw()
    complete = _usable_rows(task_type, settings.columns, rows)
    places = [place for place, (_, inputs, _) in enumerate(complete) if inputs is not None]
    texts = [text for text, _, _ in rows]
    loading.make_deterministic()
    model, tokenizer = (Path(job.inputs[name]) for name in ("model", "tokenizer"))
    batch_rows = -(-settings.batch_size // settings.micro_batch_divisor)
    observer = Observer(task_type, model, tokenizer, settings.max_length, batch_rows, settings.calibration)
    taken: Any = pa.table({})

    def report(done: int) -> None:
        events.progress(done=done, total=len(places))

    if places:
        inputs = [values for _, values, _ in complete if values is not None]
        batch = task_type.without_answers(to_batch(task_type, settings.columns, inputs))
        try:
            observed = observer.observe(batch, report)
        except RefusedRows as error:
            kept = [row for row in range(len(places)) if row not in error.rows]
            batch, places = batch.take(pa.array(kept, pa.int64())), [places[row] for row in kept]
            observed = observer.observe(batch, report) if places else pa.table({})
        for place, row in zip(places, batch.to_pylist(), strict=True):
            texts[place] = join_texts([*row.values()])
        if places and all(rows[place][2] is not None for place in places):
            observed = observed.append_column("label", pa.array([rows[place][2] for place in places], pa.string()))
        indices = np.full(len(rows), -1)
        indices[places] = np.arange(len(places))
        taken = observed.take(pa.array([None if index < 0 else index for index in indices.tolist()], pa.int64()))
    table = pa.table({"text": texts, **{name: taken[name] for name in taken.column_names}})
    (job_dir / OUTPUT).mkdir(parents=True, exist_ok=True)
    pq.write_table(table, job_dir / OUTPUT / "observations.parquet", **parquet_options(table.schema))
    return ObserveResult(
        rows=total if settings.rows is None else settings.rows,
        observed=len(rows),
        without_prediction=len(rows) - len(places),
    )


def _read_split(folder: Path, split: str, columns: Iterable[str]) -> Iterator[Row]:
    """The rows of a split as load_data stored it."""
    table = read_table(folder / f"{split}.arrow")
    names = read_labels(folder)
    labels = table["label"].to_pylist() if "label" in table.column_names else [None] * len(table)
    is_index = "label" in table.column_names and pa.types.is_integer(table.schema.field("label").type)
    inputs = zip(*(table[name].to_pylist() for name in columns), strict=True)
    for values, label in zip(inputs, labels, strict=True):
        yield join_texts(values), values, names[label] if is_index else None


def _read_sample(file: Path) -> Iterator[Row]:
    """The rows of a sample. A row that the model cannot predict has no inputs."""
    with file.open("rb") as lines:
        for line in lines:
            values = json.loads(line)
            yield join_texts(values or ()), None if values is None else tuple(values), None


def _usable_rows(task_type: TaskType, columns: Mapping[str, str], rows: list[Row]) -> list[Row]:
    """The rows, without the inputs of those that the task type cannot predict."""
    places = [place for place, (_, inputs, _) in enumerate(rows) if inputs is not None]
    if not places:
        return rows
    batch = to_batch(task_type, columns, [values for _, values, _ in rows if values is not None])
    found = [*rows]
    for _, _, mask, _ in task_type.row_problems_on_request(batch):
        for place, has_problem in zip(places, mask, strict=True):
            if has_problem:
                found[place] = (rows[place][0], None, rows[place][2])
    return found


if __name__ == "__main__":
    run_program(main)
