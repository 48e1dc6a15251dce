"""Stage: the check whether a teacher was trained on rows by which its student is evaluated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal

from tasks.cache.results import Artifact, Lock
from tasks.cache.stage import Work
from tasks.jobs.job import Files, StageJob, files_of, stage
from tasks.registry.pinned_versions import find_training_rows
from training.data.duplicates import RepeatedRows, find_repeated
from training.data.ipc_files import ipc_reader
from training.jobs.protocol import NotInKey, Settings
from training.problems import Problem, UserError
from training.recipe import Recipe
from training.recipe.data_fields import EVALUATED
from training.recipe.rules.column_rules import source_columns
from training.recipe.source_columns import StoredColumn
from training.recipe.tables.row_checks import LEVELS, TEACHER_ROWS

FIELD = "training.teacher.path"


class CheckTeacherSettings(Settings):
    """The settings of the check."""

    inputs: list[str]
    """The columns that the model reads."""
    splits: list[str]
    """The splits by which the model is evaluated."""
    teacher: Annotated[str, NotInKey("its rows are in the key")]
    level: Literal["error", "warning"]


def find_teachers_rows(recipe: Recipe, lock: Lock, data: object) -> Artifact | None:
    """The artifact of load_data with the rows that the recipe's teacher was trained on; None if there is nothing to
    compare: without a teacher, if its rows cannot be had, if the recipe ignores the check, or if they are the training
    rows of `data`, which the check shared_rows has compared.

    `data` is the artifact of load_data. A plan passes another value if it is unknown.
    """
    if lock.teacher_version is None or recipe.data.checks.get(TEACHER_ROWS) == "ignore":
        return None
    rows, own = find_training_rows(lock.teacher_version), data.parts if isinstance(data, Artifact) else {}
    if rows is None or (rows.parts["train.arrow"] == own.get("train.arrow") and not recipe.evaluation.folds):
        return None
    return rows


@stage(dict[str, RepeatedRows], where="the teacher was trained on other rows than the model")
def check_teacher(recipe: Recipe, lock: Lock, data: Artifact, taught: Artifact) -> StageJob:
    """Counts the rows of validation and test that the recipe's teacher was trained on, and with folds those of train:
    figures on them flatter the model and its teacher. `taught` has the teacher's rows.

    The training rows of the teacher, the evaluated rows, and the level of the check.
    """
    splits = [*EVALUATED, *(["train"] if recipe.evaluation.folds else [])]
    level = recipe.data.checks.get(TEACHER_ROWS, LEVELS[TEACHER_ROWS])
    assert level != "ignore"
    return StageJob(
        _check,
        CheckTeacherSettings(
            inputs=[column.name for column in source_columns(recipe).inputs],
            splits=splits,
            teacher=f"the teacher {lock.teacher_version}",
            level=level,
        ),
        reads={
            "data": files_of(data, [f"{split}.arrow" for split in splits]),
            "taught": Files(taught.path, {"teacher/train.arrow": taught.parts["train.arrow"]}, ("train.arrow",)),
        },
        code=["training.data.duplicates"],
        libraries=("numpy", "pyarrow"),
        field_names={"level": f"data.checks.{TEACHER_ROWS}", "upstream.teacher/train.arrow": "the teacher's rows"},
    )


def _check(work: Work, settings: CheckTeacherSettings, inputs: Mapping[str, Path]) -> dict[str, RepeatedRows]:
    """The rows of each split. Raises UserError for rows of the teacher if the level is error."""
    taught, found = inputs["taught"] / "train.arrow", dict[str, RepeatedRows]()
    columns = [StoredColumn(name, name, "text", FIELD) for name in settings.inputs]
    with ipc_reader(taught) as reader:
        lacking = [name for name in settings.inputs if name not in reader.schema.names]
    if lacking:
        message = f"{FIELD}: {settings.teacher} was trained on rows without {', '.join(lacking)}, so it is not checked "
        work.note(f"{message}whether the model is evaluated on some of them.")
        return {}
    for split in settings.splits:
        if (file := inputs["data"] / f"{split}.arrow").is_file():
            found[split] = find_repeated(taught, file, columns)
    problems = [*_find_problems(settings, found)]
    if problems and settings.level == "error":
        raise UserError(problems)
    for problem in problems:
        work.warning(f"{problem.where}: {problem.message}")
    return found


def _find_problems(settings: CheckTeacherSettings, found: Mapping[str, RepeatedRows]) -> Iterator[Problem]:
    for split, one in found.items():
        if one.repeated:
            rows = "is a training row" if one.repeated == 1 else "are training rows"
            figures = "figures" if split != "train" else "out-of-fold figures"
            message = (
                f"{one.repeated:,} of {one.rows:,} rows of {split} {rows} of {settings.teacher} (such as {one.first}): "
                f"{figures} on them flatter it and the model. Give both recipes the same splits, choose a teacher that "
                f"was not trained on them, or set data.checks.{TEACHER_ROWS} to ignore."
            )
            yield Problem(kind="data", where=FIELD, message=message, check=TEACHER_ROWS, level=settings.level)
