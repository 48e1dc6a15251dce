"""Stages: the trained model in other formats, and the comparison of these exports with the model, row by row."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tasks.cache.code import metrics_code
from tasks.cache.results import Artifact, Lock, Verdict
from tasks.cache.stage import Work
from tasks.jobs.job import StageJob, files_of, folder_of, stage, whole
from tasks.reports.model_reports import describe_refused
from training import task_types
from training.data.ipc_files import groups_file
from training.evaluation.scores import ComparedExport
from training.programs.compare_exports import CompareExportsSettings
from training.programs.export_model import ExportResult, ExportSettings
from training.recipe import Recipe
from training.recipe.tables.exports import EXPORTS, OUTPUTS, by_module, libraries_of
from training.recipe.tables.metrics import entries

LIBRARIES = ("torch", "transformers")


def _modules(recipe: Recipe) -> list[str]:
    """The modules of the formats, which programs import by name."""
    return [f"training.models.{module}" for module in by_module(recipe.release.exports)]


def wants_exports(recipe: Recipe, verdict: object) -> bool:
    """Whether the recipe names exports, and the gate does not reject the model. A plan may not know the verdict."""
    rejected = isinstance(verdict, Verdict) and verdict.decision == "reject"
    return bool(recipe.release.exports) and not rejected


@stage(ExportResult, where="the gate does not reject the model")
def export(recipe: Recipe, trained: Artifact) -> StageJob:
    """Converts the trained model to the formats of release.exports.

    The trained model, and the formats.
    """
    auto_class = str(task_types.class_of(recipe.task).auto_class)
    return StageJob(
        "training.programs.export_model",
        ExportSettings(auto_class=auto_class, exports=sorted(recipe.release.exports)),
        reads={"model": folder_of(trained, "model")},
        tables={
            "outputs": list(OUTPUTS.get(auto_class, ())),
            "formats": {name: asdict(EXPORTS[name]) for name in recipe.release.exports},
        },
        code=_modules(recipe),
        libraries=(*LIBRARIES, *libraries_of(recipe.release.exports)),
        field_names={"exports": "release.exports"},
    )


CompareExportsArtifact = Artifact[dict[str, ComparedExport]]


@stage(dict[str, ComparedExport], where="the gate does not reject the model")
def compare_exports(
    recipe: Recipe,
    lock: Lock,
    data: Artifact,
    tokens: Artifact,
    trained: Artifact,
    predictions: Artifact,
    exports: Artifact,
) -> StageJob:
    """Predicts the judged split with each export, tests whether it is not inferior to the model, and measures the speed
    of both.

    The exports, the model with its predictions, the rows, the metric, the margin and the confidence.
    """
    split, reported = recipe.judged_split, recipe.export_metrics
    figure = reported[0]
    metrics = recipe.compared_metrics if figure == recipe.compared_by else [figure]
    named = [*dict.fromkeys([*metrics, *reported])]
    task_type = task_types.load(**recipe.task_and_options)
    return StageJob(
        "training.programs.compare_exports",
        CompareExportsSettings(
            task=recipe.task,
            options=task_type.options_of("predict") | task_type.options_of("compare"),
            split=split,
            metrics=metrics,
            reported=[name for name in reported if name in recipe.evaluation.metrics],
            figure=figure,
            less_is_better=recipe.less_is_better,
            margin=-recipe.release.export_margin,
            confidence=recipe.release.gate.confidence,
            champion="the model",
            exports=sorted(recipe.release.exports),
            batch_size=recipe.training.per_device_eval_batch_size,
            mixed_precision=lock.mixed_precision,
        ),
        reads={
            "model": folder_of(trained, "model"),
            "exports": whole(exports),
            "data": files_of(data, ["labels.json", f"{split}.arrow", groups_file(split)]),
            "tokens": files_of(tokens, [f"{split}.arrow"]),
            "predictions": files_of(predictions, [f"{split}.parquet"]),
        },
        tables={"table": entries({*named})},
        code=[
            *_modules(recipe),
            *task_types.code_modules(recipe.task),
            *task_types.metric_modules(recipe.task, named),
        ],
        users_code=task_types.user_code(recipe.task) | metrics_code(recipe, named),
        libraries=(
            *LIBRARIES,
            *libraries_of(recipe.release.exports),
            "evaluate",
            "numpy",
            "pyarrow",
            "scikit-learn",
            "scipy",
        ),
        field_names={
            "batch_size": "training.per_device_eval_batch_size",
            "mixed_precision": "compute.mixed_precision",
            "metrics": "evaluation.metrics",
            "reported": "evaluation.metrics",
            "figure": "release.gate.compare",
            "margin": "release.export_margin",
            "confidence": "release.gate.confidence",
            "exports": "release.exports",
        },
        show=_warn_of_refused,
    )


def _warn_of_refused(work: Work, found: dict[str, Any]) -> None:
    for name, one in compare_exports.parse(found).items():
        if not one.released:
            work.warning(describe_refused(name, one))
        elif one.other_tokens:
            message = f"{name}: {one.runtime} reads {one.other_tokens} of the rows as other tokens than the model's "
            message += "tokenizer, such as texts whose accents are characters of their own."
            work.warning(message)
