"""The MLflow run of a flow run: its parameters, description and lineage record."""

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
from tasks.registry.model_card import format_figures
from tasks.tracking.connection import version_page
from tasks.tracking.mlflow_run import JUDGED_TAG, NOTE_TAG, Tracker
from tasks.tracking.reports import describe_verdict
from training.recipe import Recipe

MLFLOW_STATUS = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


def start_tracking(recipe: Recipe, run: str, changes: Sequence[str], parent: str | None = None) -> Tracker:
    """Starts the MLflow run under the flow run's name, with the recipe as parameters and as a file. `parent`: the flow
    run of the sweep that it belongs to."""
    tracker, values = Tracker(recipe.name, run, str(flow_run.get_name()), parent), recipe.model_dump(mode="json")
    fields = {name: value for name, value in flatten(values) if value is not None}
    tracker.log_params({name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()})
    tracker.set_tags(
        {
            JUDGED_TAG: f"{recipe.judged_split}/{recipe.compared_by}",
            NOTE_TAG: _describe(recipe, run, changes),
            **({"retrain.why": "; ".join(changes)} if changes else {}),
        }
    )
    tracker.log_text("recipe.yaml", yaml.safe_dump(values, sort_keys=False))
    return tracker


def end_tracking(
    tracker: Tracker,
    recipe: Recipe,
    run: str,
    result: dict[str, Any],
    finished: Finished | None,
    changes: Sequence[str],
) -> None:
    """Ends the MLflow run, and adds its id and the changes to the result."""
    tracker.set_tags({NOTE_TAG: _describe(recipe, run, changes, finished, result["problems"])})
    tracker.end(MLFLOW_STATUS[result["state"]])
    result["mlflow_run_id"] = tracker.mlflow_run_id
    if changes:
        result["why"] = list(changes)


def record_lineage(
    tracker: Tracker, recipe: Recipe, run: str, state: str, rows: list[Row], finished: Finished | None
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


def list_tracking_warnings(tracker: Tracker) -> list[str]:
    """Lists the tracker's warnings, including data that MLflow lacks after the end of the run."""
    if tracker.lost:
        lost = f"MLflow lacks the end of this run for good: {tracker.folder} was not writable, and its data is lost."
        return [*tracker.warnings, lost]
    if tracker.trouble:
        return [*tracker.warnings, f"MLflow lacks a part of this run ({tracker.trouble}); the next run delivers it."]
    return [*tracker.warnings]


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
        parts += [describe_verdict(finished.verdict), format_figures(recipe, finished.scores)]
    parts += [f"**{problem['where']}**: {problem['message']}" for problem in problems]
    if changes:
        parts.append("\n".join(["What changed:", "", *(f"- {change}" for change in changes)]))
    return "\n\n".join(parts)


def _links(run: str, finished: Finished | None) -> list[str]:
    url = page_url(run)
    links = [f"[Flow run {run}]({url})" if url else f"Flow run {run}"]
    if finished and (version := finished.version):
        page = version_page(version.name, version.version)
        links.append(f"[{version.name} version {version.version}](#/{page})")
    if finished and finished.publication:
        links.append(f"[{finished.publication.repo}]({finished.publication.url})")
    return links
