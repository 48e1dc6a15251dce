"""The result of a run as JSON, and the event of its verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import to_jsonable_python

from flows.pipeline import Finished
from tasks.cache.digests import Digests
from tasks.cache.stage import Row
from tasks.home import home
from tasks.jobs.launch import JobFailed
from tasks.reports.formatting import format_score
from training.problems import UserError
from training.recipe import Recipe


def build_result(
    state: str,
    rows: Sequence[Row],
    *,
    flow_run_id: str | None = None,
    finished: Finished | None = None,
    error: BaseException | None = None,
    where: str = "recipe",
) -> dict[str, Any]:
    """Builds the result of a run. `mlflow_run_id` and `warnings` are filled after delivery to MLflow.

    Args:
        state: completed, failed or interrupted.
        rows: A row for each stage that began.
        finished: The results of all stages if all succeeded.
        error: The error that ended the run.
        where: The place of the error if no stage began.
    """
    last = rows[-1].name if rows else where
    return {
        "state": state,
        "flow_run_id": flow_run_id,
        "mlflow_run_id": None,
        "stages": [
            {
                "name": row.name,
                "key": row.key,
                "state": row.state,
                "seconds": round(row.seconds, 3),
                "artifact": row.artifact,
                "fetched_bytes": row.fetched_bytes,
            }
            for row in rows
        ],
        "metrics": finished.scores.result if finished else {},
        "out_of_fold": finished.scores_of_folds.result["train"] if finished and finished.scores_of_folds else {},
        "verdict": finished.verdict.model_dump(mode="json") if finished else None,
        "calibration": finished.calibration.result.model_dump(mode="json")
        if finished and finished.calibration
        else None,
        "exports": to_jsonable_python(finished.exports.result) if finished and finished.exports else {},
        "model": _describe_model(finished) if finished else None,
        "problems": list_problems(error, next((row.name for row in rows if row.state == "failed"), last)),
        "warnings": [],
    }


def state_of(error: BaseException | None) -> str:
    """The state of a run that this error ended: completed, failed or interrupted."""
    return "completed" if error is None else "failed" if isinstance(error, Exception) else "interrupted"


def list_problems(error: BaseException | None, where: str) -> list[dict[str, Any]]:
    """Lists the problems behind the error that ended a run, as JSON values. `where`: the place of other errors."""
    if error is None:
        return []
    if isinstance(error, UserError):
        return [problem.model_dump() for problem in error.problems]
    kind = error.failure.kind if isinstance(error, JobFailed) else "internal"
    if isinstance(error, KeyboardInterrupt):
        kind = "interrupted"
    return [{"kind": kind, "where": where, "message": str(error) or type(error).__name__}]


def _describe_model(finished: Finished) -> dict[str, Any]:
    folder, version = finished.trained.path / "model", finished.version
    weights = folder / "model.safetensors"
    # The weights of a large model are several files: then the digest of the folder identifies them.
    digest = Digests(home()).of(weights) if weights.is_file() else finished.trained.parts["model"]
    return {
        "path": str(folder),
        "sha256": digest,
        "registered": f"{version.name}/{version.version}" if version else None,
        "alias": finished.promotion.alias if finished.promotion else None,
        "published": finished.publication.url if finished.publication else None,
    }


def build_verdict_event(recipe: Recipe, result: Mapping[str, Any], champion: str | None) -> dict[str, Any]:
    """Builds the payload of the event of a run's verdict.

    Args:
        recipe: The run's recipe.
        result: The run's result; the decision of a failed run is `failed`.
        champion: The version in the comparison, `name/version`.
    """
    split, metric = recipe.judged_split, recipe.compared_by
    verdict, model, problems = result["verdict"], result["model"] or {}, result["problems"]
    score = result["metrics"].get(split, {}).get(metric)
    decision = verdict["decision"] if verdict else "failed"
    promoted = "promoted" if model.get("alias") else "good enough to be promoted"
    words = {"promote": promoted, "keep": "kept as challenger", "reject": "rejected", "failed": "failed"}
    causes = "; ".join(f"{problem['where']}: {problem['message']}" for problem in problems)
    return {
        "decision": decision,
        "summary": words[decision] + (f", {metric} {format_score(score)} on {split}" if score else ""),
        "reason": verdict["reason"] if verdict else causes,
        "split": split,
        "metric": metric,
        **{part: score.get(part) if score else None for part in ("value", "low", "high", "baseline")},
        "champion_before": champion,
        "version": model.get("registered"),
        "mlflow_run_id": result["mlflow_run_id"],
        "flow_run_id": result["flow_run_id"],
    }
