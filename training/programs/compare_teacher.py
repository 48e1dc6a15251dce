"""The program that puts a model and its teacher side by side: `python -m training.programs.compare_teacher JOB`.

inputs     model, tokenizer (the trained model's folder), teacher_model, teacher_tokenizer (the teacher's folders), data
           (SPLIT.arrow, labels.json, and SPLIT.groups.arrow if rows have groups), predictions, teacher (each with
           SPLIT.parquet of the same rows)
settings   CompareTeacherSettings, below
output     comparison.json     the comparison of the predictions
           log/teacher.json    the result; a speed is another one each time
result     training.evaluation.scores.ComparedTeacher
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Literal

import pyarrow as pa

from training import task_types
from training.data.ipc_files import read_labels, read_table
from training.evaluation.constant_predictions import sample_evenly
from training.evaluation.row_groups import Groups
from training.evaluation.scores import ComparedTeacher, SizeAndSpeed
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, TaskSettings
from training.models.weights import read_shapes
from training.programs.compare import CompareSettings, compare_models
from training.programs.compare_exports import TIMED_ROWS, measure_in_turn
from training.programs.loaded_teacher import FIELD
from training.programs.score import read_predictions
from training.task_types.task_type import TaskType
from training.tokenization.transformers_encoder import load_encoder


class CompareTeacherSettings(CompareSettings):
    """The settings of a job of this program. `champion` is the teacher's name."""

    shown: list[str]
    """Metrics whose values are shown."""
    teacher: TaskSettings
    """The teacher's task type and options."""
    max_length: int
    """Tokens a row of the trained model."""
    teacher_max_length: int
    batch_size: int
    """Rows in one forward pass, for the speeds."""
    mixed_precision: Literal["no", "bf16", "fp16"]


def main(job_dir: Path, job: Job, events: Events) -> ComparedTeacher:
    """Compares both models by their predictions, and measures size and speed."""
    from training.evaluation import metrics
    from training.models import loading

    loading.make_deterministic()
    settings = CompareTeacherSettings.model_validate(job.settings)
    task_type, data, split = task_types.load(settings.task, settings.options), Path(job.inputs["data"]), settings.split
    labels = read_labels(data)
    new, old = (
        read_predictions(task_type, Path(job.inputs[name]) / f"{split}.parquet", labels)
        for name in ("predictions", "teacher")
    )

    def report(done: int, total: int) -> None:
        events.progress(phase="compare", split=split, done=done, total=total)

    comparison = compare_models(new, old, settings, None, report, Groups.read(data, split, new))
    stored = read_table(data / f"{split}.arrow")
    timed = stored.take(sample_evenly(len(stored), TIMED_ROWS))
    theirs = task_types.load(settings.teacher.task, settings.teacher.options)
    folders = [Path(job.inputs[name]) for name in ("model", "tokenizer", "teacher_model", "teacher_tokenizer")]
    works = [
        _work(task_type, folders[0], folders[1], settings.max_length, timed, settings),
        _work(theirs, folders[2], folders[3], settings.teacher_max_length, timed, settings),
    ]
    seconds = measure_in_turn(*works)
    sizes = [_size(folder, len(timed) / spent) for folder, spent in zip((folders[0], folders[2]), seconds, strict=True)]
    values = [metrics.compute(settings.shown, given) for given in (new, old)]
    figures = {name: (value, values[1][name]) for name, value in values[0].items() if name in values[1]}
    found = ComparedTeacher(student=sizes[0], teacher=sizes[1], figures=figures, comparison=comparison)
    (job_dir / OUTPUT / "comparison.json").write_text(comparison.model_dump_json(indent=1), encoding="utf-8")
    (job_dir / OUTPUT / "log").mkdir()
    (job_dir / OUTPUT / "log" / "teacher.json").write_text(found.model_dump_json(indent=1), encoding="utf-8")
    return found


def _work(
    task_type: TaskType,
    folder: Path,
    tokenizer_folder: Path,
    max_length: int,
    rows: pa.Table,
    settings: CompareTeacherSettings,
) -> partial[pa.Table]:
    """The prediction of the rows by a model on the CPU, from their tokens on."""
    from training.batching.batches import TokenRows
    from training.engine.inference import predict
    from training.models import loading

    (batch,) = rows.combine_chunks().to_batches()
    features = task_type.features(load_encoder(tokenizer_folder, folder, max_length), batch).rows
    collate = task_type.collator(loading.load_tokenizer(tokenizer_folder, folder), loading.padding_multiple())
    precision = "no" if settings.mixed_precision == "fp16" else settings.mixed_precision  # on CPUs it has no speed
    tokens, network = TokenRows(pa.Table.from_batches([features])), loading.load_trained(task_type, folder)
    return partial(predict, task_type, network, tokens, collate, settings.batch_size, precision)


def _size(folder: Path, rows_per_second: float) -> SizeAndSpeed:
    files = {path.name: path for path in folder.iterdir()}
    return SizeAndSpeed(
        parameters=sum(math.prod(shape) for shape in read_shapes(files, FIELD).values()),
        bytes=sum(path.stat().st_size for name, path in files.items() if name.endswith(".safetensors")),
        rows_per_second=round(rows_per_second, 1),
    )


if __name__ == "__main__":
    run_program(main)
