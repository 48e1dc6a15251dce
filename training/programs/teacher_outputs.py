"""The program that computes the outputs of a teacher for training rows: `python -m training.programs.teacher_outputs
JOB`, usually through `accelerate launch`.

inputs     model, tokenizer (the teacher's folders, which may be one), data (train.arrow, and labels.json with the
           labels of the rows); perhaps unlabelled (train.arrow)
settings   training.programs.loaded_teacher.TeacherSettings
output     train.arrow: for each row of the data `teacher`, the outputs in the order of the labels, as
           training.task_types.losses.distillation_loss reads them; unlabelled.arrow: the same of these rows
result     training.programs.loaded_teacher.TeacherResult

The rows are computed in blocks (training/jobs/blocks.py), by the teacher's own tokenizer and for its own labels, so
that students with other tokenizers and orders of labels share them. One process writes the same bytes as several with
as many threads each.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from training.data.arrow_columns import flat_values
from training.data.ipc_files import read_labels, read_table, write_table
from training.jobs.blocks import ROWS_IN_BLOCK
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, rank
from training.models.repository_files import labels_of_config, read_json
from training.problems import UserError
from training.programs.loaded_teacher import FIELD, LoadedTeacher, Report, TeacherResult, TeacherSettings
from training.task_types.losses import TEACHER
from training.task_types.task_type import LearnsFromTeacher
from training.tokenization.features import list_column

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch

ROWS_AT_ONCE = 64
"""Not a field of the recipe: another number would round outputs otherwise, and each is stored once."""


def main(job_dir: Path, job: Job, events: Events) -> TeacherResult:
    """Computes the teacher's outputs for every training row."""
    from training.batching.batches import TokenRows
    from training.models import loading

    teacher = LoadedTeacher(job_dir, job, TeacherSettings.model_validate(job.settings), events)
    task_type, data = teacher.task_type, Path(job.inputs["data"])
    assert isinstance(task_type, LearnsFromTeacher)
    of_labels = task_type.teacher_outputs != "vectors"
    labels: list[str] = read_labels(data) if of_labels else []
    theirs = labels_of_config(read_json(teacher.folder / "config.json")) if labels else []
    if message := find_missing(teacher.settings.teacher, theirs, labels):
        raise UserError.of("training", FIELD, message)
    encoder, collate = teacher.load_encoder(), task_type.collator(teacher.tokenizer, loading.padding_multiple())
    files = {"train": data / "train.arrow"}
    if (unlabelled := job.inputs.get("unlabelled")) is not None:
        files["unlabelled"] = Path(unlabelled) / "train.arrow"
    rows = {split: _read(file, task_type.teacher_columns) for split, file in files.items()}

    def read(model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        return pa.RecordBatch.from_pydict({TEACHER: task_type.outputs_of_teacher(outputs, batch)})

    def compute(network: PreTrainedModel, block: pa.Table, report: Report) -> pa.Table | None:
        (batch,) = block.combine_chunks().to_batches()
        features = task_type.features(encoder, batch).rows
        found = teacher.forward(network, TokenRows(pa.Table.from_batches([features])), collate, read, report)
        return (
            None if rank() else pa.table({TEACHER: task_type.join_outputs(found[TEACHER].combine_chunks(), features)})
        )

    for split, blocks in teacher.compute_files(rows, compute, ROWS_IN_BLOCK).items():
        found = pa.concat_tables(map(read_table, blocks))
        outputs = reorder(found[TEACHER].combine_chunks(), theirs, labels)
        schema = pa.schema([(TEACHER, outputs.type)])
        write_table(job_dir / OUTPUT / f"{split}.arrow", [pa.record_batch([outputs], schema=schema)], schema)
    return teacher.result(sum(map(len, rows.values())))


def _read(file: Path, names: Sequence[str]) -> pa.Table:
    """These columns of stored rows, as far as they are there."""
    stored = read_table(file)
    return stored.select([name for name in names if name in stored.column_names])


def find_missing(teacher: str, theirs: Sequence[str], labels: Sequence[str]) -> str | None:
    """The message about labels of the rows that the teacher lacks; None if it has all."""
    if missing := [label for label in labels if label not in theirs]:
        some = ", ".join(map(repr, missing[:5])) + (", …" if len(missing) > 5 else "")
        known = ", ".join(map(repr, theirs[:20])) + (", …" if len(theirs) > 20 else "")
        message = f"{teacher} lacks labels of the rows ({some}), it has {known or 'none with a name'}: name a teacher "
        return f"{message}with all of them, or make the names the same."
    return None


def reorder(outputs: pa.Array, theirs: Sequence[str], labels: Sequence[str]) -> pa.Array:
    """The outputs for the labels of the rows, in place of those for the teacher's labels."""
    if [*theirs] == [*labels]:
        return outputs
    values = flat_values(outputs).to_numpy().reshape(-1, len(theirs))
    chosen = values[:, [theirs.index(label) for label in labels]]
    lengths = np.diff(outputs.offsets.to_numpy()) // len(theirs) * len(labels)
    return list_column(np.ascontiguousarray(chosen).reshape(-1), lengths)


if __name__ == "__main__":
    run_program(main)
