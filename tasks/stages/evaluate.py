"""Stages: rows with labels that arrived after the release, a version's predictions on them, and its figures now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from tasks.cache.input_files import require_unchanged
from tasks.cache.results import Artifact, PinnedFile
from tasks.cache.stage import Inputs, Work, action
from tasks.home import registry_place
from tasks.jobs.job import StageJob, files_of, stage, whole
from tasks.registry.champions import files_of_version
from tasks.registry.monitored_versions import (
    LaterEvaluation,
    MonitoredVersion,
    find_predictions,
    find_rows,
    labelled_data,
    record,
)
from tasks.reports.row_reports import emit_warnings, read_report
from training import task_types
from training.data.load_rows import LoadDataResult, load
from training.data.sources import reading_by_name
from training.jobs.protocol import NotInKey, Settings
from training.problems import UserError
from training.programs.evaluate import EvaluateResult, EvaluateSettings
from training.programs.predict_champion import PredictChampionResult, PredictChampionSettings
from training.recipe import Data, Recipe
from training.recipe.rules.column_rules import code_for_rows, takes_template
from training.recipe.rules.slice_rules import FEWEST_ROWS, MOST_GROUPS
from training.recipe.tables.formats import SOURCES
from training.recipe.task_specification import specification
from training.tokenization.chat_templates import load_template

SPLIT = "test"
"""The name of the evaluated rows' split: load_data keeps its columns for slices."""


class LoadLabelledSettings(Settings):
    """The settings of reading rows with labels."""

    data: Data
    spelt: dict[str, int]
    """The indices of labels as the version's rows spell them, where these are not the labels' names."""
    task: str
    options: Annotated[dict[str, Any], NotInKey("the options that its code for rows reads are in the key")]
    files: Annotated[list[PinnedFile], NotInKey("their digests are in the key")]


@stage(LoadDataResult)
def load_labelled(version: MonitoredVersion, recipe: Recipe, rows: Artifact, files: Sequence[PinnedFile]) -> StageJob:
    """Reads and checks the rows as `load_data` does, as one split, with the labels of the version in their order.

    The settings of reading, the labels' names, the content of the files, and the tokenizer if its chat template may
    refuse rows.
    """
    data = labelled_data(version, rows, files)
    code, named, options = code_for_rows(recipe)
    source = SOURCES[data.source]
    reads, libraries = {}, [*source.libraries]
    if takes_template(recipe):
        reads = {"tokenizer": files_of_version(version.champion, "NAME")["tokenizer"]}
        libraries += ["transformers", "jinja2", "tokenizers"]
    return StageJob(
        _load,
        LoadLabelledSettings(
            **recipe.task_and_options,
            data=data,
            spelt=dict(read_report(rows.path).get("spelt", {})),
            files=list(files),
        ),
        reads=reads,
        content={"files": [pin.sha256 for pin in files], **reading_by_name(data, [pin.path for pin in files])},
        tables={"rows": {"options": options}},
        code=["training.data.load_rows", source.reader.partition(":")[0], *code],
        outside=["training.programs"],
        users_code=named,
        libraries=libraries,
        field_names={"files": ", ".join(pin.path for pin in files)},
    )


def _load(work: Work, settings: LoadLabelledSettings, inputs: Mapping[str, Path]) -> LoadDataResult:
    task_type = specification(settings.task, settings.options)
    sources, spelt = {SPLIT: [pin.path for pin in settings.files]}, settings.spelt
    template = load_template(inputs["tokenizer"]) if "tokenizer" in inputs else None
    refused = partial(task_type.refused_rows, template) if template else None
    try:
        result = load(
            *(settings.data, task_type, sources, work.out, work.progress, [SPLIT]),
            only=SPLIT,
            spelt=spelt,
            refused_rows=refused,
        )
    except UserError as error:
        words = {"where": "inputs", "message": "there are no rows that can be evaluated: give files that have some."}
        is_empty = [problem.check == "no_rows" for problem in error.problems]
        raise UserError(
            problem.model_copy(update=words) if empty else problem
            for problem, empty in zip(error.problems, is_empty, strict=True)
        ) from error
    require_unchanged(settings.files)
    emit_warnings(work, read_report(work.out))
    return result


@stage(PredictChampionResult)
def predict_labelled(version: MonitoredVersion, recipe: Recipe, labelled: Artifact) -> StageJob:
    """Predicts the rows with the version, in full precision.

    The model, and the rows with their labels.
    """
    return StageJob(
        "training.programs.predict_champion",
        PredictChampionSettings(
            task=version.task,
            options=version.options,
            split=SPLIT,
            champion=str(version.champion),
            max_length=version.champion.max_length,
            batch_size=recipe.training.per_device_eval_batch_size,
            mixed_precision="no",
        ),
        reads={
            **files_of_version(version.champion, "NAME"),
            "data": files_of(labelled, ["labels.json", f"{SPLIT}.arrow"]),
        },
        code=task_types.code_modules(version.task),
        users_code=task_types.user_code(version.task),
        libraries=(
            *("torch", "transformers", "tokenizers", "pyarrow"),
            *task_types.load(version.task, version.options).libraries,
        ),
    )


@stage(EvaluateResult)
def evaluate(version: MonitoredVersion, recipe: Recipe, labelled: Artifact, predicted: Artifact) -> StageJob:
    """Computes the metrics with intervals, in slices, and their differences from those at the registration.

    The predictions, the rows, the metrics and slices, the metrics at the registration with their rows, and the
    version's calibration.
    """
    expected, rows = find_predictions(version), find_rows(version)
    left_out = task_types.class_of(recipe.task).answer_metrics  # answers are not generated here

    def warn(work: Work, result: object) -> None:
        for name in recipe.evaluation.metrics:
            if ":" in name:
                message = f"{name} is left out: the registry names code, and code that a registry names is not run."
                work.on_events([{"kind": "warning", "message": message}])

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
                    "expected_data": files_of(rows, ["labels.json", f"{version.split}.arrow"]),
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
            "version": str(version.champion),
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
        names=[Path(name).name for name in names],
        files=files,
    )
