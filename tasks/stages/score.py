"""Stage: metrics of stored predictions, without the model and a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tasks.cache.code import metrics_code
from tasks.cache.results import Artifact
from tasks.jobs.job import StageJob, files_of, folder_of, job_of, stage
from tasks.registry.versions import LONGEST_TAG
from tasks.reports.row_reports import read_report
from training import task_types
from training.data.ipc_files import CORPUS, groups_file, ipc_reader, read_labels
from training.evaluation.scores import SplitScores
from training.evaluation.slices import of_column, of_length
from training.evaluation.stored_calibration import most_characters
from training.problems import Problem, UserError
from training.programs.score import ScoreSettings
from training.recipe import Recipe
from training.recipe.rules.release_rules import CALIBRATING, absent_splits, undefined_metrics, unfitting_metrics
from training.recipe.rules.slice_rules import (
    BUILT_IN_SLICES,
    FEWEST_ROWS,
    LABEL,
    LENGTH,
    MOST_GROUPS,
    named_groups,
    slice_of,
    unfitting_floor,
    unknown_slices,
)
from training.recipe.rules.training_rules import unfitting_weights
from training.recipe.tables.metrics import (
    ONE_LABEL,
    TOOL_METRICS,
    entries,
    frequent_positive,
    metric_libraries,
    metrics_of_second,
)
from training.recipe.task_specification import specification_class


def _slices(recipe: Recipe) -> dict[str, Any]:
    names, floors = recipe.evaluation.slices, recipe.release.gate.floors
    named = {name: sorted(groups) for name, groups in named_groups(floors, names).items()}
    sizes = {"fewest_rows": FEWEST_ROWS, "most_groups": MOST_GROUPS}
    return {"slices": list(names), "each": [name for name in names if name in floors], "named": named, **sizes}


def _slice_columns(recipe: Recipe) -> list[str]:
    return [name for name in recipe.evaluation.slices if name not in BUILT_IN_SLICES]


def require_fitting(recipe: Recipe, data: object) -> None:
    """Raises UserError with every metric and slice that is impossible with these rows.

    `data` is the artifact of load_data or a folder with the same files. A plan passes other values if it is unknown:
    then nothing is checked.
    """
    folder = data.path if isinstance(data, Artifact) else data
    if isinstance(folder, Path) and (problems := list(_find_unfitting(recipe, folder))):
        raise UserError(problems)


def find_frequent_positive(recipe: Recipe, rows: Path) -> Iterator[Problem]:
    """The warning about metrics of the second of two labels if it is by far the more frequent one in train, and the
    recipe does not name the order. `rows` is the folder of load_data."""
    labels, of_second = read_labels(rows), metrics_of_second(recipe.evaluation.metrics)
    if of_second and specification_class(recipe.task).prediction_type == ONE_LABEL and recipe.data.label_names is None:
        counts = read_report(rows)["labels"]["train"]
        if message := frequent_positive({label: counts.get(label, 0) for label in labels}):
            message = f"{', '.join(of_second)}: {message}"
            yield Problem(kind="metrics", where="evaluation.metrics", message=message, level="warning")


def _find_unfitting(recipe: Recipe, rows: Path) -> Iterator[Problem]:
    names, labels = recipe.evaluation.slices, read_labels(rows)
    splits = [file.stem for file in rows.glob("*.arrow")]
    for where, message in absent_splits(recipe.evaluation.splits, splits, recipe.data):
        yield Problem(kind="data", where=where, message=message)
    if folds := recipe.evaluation.folds:
        report, unit = read_report(rows), "rows"
        found = report["rows"]["train"]
        if (split := report.get("split", {})).get("groups"):
            found, unit = split["groups"]["train"] + split["without_group"]["train"], "groups"
        if folds > found:
            message = f"{folds} is more than the {found:,} {unit} of train: choose fewer folds, or leave it out."
            yield Problem(kind="data", where="evaluation.folds", message=message)
    if recipe.release.calibrates and recipe.release.registry is not None and labels:
        has_many = specification_class(recipe.task).prediction_type != ONE_LABEL
        if (most := most_characters(labels, has_many=has_many)) > LONGEST_TAG:
            fields = [name for name in CALIBRATING if getattr(recipe.release, name) not in (None, False)]
            message = f"the calibration of {len(labels):,} labels has up to {most:,} characters, and MLflow stores "
            message += f"{LONGEST_TAG:,} with a version: leave it out."
            yield from (Problem(kind="release", where=f"release.{name}", message=message) for name in fields)
    for where, message in unfitting_metrics(recipe.evaluation.metrics, labels):
        yield Problem(kind="metrics", where=where, message=message)
    for where, message in unfitting_weights(recipe.training.class_weights, labels):
        yield Problem(kind="training", where=where, message=message)
    if tool_metrics := [name for name in recipe.evaluation.metrics if name in TOOL_METRICS]:
        for split in recipe.evaluation.splits:
            if split in splits and not _has_tools(rows / f"{split}.arrow"):
                message = f"{tool_metrics[0]} is of rows with tools, and no row of {split} has any: name their column "
                message += "in data.columns.tools, or choose another metric."
                yield Problem(kind="metrics", where="evaluation.metrics", message=message)
    for where, message in undefined_metrics(recipe, labels, partial(_find_labels, rows)):
        yield Problem(kind="metrics", where=where, message=message)
    kept: list[str] = []
    if _slice_columns(recipe):
        found = json.loads((rows / "slices.json").read_text(encoding="utf-8"))
        kept = found["kept"]
        for where, message in unknown_slices(names, kept, found["left_out"]):
            yield Problem(kind="slices", where=where, message=message)
    groups: dict[str, list[str]] = {}
    for key, name, group in _floors(recipe):
        if (
            name not in groups
            and recipe.judged_split in splits
            and (name == LABEL or (name in kept and name != LENGTH))
        ):
            groups[name] = _read_groups(rows, recipe.judged_split, name)
        if name in groups:
            yield from _unfitting_floor(recipe, key, name, group, groups[name])


def _has_tools(file: Path) -> bool:
    with ipc_reader(file) as reader:
        place = reader.schema.get_field_index("tools")
        blocks = map(reader.get_batch, range(reader.num_record_batches if place >= 0 else 0))
        return any(block.column(place).null_count < block.num_rows for block in blocks)


def _find_labels(rows: Path, split: str) -> set[str]:
    """The labels that rows of the split have; of numbers the least and the largest. Empty without such a column."""
    if counts := read_report(rows).get("labels", {}).get(split):
        return {label for label, count in counts.items() if count}
    if not (file := rows / f"{split}.arrow").is_file():
        return set()
    found: set[str] = set()
    with ipc_reader(file) as reader:
        place = reader.schema.get_field_index("label")
        if place < 0 or not pa.types.is_primitive(reader.schema.field(place).type):
            return found
        for number in range(reader.num_record_batches):
            least_and_most = pc.min_max(reader.get_batch(number).column(place)).as_py()
            found |= {str(value) for value in least_and_most.values() if value is not None}
    return found


def _floors(recipe: Recipe) -> Iterator[tuple[str, str, str | None]]:
    """Each floor's key, its slice, and its group (None: every group)."""
    for key in recipe.release.gate.floors:
        yield key, *(slice_of(key, recipe.evaluation.slices) or ("", None))


def _unfitting_floor(
    recipe: Recipe, key: str, name: str, group: str | None, groups: Sequence[str]
) -> Iterator[Problem]:
    if message := unfitting_floor(name, group, groups, recipe.judged_split):
        yield Problem(kind="slices", where=f"release.gate.floors.{key}", message=message)


def _read_groups(rows: Path, split: str, name: str) -> list[str]:
    """The groups of the split by label or by a column."""
    if name == LABEL:
        return [label for label, count in read_report(rows)["labels"].get(split, {}).items() if count]
    return list(of_column(rows / f"{split}.slices.arrow", name))


def require_fitting_lengths(recipe: Recipe, tokens: object) -> None:
    """Raises UserError with every group by length that a floor names and that has no judged row.

    `tokens` is the artifact of tokenize or a folder with the same files; other values are not checked.
    """
    named = [floor for floor in _floors(recipe) if floor[1] == LENGTH and floor[2] is not None]
    folder = tokens.path if isinstance(tokens, Artifact) else tokens
    if named and isinstance(folder, Path):
        groups = _read_length_groups(folder / f"{recipe.judged_split}.arrow")
        if problems := [problem for floor in named for problem in _unfitting_floor(recipe, *floor, groups)]:
            raise UserError(problems)


def _read_length_groups(file: Path) -> list[str]:
    return list(of_length(pa.ipc.open_file(pa.memory_map(str(file))).read_all()["length"].to_numpy()))


ScoreArtifact = Artifact[SplitScores]


@stage(SplitScores)
def score(recipe: Recipe, data: Artifact, tokens: Artifact, trained: Artifact, predictions: Artifact) -> StageJob:
    """Computes every metric with its interval and baseline, on each split and each group of the slices, and draws
    plots.

    The predictions, their rows with the groups of these, the sources of the baseline, the metrics and the slices. The
    columns for slices are included only if a slice uses one.
    """
    metrics, splits = recipe.evaluation.metrics, recipe.evaluation.splits
    rows = ["labels.json", "train.arrow", *(f"{name}.arrow" for name in (*splits, CORPUS))]
    rows += map(groups_file, splits)
    rows += [f"{split}.slices.arrow" for split in splits if _slice_columns(recipe)]
    return StageJob(
        "training.programs.score",
        ScoreSettings(
            task=recipe.task,
            options=task_types.load(**recipe.task_and_options).options_of("score"),
            splits=list(splits),
            metrics=list(metrics),
            **_slices(recipe),
        ),
        reads={
            "predictions": files_of(predictions, [f"{split}.parquet" for split in splits]),
            "data": files_of(data, rows),
            "tokens": files_of(tokens, [f"{split}.arrow" for split in dict.fromkeys(["train", *splits])]),
            "model": folder_of(trained, "model"),
        },
        tables={"table": entries(metrics)},
        code=[*task_types.code_modules(recipe.task), *task_types.metric_modules(recipe.task, metrics)],
        users_code=task_types.user_code(recipe.task) | metrics_code(recipe, metrics),
        libraries=("evaluate", "scikit-learn", "scipy", "numpy", "matplotlib", *metric_libraries(metrics)),
        field_names={"metrics": "evaluation.metrics", "slices": "evaluation.slices", "splits": "evaluation.splits"},
    )


@stage(SplitScores)
def score_folds(recipe: Recipe, data: Artifact, tokens: Artifact, trained: Artifact, predictions: Artifact) -> StageJob:
    """Computes every metric of the out-of-fold predictions of all training rows together, as `score` does, without
    slices and metrics of answers.

    The predictions, the training rows, the sources of the baseline, and the metrics.
    """
    answers = specification_class(recipe.task).answer_metrics
    metrics = [name for name in recipe.evaluation.metrics if name not in answers]
    evaluation = recipe.evaluation.model_copy(update={"splits": ["train"], "metrics": metrics, "slices": []})
    release = recipe.release.model_copy(update={"gate": recipe.release.gate.model_copy(update={"floors": {}})})
    plain = recipe.model_copy(update={"evaluation": evaluation, "release": release})
    return job_of(score, plain, data, tokens, trained, predictions)
