"""Stages: the teacher. Its outputs for the training rows and for rows without labels, and the model beside it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tasks.cache.code import figures_code, metrics_code
from tasks.cache.input_files import copy_pinned
from tasks.cache.results import Artifact, Lock, label_names
from tasks.cache.stage import Work
from tasks.hub.client import download_model
from tasks.jobs.commands import build_predict_launch
from tasks.jobs.job import Files, StageJob, files_of, folder_of, stage
from tasks.jobs.retries import divide_batches
from tasks.registry.pinned_versions import PARTS, fetch_config, files_of_version
from tasks.tracking.connection import MlflowFailed
from training import task_types
from training.data.ipc_files import CORPUS, groups_file
from training.evaluation.scores import ComparedTeacher
from training.jobs.protocol import TaskSettings
from training.models.repository_files import dimensions_of_config, labels_of_config, part_of, read_json
from training.problems import UserError
from training.programs import teacher_texts, teacher_tokens
from training.programs.compare_teacher import CompareTeacherSettings
from training.programs.loaded_teacher import FIELD, TeacherResult, TeacherSettings
from training.programs.predict_champion import PredictChampionResult, PredictChampionSettings
from training.programs.teacher_outputs import ROWS_AT_ONCE, find_missing
from training.programs.teacher_tokens import TokenSettings
from training.recipe import Recipe
from training.recipe.tables.metrics import entries
from training.task_types.generation import Generation
from training.task_types.task_type import LearnsVectors, TaskType

PROGRAM = "training.programs.teacher_outputs"


@stage(TeacherResult)
def teacher_outputs(
    recipe: Recipe,
    lock: Lock,
    data: Artifact,
    unlabelled: Artifact | None = None,
    model: Artifact | None = None,
    tokens: Artifact | None = None,
    mined: Artifact | None = None,
) -> StageJob:
    """Computes the outputs of the recipe's teacher for the training rows, and for rows without labels, so that training
    holds one model alone. Validation and test need none: their loss is the ordinary one. Of language models the outputs
    are the likeliest tokens of each target in `tokens`, for which the teacher needs the tokenizer of `model`; or the
    teacher writes the targets of `data`. Other teachers read `data`, or the rows with `mined` documents, by their own
    tokenizer.

    The teacher's files, task type and options, the training rows and their labels, the length, and the number format of
    prediction; of language models the temperature and top_k, or the options of generation. Nothing else of the model
    that learns, so all of them share the result, and those of other rows its equal blocks of rows.
    """
    teacher, own = recipe.training.teacher, task_types.load(**recipe.task_and_options)
    assert teacher is not None
    options, max_length = _options(recipe, lock), _max_length(recipe, lock)
    task: dict[str, Any] = {
        "task": recipe.task,
        "teacher": name_of_teacher(recipe, lock),
        "mixed_precision": lock.mixed_precision,
    }
    if teacher.writes_targets:
        options = {name: options[name] for name in own.learned_options if name in options}
        options = own.options_of("tokenize") | own.options.model_dump(include={*Generation.model_fields}) | options
        writing = TeacherSettings(**task, options=options, max_length=max_length, batch_size=teacher_texts.ROWS_AT_ONCE)
        return _job(teacher_texts.__name__, recipe, lock, writing, {"data": files_of(data, ["train.arrow"])})
    if model is not None and tokens is not None:
        comparing = TokenSettings(
            **task,
            options=own.options_of("tokenize") | own.options_of("fit"),
            max_length=recipe.tokens.max_length,
            batch_size=teacher_tokens.ROWS_AT_ONCE,
            temperature=teacher.temperature_of("tokens"),
            top_k=teacher.top_k,
        )
        rows = {"tokens": files_of(tokens, ["train.arrow"]), "student": folder_of(model, "tokenizer")}
        return _job(teacher_tokens.__name__, recipe, lock, comparing, rows)
    theirs = _task_type(recipe, lock)
    options = theirs.options_of("tokenize") | theirs.options_of("predict")
    reading = TeacherSettings(**task, options=options, max_length=max_length, batch_size=ROWS_AT_ONCE)
    if theirs.teacher_outputs == "vectors":
        rows = {"data": files_of(mined or data, ["train.arrow"])}
    else:
        rows = {"data": files_of(data, ["labels.json", "train.arrow"])}
    if unlabelled is not None:
        rows["unlabelled"] = files_of(unlabelled, ["train.arrow"])
    return _job(PROGRAM, recipe, lock, reading, rows)


def _job(program: str, recipe: Recipe, lock: Lock, settings: TeacherSettings, rows: Mapping[str, Files]) -> StageJob:
    """The job of a teacher's program. `rows` are the files that change no block of other rows."""
    task_type = task_types.load(settings.task, settings.options)
    return StageJob(
        program,
        settings,
        reads={**_files_of_teacher(recipe, lock), **rows},
        code=task_types.code_modules(recipe.task),
        outside=figures_code(recipe.task),
        users_code=task_types.user_code(recipe.task),
        libraries=("torch", "transformers", "tokenizers", "numpy", "pyarrow", *task_type.libraries),
        field_names={
            **_field_names(recipe, lock),
            "temperature": "training.teacher.temperature",
            "top_k": "training.teacher.top_k",
        },
        launch=partial(build_predict_launch, program, lock),
        batches=divide_batches(program, settings.batch_size, settings.max_length, lock),
        blocks_without=tuple(f"upstream.{name}" for files in rows.values() for name in files.digests),
    )


@stage(PredictChampionResult, where="a registered model has a teacher")
def predict_teacher(recipe: Recipe, lock: Lock, data: Artifact) -> StageJob:
    """Predicts every row of the judged split by the teacher with its own tokenizer, once for all models that learn from
    it.

    The teacher's files, task type and options, the rows and labels, the length, and the number format of prediction.
    """
    program, split, task_type = "training.programs.predict_champion", recipe.judged_split, _task_type(recipe, lock)
    return StageJob(
        program,
        PredictChampionSettings(
            task=recipe.task,
            options=task_type.options_of("tokenize") | task_type.options_of("predict"),
            split=split,
            champion=name_of_teacher(recipe, lock),
            max_length=_max_length(recipe, lock),
            batch_size=ROWS_AT_ONCE,
            mixed_precision=lock.mixed_precision,
        ),
        reads={
            **_files_of_teacher(recipe, lock),
            "data": files_of(data, ["labels.json", f"{split}.arrow", f"{CORPUS}.arrow"]),
        },
        code=task_types.code_modules(recipe.task),
        outside=("training.engine.answers", "training.evaluation.preferences"),
        users_code=task_types.user_code(recipe.task),
        libraries=("torch", "transformers", "tokenizers", "pyarrow", *task_type.libraries),
        field_names=_field_names(recipe, lock),
        launch=partial(build_predict_launch, program, lock),
        batches=divide_batches(program, ROWS_AT_ONCE, _max_length(recipe, lock), lock),
    )


@stage(ComparedTeacher, where="a registered model has a teacher")
def compare_teacher(
    recipe: Recipe, lock: Lock, data: Artifact, trained: Artifact, predictions: Artifact, teacher: Artifact
) -> StageJob:
    """Puts the model and its teacher side by side on the judged split: metrics, with a paired test, size and speed.
    `teacher` has the predictions of the teacher. The gate does not read it.

    Both models with their predictions, the rows, the metrics and the confidence.
    """
    split, metrics, task_type = recipe.judged_split, recipe.compared_metrics, _task_type(recipe, lock)
    shown = [name for name in recipe.evaluation.metrics if ":" not in name]
    options = task_types.load(**recipe.task_and_options)
    return StageJob(
        "training.programs.compare_teacher",
        CompareTeacherSettings(
            task=recipe.task,
            options=options.options_of("tokenize") | options.options_of("predict") | options.options_of("compare"),
            teacher=TaskSettings(
                task=recipe.task, options=task_type.options_of("tokenize") | task_type.options_of("predict")
            ),
            split=split,
            metrics=metrics,
            shown=shown,
            figure=recipe.compared_by,
            less_is_better=recipe.less_is_better,
            margin=0.0,
            confidence=recipe.release.gate.confidence,
            champion=name_of_teacher(recipe, lock),
            max_length=recipe.tokens.max_length,
            teacher_max_length=_max_length(recipe, lock),
            batch_size=ROWS_AT_ONCE,
            mixed_precision=lock.mixed_precision,
        ),
        reads={
            "model": folder_of(trained, "model"),
            "tokenizer": folder_of(trained, "model"),
            **{f"teacher_{part}": files for part, files in _files_of_teacher(recipe, lock).items()},
            "data": files_of(data, ["labels.json", f"{split}.arrow", groups_file(split)]),
            "predictions": files_of(predictions, [f"{split}.parquet"]),
            "teacher": files_of(teacher, [f"{split}.parquet"]),
        },
        tables={"table": entries({recipe.compared_by, *metrics, *shown})},
        code=[*task_types.code_modules(recipe.task), *task_types.metric_modules(recipe.task, [*metrics, *shown])],
        users_code=task_types.user_code(recipe.task) | metrics_code(recipe, metrics),
        libraries=("torch", "transformers", "tokenizers", "evaluate", "numpy", "pyarrow", "scikit-learn", "scipy"),
        field_names={
            **_field_names(recipe, lock),
            "metrics": "evaluation.metrics",
            "shown": "evaluation.metrics",
            "figure": "release.gate.compare",
            "confidence": "release.gate.confidence",
        },
    )


def _task_type(recipe: Recipe, lock: Lock) -> TaskType:
    """The teacher's."""
    return task_types.load(recipe.task, _options(recipe, lock))


def _options(recipe: Recipe, lock: Lock) -> dict[str, Any]:
    """The options of the teacher: a version's own, else the recipe's. The prompts of embeddings are then those of the
    teacher's files, because the recipe has those of the model that learns."""
    if lock.teacher_version is not None:
        return lock.teacher_version.options or {}
    task_type = task_types.class_of(recipe.task)
    learned = task_type.learned_options if task_type.embeds else ()
    return {name: value for name, value in recipe.options.items() if name not in learned}


def _max_length(recipe: Recipe, lock: Lock) -> int:
    """The tokens after which the teacher cuts a text."""
    return recipe.tokens.max_length if lock.teacher_version is None else lock.teacher_version.max_length


def _field_names(recipe: Recipe, lock: Lock) -> dict[str, str]:
    teacher = f"the teacher {_named(recipe)}"
    files = {f"upstream.teacher/{name}": f"{name} of {teacher}" for name in lock.teacher_files}
    return {"max_length": "tokens.max_length", "upstream.champion": teacher, "upstream.teacher": teacher, **files}


def _named(recipe: Recipe) -> str:
    teacher = recipe.training.teacher
    assert teacher is not None
    return f"{teacher.path} at {teacher.revision or 'main'}" if teacher.source == "hub" else teacher.path


def by_tokens(recipe: Recipe) -> bool:
    """Whether a teacher's outputs are those of the tokens that the recipe's model learns."""
    teacher = recipe.training.teacher
    outputs = task_types.class_of(recipe.task).teacher_outputs
    return teacher is not None and not teacher.writes_targets and outputs == "tokens"


def is_beside_teacher(recipe: Recipe) -> bool:
    """Whether a run compares the model with its teacher: a registered model of any kind but language models."""
    outputs = task_types.class_of(recipe.task).teacher_outputs
    return recipe.training.teacher is not None and recipe.release.registry is not None and outputs != "tokens"


def name_of_teacher(recipe: Recipe, lock: Lock) -> str:
    """`big/7`, `owner/name at 0123456789ab`, or the folder."""
    teacher = recipe.training.teacher
    assert teacher is not None
    if lock.teacher_hub is not None:
        return f"{teacher.path} at {lock.teacher_hub.commit[:12]}"
    return str(lock.teacher_version or teacher.path)


def _files_of_teacher(recipe: Recipe, lock: Lock) -> dict[str, Files]:
    """The folders `model` and `tokenizer`."""
    if lock.teacher_version is not None:
        return files_of_version(lock.teacher_version, FIELD)
    teacher = recipe.training.teacher
    assert teacher is not None
    folders: dict[str, Path] = {}

    def find(part: str, work: Work) -> Path:
        if not folders:
            place = work.job / "teacher"
            shutil.rmtree(place, ignore_errors=True)
            folders.update({one: place / one for one in PARTS})
            for folder in folders.values():
                folder.mkdir(parents=True)
            if lock.teacher_hub is not None:
                for name, file in download_model(teacher.path, lock.teacher_hub.commit).items():
                    (place / str(part_of(name)) / name).symlink_to(file)
            # Copied: a link would show the program a later content than that in the key.
            for name, pin in lock.teacher_files.items():
                copy_pinned(pin, place / str(part_of(name)) / name)
        return folders[part]

    return {part: Files(partial(find, part), lock.teacher) for part in PARTS}


def require_labels(recipe: Recipe, lock: Lock, data: Any) -> None:
    """Raises UserError if the teacher, of a registry or a folder, lacks labels of the rows. The program checks a model
    of the Hub when its files are there.

    `data` is the artifact of load_data. A plan passes another value if it is unknown: then nothing is checked.
    """
    if recipe.training.teacher is None or not isinstance(data, Artifact):
        return
    labels = label_names(data)
    if not labels or task_types.class_of(recipe.task).teacher_outputs == "vectors":
        return
    if (config := _config(lock)) is None:
        return
    if message := find_missing(name_of_teacher(recipe, lock), labels_of_config(config), labels):
        raise UserError.of("training", FIELD, message)


def require_dimensions(recipe: Recipe, lock: Lock, model: Any) -> None:
    """Raises UserError if the vectors of the teacher, of a registry or a folder, have other dimensions than the
    embeddings of the base model, the artifact of load_model. Training checks a model of the Hub.

    A plan passes another value if it is unknown: then nothing is checked.
    """
    if task_types.class_of(recipe.task).teacher_outputs != "vectors" or recipe.training.teacher is None:
        return
    if not isinstance(model, Artifact) or (config := _config(lock)) is None:
        return
    theirs, own = map(dimensions_of_config, (config, read_json(model.path / "model/config.json")))
    if theirs is not None and own is not None:
        LearnsVectors.require_dimensions(name_of_teacher(recipe, lock), theirs, own)


def _config(lock: Lock) -> dict[str, Any] | None:
    """The teacher's config.json; None if it is not here, as that of a model of the Hub."""
    if lock.teacher_hub is not None:
        return None
    if lock.teacher_version is None:
        return read_json(Path(lock.teacher_files["config.json"].path))
    try:
        return fetch_config(lock.teacher_version, FIELD)
    except (UserError, MlflowFailed):  # gone since a recorded run, whose outputs may be stored
        return None
