"""Stage: metrics from stored predictions; needs neither the model nor a GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tasks.runtime.jobs import run_child
from tasks.runtime.launch import python_argv
from tasks.runtime.refs import Ref
from tasks.runtime.stage import Ingredients, Work, stage
from training.kinds import KINDS
from training.recipe import Recipe
from training.recipe.release import require_fitting_metrics


def ingredients(recipe: Recipe, data: Ref, predictions: Ref) -> Ingredients:
    """The predictions, the rows they are of, and the metrics asked for, with their code where they are the user's."""
    metrics = recipe.evaluation.metrics
    return Ingredients(
        {
            "kind": recipe.kind,
            "evaluation": {"metrics": list(metrics)},
            "upstream": {
                **{f"load_data/{split}": data.parts[f"{split}.arrow"] for split in recipe.evaluation.splits},
                "labels": data.parts["labels.json"],
                "predict": predictions.digest,
            },
        },
        code=["training.score", KINDS[recipe.kind]],
        named={f"evaluation.metrics[{index}]": name for index, name in enumerate(metrics)},
        libraries=("evaluate", "scikit-learn", "scipy", "numpy", "matplotlib"),
    )


def require_fitting(recipe: Recipe, data: object) -> None:
    """Raises UserError where the rows' labels are not what a metric needs: before anything is trained, and by a plan
    where the rows are there already."""
    if isinstance(data, Ref):
        require_fitting_metrics(recipe.evaluation.metrics, json.loads((data.path / "labels.json").read_text()))


@stage(ingredients)
def score(work: Work, recipe: Recipe, data: Ref, predictions: Ref) -> Mapping[str, Any]:
    """Computes every metric on every split, each with its interval, and draws what is better looked at."""
    run_child(
        work,
        "training.score",
        python_argv("training.score"),
        settings={
            "kind": recipe.kind,
            "metrics": list(recipe.evaluation.metrics),
            "labels": json.loads((data.path / "labels.json").read_text()),
        },
        inputs={"predictions": predictions.path, "data": data.path},
    )
    figures = json.loads((work.out / "metrics.json").read_text())
    return dict(figures)
