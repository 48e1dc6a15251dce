"""Stages: the trained model in other formats, and the comparison of these exports with the model, row by row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tasks.cache.refs import Lock, Ref, Verdict
from tasks.cache.stage import Inputs, Work, stage
from tasks.jobs.child import run_child
from tasks.jobs.commands import python_argv
from tasks.reports.model_reports import describe_refused
from training import task_types
from training.recipe import Recipe
from training.recipe.program_settings import CompareExportsSettings, ExportSettings
from training.recipe.tables.exports import EXPORTS, OUTPUTS
from training.recipe.tables.metrics import entries

LIBRARIES = ("torch", "transformers", "onnx", "onnx-ir", "onnxruntime", "onnxscript")


def wants_exports(recipe: Recipe, verdict: object) -> bool:
    """Whether the recipe names exports, and the gate does not reject the model. A plan may not know the verdict."""
    rejected = isinstance(verdict, Verdict) and verdict.decision == "reject"
    return bool(recipe.release.exports) and not rejected


def export_inputs(recipe: Recipe, trained: Ref) -> Inputs:
    """The trained model, and the formats."""
    auto_class = task_types.class_of(recipe.task).auto_class
    return Inputs(
        {
            "auto_class": auto_class,
            "outputs": list(OUTPUTS.get(str(auto_class), ())),
            "release": {"exports": {name: EXPORTS[name] for name in recipe.release.exports}},
            "upstream": {"fit": trained.parts["model"]},
        },
        code=["training.programs.export_onnx"],
        libraries=LIBRARIES,
    )


@stage(export_inputs, where="the gate does not reject the model")
def export(work: Work, recipe: Recipe, trained: Ref) -> Mapping[str, Any]:
    """Converts the trained model to the formats of release.exports."""
    return run_child(
        work,
        "training.programs.export_onnx",
        python_argv("training.programs.export_onnx"),
        settings=ExportSettings(
            auto_class=task_types.class_of(recipe.task).auto_class, exports=sorted(recipe.release.exports)
        ),
        inputs={"model": trained.path / "model"},
    )


def comparison_inputs(
    recipe: Recipe, lock: Lock, data: Ref, tokens: Ref, trained: Ref, predictions: Ref, exports: Ref
) -> Inputs:
    """The exports, the model with its predictions, the rows, the metric, the margin and the confidence."""
    split, metrics = recipe.judged_split, recipe.compared_metrics
    task_type = task_types.load(**recipe.task_and_options)
    return Inputs(
        {
            "task": recipe.task,
            "options": task_type.options_of("predict") | task_type.options_of("compare"),
            "evaluation": {"metrics": metrics},
            "metrics": entries({recipe.compared_by, *metrics}),
            "compute": {"mixed_precision": lock.mixed_precision},
            "training": recipe.training.model_dump(include={"per_device_eval_batch_size"}),
            "release": {
                "gate": {"compare": recipe.compared_by, "confidence": recipe.release.gate.confidence},
                "export_margin": recipe.release.export_margin,
            },
            "less_is_better": recipe.less_is_better,
            "upstream": {
                "load_data": data.parts[f"{split}.arrow"],
                "labels": data.parts["labels.json"],
                "tokenize": tokens.parts[f"{split}.arrow"],
                "fit": trained.parts["model"],
                "predict": predictions.parts[f"{split}.parquet"],
                "export": exports.digest,
            },
        },
        code=[
            "training.programs.compare_exports",
            *task_types.code_modules(recipe.task),
            *task_types.metric_modules(recipe.task, metrics),
        ],
        named={
            **task_types.user_code(recipe.task),
            **{f"evaluation.metrics[{index}]": name for index, name in enumerate(metrics)},
        },
        libraries=(*LIBRARIES, "evaluate", "numpy", "pyarrow", "scikit-learn", "scipy"),
    )


@stage(comparison_inputs, where="the gate does not reject the model")
def compare_exports(
    work: Work, recipe: Recipe, lock: Lock, data: Ref, tokens: Ref, trained: Ref, predictions: Ref, exports: Ref
) -> Mapping[str, Any]:
    """Predicts the judged split with each export, tests whether it is not inferior to the model, and measures the speed
    of both."""
    settings = CompareExportsSettings(
        **recipe.task_and_options,
        split=recipe.judged_split,
        labels=json.loads((data.path / "labels.json").read_text()),
        metrics=recipe.compared_metrics,
        figure=recipe.compared_by,
        less_is_better=recipe.less_is_better,
        margin=-recipe.release.export_margin,
        confidence=recipe.release.gate.confidence,
        champion="the model",
        exports=sorted(recipe.release.exports),
        batch_size=recipe.training.per_device_eval_batch_size,
        mixed_precision=lock.mixed_precision,
    )
    figures = run_child(
        work,
        "training.programs.compare_exports",
        python_argv("training.programs.compare_exports"),
        settings=settings,
        inputs={
            "model": trained.path / "model",
            "exports": exports.path,
            "data": data.path,
            "tokens": tokens.path,
            "predictions": predictions.path,
        },
    )
    for name, one in figures.items():
        if not one["released"]:
            work.on_events([{"kind": "warning", "message": describe_refused(name, one)}])
    return figures
