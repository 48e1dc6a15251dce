"""Stage: the model and the champion, row by row on the split that is judged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.runtime.jobs import run_child
from tasks.runtime.launch import python_argv
from tasks.runtime.refs import Champion, Counted, Ref
from tasks.runtime.stage import Ingredients, Work, stage
from training import kinds
from training.metric_names import METRICS
from training.recipe import Recipe


def ingredients(
    recipe: Recipe, data: Ref, predictions: Ref, champion: Champion, rival: Ref, count: Counted | None
) -> Ingredients:
    """Both models' predictions, and by what, by how much and how surely the new one must be better."""
    gate, split, metrics = recipe.release.gate, recipe.judged_split, _metrics(recipe)
    return Ingredients(
        {
            "kind": recipe.kind,
            "options": kinds.load(**recipe.task).options_of("compare"),
            "evaluation": {"metrics": metrics},
            "release": {
                "gate": {"compare": recipe.compared_by, "margin": gate.margin, "confidence": _confidence(recipe, count)}
            },
            **({"comparison": count.comparison} if count else {}),
            "less_is_better": _less_is_better(recipe),
            "champion": f"{champion.name}/{champion.version}",
            "upstream": {
                "load_data": data.parts[f"{split}.arrow"],
                "labels": data.parts["labels.json"],
                "predict": predictions.parts[f"{split}.parquet"],
                "predict_champion": rival.digest,
            },
        },
        code=["training.compare", *kinds.code(recipe.kind)],
        named=kinds.named(recipe.kind) | {f"evaluation.metrics[{index}]": name for index, name in enumerate(metrics)},
        libraries=("evaluate", "numpy", "scikit-learn", "scipy"),
    )


@stage(ingredients, where="there is a champion")
def compare(
    work: Work,
    recipe: Recipe,
    data: Ref,
    predictions: Ref,
    champion: Champion,
    rival: Ref,
    count: Counted | None,
) -> Mapping[str, Any]:
    """Says whether the model is better than the champion, and shows rows in which they differ."""
    gate = recipe.release.gate
    figures = run_child(
        work,
        "training.compare",
        python_argv("training.compare"),
        settings={
            **recipe.task,
            "split": recipe.judged_split,
            "labels": json.loads((data.path / "labels.json").read_text()),
            "metrics": _metrics(recipe),
            "figure": recipe.compared_by,
            "less_is_better": _less_is_better(recipe),
            "margin": gate.margin,
            "confidence": _confidence(recipe, count),
            "champion": f"{champion.name}/{champion.version}",
            "warnings": list(_warnings(champion, rival)),
        },
        inputs={"predictions": predictions.path, "champion": rival.path, "data": data.path},
    )
    return {**figures, "comparison": count.comparison} if count else figures


def _confidence(recipe: Recipe, count: Counted | None) -> float:
    return count.confidence if count else recipe.release.gate.confidence


def _metrics(recipe: Recipe) -> list[str]:
    """The metric that counts; all of them where it is a figure of the user's own, which any of them may give."""
    return [recipe.compared_by] if recipe.compared_by in METRICS else list(recipe.evaluation.metrics)


def _less_is_better(recipe: Recipe) -> list[str]:
    """The user's own figures of which less is better, for they have a maximum."""
    return [] if recipe.compared_by in METRICS else sorted(recipe.release.gate.maximum)


def _warnings(champion: Champion, rival: Ref) -> Iterator[str]:
    name = f"{champion.name}/{champion.version}"
    if unknown := rival.figures["unknown"]:
        yield f"{name} does not know {_listed(unknown)}: it gets no row of these right."
    if dropped := rival.figures["dropped"]:
        yield f"{name} also knows {_listed(dropped)}, which no row has today: where it says so, it is wrong."


def _listed(labels: list[str], most: int = 10) -> str:
    """`the labels a, b and 3 more`"""
    more = f" and {len(labels) - most:,} more" if len(labels) > most else ""
    return f"the label{'s' if len(labels) > 1 else ''} {', '.join(labels[:most])}{more}"
