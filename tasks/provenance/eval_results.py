"""Evaluation results of a published model as the Hub reads them (`.eval_results/`): its judged metric on a dataset.

The Hub shows it on the model's page, and in the dataset's leaderboard if there is one. The format has neither the name
of a metric nor its direction (https://huggingface.co/docs/hub/eval-results), and a leaderboard lists the highest values
first. The card's `model-index` has all metrics of all splits.
"""

from __future__ import annotations

import math

import yaml

from tasks.cache.results import Artifact, Lock
from tasks.reports.row_reports import read_report
from training.data.load_rows import LoadDataResult
from training.evaluation.scores import SplitScores
from training.recipe import Recipe
from training.recipe.tables.metrics import more_is_better

DEFAULT_TASK = "default"
"""The task of a dataset without subsets."""


def build_eval_results(
    recipe: Recipe, lock: Lock, data: Artifact[LoadDataResult], scores: Artifact[SplitScores]
) -> str | None:
    """The content of the file; None unless the judged split is a whole split of one dataset of the Hub, and a higher
    value of the metric is better. The value of held-out or filtered rows would not be comparable with those of other
    models, and one for which lower is better could put the worst model first: the format names no direction."""
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    split, metric, on_hub = recipe.judged_split, recipe.compared_by, find_hub_split(recipe)
    score = scores.result.get(split, {}).get(metric)
    if metric in recipe.less_is_better or not more_is_better(metric):
        return None
    if lock.data_hub is None or recipe.data.limit is not None or on_hub is None or score is None:
        return None
    report = read_report(data.path)
    if any(report[reason].get(split) for reason in ("held_out", "left_out", "filtered")):
        return None
    value, low, high = score["value"], score.get("low"), score.get("high")
    if value is None or not math.isfinite(value):
        return None
    interval = "" if low is None or high is None else f", 95 % interval {low:.4f} to {high:.4f}"
    entry = EvalResultEntry(
        dataset_id=recipe.data.path,
        task_id=recipe.data.config or DEFAULT_TASK,
        value=value,
        dataset_revision=lock.data_hub.commit,
        notes=f"{metric} on {on_hub}{interval}",
    )
    return yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False, allow_unicode=True)


def find_hub_split(recipe: Recipe) -> str | None:
    """The dataset's own name of the judged split; None if it is a part of one, or the split that is trained on."""
    names = recipe.data.splits or {}
    judged, trained = (str(names.get(split, split)) for split in (recipe.judged_split, "train"))
    return judged if judged.isidentifier() and judged != trained else None
