"""Stages: the rows of release.gate.must_hold, the trained model's predictions of them, and those that it has wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from tasks.cache.input_files import Progress, unchanged
from tasks.cache.results import Artifact, Lock, PinnedFile
from tasks.cache.stage import Work
from tasks.jobs.job import StageJob, files_of, folder_of, stage, whole
from tasks.jobs.retries import divide_batches
from tasks.reports.row_reports import emit_warnings, read_report
from training import task_types
from training.data.ipc_files import read_labels
from training.data.load_rows import LoadDataResult, load
from training.data.prediction_rows import format_of
from training.data.sources import reading_by_name
from training.evaluation.scores import HeldRows
from training.jobs.protocol import NotInKey, Settings
from training.problems import Problem, UserError
from training.programs.must_hold import SPLIT, MustHoldSettings
from training.programs.predict_champion import PredictChampionResult, PredictChampionSettings
from training.recipe import Data, Recipe
from training.recipe.fields import MustHold
from training.recipe.reading_rules import TEXT_LINES, ReadingRules
from training.recipe.rules.column_rules import code_for_rows
from training.recipe.tables.formats import SOURCES
from training.recipe.task_specification import specification

FIELD = "release.gate.must_hold"


class LoadMustHoldSettings(Settings):
    """The settings of reading rows that must be right."""

    data: Data
    reason: str
    """The column of reasons."""
    task: str
    options: Annotated[dict[str, Any], NotInKey("the options that its code for rows reads are in the key")]
    files: Annotated[list[PinnedFile], NotInKey("their digests are in the key")]


def load_must_hold_settings(recipe: Recipe, files: Sequence[PinnedFile]) -> LoadMustHoldSettings:
    """The settings by which these files are read: as the recipe reads its rows, without its filter. Raises UserError
    for files of several formats."""
    rules, must_hold = ReadingRules.of(recipe.data), recipe.release.gate.must_hold
    assert must_hold is not None
    formats = {format_of(pin.path, rules): pin.path for pin in files}
    if TEXT_LINES in formats or len(formats) > 1:
        message = f"{must_hold.path!r} has rows without labels, or files of several formats ({', '.join(formats)}): "
        raise UserError.of("data", f"{FIELD}.path", f"{message}name files of one of {', '.join(rules.suffixes[1:])}.")
    data = rules.data(*formats)
    levels = dict.fromkeys(("duplicates", "shared_rows", "absent_label"), "ignore")
    levels |= dict.fromkeys(("blank_text", "missing_label", "conflicting_labels"), "error")
    return LoadMustHoldSettings(
        **recipe.task_and_options,
        data=Data.model_validate(data.model_dump(mode="json") | {"checks": {**data.checks, **levels}, "filter": None}),
        reason=must_hold.reason,
        files=list(files),
    )


@stage(LoadDataResult, where="the gate has rows that must hold")
def load_must_hold(recipe: Recipe, lock: Lock, rows: Artifact) -> StageJob:
    """Reads and checks the rows that must be right as `load_data` does, as one split, with the same labels.

    The settings of reading, the labels of the rows, and the content of the files.
    """
    settings = load_must_hold_settings(recipe, lock.must_hold)
    code, named, options = code_for_rows(recipe)
    data, files = settings.data, settings.files
    source = SOURCES[data.source]
    return StageJob(
        _load,
        settings,
        reads={"rows": whole(rows)},
        content={"files": [pin.sha256 for pin in files], **reading_by_name(data, [pin.path for pin in files])},
        tables={"rows": {"options": options}},
        code=["training.data.load_rows", source.reader.partition(":")[0], *code],
        outside=["training.programs"],
        users_code=named,
        libraries=source.libraries,
        field_names={"files": ", ".join(pin.path for pin in files)},
    )


def _load(work: Work, settings: LoadMustHoldSettings, inputs: Mapping[str, Path]) -> LoadDataResult:
    result = read_must_hold(settings, inputs["rows"], work.out, work.progress)
    emit_warnings(work, read_report(work.out))
    return result


def read_must_hold(settings: LoadMustHoldSettings, rows: Path, out: Path, progress: Progress) -> LoadDataResult:
    """Writes the rows to the folder `out`; `rows` is the folder with those of the recipe. Raises UserError with every
    problem."""
    task_type, report = specification(settings.task, settings.options), read_report(rows)
    names = read_labels(rows)
    data = settings.data.model_copy(update={"label_names": names if len(names) > 1 else None})
    sources, spelt = {SPLIT: [pin.path for pin in settings.files]}, dict(report.get("spelt", {}))
    with unchanged(settings.files):
        result = load(data, task_type, sources, out, progress, [SPLIT], only=SPLIT, spelt=spelt)
    reason = json.loads((out / "slices.json").read_text(encoding="utf-8"))["left_out"].get(settings.reason)
    if reason and reason != "holds no value":
        message = f"column {settings.reason!r} {reason}: name another in {FIELD}.reason, or shorten its texts."
        raise UserError([Problem(kind="data", where=f"{FIELD}.reason", message=message)])
    return result


@stage(PredictChampionResult, where="the gate has rows that must hold")
def predict_must_hold(recipe: Recipe, lock: Lock, trained: Artifact, held: Artifact) -> StageJob:
    """Predicts the rows that must be right by the trained model, in the number format of prediction.

    The model, and the rows with their labels.
    """
    task_type = task_types.load(**recipe.task_and_options)
    program, batch_size = "training.programs.predict_champion", recipe.training.per_device_eval_batch_size
    model = folder_of(trained, "model")
    return StageJob(
        program,
        PredictChampionSettings(
            task=recipe.task,
            options=task_type.options_of("tokenize") | task_type.options_of("predict"),
            split=SPLIT,
            champion="the trained model",
            max_length=recipe.tokens.max_length,
            batch_size=batch_size,
            mixed_precision=lock.mixed_precision,
        ),
        reads={"model": model, "tokenizer": model, "data": files_of(held, ["labels.json", f"{SPLIT}.arrow"])},
        code=task_types.code_modules(recipe.task),
        outside=("training.engine.answers", "training.evaluation.preferences"),
        users_code=task_types.user_code(recipe.task),
        libraries=("torch", "transformers", "tokenizers", "pyarrow", *task_type.libraries),
        batches=divide_batches(program, batch_size, recipe.tokens.max_length, lock),
    )


@stage(HeldRows, where="the gate has rows that must hold")
def must_hold(recipe: Recipe, held: Artifact, predicted: Artifact) -> StageJob:
    """Finds the rows that the model has wrong, with their reasons.

    The predictions, and the rows.
    """
    section = recipe.release.gate.must_hold
    assert isinstance(section, MustHold)
    task_type = task_types.load(**recipe.task_and_options)
    return StageJob(
        "training.programs.must_hold",
        MustHoldSettings(task=recipe.task, options=task_type.options_of("score"), reason=section.reason),
        reads={"predictions": whole(predicted), "data": whole(held)},
        code=task_types.code_modules(recipe.task),
        users_code=task_types.user_code(recipe.task),
        libraries=("numpy", "pyarrow"),
        field_names={"reason": f"{FIELD}.reason"},
    )
