"""Stages: the rows of train whose labels are probably wrong, and their file in MLflow."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tasks.cache.results import Artifact
from tasks.cache.stage import Inputs, Work, action
from tasks.home import registry_place
from tasks.jobs.job import StageJob, files_of, stage
from tasks.registry.lineage import RECIPE_WITHOUT_DEFAULTS
from tasks.shared_store.bucket_remote import find_artifact
from tasks.tracking.connection import connect, mlflow_errors
from training import task_types
from training.data.corrections import COLUMNS, FIELD, parse_lines, read_decided, write_review
from training.evaluation.scores import SuspectLabels
from training.problems import UserError
from training.programs.list_labels import OTHER, SPLIT, ListLabelsSettings
from training.recipe import Recipe, parse
from training.recipe.rules.column_rules import source_columns

PREDICTIONS = "out_of_fold"
"""The stage with the predictions of each training row by a model that has not seen it."""
REVIEW = "review.csv"


class OutOfFold(NamedTuple):
    """The rows of a run, and their out-of-fold predictions."""

    recipe: Recipe
    data: Artifact
    predictions: Artifact
    mlflow_run: str | None


def find_out_of_fold(record: Mapping[str, Any], name: str) -> OutOfFold:
    """Finds the artifacts of the run with this lineage record. Raises UserError if it has no such predictions, or they
    are no longer stored."""
    recipe = parse(record[RECIPE_WITHOUT_DEFAULTS])
    keys = {one["name"]: one["key"] for one in record.get("stages", ())}
    if not keys.get(PREDICTIONS):
        message = f"{name} has no predictions of its training rows by models that have not seen them: add "
        message += "`evaluation: {folds: 5}` to the recipe, and run it again."
        raise UserError.of("recipe", "evaluation.folds", message)
    found = list[Artifact]()
    for one in ("load_data", PREDICTIONS):
        if (artifact := find_artifact(one, keys[one])) is None:
            message = f"the output of {one} in the run of {name} is no longer stored: run the recipe again."
            raise UserError.of("registry", "NAME", message)
        found.append(artifact)
    return OutOfFold(recipe, found[0], found[1], record["run"].get("mlflow_run_id"))


@stage(SuspectLabels)
def list_labels(recipe: Recipe, data: Artifact, predictions: Artifact, other: Artifact | None = None) -> StageJob:
    """Lists the training rows whose labels are probably wrong, those that are equal to others with another label, and
    those that another source labels otherwise.

    The rows, their out-of-fold predictions, the names of the rows that data.corrections decides, and the labels of the
    other source if there is one.
    """
    task_type = task_types.load(**recipe.task_and_options)
    return StageJob(
        "training.programs.list_labels",
        ListLabelsSettings(
            task=recipe.task,
            options=task_type.options_of("score"),
            columns=[column.name for column in source_columns(recipe).inputs],
            decided=sorted(read_decided(recipe.data.corrections)) if recipe.data.corrections else [],
        ),
        reads={
            "predictions": files_of(predictions, [f"{SPLIT}.parquet"]),
            "data": files_of(data, ["labels.json", f"{SPLIT}.arrow"]),
            **({"other": files_of(other, ["labels.json", f"{OTHER}.arrow"])} if other is not None else {}),
        },
        code=task_types.code_modules(recipe.task),
        users_code=task_types.user_code(recipe.task),
        libraries=("numpy", "scipy", "pyarrow"),
        field_names={"decided": FIELD},
    )


def require_new(out: Path) -> None:
    """Raises UserError if there is such a file already, because it may hold decisions."""
    if out.exists():
        message = f"{str(out)!r} exists, and may hold decisions: name another file, or remove it."
        raise UserError.of("option", "out", message)


def save_review(recipe: Recipe, listed: Artifact, out: Path) -> None:
    """Writes the file of the rows to look at, behind the rows that people have decided on."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if recipe.data.corrections is None:
        shutil.copyfile(listed.path / REVIEW, out)
        return
    decided = read_decided(recipe.data.corrections).values()
    # Not by read_lines: files that a recipe names are refused if they lie in the home.
    lines = [*decided, *(cells for _, cells in parse_lines((listed.path / REVIEW).read_bytes(), REVIEW))]
    write_review(([cells[name] for name in COLUMNS] for cells in lines), out)


def log_inputs(listed: Artifact[SuspectLabels], mlflow_run: str) -> Inputs:
    """The list, and the run in MLflow."""
    return Inputs({"registry": registry_place(), "run": mlflow_run, "upstream": {"list_labels": listed.digest}})


@action(log_inputs)
def log_labels(work: Work, listed: Artifact[SuspectLabels], mlflow_run: str) -> None:
    """Adds the list to the run in MLflow, in the folder `labels`."""
    with mlflow_errors():
        client = connect()
        for name in (REVIEW, "labels.json"):
            client.log_artifact(mlflow_run, str(listed.path / name), "labels")
