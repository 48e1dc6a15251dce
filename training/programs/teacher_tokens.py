"""The program that computes a teacher's distributions of the target tokens of training rows: `python -m
training.programs.teacher_tokens JOB`, usually through `accelerate launch`.

inputs     model, tokenizer (the teacher's folders, which may be one), student (the tokenizer of the rows), tokens
           (train.arrow)
settings   TokenSettings, below
output     train/NUMBER.arrow: blocks of rows with the columns of training.task_types.losses.token_distillation, in the
           order of the token rows
result     training.programs.loaded_teacher.TeacherResult

The blocks (training/jobs/blocks.py) are links if the file system has them, so that they take their place on the
disk once. One process writes the same bytes as several with as many threads each.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from training.data.ipc_files import read_table
from training.jobs.blocks import ROWS_IN_BLOCK
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job
from training.problems import UserError
from training.programs.loaded_teacher import FIELD, LoadedTeacher, Report, TeacherResult, TeacherSettings
from training.task_types.task_type import LearnsTokens
from training.tokenization.features import list_column

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch

ROWS_AT_ONCE = 8
"""Not a field of the recipe: another number would round log-probabilities otherwise, and each is stored once."""
VALUES_IN_BLOCK = 2**23
"""The most stored tokens of a block, which is in memory as a whole: 64 MiB."""


class TokenSettings(TeacherSettings):
    """The settings of a job of this program. The task type and its options are those of the model that learns."""

    temperature: float
    top_k: int


def main(job_dir: Path, job: Job, events: Events) -> TeacherResult:
    """Computes the likeliest tokens of every target."""
    from training.batching.batches import IGNORED, TokenRows
    from training.models import loading
    from training.task_types.losses.token_distillation import IDS, LOGPS, top_tokens

    settings = TokenSettings.model_validate(job.settings)
    teacher = LoadedTeacher(job_dir, job, settings, events)
    task_type = teacher.task_type
    assert isinstance(task_type, LearnsTokens)
    own = loading.load_tokenizer(Path(job.inputs["student"]), teacher.folder)
    require_same_tokens(settings.teacher, teacher.tokenizer, own, can_write=task_type.teacher_writes)
    known = 1 + max(own.get_vocab().values())
    collate = task_type.collator(own, loading.padding_multiple())
    rows = TokenRows(Path(job.inputs["tokens"]) / "train.arrow").table

    def prepare(network: PreTrainedModel) -> None:
        loading.require_positions(network, max_length=settings.max_length)
        task_type.prepare(network, own)

    def read(model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        is_target = task_type.target_ids(batch) != IGNORED
        logits = outputs["logits"][is_target]
        ids, logps = top_tokens(logits, settings.top_k, settings.temperature, min(known, logits.shape[1]))
        counts = is_target.sum(dim=1).cpu().numpy()
        columns = {IDS: ids, LOGPS: logps}
        return pa.RecordBatch.from_pydict(
            {
                name: list_column(values.flatten().cpu().numpy(), counts * values.shape[1])
                for name, values in columns.items()
            }
        )

    def compute(network: PreTrainedModel, block: pa.Table, report: Report) -> pa.Table:
        return teacher.forward(network, TokenRows(block), collate, read, report)

    rows_in_block = max(1, min(ROWS_IN_BLOCK, VALUES_IN_BLOCK // (settings.max_length * settings.top_k)))
    found = teacher.compute_files({"train": rows}, compute, rows_in_block, prepare)
    for split, files in found.items():
        (job_dir / OUTPUT / split).mkdir()
        for number, file in enumerate(files):
            place = job_dir / OUTPUT / split / f"{number:06}.arrow"
            try:
                place.hardlink_to(file)
            except OSError:  # a file system without hard links
                shutil.copyfile(file, place)
    return teacher.result(len(rows), rest=_mean_rest(found.get("train", []), IDS, LOGPS))


def require_same_tokens(
    teacher: str, theirs: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase, *, can_write: bool
) -> None:
    """Raises UserError if a token has another id in the teacher's tokenizer than in that of the rows, or none."""
    of_teacher, of_rows = theirs.get_vocab(), own.get_vocab()
    if of_teacher == of_rows:
        return
    tokens = sorted(of_rows.keys() | of_teacher.keys())
    differing = [token for token in tokens if of_teacher.get(token) != of_rows.get(token)]
    its, own_id = (ids.get(differing[0], "none") for ids in (of_teacher, of_rows))
    message = f"{teacher} has other tokens than the model: {len(differing):,} of {len(tokens):,} differ, such as "
    message += f"{differing[0]!r}, whose id is {its} in the teacher and {own_id} in the model. Name a teacher with the "
    message += "model's tokenizer"
    if can_write:
        message += ", or set training.teacher.loss to sequence, for which any tokenizer does"
    raise UserError.of("training", FIELD, f"{message}.")


def _mean_rest(files: Sequence[Path], ids: str, logps: str) -> float | None:
    """The mean probability of the tokens that are not stored, over all targets; None without any."""
    total, targets = 0.0, 0
    for file in files:
        table = read_table(file)
        stored, values = (table[name].combine_chunks().flatten().to_numpy() for name in (ids, logps))
        count = len(values) - len(stored)
        if count:
            total += float(np.exp(values.reshape(count, -1)[:, -1], dtype=np.float64).sum())
            targets += count
    return total / targets if targets else None


if __name__ == "__main__":
    run_program(main)
