"""Stages around the trainings of folds: the fold of each training row, and the predictions of all folds together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.cache.results import Artifact, Lock, label_names
from tasks.cache.stage import Work
from tasks.jobs.hardware import visible_gpus
from tasks.jobs.job import StageJob, files_of, stage
from training.data import folds as row_folds
from training.data.folds import FoldsResult, OutOfFoldResult
from training.data.ipc_files import groups_file
from training.jobs.protocol import Settings
from training.problems import UserError
from training.recipe import Recipe
from training.recipe.rules.column_rules import source_columns

FoldsArtifact = Artifact[FoldsResult]


class AssignFoldsSettings(Settings):
    """The settings of the assignment."""

    folds: int
    inputs: list[str]
    """The columns that the model reads."""
    labels: list[str]


class OutOfFoldSettings(Settings):
    """The join has no settings."""


def require_gpus(recipe: Recipe, lock: Lock) -> None:
    """Raises UserError if the trainings of folds that run at once need more GPUs than this machine has."""
    gpus, processes, at_once = len(visible_gpus()), lock.num_processes, recipe.evaluation.parallel_folds
    if gpus and at_once * processes > gpus:
        message = f"{at_once} trainings at once with {processes} processes each need {at_once * processes} GPUs, and "
        message += f"there are {gpus}: lower it or compute.num_processes."
        raise UserError.of("compute", "evaluation.parallel_folds", message)


def require_rows(recipe: Recipe, rows: Path) -> None:
    """Raises UserError if a fold has no rows. `rows` is the folder of load_data."""
    if recipe.evaluation.folds:
        row_folds.assign(rows, _inputs(recipe), recipe.evaluation.folds)


def _inputs(recipe: Recipe) -> list[str]:
    return [column.name for column in source_columns(recipe).inputs]


@stage(FoldsResult, may_repeat=True)
def assign_folds(recipe: Recipe, data: Artifact) -> StageJob:
    """Assigns each training row to a fold by a hash of its text, or of its group, and warns of labels that are in one
    fold alone.

    The training rows with their groups, and the number of folds.
    """
    return StageJob(
        _assign,
        AssignFoldsSettings(
            folds=recipe.evaluation.folds or 0,
            inputs=_inputs(recipe),
            labels=label_names(data),
        ),
        reads={"data": files_of(data, ["train.arrow", groups_file("train")])},
        code=["training.data.folds"],
        libraries=("numpy", "pyarrow"),
        field_names={"folds": "evaluation.folds"},
    )


def _assign(work: Work, settings: AssignFoldsSettings, inputs: Mapping[str, Path]) -> FoldsResult:
    found = row_folds.assign(inputs["data"], settings.inputs, settings.folds)
    row_folds.write(found, work.out / "folds.arrow")
    for message in row_folds.find_lone_labels(inputs["data"], found, settings.labels):
        work.warning(message)
    return FoldsResult(rows=[int((found == fold).sum()) for fold in range(1, settings.folds + 1)])


@stage(OutOfFoldResult)
def out_of_fold(recipe: Recipe, *predictions: Artifact) -> StageJob:
    """Joins the predictions of all folds: one for each training row, by a model that has not seen it, in the form in
    which `predict` stores a split.

    The predictions of each fold.
    """
    return StageJob(
        _join,
        OutOfFoldSettings(),
        reads={artifact.stage: files_of(artifact, ["train.parquet"]) for artifact in predictions},
        libraries=("pyarrow",),
    )


def _join(work: Work, settings: OutOfFoldSettings, inputs: Mapping[str, Path]) -> OutOfFoldResult:
    parts = [pq.read_table(folder / "train.parquet") for folder in inputs.values()]
    rows = pa.concat_tables(parts).sort_by("row").combine_chunks()
    pq.write_table(rows, work.out / "train.parquet", compression="zstd")
    return OutOfFoldResult(rows=rows.num_rows)
