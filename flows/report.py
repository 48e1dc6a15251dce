"""What a run has to say at its end: the JSON that `finetune run --json` writes."""

from __future__ import annotations

from typing import Any

from flows.pipeline import Finished
from tasks.runtime import settings
from tasks.runtime.digests import Digests
from tasks.runtime.launch import JobFailed
from tasks.runtime.refs import Ref
from tasks.runtime.stage import Row
from training.problems import UserError

WEIGHTS = "model.safetensors"


def result(
    state: str,
    rows: list[Row],
    *,
    flow_run_id: str | None = None,
    finished: Finished | None = None,
    error: BaseException | None = None,
) -> dict[str, Any]:
    """The result of a run, plain JSON; without what is known only once MLflow was told: `mlflow_run_id`, `warnings`.

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
