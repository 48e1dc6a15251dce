"""What a run has to say at its end: the JSON that `finetune run --json` writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flows.pipeline import Finished
from tasks.cache import settings
from tasks.cache.digests import Digests
from tasks.cache.refs import Ref
from tasks.cache.stage import Row
from tasks.jobs.launch import JobFailed
from tasks.tracking.reports import format_score
from training.problems import UserError
from training.recipe import Recipe

WEIGHTS = "model.safetensors"


def result(
    state: str,
    rows: list[Row],
    *,
    flow_run_id: str | None = None,
    finished: Finished | None = None,
    error: BaseException | None = None,
) -> dict[str, Any]:
    """The result of a run, plain JSON; without `mlflow_run_id` and `warnings`, known after delivery to MLflow.

    Args:
        state: completed, failed or interrupted.
        rows: one a stage that began.
        finished: what the stages gave, where all of them ended well.
        error: what ended the run, where something did.
    """
    return {
        "state": state,
        "flow_run_id": flow_run_id,
        "mlflow_run_id": None,
        "stages": [
            {
                "name": r.name,
                "key": r.key,
                "state": r.state,
                "seconds": round(r.seconds, 3),
                "artifact": r.artifact,
            }
            for r in rows
        ],
        "metrics": finished.scores.figures if finished else {},
        "verdict": finished.verdict.model_dump(mode="json") if finished else None,
        "model": _model(finished.trained, finished) if finished else None,
        "problems": problems(error, rows[-1].name if rows else "recipe"),
        "warnings": [],
    }


def problems(error: BaseException | None, stage: str) -> list[dict[str, Any]]:
    """What went wrong, one entry a problem; all of them for the user's own mistakes."""
    if error is None:
        return []
    if isinstance(error, UserError):
        return [problem.model_dump() for problem in error.problems]
    kind = error.failure.kind if isinstance(error, JobFailed) else "internal"
    if isinstance(error, KeyboardInterrupt):
        kind = "interrupted"
    return [{"kind": kind, "where": stage, "message": str(error) or type(error).__name__}]


def _model(trained: Ref, finished: Finished) -> dict[str, Any]:
    folder = trained.path / "model"
    whole = folder / WEIGHTS
    version = finished.version
    return {
        "path": str(folder),
        # Large models are saved in several files; then their common digest stands for them.
        "sha256": Digests(settings.home()).of(whole) if whole.is_file() else trained.parts["model"],
        "registered": f"{version.name}/{version.version}" if version else None,
        "alias": finished.promotion.alias if finished.promotion else None,
        "published": finished.publication.url if finished.publication else None,
    }


def verdict_event(recipe: Recipe, done: Mapping[str, Any], champion: str | None) -> dict[str, Any]:
    """What the event of a run's verdict carries: what was decided, why, of what, in a few plain values.

    Args:
        done: the run's result; one that failed has the decision `failed`.
        champion: the version that was compared with, `name/version`.
    """
    split, metric = recipe.judged_split, recipe.compared_by
    verdict, model, problems = done["verdict"], done["model"] or {}, done["problems"]
    score = done["metrics"].get(split, {}).get(metric)
    decision = verdict["decision"] if verdict else "failed"
    promoted = "promoted" if model.get("alias") else "good enough to be promoted"
    words = {"promote": promoted, "keep": "kept as challenger", "reject": "rejected", "failed": "failed"}
    figure = f", {metric} {format_score(score)} on {split}" if score else ""
    return {
        "decision": decision,
        "summary": words[decision] + figure,
        "reason": verdict["reason"] if verdict else "; ".join(f"{one['where']}: {one['message']}" for one in problems),
        "split": split,
        "metric": metric,
        **{part: score.get(part) if score else None for part in ("value", "low", "high", "baseline")},
        "champion_before": champion,
        "version": model.get("registered"),
        "mlflow_run_id": done["mlflow_run_id"],
        "flow_run_id": done["flow_run_id"],
    }
