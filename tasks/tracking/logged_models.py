"""Logged models of MLflow 3: each exported model of a run is one, with the run's parameters and with metrics that name
the rows on which they were computed.

Registration logs a model with its files. A model that no run registers, such as a trial's, has only parameters and
metrics; MLflow calls it external.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tasks.tracking.connection import MODEL_TAG, REASON_TAG, VERDICT_TAG

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel, Metric
    from mlflow.entities import Run as MlflowRun

AT_ONCE = 1000  # metrics of a request
EXTERNAL_TAG = "mlflow.model.isExternal"
NOTE_TAG = "mlflow.note.content"
CONTEXTS = {"train": "training"}
"""MLflow's word for the use of a split's rows, where it is not the split's name."""
MACHINE = ("system/", "fit/speed/")
"""Prefixes of metrics of the machine, not of the model."""


def describe_model(client: MlflowClient, run_id: str, experiment: str, values: Mapping[str, Any]) -> None:
    """Adds what the logged model lacks: its run's parameters, tags, and metrics with their rows. Creates a model that
    is not registered, unless the experiment has one with the same digest. Returns without a change if the version was
    deleted meanwhile, and on a server of MLflow 2, which has no logged models. May be called twice.

    Args:
        experiment: the recipe's name.
        values: `version`, NAME/NUMBER, or None; `digest` of the model; `step` of the exported checkpoint; `tags`; and
            `rows`, the digest of each split's rows.
    """
    from mlflow.entities import LoggedModelInput, LoggedModelOutput
    from mlflow.exceptions import MlflowException

    run, tags = client.get_run(run_id), dict(values["tags"])
    try:
        model = _find_model(client, run, values, tags) or _create_model(client, run, experiment, values)
        if model.status != "READY":  # a kill came between both calls
            model = client.finalize_logged_model(model.model_id, "READY")
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "ENDPOINT_NOT_FOUND"):
            return
        raise
    if model.source_run_id != run_id:
        client.log_inputs(run_id, models=[LoggedModelInput(model.model_id)])
    else:
        outputs = run.outputs.model_outputs if run.outputs else []
        if model.model_id not in [output.model_id for output in outputs]:
            client.log_outputs(run_id, [LoggedModelOutput(model.model_id, values["step"])])
        if params := {name: value for name, value in run.data.params.items() if name not in (model.params or {})}:
            client.log_model_params(model.model_id, params)
    if changed := {name: value for name, value in tags.items() if (model.tags or {}).get(name) != value}:
        client.set_logged_model_tags(model.model_id, changed)
    metrics = [*_list_new_metrics(client, run, model, values)]
    for first in range(0, len(metrics), AT_ONCE):
        client.log_batch(run_id, metrics=metrics[first : first + AT_ONCE])


def _find_model(
    client: MlflowClient, run: MlflowRun, values: Mapping[str, Any], tags: dict[str, str]
) -> LoggedModel | None:
    """The logged model of the version, whose description and verdict come into the tags, or one with the same digest.

    The version's verdict may be that of an earlier run.
    """
    if values["version"] is None:
        same = f"tags.`{MODEL_TAG}` = '{values['digest']}'"
        return next(iter(client.search_logged_models([run.info.experiment_id], same, max_results=1)), None)
    name, number = values["version"].rsplit("/", 1)
    version = client.get_model_version(name, number)
    tags |= {tag: version.tags[tag] for tag in (VERDICT_TAG, REASON_TAG) if tag in version.tags}
    tags[NOTE_TAG] = version.description or ""
    return client.get_logged_model(version.source.rpartition("/")[2])


def _create_model(client: MlflowClient, run: MlflowRun, experiment: str, values: Mapping[str, Any]) -> LoggedModel:
    return client.create_logged_model(
        run.info.experiment_id,
        name=re.sub(r"[/:.%\"']", "_", experiment),  # which MLflow refuses
        source_run_id=run.info.run_id,
        tags={EXTERNAL_TAG: "true", MODEL_TAG: values["digest"]},
    )


def _list_new_metrics(
    client: MlflowClient, run: MlflowRun, model: LoggedModel, values: Mapping[str, Any]
) -> Iterator[Metric]:
    """The last values of the run's metrics, and those of its curves at the checkpoint's step. They keep time and step:
    MLflow ignores a point that the run has.

    A later run with the same model adds values that differ, and no counts and times of its own. A point that the model
    has is left out, because MLflow refuses it with other rows; so is a value that is no number, which MLflow would
    store as 0.
    """
    from mlflow.entities import Metric

    had, points, names = set(), set(), set()
    for one in model.metrics or []:
        had.add((one.key, one.dataset_digest, one.value))
        points.add((one.key, one.timestamp, one.step, one.run_id))
        names.add(one.key)
    for last in run.data.to_proto().metrics:
        point, split = last, _find_split(last.key, values["rows"])
        if last.key.startswith(MACHINE) or (split is None and last.key in names):
            continue
        if last.step not in (0, values["step"]):
            curve = client.get_metric_history(run.info.run_id, last.key)
            point = next((one for one in curve if one.step == values["step"]), None)
        rows = (split, values["rows"][split]) if split else (None, None)
        if (
            point is None
            or math.isnan(point.value)
            or (point.key, point.timestamp, point.step, run.info.run_id) in points
        ):
            continue
        if (point.key, rows[1], point.value) not in had:
            yield Metric(point.key, point.value, point.timestamp, point.step, model.model_id, *rows)


def _find_split(metric: str, splits: Mapping[str, str]) -> str | None:
    """The split on whose rows a metric was computed, from a name such as `score/SPLIT/accuracy/value`."""
    if metric.startswith("fit/eval_"):
        return "validation" if "validation" in splits else None
    split = metric.partition("/")[2].partition("/")[0]
    return split if split in splits else None
