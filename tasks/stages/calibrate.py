"""Stage: calibrated probabilities, and the thresholds below which a row is for a person, from stored predictions."""

from __future__ import annotations

from tasks.cache.results import Artifact
from tasks.jobs.job import StageJob, files_of, stage
from training import task_types
from training.data.ipc_files import groups_file
from training.evaluation.stored_calibration import CalibrateResult
from training.programs.calibrate import AbstainSettings, CalibrateSettings
from training.recipe import Recipe
from training.recipe.data_fields import EVALUATED

CalibrateArtifact = Artifact[CalibrateResult]


@stage(CalibrateResult)
def calibrate(recipe: Recipe, data: Artifact, predictions: Artifact) -> StageJob:
    """Fits the calibration of probabilities to validation, finds the thresholds for rows that a person should look at
    on test, and measures both on test.

    The predictions, labels and groups of both splits, release.abstain and release.prediction_sets.
    """
    splits, abstain = [split for split in EVALUATED if split in recipe.evaluation.splits], recipe.release.abstain
    return StageJob(
        "training.programs.calibrate",
        CalibrateSettings(
            task=recipe.task,
            options=task_types.load(**recipe.task_and_options).options_of("score"),
            measured="test" in splits,
            abstain=AbstainSettings(**abstain.model_dump()) if abstain else None,
            prediction_sets=recipe.release.prediction_sets,
        ),
        reads={
            "predictions": files_of(predictions, [f"{split}.parquet" for split in splits]),
            "data": files_of(data, ["labels.json", *map(groups_file, splits)]),
        },
        code=task_types.code_modules(recipe.task),
        users_code=task_types.user_code(recipe.task),
        libraries=("numpy", "scipy", "matplotlib", "pyarrow"),
        field_names={
            "measured": "evaluation.splits",
            "abstain": "release.abstain",
            "prediction_sets": "release.prediction_sets",
        },
    )
