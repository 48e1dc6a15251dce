"""Registered versions under monitoring: the facts that drift reports and later evaluations need, and the history of
evaluations on rows whose labels arrived after the release.

The history is a tag of the version, its metrics by number are metrics of the MLflow run that registered it, and its
reports are files of that run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.cache.results import Artifact, PinnedVersion
from tasks.home import home, named_lock
from tasks.jobs.retries import BatchDivision
from tasks.registry import lineage, untrusted_code
from tasks.registry.model_spec import find_model, read_by
from tasks.registry.versions import (
    EVALUATIONS_TAG,
    LOAD_DATA_TAG,
    PREDICT_TAG,
    RECIPE_TAG,
    SPLIT_TAG,
    read_metrics,
    read_name,
    read_tag,
)
from tasks.shared_store.bucket_remote import find_artifact
from tasks.tracking.connection import MODEL_TAG, connect, mlflow_errors
from training import task_types
from training.data.load_rows import LoadDataResult
from training.evaluation.scores import Scores
from training.evaluation.stored_calibration import Calibration
from training.problems import Problem, UserError, nearest
from training.recipe import Recipe, parse
from training.recipe.field_types import split_version_name
from training.recipe.fields import Drift
from training.recipe.reading_rules import ReadingRules
from training.recipe.tables.metrics import PAIRS, UNPAIRED
from training.task_types.task_type import BaseReference

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion


class MonitoredVersion(BaseModel):
    """A registered version."""

    model_config = ConfigDict(frozen=True)

    pinned: PinnedVersion
    """Its name, number, model and options."""
    task: str
    options: dict[str, Any]
    columns: dict[str, str]
    """The names of the model's input columns in files, by the task type's names."""
    rules: ReadingRules = ReadingRules()
    """How its rows are read."""
    calibration: Calibration | None = None
    recipe: str
    """The name of the recipe that registered it."""
    split: str
    """The split that was judged."""
    load_data: str
    """The key of the artifact with its rows."""
    predict: str | None
    """The key of the artifact with its predictions on these rows."""
    expected: Scores
    """Of the judged split, at its registration."""
    mlflow_run: str | None
    """The run that registered it."""

    def divide_batches(self, program: str, rows: int) -> Callable[[Path], BatchDivision]:
        """As `retries.divide_batches`, for a program that uses the version in full precision."""
        return lambda model: BatchDivision(
            rows,
            model,
            program=program,
            max_length=self.pinned.max_length,
            mixed_precision="no",
            options=self.options,
        )


def find_monitored(model: str, own_task: str = "", data: Mapping[str, Any] | None = None) -> MonitoredVersion:
    """Finds `NAME`, `NAME@ALIAS` or `NAME/VERSION`; a NAME alone is its champion. `data` has other values of fields by
    which its rows are read.

    Raises UserError as `model_spec.find_model` and `read_by` do, and for a version that no run of this project
    registered.
    """
    name, alias, number = split_version_name(model)
    spec = read_by(find_model(name, alias, number, own_task), data)
    with mlflow_errors():
        found = connect().get_model_version(name, spec.version)
    needed = {MODEL_TAG, RECIPE_TAG, SPLIT_TAG, LOAD_DATA_TAG}
    if not needed <= found.tags.keys():
        raise UserError.of(
            "registry", "NAME", f"{name}/{spec.version} was not registered by a run of finetune: run a recipe for it."
        )
    return MonitoredVersion(
        pinned=spec.pinned,
        task=spec.task["task"],
        options=dict(spec.task["options"]),
        columns=dict(spec.columns),
        rules=spec.rules,
        calibration=spec.calibration,
        recipe=str(read_name(found, RECIPE_TAG)),
        split=found.tags[SPLIT_TAG],
        load_data=str(read_name(found, LOAD_DATA_TAG)),
        predict=read_name(found, PREDICT_TAG),
        expected=read_metrics(found).get(found.tags[SPLIT_TAG], {}),
        mlflow_run=found.run_id,
    )


def require_single_inputs(version: MonitoredVersion) -> None:
    """Raises UserError for a model that rates or compares answers: it has no one prediction of a row to observe."""
    if task_types.class_of(version.task).prediction_type in (PAIRS, UNPAIRED):
        message = f"{version.pinned} compares answers (task {version.task}), whose drift is not measured: "
        raise UserError.of("registry", "NAME", message + "compare it with a new model on new rows, by `finetune run`.")


def require_no_reference(version: MonitoredVersion) -> None:
    """Raises UserError for a model whose metrics are relative to a reference model, which new rows have no part of."""
    task_type = task_types.load(version.task, version.options)
    if isinstance(task_type, BaseReference) and task_type.needs_reference:
        message = f"metrics of {version.pinned} are relative to its base model (task {version.task}), whose part is "
        message += "not computed for new rows: add them to a split of the recipe, and `finetune run` compares it there."
        raise UserError.of("registry", "NAME", message)


def find_rows(version: MonitoredVersion) -> Artifact[LoadDataResult]:
    """Finds the artifact of load_data with the version's rows, here or in the shared store. Raises UserError."""
    rows = find_artifact("load_data", version.load_data)
    try:
        rows = rows and rows.model_copy(update={"result": LoadDataResult.model_validate(rows.result)})
    except ValidationError:  # of another version of this project
        rows = None
    if rows is None or f"{version.split}.arrow" not in rows.parts:
        message = (
            f"the {version.split} rows of {version.pinned} are not in {home()}: run its recipe again here, "
            "or share the store of the home that registered it."
        )
        raise UserError.of("registry", "NAME", message)
    return rows


def find_predictions(version: MonitoredVersion) -> Artifact | None:
    """Finds the artifact with the version's predictions on its judged split, here or in the shared store; None if it
    cannot be had."""
    found = find_artifact("predict", version.predict) if version.predict is not None else None
    return found if found is not None and f"{version.split}.parquet" in found.parts else None


def read_recipe(version: MonitoredVersion, run_code: bool) -> Recipe:
    """Reads the recipe that registered the version.

    Raises UserError if it is unknown or no longer valid, and without `run_code` for code that it names, but for the
    version's own task type, to which `find_monitored` needs consent.
    """
    record = lineage.find_version(str(version.pinned))
    if not run_code:
        source, run = f"the record of {version.pinned}", record["run"]["flow_run_id"]
        untrusted_code.require_consent(source, record[lineage.RECIPE_WITHOUT_DEFAULTS], run=run, named=[version.task])
    return parse(record[lineage.RECIPE_WITHOUT_DEFAULTS])


def read_drift_section(version: MonitoredVersion, overrides: Mapping[str, Any]) -> Drift:
    """Reads `release.drift` of the recipe that registered the version, with these fields replaced. Raises UserError if
    the version's record cannot be read, and for unknown fields and values."""
    values = lineage.find_version(str(version.pinned))["recipe"]["release"].get("drift", {})
    problems = [
        Problem(
            kind="option",
            where=f"thresholds.{name}",
            message=f"is unknown: choose from {', '.join(Drift.model_fields)}.{nearest(name, Drift.model_fields)}",
        )
        for name in overrides
        if name not in Drift.model_fields
    ]
    if problems:
        raise UserError(problems)
    try:
        return Drift.model_validate({**values, **overrides})
    except ValidationError as error:
        raise UserError(
            [
                Problem(
                    kind="option",
                    where=f"thresholds.{'.'.join(map(str, detail['loc']))}",
                    message=f"{detail['msg']}, not {detail['input']!r}.",
                )
                for detail in error.errors(include_url=False)
            ]
        ) from error


MAX_ENTRIES = 100
"""Of the tag; MLflow keeps the metrics of all."""
MAX_NAMES = 10


class LaterEvaluation(BaseModel):
    """The metrics of a version on some rows."""

    model_config = ConfigDict(frozen=True)

    number: int
    """From 1. Rows that were evaluated before keep their number."""
    time: str
    """In UTC, such as 2026-01-31T12:00:00+00:00."""
    rows: int
    digest: str
    """Of the rows."""
    files: list[str]
    """Names, the first ones."""
    metrics: Scores
    below: list[str]
    """Metrics outside of the gate's bounds, such as `accuracy 0.71 < 0.75`."""


def read_evaluations(version: ModelVersion) -> list[LaterEvaluation]:
    """Reads the history from the version's tag, oldest first; entries that cannot be read are left out. Raises
    UserError as `read_tag` does."""
    found = []
    for entry in read_tag(version, EVALUATIONS_TAG, list[Any], "[]"):
        try:
            found.append(LaterEvaluation.model_validate(entry))
        except ValidationError:  # of a later version of the project
            continue
    return found


def find_missed_bounds(metrics: Scores, minimum: Mapping[str, float], maximum: Mapping[str, float]) -> list[str]:
    """The metrics outside of the gate's bounds. An undefined metric keeps none."""
    missed = []
    for bounds, sign, factor in ((minimum, "<", 1), (maximum, ">", -1)):
        for name, bound in bounds.items():
            value = metrics[name]["value"] if name in metrics else None
            if name in metrics and (value is None or factor * value < factor * bound):
                missed.append(f"{name} {'undefined' if value is None else f'{value:.4g}'} {sign} {bound:g}")
    return missed


def record(
    version: MonitoredVersion,
    *,
    rows: int,
    digest: str,
    metrics: Scores,
    bounds: tuple[Mapping[str, float], Mapping[str, float]],
    names: Sequence[str],
    files: Sequence[Path],
) -> LaterEvaluation:
    """Adds an evaluation to the history, or replaces the one of the same rows. Raises MlflowFailed.

    Args:
        version: The version.
        rows: The number of rows.
        digest: Of the rows.
        metrics: By name: value, low and high.
        bounds: The gate's minimum and maximum.
        names: Of the files with the rows.
        files: The report, for MLflow.
    """
    name, number, now = version.pinned.name, version.pinned.version, datetime.now(UTC)
    with mlflow_errors(), named_lock(f"registry-{name}"):
        from mlflow.entities import Metric

        client = connect()
        history = read_evaluations(client.get_model_version(name, number))
        known = next((entry.number for entry in history if entry.digest == digest), None)
        found = LaterEvaluation(
            number=known or max((entry.number for entry in history), default=0) + 1,
            time=now.isoformat(timespec="seconds"),
            rows=rows,
            digest=digest,
            files=list(names)[:MAX_NAMES],
            metrics=dict(metrics),
            below=find_missed_bounds(metrics, *bounds),
        )
        kept = [*(entry for entry in history if entry.number != found.number), found]
        text = json.dumps([entry.model_dump(mode="json") for entry in kept[-MAX_ENTRIES:]], ensure_ascii=False)
        client.set_model_version_tag(name, number, EVALUATIONS_TAG, text)
        if version.mlflow_run is not None:
            for file in files:
                client.log_artifact(version.mlflow_run, str(file), f"evaluated/{found.number:04d}")
            stamp = int(now.timestamp() * 1000)
            values = {metric: score["value"] for metric, score in metrics.items() if score["value"] is not None}
            entries = [Metric(f"evaluated/{key}", value, stamp, found.number) for key, value in values.items()]
            client.log_batch(version.mlflow_run, metrics=entries)
    return found
