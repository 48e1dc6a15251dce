"""The tracking of a flow run: its parameters, description and lineage record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from prefect import get_run_logger
from prefect.runtime import flow_run

from flows.pipeline import Finished
from tasks.cache.stage import Row, flatten
from tasks.prefect.flow_runs import page_url
from tasks.registry import lineage
from tasks.registry.model_card import format_metrics
from tasks.reports.model_reports import describe_verdict
from tasks.tracking.run_tracker import RunTracker
from tasks.tracking.tracker import JUDGED_TAG, RECIPE
from training.recipe import Recipe

MLFLOW_STATUS = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


def start_tracking(recipe: Recipe, run: str, changes: Sequence[str], parent: str | None = None) -> RunTracker:
    """Starts to track under the flow run's name, with the recipe as parameters and as a file. `parent`: the flow run of
    the sweep that it belongs to."""
    tracker = RunTracker(recipe.name, run, str(flow_run.get_name()), parent, recipe.training.report_to)
    values = recipe.model_dump(mode="json")
    fields = {name: value for name, value in flatten(values) if value not in (None, {})}
    tracker.log_params({name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()})
    tracker.set_tags(
        {
            JUDGED_TAG: f"{recipe.judged_split}/{recipe.compared_by}",
            **({"retrain.why": "; ".join(changes)} if changes else {}),
        }
    )
    tracker.describe(_describe(recipe, run, changes))
    tracker.log_text(RECIPE, yaml.safe_dump(values, sort_keys=False))
    return tracker


def end_tracking(
    tracker: RunTracker,
    recipe: Recipe,
    run: str,
    result: dict[str, Any],
    finished: Finished | None,
    changes: Sequence[str],
) -> None:
    """Ends the tracking, and adds the MLflow run's id and the changes to the result."""
    tracker.describe(_describe(recipe, run, changes, finished, result["problems"]))
    tracker.end(MLFLOW_STATUS[result["state"]])
    result["mlflow_run_id"] = tracker.mlflow_run_id
    if changes:
        result["why"] = list(changes)


def record_lineage(
    tracker: RunTracker, recipe: Recipe, run: str, state: str, rows: list[Row], finished: Finished | None
) -> None:
    """Stores the lineage record of the model. A failure is only logged: it fails no run."""
    made: dict[str, Any] = {}
    if finished is not None:
        made = {name: getattr(finished, name) for name in ("verdict", "version", "publication", "promotion")}
    try:
        record = lineage.build_record(recipe, run, rows, mlflow_run=tracker.mlflow_run_id, state=state, **made)
        tracker.log_text(lineage.LINEAGE, lineage.save_record(record))
    except Exception:
        get_run_logger().warning("the lineage record was not stored", exc_info=True)


def _describe(
    recipe: Recipe,
    run: str,
    changes: Sequence[str],
    finished: Finished | None = None,
    problems: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Describes the run in Markdown: links, verdict, metrics, problems, and changes. MLflow shows about three lines
    without a click."""
    parts = [" · ".join(_links(run, finished))]
    if finished is not None:
        parts += [describe_verdict(finished.verdict), format_metrics(recipe, finished.scores, finished.scores_of_folds)]
    parts += [f"**{problem['where']}**: {problem['message']}" for problem in problems]
    if changes:
        parts.append("\n".join(["What changed:", "", *(f"- {change}" for change in changes)]))
    return "\n\n".join(parts)


def _links(run: str, finished: Finished | None) -> list[str]:
    url = page_url(run)
    links = [f"[Flow run {run}]({url})" if url else f"Flow run {run}"]
    if finished and (version := finished.version):
        links.append(f"[{version.name} version {version.version}](models:/{version.name}/{version.version})")
    if finished and finished.publication:
        links.append(f"[{finished.publication.repo}]({finished.publication.url})")
    return links
