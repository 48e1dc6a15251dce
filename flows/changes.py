"""Whether a run would do anything that the last completed one did not, and why it would."""

from __future__ import annotations

from typing import Any

from tasks.cache.history import History
from tasks.cache.planner import PlannedStage
from tasks.tracking.mlflow_run import deliver_left

RESOLVE = "resolve"


def nothing_changed(recipe: str, foreseen: list[PlannedStage]) -> dict[str, Any] | None:
    """The result of the last completed run, if a run of the recipe of this name would do nothing that it did not do;
    without the alias, which may have been moved since. Else None.

    The key of `resolve` is left out: it holds the whole recipe, and what reaches an output is in the other keys.
    """
    done = History(recipe).last_completed()
    if done is None or any(row.state == "will run" for row in foreseen):
        return None
    if _keys(done) != {row.name: row.key for row in foreseen if row.name != RESOLVE}:
        return None
    return {**done, "model": {**done["model"], "alias": None}}


def cached_result(done: dict[str, Any]) -> dict[str, Any]:
    """The result of a run that found nothing to do since the run `done`. Delivers what MLflow lacks of other runs."""
    trouble = deliver_left()
    warnings = [f"MLflow has not everything yet ({trouble})."] if trouble else []
    stages = [{**stage, "state": "cached", "seconds": 0.0} for stage in done["stages"]]
    return {**done, "stages": stages, "warnings": warnings}


def changes(recipe: str, foreseen: list[PlannedStage]) -> list[str]:
    """Why a run would do something, in the words of `finetune plan`: a line a stage that does not only follow another
    one, `fit: training.learning_rate 2e-05 → 3e-05`."""
    found = [f"{row.name}: {'; '.join(row.reasons)}" for row in foreseen if row.state == "will run" and row.key]
    if found:
        return found
    done = History(recipe).last_completed()
    if done is None:
        return ["no run has completed before"]
    before = _keys(done)
    now = {row.name: row.key for row in foreseen if row.name != RESOLVE}
    other = [f"{name}: it is given something else" for name, key in now.items() if before.get(name) != key]
    return other + [f"{name}: it is no part of a run any more" for name in before.keys() - now.keys()]


def _keys(done: dict[str, Any]) -> dict[str, str | None]:
    return {stage["name"]: stage["key"] for stage in done["stages"] if stage["name"] != RESOLVE}
