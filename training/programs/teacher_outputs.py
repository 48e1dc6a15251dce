"""The program that computes the outputs of a teacher for training rows: `python -m training.programs.teacher_outputs
JOB`, usually through `accelerate launch`.

inputs     model, tokenizer (the teacher's folders, which may be one), data (train.arrow, and labels.json with the
           labels of the rows); perhaps unlabelled (train.arrow)
settings   TeacherSettings, below
output     train.arrow: for each row of the data `teacher`, the outputs in the order of the labels, as
           training.task_types.losses.distillation_loss reads them; unlabelled.arrow: the same of these rows
result     TeacherResult, below

The rows are computed in blocks (training/jobs/blocks.py), by the teacher's own tokenizer and for its own labels, so
that students with other tokenizers and orders of labels share them. One process writes the same bytes as several with
as many threads each.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import pyarrow as pa

from training import task_types
from training.data.arrow_columns import flat_values
from training.data.ipc_files import in_blocks, ipc_writer
from training.jobs.blocks import BLOCKS, ROWS_IN_BLOCK, compute_columns
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, NotInKey, rank
from training.models.repository_files import labels_of_config, read_json
from training.problems import UserError
from training.programs.predict import BlocksResult, ForwardSettings, progress_of_rows
from training.programs.predict_champion import require_task
from training.task_types.losses import TEACHER
from training.task_types.task_type import LearnsFromTeacher
from training.tokenization.features import list_column
from training.tokenization.transformers_encoder import load_encoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch

ROWS_AT_ONCE = 64
"""Not a field of the recipe: another number would round outputs otherwise, and each is stored once."""
FIELD = "training.teacher.path"


class TeacherSettings(ForwardSettings):
    """The settings of a job of this program. The task type and its options are the teacher's."""

    teacher: Annotated[str, NotInKey("it names the model in messages")]
    """NAME/VERSION, the repository or the folder."""
    max_length: int
    """Tokens a row."""


class TeacherResult(BlocksResult):
    """The work of a teacher."""

    rest: float | None = None
    """Of language models, the mean probability of tokens that are not stored; None if the teacher wrote texts."""
    cut: int = 0
    """The texts of the teacher that were cut at options.max_new_tokens."""


def main(job_dir: Path, job: Job, events: Events) -> TeacherResult:
    """Computes the teacher's outputs for every training row."""
    from training.batching.batches import TokenRows
    from training.distributed import ranks
    from training.engine.inference import compute
    from training.models import loading

    device = ranks.join_group()
    loading.make_deterministic()
    settings = TeacherSettings.model_validate(job.settings)
    data, folder, tokenizer_folder = (Path(job.inputs[name]) for name in ("data", "model", "tokenizer"))
    labels: list[str] = json.loads((data / "labels.json").read_text())
    task_type = task_types.load(settings.task, settings.options)
    assert isinstance(task_type, LearnsFromTeacher)
    advice = "name a teacher of this task."
    require_task(task_type, settings.task, folder, settings.teacher, "teacher", FIELD, advice)
    theirs = labels_of_config(read_json(folder / "config.json")) if labels else []
    if message := find_missing(settings.teacher, theirs, labels):
        raise UserError.of("training", FIELD, message)
    with in_field_of_teacher(settings.teacher):
        encoder = load_encoder(tokenizer_folder, folder, settings.max_length)
        collate = task_type.collator(loading.load_tokenizer(tokenizer_folder, folder), loading.padding_multiple())
    inputs = [name for name, column in task_type.columns.items() if not column.target and name != "label"]
    files = {"train": data / "train.arrow"}
    if (unlabelled := job.inputs.get("unlabelled")) is not None:
        files["unlabelled"] = Path(unlabelled) / "train.arrow"
    rows = {split: _read(file, inputs) for split, file in files.items()}
    total = sum(map(len, rows.values()))
    batch_size, precision = -(-settings.batch_size // settings.micro_batch_divisor), settings.mixed_precision
    computed, spent_s = 0, 0.0

    @cache
    def load_network() -> PreTrainedModel:
        with in_field_of_teacher(settings.teacher):
            return loading.load_trained(task_type, folder).to(device)

    def compute_block(split: str, first: int, block: pa.Table) -> pa.Table | None:
        nonlocal computed, spent_s
        network, began = load_network(), time.monotonic()
        (batch,) = block.combine_chunks().to_batches()
        features = task_type.features(encoder, batch).rows
        report = progress_of_rows(events, split, first + (len(rows["train"]) if split != "train" else 0), total)
        tokens = TokenRows(pa.Table.from_batches([features]))

        def read(model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
            return pa.RecordBatch.from_pydict({TEACHER: task_type.outputs_of_teacher(outputs, batch)})

        found = compute(task_type, network, tokens, collate, batch_size, precision, read, report)
        computed += len(block)
        spent_s += time.monotonic() - began
        if rank():
            return None
        return pa.table({TEACHER: task_type.join_outputs(found[TEACHER].combine_chunks(), features)})

    found = compute_columns(job_dir / BLOCKS, rows, compute_block, ROWS_IN_BLOCK)
    for split, columns in found.items():
        outputs = reorder(columns[TEACHER].combine_chunks(), theirs, labels)
        schema = pa.schema([(TEACHER, outputs.type)])
        with ipc_writer(job_dir / OUTPUT / f"{split}.arrow", schema) as writer:
            for part in in_blocks([pa.record_batch([outputs], schema=schema)], schema):
                writer.write(part)
    ranks.leave_group()
    rate = computed / max(spent_s, 1e-9)
    return TeacherResult(rows=total, rows_per_second=round(rate, 1), computed=computed)


@contextmanager
def in_field_of_teacher(teacher: str) -> Iterator[None]:
    """Inside, problems of a model and its tokenizer get the teacher's name and field; those of lengths keep theirs."""
    try:
        yield
    except UserError as error:
        raise UserError(
            problem.model_copy(
                update={
                    "message": f"the teacher {teacher}: {problem.message}",
                    **(
                        {}
                        if problem.where.startswith(("tokens.", "options."))
                        else {"kind": "training", "where": FIELD}
                    ),
                }
            )
            for problem in error.problems
        ) from error


def _read(file: Path, names: Sequence[str]) -> pa.Table:
    """These columns of stored rows, as far as they are there."""
    stored = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
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
