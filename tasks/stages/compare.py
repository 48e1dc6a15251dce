"""Stages: the champion of the registry, the comparison of the model with it or with the baseline, row by row on the
judged split, and the number of this comparison among all on the same rows, more of them or fewer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tasks.cache.code import code_behind, library_versions, metrics_code, users_code
from tasks.cache.digests import digest_of
from tasks.cache.results import Artifact, NumberedComparison, PinnedVersion
from tasks.cache.stage import Inputs, Work, action
from tasks.home import registry_place
from tasks.jobs.job import StageJob, files_of, folder_of, stage
from tasks.registry.comparisons import JudgedRows, confidence_of_number, number_comparison
from tasks.registry.pinned_versions import find_current
from training import task_types
from training.data.ipc_files import CORPUS, groups_file
from training.evaluation.scores import Comparison
from training.programs.compare import CompareSettings
from training.programs.predict import PredictResult
from training.programs.predict_champion import PredictChampionResult
from training.recipe import Recipe
from training.recipe.fields import answered_prompts
from training.recipe.rules.column_rules import source_columns
from training.recipe.tables.metrics import WIN_RATE, entries, metric_libraries

SHOWN_LABELS = 10
"""Labels that a warning names."""


def champion_inputs(recipe: Recipe, trained: Artifact, scores: Artifact) -> Inputs:
    """The registry, the alias, and the model to compare with the champion."""
    return Inputs(
        {
            "release": recipe.release.model_dump(include={"registry", "champion"}),
            "registry": registry_place(),
            "upstream": {"fit": trained.parts["model"], "score": scores.digest},
        }
    )


@action(champion_inputs, gives=PinnedVersion)
def find_champion(work: Work, recipe: Recipe, trained: Artifact, scores: Artifact) -> PinnedVersion | None:
    """Finds the version with the champion's alias, unless it is the trained model itself."""
    if recipe.release.registry is None:
        work.state = "skipped"
        return None
    found = find_current(recipe)
    return None if found is None or found.champion.model == trained.parts["model"] else found.champion


def has_opponent(recipe: Recipe, champion: PinnedVersion | None) -> bool:
    """Whether there is a champion or a baseline to compare the model with."""
    return champion is not None or (recipe.release.gate.baseline and task_types.has_baseline(recipe.task))


def count_inputs(
    recipe: Recipe, data: Artifact, trained: Artifact, predictions: Artifact, opponent: Artifact | None
) -> Inputs:
    """The registry, the rows, the test, and the trained model: the champion itself is not counted."""
    return Inputs(
        {
            "release": {"registry": recipe.release.registry, "gate": {"confidence": recipe.release.gate.confidence}},
            "registry": registry_place(),
            "upstream": {"load_data": data.parts[f"{recipe.judged_split}.arrow"], "fit": trained.parts["model"]},
            "test": _describe_test(recipe, data, predictions, opponent),
        }
    )


@action(count_inputs, gives=NumberedComparison, where="there is a champion or a baseline")
def count_comparison(
    work: Work, recipe: Recipe, data: Artifact, trained: Artifact, predictions: Artifact, opponent: Artifact | None
) -> NumberedComparison | None:
    """Numbers the comparison among all on these rows and on splits that share rows with them, and computes the
    confidence that it needs. Skipped if the model is the champion itself."""
    name, gate = str(recipe.release.registry), recipe.release.gate
    if opponent is None and (found := find_current(recipe)) and found.champion.model == trained.parts["model"]:
        work.state = "skipped"
        return None
    file = f"{recipe.judged_split}.arrow"
    rows = JudgedRows(data.path / file, source_columns(recipe).inputs)
    pair = digest_of(_describe_test(recipe, data, predictions, opponent))
    number = number_comparison(name, data.parts[file], pair, rows)
    return NumberedComparison(comparison=number, confidence=confidence_of_number(number, gate.confidence))


def _describe_test(recipe: Recipe, data: Artifact, predictions: Artifact, opponent: Artifact | None) -> dict[str, Any]:
    """Everything that can change the p-value on given rows. Comparisons with equal values are one test; any other
    comparison is another chance of a false promotion."""
    file, groups = f"{recipe.judged_split}.parquet", data.parts.get(groups_file(recipe.judged_split))
    own, installed = users_code(_user_code(recipe))
    return ({"groups": groups} if groups else {}) | {
        "predictions": predictions.parts[file],
        "rival": opponent.parts[file] if opponent else None,
        "compare": recipe.compared_by,
        "metrics": recipe.compared_metrics,
        "less_is_better": recipe.less_is_better,
        "margin": recipe.release.gate.margin,
        "code": code_behind(own).digests,
        "library": library_versions(installed) if installed else {},
    }


def _user_code(recipe: Recipe) -> dict[str, str]:
    """The user code of a comparison, by recipe field."""
    judge = {"evaluation.judge": recipe.evaluation.judge} if recipe.compared_by == WIN_RATE else {}
    metrics = metrics_code(recipe, recipe.compared_metrics)
    return task_types.user_code(recipe.task) | metrics | {field: str(name) for field, name in judge.items()}


def _answers(recipe: Recipe) -> dict[str, Any]:
    """The settings of comparisons of answers; empty if nothing reads them."""
    judge, lengths = recipe.evaluation.judge, "generated_length" in recipe.evaluation.metrics
    return {"judge": judge, "lengths": lengths} if answered_prompts(recipe) and (judge or lengths) else {}


@stage(Comparison, where="there is a champion or a baseline")
def compare(
    recipe: Recipe,
    champion: PinnedVersion | None,
    number: NumberedComparison | None,
    data: Artifact,
    tokens: Artifact,
    trained: Artifact,
    predictions: Artifact,
    opponent: Artifact[PredictResult] | None,
) -> StageJob:
    """Tests whether the model is better than the champion, or without one than the baseline, and lists rows in which
    they differ. `opponent`: the predictions of the champion, or of another trial.

    Both models' predictions or the sources of the baseline, the groups of rows, the metric, the margin and the
    confidence.
    """
    split, metrics, rival = recipe.judged_split, recipe.compared_metrics, f"{recipe.judged_split}.parquet"
    judged = [f"{split}.arrow", groups_file(split)]
    if opponent:
        rows = {"champion": files_of(opponent, [rival]), "data": files_of(data, ["labels.json", *judged])}
    else:
        rows = {
            "data": files_of(data, ["labels.json", "train.arrow", f"{CORPUS}.arrow", *judged]),
            "tokens": files_of(tokens, ["train.arrow", f"{split}.arrow"]),
            "model": folder_of(trained, "model"),
        }
    answers, judge = _answers(recipe), recipe.evaluation.judge
    predicted = opponent.result if opponent else None
    return StageJob(
        "training.programs.compare",
        CompareSettings(
            task=recipe.task,
            options=task_types.load(**recipe.task_and_options).options_of("compare"),
            split=split,
            metrics=metrics,
            figure=recipe.compared_by,
            less_is_better=recipe.less_is_better,
            margin=_margin(recipe, champion),
            confidence=number.confidence if number else recipe.release.gate.confidence,
            champion=str(champion) if champion else None,
            comparison=number.comparison if number else None,
            max_flips=recipe.release.gate.flips.max_share if champion and recipe.release.gate.flips else None,
            **answers,
            warnings=list(_label_warnings(champion, predicted))
            if champion and isinstance(predicted, PredictChampionResult)
            else [],
        ),
        reads={"predictions": files_of(predictions, [rival]), **rows},
        tables={"table": entries({recipe.compared_by, *metrics})},
        code=[*task_types.code_modules(recipe.task), *task_types.metric_modules(recipe.task, metrics)],
        outside=() if answers else ("training.evaluation.judgements",),
        users_code=_user_code(recipe) | ({"evaluation.judge": judge} if judge else {}),
        libraries=("evaluate", "numpy", "scikit-learn", "scipy", *metric_libraries(metrics)),
        field_names={
            "metrics": "evaluation.metrics",
            "judge": "evaluation.judge",
            "figure": "release.gate.compare",
            "margin": "release.gate.margin",
            "confidence": "release.gate.confidence",
            "max_flips": "release.gate.flips.max_share",
        },
    )


def _margin(recipe: Recipe, champion: PinnedVersion | None) -> float:
    """A negative margin allows a model worse than the champion, but not worse than the baseline."""
    return recipe.release.gate.margin if champion else max(0.0, recipe.release.gate.margin)


def _label_warnings(champion: PinnedVersion, predicted: PredictChampionResult) -> Iterator[str]:
    if unknown := predicted.unknown:
        yield f"{champion} does not know {_list_labels(unknown)}: it gets no row of these right."
    if dropped := predicted.dropped:
        yield f"{champion} also knows {_list_labels(dropped)}, which no row has today: it errs by predicting them."


def _list_labels(labels: list[str]) -> str:
    """`the labels a, b and 3 more`"""
    more = f" and {len(labels) - SHOWN_LABELS:,} more" if len(labels) > SHOWN_LABELS else ""
    return f"the label{'s' if len(labels) > 1 else ''} {', '.join(labels[:SHOWN_LABELS])}{more}"
