"""Stages: rows with labels that arrived after the release, a version's predictions on them, and its figures now."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.cache import settings
from tasks.cache.input_files import require_unchanged
from tasks.cache.refs import PinnedFile, Ref
from tasks.cache.stage import Inputs, Work, action, stage
from tasks.jobs.child import run_child
from tasks.jobs.commands import python_argv
from tasks.registry.champions import find_folders
from tasks.registry.evaluations import Evaluation, record
from tasks.registry.monitored import Monitored, find_predictions, find_rows, label_names, labelled_data
from tasks.reports.row_reports import emit_warnings, read_report
from training import task_types
from training.data.sources import delimiter_of
from training.problems import UserError
from training.recipe import Recipe
from training.recipe.mixture import OF_MIXTURE
from training.recipe.monitoring_settings import EvaluateSettings
from training.recipe.program_settings import PredictChampionSettings
from training.recipe.rules.column_rules import code_for_rows, source_columns
from training.recipe.rules.slice_rules import FEWEST_ROWS, MOST_GROUPS
from training.recipe.tables.formats import SOURCES

SPLIT = "test"
"""The name of the evaluated rows' split: load_data keeps its columns for slices."""


def load_inputs(version: Monitored, recipe: Recipe, rows: Ref, files: Sequence[PinnedFile]) -> Inputs:
    """The settings of reading, the labels' names, and the content of the files."""
    data = labelled_data(version, rows, files)
    code, named, options = code_for_rows(recipe)
    source = SOURCES[data.source]
    return Inputs(
        {
            "data": data.model_dump(exclude={"path", "config", "revision", "splits", "max_file_gb", *OF_MIXTURE}),
            "delimiter": [delimiter_of(pin.path, data) for pin in files] if data.source == "csv" else None,
            "spelt": _read_spelling(rows),
            "task": {"name": version.task, "options": options},
            "files": [pin.sha256 for pin in files],
        },
        code=["training.data.load_rows", source.reader.partition(":")[0], *code],
        named=named,
        libraries=source.libraries,
        names={"files": ", ".join(pin.path for pin in files)},
    )


def _read_spelling(rows: Ref) -> dict[str, int]:
    """The indices of labels as the version's rows spell them, where these are not the labels' names."""
    return dict(read_report(rows.path).get("spelt", {}))


@stage(load_inputs)
def load_labelled(
    work: Work, version: Monitored, recipe: Recipe, rows: Ref, files: Sequence[PinnedFile]
) -> Mapping[str, Any]:
    """Reads and checks the rows as `load_data` does, as one split, with the labels of the version in their order."""
    from training.data.load_rows import load

    data, task_type = labelled_data(version, rows, files), source_columns(recipe).task_type
    sources = {SPLIT: [pin.path for pin in files]}
    spelt = _read_spelling(rows)
    try:
        figures = load(data, task_type, sources, work.out, work.progress, [SPLIT], only=SPLIT, spelt=spelt)
    except UserError as error:
        words = {"where": "inputs", "message": "there are no rows that can be evaluated: give files that have some."}
        is_empty = [problem.check == "no_rows" for problem in error.problems]
        raise UserError(
            problem.model_copy(update=words) if empty else problem
            for problem, empty in zip(error.problems, is_empty, strict=True)
        ) from error
    require_unchanged(files)
    emit_warnings(work, read_report(work.out))
    return {f"{SPLIT}_rows": figures[f"{SPLIT}_rows"], "labels": figures["labels"], "warnings": figures["warnings"]}


def predict_inputs(version: Monitored, recipe: Recipe, labelled: Ref) -> Inputs:
    """The model, and the rows with their labels."""
    task_type = task_types.load(version.task, version.options)
    return Inputs(
        {
            "task": version.task,
            "options": version.options,
            "tokens": {"max_length": version.champion.max_length},
            "training": recipe.training.model_dump(include={"per_device_eval_batch_size"}),
            "upstream": {
                "fit": version.champion.model,
                "load_labelled": labelled.parts[f"{SPLIT}.arrow"],
                "labels": labelled.parts["labels.json"],
            },
        },
        code=["training.programs.predict_champion", *task_types.code_modules(version.task)],
        named=task_types.user_code(version.task),
        libraries=("torch", "transformers", "tokenizers", "pyarrow", *task_type.libraries),
    )


@stage(predict_inputs)
def predict_labelled(work: Work, version: Monitored, recipe: Recipe, labelled: Ref) -> Mapping[str, Any]:
    """Predicts the rows with the version, in full precision."""
    return run_child(
        work,
        "training.programs.predict_champion",
        python_argv("training.programs.predict_champion"),
        settings=PredictChampionSettings(
            task=version.task,
            options=version.options,
            split=SPLIT,
            labels=label_names(labelled),
            champion=str(version.champion),
            max_length=version.champion.max_length,
            batch_size=recipe.training.per_device_eval_batch_size,
            mixed_precision="no",
        ),
        inputs={**find_folders(work, version.champion, "NAME"), "data": labelled.path},
    )


def inputs(version: Monitored, recipe: Recipe, labelled: Ref, predicted: Ref) -> Inputs:
    """The predictions, the rows, the metrics and slices, and the promised figures with their rows."""
    promised = find_predictions(version)
    return Inputs(
        {
            "task": version.task,
            "options": version.options,
            "metrics": list(_metrics(recipe)),
            "slices": list(recipe.evaluation.slices),
            "sizes": {"fewest_rows": FEWEST_ROWS, "most_groups": MOST_GROUPS},
            "promised": version.promised,
            "upstream": {
                "load_labelled": labelled.digest,
                "predict_labelled": predicted.digest,
                "predict": promised.digest if promised else None,
            },
        },
        code=["training.programs.evaluate", *task_types.code_modules(version.task)],
        named=task_types.user_code(version.task),
        libraries=("evaluate", "scikit-learn", "scipy", "numpy", "matplotlib"),
    )


@stage(inputs)
def evaluate(work: Work, version: Monitored, recipe: Recipe, labelled: Ref, predicted: Ref) -> Mapping[str, Any]:
    """Computes the metrics with intervals, in slices, and their differences from the promised ones."""
    promised, folders = find_predictions(version), {}
    rows = find_rows(version)
    if promised is not None:
        folders = {"promised": promised.path, "promised_data": rows.path}
    figures = run_child(
        work,
        "training.programs.evaluate",
        python_argv("training.programs.evaluate"),
        settings=EvaluateSettings(
            task=version.task,
            options=version.options,
            labels=label_names(labelled),
            metrics=list(_metrics(recipe)),
            slices=list(recipe.evaluation.slices),
            columns=list(version.columns),
            split=version.split,
            promised={
                name: {end: score.get(end) for end in ("value", "low", "high")}
                for name, score in version.promised.items()
            },
            promised_labels=label_names(rows),
        ),
        inputs={"predictions": predicted.path, "data": labelled.path, **folders},
    )
    for name in recipe.evaluation.metrics:
        if ":" in name:
            message = f"{name} is left out: the registry names code, and code that a registry names is not run."
            work.on_events([{"kind": "warning", "message": message}])
    return figures


def _metrics(recipe: Recipe) -> list[str]:
    """The project's own metrics of the recipe, without those of answers, which are not generated here."""
    left_out = task_types.class_of(recipe.task).answer_metrics
    return [name for name in recipe.evaluation.metrics if ":" not in name and name not in left_out]


def record_inputs(version: Monitored, recipe: Recipe, labelled: Ref, evaluated: Ref, names: Sequence[str]) -> Inputs:
    """The version, the rows, and the figures."""
    return Inputs(
        {
            "registry": settings.registry_place(),
            "version": str(version.champion),
            "upstream": {"load_labelled": labelled.digest, "evaluate": evaluated.digest},
        }
    )


@action(record_inputs, gives=Evaluation)
def record_evaluation(
    work: Work, version: Monitored, recipe: Recipe, labelled: Ref, evaluated: Ref, names: Sequence[str]
) -> Evaluation:
    """Adds the figures to the version's history in MLflow, and compares them with the gate's bounds."""
    gate, figures = recipe.release.gate, evaluated.figures
    report = json.loads((evaluated.path / "evaluation.json").read_text(encoding="utf-8"))
    files = [evaluated.path / "evaluation.json", *sorted((evaluated.path / "log").glob("*.png"))]
    return record(
        version,
        rows=figures["rows"],
        digest=labelled.parts[f"{SPLIT}.arrow"],
        metrics=report["metrics"],
        bounds=(gate.minimum, gate.maximum),
        names=[Path(name).name for name in names],
        files=files,
    )
