"""Stages: the model and the champion, row by row on the split that is judged, or the model and the baseline; and the
number of that comparison among all on the same rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.cache import settings
from tasks.cache.code import code_behind, library_versions, users_code
from tasks.cache.digests import digest_of
from tasks.cache.refs import Champion, Counted, Ref, baseline_upstream
from tasks.cache.stage import Inputs, Work, action, stage
from tasks.jobs.child import run_child
from tasks.jobs.launch import python_argv
from tasks.registry.champions import present
from tasks.registry.comparisons import count_of
from training import task_types
from training.recipe import Recipe
from training.recipe.program_settings import CompareSettings
from training.recipe.tables.metrics import METRICS, entries


def has_rival(recipe: Recipe, champion: Champion | None) -> bool:
    """Whether there is anything to compare a model with: a champion, or else the baseline, unless the recipe wants none
    or the task type has none."""
    return champion is not None or (recipe.release.gate.baseline and task_types.has_baseline(recipe.task))


def counted(recipe: Recipe) -> bool:
    """Whether comparisons on the same rows share one error level. Without a registry nothing is promoted."""
    return recipe.release.gate.control == "all" and recipe.release.registry is not None


def count_inputs(recipe: Recipe, data: Ref, trained: Ref, predictions: Ref, rival: Ref | None) -> Inputs:
    """The registry, the rows and the test. The trained model is one, because the champion itself is not counted."""
    return Inputs(
        {
            "release": {"registry": recipe.release.registry, "gate": {"confidence": recipe.release.gate.confidence}},
            "registry": settings.registry_place(),
            "upstream": {"load_data": data.parts[f"{recipe.judged_split}.arrow"], "fit": trained.parts["model"]},
            "test": _test(recipe, predictions, rival),
        }
    )


@action(count_inputs, gives=Counted, where="there is a champion or a baseline")
def count_comparison(
    work: Work, recipe: Recipe, data: Ref, trained: Ref, predictions: Ref, rival: Ref | None
) -> Counted | None:
    """Numbers the comparison among all on the same rows, and gives the confidence that it takes. None if the model is
    the champion itself."""
    from training.evaluation.significance import alpha_spent  # here, for it imports numpy

    name, gate = str(recipe.release.registry), recipe.release.gate
    if rival is None and (found := present(recipe)) and found.champion.model == trained.parts["model"]:
        work.state = "skipped"
        return None
    rows = data.parts[f"{recipe.judged_split}.arrow"]
    number = count_of(name, rows, digest_of(_test(recipe, predictions, rival)))
    return Counted(comparison=number, confidence=1 - alpha_spent(number, 1 - gate.confidence))


def _test(recipe: Recipe, predictions: Ref, rival: Ref | None) -> dict[str, Any]:
    """Everything that can change the p-value of a comparison on given rows: two comparisons that are equal in this are
    one test, all others are another chance of a false promotion."""
    file = f"{recipe.judged_split}.parquet"
    own, installed = users_code(_named(recipe))
    return {
        "predictions": predictions.parts[file],
        "rival": rival.parts[file] if rival else None,
        "compare": recipe.compared_by,
        "metrics": _metrics(recipe),
        "less_is_better": _less_is_better(recipe),
        "margin": recipe.release.gate.margin,
        "code": code_behind(own).digests,
        "library": library_versions(installed) if installed else {},
    }


def _named(recipe: Recipe) -> dict[str, str]:
    """The user's code that a comparison runs, by recipe field."""
    metrics = {f"evaluation.metrics[{index}]": name for index, name in enumerate(_metrics(recipe))}
    return task_types.user_code(recipe.task) | metrics


def inputs(
    recipe: Recipe,
    data: Ref,
    tokens: Ref,
    trained: Ref,
    predictions: Ref,
    champion: Champion | None,
    rival: Ref | None,
    count: Counted | None,
) -> Inputs:
    """Both models' predictions, or what the baseline is made of, and by what, by how much and how surely the new model
    must be better."""
    split = recipe.judged_split
    return Inputs(
        {
            "task": recipe.task,
            "options": task_types.load(**recipe.task_and_options).options_of("compare"),
            "evaluation": {"metrics": _metrics(recipe)},
            "metrics": entries({recipe.compared_by, *_metrics(recipe)}),
            "release": {
                "gate": {
                    "compare": recipe.compared_by,
                    "margin": _margin(recipe, champion),
                    "confidence": _confidence(recipe, count),
                }
            },
            **({"comparison": count.comparison} if count else {}),
            "less_is_better": _less_is_better(recipe),
            "champion": str(champion) if champion else None,
            "upstream": {
                "load_data": data.parts[f"{split}.arrow"],
                "labels": data.parts["labels.json"],
                "predict": predictions.parts[f"{split}.parquet"],
                **({"predict_champion": rival.digest} if rival else baseline_upstream([split], data, tokens, trained)),
            },
        },
        code=[
            "training.programs.compare",
            *task_types.code_modules(recipe.task),
            *task_types.metric_modules(recipe.task, _metrics(recipe)),
        ],
        named=_named(recipe),
        libraries=("evaluate", "numpy", "scikit-learn", "scipy"),
    )


@stage(inputs, where="there is a champion or a baseline")
def compare(
    work: Work,
    recipe: Recipe,
    data: Ref,
    tokens: Ref,
    trained: Ref,
    predictions: Ref,
    champion: Champion | None,
    rival: Ref | None,
    count: Counted | None,
) -> Mapping[str, Any]:
    """Tests whether the model is better than the champion, or without one than the baseline, and shows rows in which
    they differ."""
    figures = run_child(
        work,
        "training.programs.compare",
        python_argv("training.programs.compare"),
        settings=CompareSettings(
            **recipe.task_and_options,
            split=recipe.judged_split,
            labels=json.loads((data.path / "labels.json").read_text()),
            metrics=_metrics(recipe),
            figure=recipe.compared_by,
            less_is_better=_less_is_better(recipe),
            margin=_margin(recipe, champion),
            confidence=_confidence(recipe, count),
            champion=str(champion) if champion else None,
            warnings=list(_warnings(champion, rival)) if champion and rival else [],
        ),
        inputs={
            "predictions": predictions.path,
            **({"champion": rival.path} if rival else {}),
            "data": data.path,
            "tokens": tokens.path,
            "model": trained.path / "model",
        },
    )
    return {**figures, "comparison": count.comparison} if count else figures


def _confidence(recipe: Recipe, count: Counted | None) -> float:
    return count.confidence if count else recipe.release.gate.confidence


def _margin(recipe: Recipe, champion: Champion | None) -> float:
    """A new model may be worse than the champion where the recipe allows it, but never worse than the baseline."""
    return recipe.release.gate.margin if champion else max(0.0, recipe.release.gate.margin)


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
