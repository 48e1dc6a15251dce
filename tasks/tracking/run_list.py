"""The list of past runs, from MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tasks.tracking.connection import FLOW_RUN_TAG, connect, mlflow_errors, search_all
from tasks.tracking.outbox import was_killed_here
from tasks.tracking.tracker import JUDGED_TAG, STUDY_TAG, TRIAL_STATE_TAG, TRIAL_TAG, VERSION_TAG
from training.problems import UserError, nearest

if TYPE_CHECKING:
    from mlflow.entities import Run

STATES = {"FINISHED": "completed", "FAILED": "failed", "KILLED": "killed", "RUNNING": "running"}


def list_runs(recipe: str | None, limit: int) -> list[dict[str, Any]]:
    """Lists the last `limit` runs of one recipe, or of all, newest first, as JSON values: ids, `recipe`, `state`,
    `started_ms`, `seconds`, the `judged` figure, `verdict`, `reason`, the registered `version`, and of a sweep its
    `part`: sweep or the trial.

    Raises UserError if the recipe has not run, and MlflowFailed if MLflow does not answer.
    """
    with mlflow_errors():
        client = connect()
        names = {experiment.experiment_id: experiment.name for experiment in search_all(client.search_experiments)}
        chosen = [id for id, name in names.items() if recipe in (None, name)]
        if recipe is not None and not chosen:
            recipes = ", ".join(sorted({*names.values()} - {"Default"})) or "nothing has run yet"
            message = f"no recipe {recipe!r} has run: {recipes}.{nearest(recipe, list(names.values()))}"
            raise UserError.of("registry", "RECIPE", message)
        # Runs that other programs track on the same server have no such tag.
        runs = client.search_runs(
            chosen, f"tags.`{FLOW_RUN_TAG}` LIKE '%'", max_results=limit, order_by=["attributes.start_time DESC"]
        )
        return [_build_row(run, names[run.info.experiment_id]) for run in runs]


def _build_row(run: Run, recipe: str) -> dict[str, Any]:
    tags, started_ms = run.data.tags, run.info.start_time
    state = STATES.get(run.info.status, run.info.status.lower())
    if state == "running" and was_killed_here(tags[FLOW_RUN_TAG]):
        state = "killed"
    if state == "killed":  # MLflow has no word for a pause
        state = tags.get(TRIAL_STATE_TAG, state)
    ended_ms = run.info.end_time or (int(time.time() * 1000) if state == "running" else None)
    return {
        "flow_run_id": tags[FLOW_RUN_TAG],
        "mlflow_run_id": run.info.run_id,
        "recipe": recipe,
        "part": f"trial {tags[TRIAL_TAG]}" if TRIAL_TAG in tags else "sweep" if STUDY_TAG in tags else None,
        "state": state,
        "started_ms": started_ms,
        "seconds": None if ended_ms is None else (ended_ms - started_ms) / 1000,
        "judged": _read_judged_figure(tags, run.data.metrics),
        "verdict": tags.get("gate.decision"),
        "reason": tags.get("gate.reason"),
        "version": tags.get(VERSION_TAG),
    }


def _read_judged_figure(tags: Mapping[str, str], metrics: Mapping[str, float]) -> dict[str, Any] | None:
    """The figure by which models of the recipe are compared; None if the run has not computed it yet."""
    name = tags.get(JUDGED_TAG, "")
    if f"score/{name}/value" not in metrics:
        return None
    split, _, metric = name.partition("/")
    figures = {part: metrics.get(f"score/{name}/{part}") for part in ("value", "low", "high")}
    return {"split": split, "metric": metric, **figures}
