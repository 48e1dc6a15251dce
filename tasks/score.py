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


def ingredients(recipe: Recipe, data: Ref, predictions: Ref) -> Ingredients:
    """The predictions, the rows they are of, and the metrics asked for, with their code where they are the user's."""
    metrics = list(recipe.evaluation.metrics)
    return Ingredients(
        {
            "kind": recipe.kind,
            "evaluation": {"metrics": metrics},
            "upstream": {"load_data": data.digest, "predict": predictions.digest},
        },
        code=["training.score", KINDS[recipe.kind]],
        named={f"evaluation.metrics[{index}]": name for index, name in enumerate(metrics)},
        libraries=("evaluate", "scikit-learn", "matplotlib"),
    )


@stage(ingredients)
def score(work: Work, recipe: Recipe, data: Ref, predictions: Ref) -> Mapping[str, Any]:
    """Computes every metric on every split, and draws what is better looked at."""
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
