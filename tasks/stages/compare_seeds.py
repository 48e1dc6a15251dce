"""Stage: the comparison of a sweep's variants with its recipe over several seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasks.cache.code import metrics_code
from tasks.cache.results import Artifact
from tasks.jobs.job import StageJob, files_of, stage
from training import task_types
from training.data.ipc_files import groups_file
from training.evaluation.scores import VariantGain
from training.programs.compare_seeds import CompareSeedsSettings
from training.recipe import Recipe
from training.recipe.tables.metrics import entries, metric_libraries

SPLIT = "validation"


def describe_gain(found: VariantGain) -> str:
    """The answer in a sentence, and the figures."""
    seeds, change = len(found.values), "better" if found.gain > 0 else "worse"
    if found.answer == "variant":
        answer = f"{found.variant} is {change} than the recipe: it is the settings, not the seed"
    elif found.answer == "seed":
        answer = f"{found.variant} changes no more than another seed does, {found.other_seed:.4f}: it is the seed"
    elif found.needed_seeds is not None:
        answer = f"{found.variant}: {seeds} seeds are too few to say; about {found.needed_seeds} would do"
    else:
        answer = f"{found.variant}: {seeds} seeds are too few to say, and so are more; add rows to {SPLIT}"
    value, of_recipe = (sum(values) / seeds for values in (found.values, found.recipe_values))
    in_groups = "" if found.groups is None else f" in {found.groups:,} groups"
    return (
        f"{answer}. {found.metric} {value:.4f} against {of_recipe:.4f}, a gain of {found.gain:+.4f} "
        f"({found.low:+.4f} to {found.high:+.4f}) over {seeds} seeds and {found.rows:,} rows{in_groups}."
    )


@stage(list[VariantGain])
def compare_seeds(
    recipe: Recipe, metric: str, less_is_better: bool, data: Artifact, predictions: Mapping[str, Sequence[Artifact]]
) -> StageJob:
    """Computes the gain of each variant over the recipe with its interval. `predictions`: of each setting by its name,
    the recipe first, in the order of the seeds.

    The predictions of all trials, the groups of rows, and the metric.
    """
    metrics = recipe.evaluation.metrics
    numbered = [(name, artifact) for name, of_setting in predictions.items() for artifact in of_setting]
    trials: dict[str, list[str]] = {name: [] for name in predictions}
    for number, (name, _) in enumerate(numbered, 1):
        trials[name].append(f"trial_{number}")
    return StageJob(
        "training.programs.compare_seeds",
        CompareSeedsSettings(
            task=recipe.task,
            options=task_types.load(**recipe.task_and_options).options_of("score"),
            split=SPLIT,
            metrics=list(metrics),
            figure=metric,
            less_is_better=less_is_better,
            trials=trials,
        ),
        reads={
            "data": files_of(data, ["labels.json", groups_file(SPLIT)]),
            **{
                f"trial_{number}": files_of(artifact, [f"{SPLIT}.parquet"])
                for number, (_, artifact) in enumerate(numbered, 1)
            },
        },
        tables={"table": entries(metrics)},
        code=[*task_types.code_modules(recipe.task), *task_types.metric_modules(recipe.task, metrics)],
        users_code=task_types.user_code(recipe.task) | metrics_code(recipe, metrics),
        libraries=("evaluate", "scikit-learn", "scipy", "numpy", *metric_libraries(metrics)),
        field_names={"metrics": "evaluation.metrics", "figure": "sweep.metric"},
    )
