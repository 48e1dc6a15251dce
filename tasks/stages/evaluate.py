"""Stages: a version's predictions on rows whose labels arrived after the release, and its figures now."""

from __future__ import annotations

from collections.abc import Sequence

from tasks.cache.results import Artifact
from tasks.cache.stage import Inputs, Work, action
from tasks.home import registry_place
from tasks.jobs.job import StageJob, files_of, stage, whole
from tasks.registry.monitored_versions import (
    LaterEvaluation,
    MonitoredVersion,
    find_predictions,
    find_rows,
    record,
)
from tasks.registry.pinned_versions import files_of_version
from training import task_types
from training.data.file_systems import name_of
from training.data.ipc_files import groups_file
from training.programs.evaluate import SPLIT, EvaluateResult, EvaluateSettings
from training.programs.predict_champion import PredictChampionResult, PredictChampionSettings
from training.recipe import Recipe
from training.recipe.rules.slice_rules import FEWEST_ROWS, MOST_GROUPS


@stage(PredictChampionResult)
def predict_labelled(version: MonitoredVersion, recipe: Recipe, labelled: Artifact) -> StageJob:
    """Predicts the rows with the version, in full precision.

    The model, and the rows with their labels.
    """
    program, batch_size = "training.programs.predict_champion", recipe.training.per_device_eval_batch_size
    return StageJob(
        program,
        PredictChampionSettings(
            task=version.task,
            options=version.options,
            split=SPLIT,
            champion=str(version.pinned),
            max_length=version.pinned.max_length,
            batch_size=batch_size,
            mixed_precision="no",
        ),
        reads={
            **files_of_version(version.pinned, "NAME"),
            "data": files_of(labelled, ["labels.json", f"{SPLIT}.arrow"]),
        },
        code=task_types.code_modules(version.task),
        users_code=task_types.user_code(version.task),
        libraries=(
            *("torch", "transformers", "tokenizers", "pyarrow"),
            *task_types.load(version.task, version.options).libraries,
        ),
        batches=version.divide_batches(program, batch_size),
    )


@stage(EvaluateResult)
def evaluate(version: MonitoredVersion, recipe: Recipe, labelled: Artifact, predicted: Artifact) -> StageJob:
    """Computes the metrics with intervals, in slices, and their differences from those at the registration.

    The predictions, the rows with their groups, the metrics and slices, the metrics at the registration with their
    rows, and the version's calibration.
    """
    expected, rows = find_predictions(version), find_rows(version)
    left_out = task_types.class_of(recipe.task).answer_metrics  # answers are not generated here

    def warn(work: Work, result: object) -> None:
        if recipe.data.corpus is not None:
            message = "the documents of the rows alone are searched, and those of data.corpus were too at the "
            work.warning(f"{message}registration: the figures now are higher for that alone.")
        if recipe.data.negatives is not None and recipe.data.negatives.num_candidates is not None:
            message = "the documents of the rows are ranked, and at the registration those that a search had found "
            message += "were (data.negatives.num_candidates): the figures are of two different tasks."
            work.warning(message)
        for name in recipe.evaluation.metrics:
            if ":" in name:
                message = f"{name} is left out: the registry names code, and code that a registry names is not run."
                work.warning(message)

    return StageJob(
        "training.programs.evaluate",
        EvaluateSettings(
            task=version.task,
            options=version.options,
            metrics=[name for name in recipe.evaluation.metrics if ":" not in name and name not in left_out],
            slices=list(recipe.evaluation.slices),
            fewest_rows=FEWEST_ROWS,
            most_groups=MOST_GROUPS,
            columns=list(version.columns),
            split=version.split,
            expected={
                name: {"value": score["value"], "low": score.get("low"), "high": score.get("high")}
                for name, score in version.expected.items()
            },
            calibration=version.calibration,
        ),
        reads={
            "predictions": whole(predicted),
            "data": whole(labelled),
            **(
                {
                    "expected": files_of(expected, [f"{version.split}.parquet"]),
                    "expected_data": files_of(
                        rows, ["labels.json", f"{version.split}.arrow", groups_file(version.split)]
                    ),
                }
                if expected
                else {}
            ),
        },
        code=task_types.code_modules(version.task),
        users_code=task_types.user_code(version.task),
        libraries=("evaluate", "scikit-learn", "scipy", "numpy", "matplotlib"),
        show=warn,
    )


def record_inputs(
    version: MonitoredVersion,
    recipe: Recipe,
    labelled: Artifact,
    evaluated: Artifact[EvaluateResult],
    names: Sequence[str],
) -> Inputs:
    """The version, the rows, and the metrics."""
    return Inputs(
        {
            "registry": registry_place(),
            "version": str(version.pinned),
            "upstream": {"load_labelled": labelled.digest, "evaluate": evaluated.digest},
        }
    )


@action(record_inputs, gives=LaterEvaluation)
def record_evaluation(
    work: Work,
    version: MonitoredVersion,
    recipe: Recipe,
    labelled: Artifact,
    evaluated: Artifact[EvaluateResult],
    names: Sequence[str],
) -> LaterEvaluation:
    """Adds the metrics to the version's history in MLflow, and compares them with the gate's bounds."""
    gate, found = recipe.release.gate, evaluated.result
    files = [evaluated.path / "evaluation.json", *sorted((evaluated.path / "log").glob("*.png"))]
    return record(
        version,
        rows=found.rows,
        digest=labelled.parts[f"{SPLIT}.arrow"],
        metrics=found.metrics,
        bounds=(gate.minimum, gate.maximum),
        names=[name_of(name) for name in names],
        files=files,
    )
