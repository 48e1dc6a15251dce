"""Stage: a snapshot of the base model and its tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.cache.refs import Lock, Ref
from tasks.cache.stage import Inputs, Work, stage
from tasks.hub.client import explain_read_errors
from tasks.jobs.child import run_child
from tasks.jobs.commands import python_argv
from tasks.registry.champions import find_folders
from tasks.stages.preflight.model_check import require_model
from training.data.file_systems import PIECE_BYTES
from training.local_files import open_local
from training.models.repository_files import (
    HOME_ROOMS,
    MODEL_FILES,
    TOKENIZER_FILES,
    part_of,
    read_json,
    require_files,
    require_no_other_files,
    require_vocabulary,
)
from training.models.weights import read_shapes
from training.problems import UserError
from training.recipe import Recipe
from training.recipe.program_settings import CreateModelSettings
from training.recipe.rules.column_rules import source_columns

# Code that refuses models and changes no artifact.
_ONLY_CHECKS = ("tasks.stages.preflight", "training.models.weights")


def inputs(recipe: Recipe, lock: Lock, data: Ref | None) -> Inputs:
    """The registered version's content; else the commit, the files' content, or the configuration, the seed and the
    rows that the tokenizer is trained on.

    `data` is only given for a model from scratch.
    """
    model, pinned, champion = recipe.model, lock.model_hub, lock.start
    files = {name: pin.sha256 for name, pin in lock.model_files.items()}
    names = {f"files.{name}": pin.path for name, pin in lock.model_files.items()}
    replacing = {"files": files} if files else {}
    if champion is not None:
        named = "the champion" if lock.started_from else model.path
        names["model.champion"] = f"the model of {named} that training starts from"
        return Inputs({"model": {"champion": champion.model}, **replacing}, outside=_ONLY_CHECKS, names=names)
    if data is not None:
        wanted = source_columns(recipe)
        return Inputs(
            {
                "model": model.model_dump(include={"config", "seed"}),
                "texts": wanted.texts,
                "writes": wanted.task_type.generates_text,
                "upstream": {"load_data": data.parts["train.arrow"]},
                **replacing,
            },
            code=["training.programs.create_model"],
            outside=_ONLY_CHECKS,
            libraries=("tokenizers", "transformers", "torch", "safetensors"),
            names=names,
        )
    names["model.commit"] = f"{model.path} at {model.revision or 'main'}"
    from_hub = {"commit": pinned.commit, "path": model.path} if pinned else {}
    return Inputs({"model": from_hub, "files": files}, outside=_ONLY_CHECKS, names=names)


@stage(inputs, may_repeat=True)
def load_model(work: Work, recipe: Recipe, lock: Lock, data: Ref | None) -> Mapping[str, Any]:
    """Downloads, copies or creates the model in `model/` and `tokenizer/`, with weights in safetensors only. Pinned
    files replace the model's."""
    pinned = {name: Path(pin.path) for name, pin in lock.model_files.items()}
    if data is not None:
        figures = _create(work, recipe, data)
        _copy_pinned(pinned, work.out)
        return figures
    files: dict[str, Path] = {}
    if lock.start is not None:
        folders = find_folders(work, lock.start, lock.start_field)
        files = {file.name: file for part, folder in folders.items() for file in _list_part(folder, part)}
    elif lock.model_hub is not None:
        files = _download(str(recipe.model.path), lock.model_hub.commit)
    read_shapes(files | pinned, lock.start_field if lock.start else "model.path")
    for name, path in files.items():
        shutil.copyfile(path, _place(name, work.out))
    _copy_pinned(pinned, work.out)
    require_no_other_files(work.out / "model", work.out / "tokenizer")
    require_vocabulary(work.out / "tokenizer", str(lock.start or recipe.model.path))
    checked = require_model(recipe, lock, model=work.out / "model")
    work.on_events([{"kind": "note", "message": note} for note in checked.notes])
    work.on_events([{"kind": "warning", "message": f"{one.where}: {one.message}"} for one in checked.warnings])
    size = sum(path.stat().st_size for path in (work.out / "model").glob("*.safetensors"))
    known = {} if checked.vocab_size is None else {"vocab_size": checked.vocab_size}
    return {"megabytes": round(size / 1e6, 1), **known}


def _create(work: Work, recipe: Recipe, data: Ref) -> dict[str, Any]:
    wanted = source_columns(recipe)
    return run_child(
        work,
        "training.programs.create_model",
        python_argv("training.programs.create_model"),
        settings=CreateModelSettings(
            config=recipe.model.config or {},
            seed=recipe.model.seed,
            texts=wanted.texts,
            writes=wanted.task_type.generates_text,
        ),
        inputs={"data": data.path},
    )


def _place(name: str, out: Path) -> Path:
    part = out / str(part_of(name))
    part.mkdir(exist_ok=True)
    return part / name


def _copy_pinned(files: Mapping[str, Path], out: Path) -> None:
    for name, path in files.items():
        with open(open_local(str(path), HOME_ROOMS, "model"), "rb") as source, _place(name, out).open("wb") as target:
            shutil.copyfileobj(source, target, PIECE_BYTES)


def require_same_labels(lock: Lock, data: object, model: object) -> None:
    """Raises UserError if training starts from a champion whose labels, or their order, differ from those of the rows.

    `data` and `model` are the artifacts of load_data and load_model. A plan passes other values for artifacts that are
    unknown: then nothing is checked.
    """
    if lock.started_from is None or not isinstance(data, Ref) or not isinstance(model, Ref):
        return
    labels = json.loads((data.path / "labels.json").read_text())
    if not labels:
        return
    named = read_json(model.path / "model" / "config.json").get("id2label", {})
    own = [named[number] for number in sorted(named, key=int)]
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


def _download(name: str, commit: str) -> dict[str, Path]:
    """The files of a commit in the cache of the Hub's clients."""
    from huggingface_hub import get_cached_repo_tree, snapshot_download

    with explain_read_errors("model", name, commit):
        wanted = [*MODEL_FILES, *TOKENIZER_FILES]
        folder = snapshot_download(name, revision=commit, allow_patterns=wanted, ignore_patterns="*/*")
        # Another program may have left a part of the commit in the cache: the stored listing names all files.
        paths = [file.path for file in get_cached_repo_tree(name, revision=commit)]
    files = {path: Path(folder, path) for path in paths if "/" not in path and part_of(path)}
    require_files(files, f"{name!r} at {commit[:12]}")
    return files
