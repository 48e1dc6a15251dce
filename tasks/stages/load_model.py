"""Stage: a snapshot of the base model and its tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

from tasks.cache.input_files import copy_pinned
from tasks.cache.results import Artifact, Lock, label_names
from tasks.cache.stage import Work
from tasks.hub.client import download_model
from tasks.jobs.job import Files, StageJob, files_of, stage
from tasks.registry.pinned_versions import files_of_version
from tasks.stages.preflight.model_check import require_model
from training import task_types
from training.jobs.protocol import NotInKey, Settings
from training.models.repository_files import (
    labels_of_config,
    part_of,
    read_json,
    require_image_processor,
    require_no_other_files,
    require_vocabulary,
)
from training.models.weights import read_shapes
from training.problems import UserError
from training.programs.create_image_model import CreateImageModelSettings
from training.programs.create_model import CreateModelSettings, ModelResult
from training.recipe import Recipe
from training.recipe.rules.column_rules import source_columns

# Code that refuses models and changes no artifact.
_ONLY_CHECKS = ("tasks.stages.preflight", "training.models.weights")


class CopyModelSettings(Settings):
    """The settings of the copy of a base model."""

    path: str | None
    """The repository on the Hub; None for a folder or a registered version."""
    commit: str | None
    lock: Annotated[Lock, NotInKey("the digests of the files are in the key, or the commit")]
    recipe: Annotated[Recipe, NotInKey("the model is checked for it, and not changed")]


@stage(ModelResult, may_repeat=True)
def load_model(recipe: Recipe, lock: Lock, data: Artifact | None) -> StageJob:
    """Downloads, copies or creates the model in `model/` and `tokenizer/`, with weights in safetensors only. Pinned
    files replace the model's.

    The registered version's content; else the commit, the files' content, or the configuration, the seed and the rows
    that the tokenizer is trained on. Only for a model from scratch, `data` is given.
    """
    model, hub, start = recipe.model, lock.model_hub, lock.start
    names = {f"files.{name}": pin.path for name, pin in lock.model_files.items()}
    files = {"files": {name: pin.sha256 for name, pin in lock.model_files.items()}}
    wanted = source_columns(recipe)
    if data is not None and wanted.has_images:
        return StageJob(
            "training.programs.create_image_model",
            CreateImageModelSettings(config=model.config or {}, seed=model.seed),
            reads={},
            libraries=("transformers", "torch", "safetensors"),
            field_names={"config": "model.config", "seed": "model.seed"},
        )
    if data is not None:
        return StageJob(
            "training.programs.create_model",
            CreateModelSettings(
                config=model.config or {},
                seed=model.seed,
                texts=wanted.texts,
                writes=wanted.task_type.generates_text,
                sentinels=wanted.task_type.sentinels,
            ),
            reads={
                "data": files_of(data, ["train.arrow"]),
                **({"pinned": Files(partial(_fetch_pinned, lock), {})} if lock.model_files else {}),
            },
            content=files,
            libraries=("tokenizers", "transformers", "torch", "safetensors"),
            field_names=names | {"config": "model.config", "seed": "model.seed"},
        )
    if start is not None:
        named = "the champion" if lock.started_from else model.path
        names["upstream.champion"] = f"the model of {named} that training starts from"
    names["commit"] = f"{model.path} at {model.revision or 'main'}"
    return StageJob(
        _copy,
        CopyModelSettings(
            path=str(model.path) if hub else None, commit=hub.commit if hub else None, lock=lock, recipe=recipe
        ),
        reads=files_of_version(start, lock.start_field) if start is not None else {},
        content=files,
        outside=_ONLY_CHECKS,
        field_names=names,
    )


def _copy(work: Work, settings: CopyModelSettings, inputs: Mapping[str, Path]) -> ModelResult:
    lock, out, files = settings.lock, work.out, dict[str, Path]()
    if inputs:
        files = {file.name: file for part, folder in inputs.items() for file in _list_part(folder, part)}
    elif settings.path is not None and settings.commit is not None:
        files = download_model(settings.path, settings.commit)
    pinned = {name: Path(pin.path) for name, pin in lock.model_files.items()}
    where = str(lock.start or settings.recipe.model.path)
    read_shapes(files | pinned, lock.start_field if lock.start else "model.path")
    for name, path in files.items():
        shutil.copyfile(path, _place(name, out))
    for name, pin in lock.model_files.items():
        copy_pinned(pin, _place(name, out))
    require_no_other_files(out / "model", out / "tokenizer")
    if task_types.class_of(settings.recipe.task).reads_images():
        require_image_processor(out / "tokenizer", where)
    else:
        require_vocabulary(out / "tokenizer", where)
    checked = require_model(settings.recipe, lock, model=out / "model")
    for note in checked.notes:
        work.note(note)
    for one in checked.warnings:
        work.warning(f"{one.where}: {one.message}")
    size = sum(path.stat().st_size for path in (out / "model").glob("*.safetensors"))
    return ModelResult(megabytes=round(size / 1e6, 1), vocab_size=checked.vocab_size)


def _place(name: str, out: Path) -> Path:
    part = out / str(part_of(name))
    part.mkdir(exist_ok=True)
    return part / name


def _fetch_pinned(lock: Lock, work: Work) -> Path:
    """A folder with copies of the files that replace some of a new model."""
    folder = work.job / "pinned"
    folder.mkdir(parents=True, exist_ok=True)
    for name, pin in lock.model_files.items():
        copy_pinned(pin, folder / name)
    return folder


def require_same_labels(lock: Lock, data: object, model: object) -> None:
    """Raises UserError if training starts from a champion whose labels, or their order, differ from those of the rows.

    `data` and `model` are the artifacts of load_data and load_model. A plan passes other values for artifacts that are
    unknown: then nothing is checked.
    """
    if lock.started_from is None or not isinstance(data, Artifact) or not isinstance(model, Artifact):
        return
    labels = label_names(data)
    if not labels:
        return
    own = labels_of_config(read_json(model.path / "model" / "config.json"))
    if own != labels:
        labelled, advice = "names no labels", ""
        if own:
            labelled, advice = f"gives the labels {', '.join(own)}", "make them the same in data.label_names, or "
        message = (
            f"{lock.started_from}, which training starts from, {labelled}, and the rows have {', '.join(labels)}: "
            f"{advice}set this to base."
        )
        raise UserError.of("model", "model.start_from", message)


def _list_part(folder: Path, part: str) -> list[Path]:
    return [file for file in sorted(folder.iterdir()) if part_of(file.name) == part]
