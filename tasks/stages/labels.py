"""Stages: the rows of train whose labels are probably wrong, and their file in MLflow."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from tasks.cache import store
from tasks.cache.input_files import pin_files, require_unchanged
from tasks.cache.results import Artifact, PinnedFile, label_names
from tasks.cache.stage import Inputs, Work, action
from tasks.home import registry_place
from tasks.jobs.job import StageJob, files_of, stage
from tasks.prediction.input_rows import list_files
from tasks.registry.lineage import RECIPE_SET
from tasks.reports.row_reports import emit_warnings, read_report
from tasks.shared_store.bucket_remote import open_remote
from tasks.tracking.connection import connect, mlflow_errors
from training import task_types
from training.data.corrections import COLUMNS, FIELD, read_decided, read_lines, write_review
from training.data.load_rows import LoadDataResult, load
from training.data.prediction_rows import format_of
from training.data.sources import reading_by_name
from training.evaluation.scores import SuspectLabels
from training.jobs.protocol import NotInKey, Settings
from training.problems import UserError
from training.programs.list_labels import OTHER, SPLIT, ListLabelsSettings
from training.recipe import Data, Recipe, parse
from training.recipe.reading_rules import TEXT_LINES, ReadingRules
from training.recipe.rules.column_rules import code_for_rows, source_columns
from training.recipe.tables.formats import SOURCES
from training.recipe.task_specification import specification

PREDICTIONS = "out_of_fold"
"""The stage with the predictions of each training row by a model that has not seen it."""
REVIEW = "review.csv"


class OutOfFold(NamedTuple):
    """The rows of a run, and their out-of-fold predictions."""

    recipe: Recipe
    data: Artifact
    predictions: Artifact
    mlflow_run: str | None


def find_out_of_fold(record: Mapping[str, Any], name: str) -> OutOfFold:
    """Finds the artifacts of the run with this lineage record. Raises UserError if it has no such predictions, or they
    are no longer stored."""
    recipe = parse(record[RECIPE_SET])
    keys = {one["name"]: one["key"] for one in record.get("stages", ())}
    if not keys.get(PREDICTIONS):
        message = f"{name} has no predictions of its training rows by models that have not seen them: add "
        message += "`evaluation: {folds: 5}` to the recipe, and run it again."
        raise UserError.of("recipe", "evaluation.folds", message)
    found = list[Artifact]()
    for one in ("load_data", PREDICTIONS):
        try:
            artifact = store.find(one, keys[one]) or open_remote().find(one, keys[one])
        except store.Damaged:
            artifact = None
        if artifact is None:
            message = f"the output of {one} in the run of {name} is no longer stored: run the recipe again."
            raise UserError.of("registry", "NAME", message)
        found.append(artifact)
    return OutOfFold(recipe, found[0], found[1], record["run"].get("mlflow_run_id"))


class LoadOtherSettings(Settings):
    """The settings of reading rows with labels of another source."""

    data: Data
    spelt: dict[str, int]
    """The indices of labels whose spelling is not their name."""
    task: str
    options: Annotated[dict[str, Any], NotInKey("the options that its code for rows reads are in the key")]
    files: Annotated[list[PinnedFile], NotInKey("their digests are in the key")]


def find_other_files(recipe: Recipe, path: str) -> list[PinnedFile]:
    """The files of another source of labels. Raises UserError."""
    return pin_files(list_files([path], field="against", rules=ReadingRules.of(recipe.data)))


@stage(LoadDataResult)
def load_other_labels(recipe: Recipe, rows: Artifact, files: Sequence[PinnedFile], label: str | None) -> StageJob:
    """Reads rows with labels of another source as `load_data` does, as one split, with the same labels.

    The settings of reading, the labels of the rows, and the content of the files.
    """
    rules = ReadingRules.of(recipe.data)
    formats = {format_of(pin.path, rules) for pin in files}
    if len(formats) > 1 or TEXT_LINES in formats:
        message = f"has rows without labels, or files of several formats ({', '.join(sorted(formats))}): name files of "
        raise UserError.of("option", "against", f"{message}one of {', '.join(rules.suffixes[1:])}.")
    (source,) = formats
    data, names = rules.data(source), label_names(rows)
    levels = dict.fromkeys(("duplicates", "conflicting_labels", "absent_label"), "ignore")
    levels |= dict.fromkeys(("blank_text", "missing_label", "unknown_label"), "warning")
    values: dict[str, Any] = {"label": label or data.label, "checks": {**data.checks, **levels}}
    values["label_names"] = names if len(names) > 1 else None
    code, named, options = code_for_rows(recipe)
    return StageJob(
        _load_other,
        LoadOtherSettings(
            **recipe.task_and_options,
            data=Data.model_validate(data.model_dump(mode="json") | values),
            spelt=dict(read_report(rows.path).get("spelt", {})),
            files=list(files),
        ),
        reads={},
        content={"files": [pin.sha256 for pin in files], **reading_by_name(data, [pin.path for pin in files])},
        tables={"rows": {"options": options}},
        code=["training.data.load_rows", SOURCES[source].reader.partition(":")[0], *code],
        outside=["training.programs"],
        users_code=named,
        libraries=SOURCES[source].libraries,
        field_names={"files": ", ".join(pin.path for pin in files)},
    )


def _load_other(work: Work, settings: LoadOtherSettings, inputs: Mapping[str, Path]) -> LoadDataResult:
    task_type = specification(settings.task, settings.options)
    sources, spelt = {OTHER: [pin.path for pin in settings.files]}, settings.spelt
    result = load(settings.data, task_type, sources, work.out, work.progress, [OTHER], only=OTHER, spelt=spelt)
    require_unchanged(settings.files)
    emit_warnings(work, read_report(work.out))
    return result


@stage(SuspectLabels)
def list_labels(recipe: Recipe, data: Artifact, predictions: Artifact, other: Artifact | None = None) -> StageJob:
    """Lists the training rows whose labels are probably wrong, those that are equal to others with another label, and
    those that another source labels otherwise.

    The rows, their out-of-fold predictions, the names of the rows that data.corrections decides, and the labels of the
    other source if there is one.
    """
    task_type = task_types.load(**recipe.task_and_options)
    return StageJob(
        "training.programs.list_labels",
        ListLabelsSettings(
            task=recipe.task,
            options=task_type.options_of("score"),
            columns=[column.name for column in source_columns(recipe).inputs],
            decided=sorted(read_decided(recipe.data.corrections)) if recipe.data.corrections else [],
        ),
        reads={
            "predictions": files_of(predictions, [f"{SPLIT}.parquet"]),
            "data": files_of(data, ["labels.json", f"{SPLIT}.arrow"]),
            **({"other": files_of(other, ["labels.json", f"{OTHER}.arrow"])} if other is not None else {}),
        },
        code=task_types.code_modules(recipe.task),
        users_code=task_types.user_code(recipe.task),
        libraries=("numpy", "scipy", "pyarrow"),
        field_names={"decided": FIELD},
    )


def require_new(out: Path) -> None:
    """Raises UserError if there is such a file already, because it may hold decisions."""
    if out.exists():
        message = f"{str(out)!r} exists, and may hold decisions: name another file, or remove it."
        raise UserError.of("option", "out", message)


def save_review(recipe: Recipe, listed: Artifact, out: Path) -> None:
    """Writes the file of the rows to look at, behind the rows that people have decided on."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if recipe.data.corrections is None:
        shutil.copyfile(listed.path / REVIEW, out)
        return
    decided = read_decided(recipe.data.corrections).values()
    lines = [*decided, *(cells for _, cells in read_lines(str(listed.path / REVIEW)))]
    write_review(([cells[name] for name in COLUMNS] for cells in lines), out)


def log_inputs(listed: Artifact[SuspectLabels], mlflow_run: str) -> Inputs:
    """The list, and the run in MLflow."""
    return Inputs({"registry": registry_place(), "run": mlflow_run, "upstream": {"list_labels": listed.digest}})


@action(log_inputs)
def log_labels(work: Work, listed: Artifact[SuspectLabels], mlflow_run: str) -> None:
    """Adds the list to the run in MLflow, in the folder `labels`."""
    with mlflow_errors():
        client = connect()
        for name in (REVIEW, "labels.json"):
            client.log_artifact(mlflow_run, str(listed.path / name), "labels")
