"""Stage: the base model and its tokenizer, as a snapshot of files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.cache.refs import Lock, Ref
from tasks.cache.stage import Inputs, Work, stage
from tasks.hub.client import read_errors
from tasks.jobs.child import run_child
from tasks.jobs.launch import python_argv
from tasks.registry.champions import folders_of
from training.models.repository_files import (
    MODEL_FILES,
    TOKENIZER_FILES,
    part_of,
    read_json,
    require_files,
    require_vocabulary,
)
from training.problems import Problem, UserError
from training.recipe import Recipe
from training.recipe.program_settings import CreateModelSettings
from training.recipe.rules.column_rules import source_columns


def inputs(recipe: Recipe, lock: Lock, data: Ref | None) -> Inputs:
    """The champion's content; else the commit, the files' content, or the configuration, the seed and the rows that the
    tokenizer learns from.

    `data` is given for a model that is made from scratch alone.
    """
    model, pinned, champion = recipe.model, lock.model_hub, lock.started_from
    files = {name: pin.sha256 for name, pin in lock.model_files.items()}
    names = {f"files.{name}": pin.path for name, pin in lock.model_files.items()}
    laid_over = {"files": files} if files else {}
    if champion is not None:
        names["model.champion"] = "the model of the champion that training starts from"
        return Inputs({"model": {"champion": champion.model}, **laid_over}, names=names)
    if data is not None:
        asked = source_columns(recipe)
        return Inputs(
            {
                "model": model.model_dump(include={"config", "seed"}),
                "texts": asked.texts,
                "writes": asked.task_type.generates_text,
                "upstream": {"load_data": data.parts["train.arrow"]},
                **laid_over,
            },
            code=["training.programs.create_model"],
            libraries=("tokenizers", "transformers", "torch", "safetensors"),
            names=names,
        )
    names["model.commit"] = f"{model.path} at {model.revision or 'main'}"
    of_hub = {"commit": pinned.commit, "path": model.path} if pinned else {}
    return Inputs({"model": of_hub, "files": files}, names=names)


@stage(inputs, may_repeat=True)
def load_model(work: Work, recipe: Recipe, lock: Lock, data: Ref | None) -> Mapping[str, Any]:
    """Fetches, copies or creates the model into `model/` and `tokenizer/`; weights in safetensors only. Files that are
    pinned take the place of its own."""
    pinned = {name: Path(pin.path) for name, pin in lock.model_files.items()}
    if data is not None:
        made = _from_scratch(work, recipe, data)
        _copy(pinned, work.out)
        return made
    files: dict[str, Path] = {}
    if lock.started_from is not None:
        folders = folders_of(work, lock.started_from, "model.start_from")
        files = {file.name: file for part, folder in folders.items() for file in _of_part(folder, part)}
    elif lock.model_hub is not None:
        files = _downloaded(str(recipe.model.path), lock.model_hub.commit)
    _copy(files | pinned, work.out)
    require_vocabulary(work.out / "tokenizer", str(lock.started_from or recipe.model.path))
    size = sum(path.stat().st_size for path in (work.out / "model").glob("*.safetensors"))
    return {"megabytes": round(size / 1e6, 1)}


def _from_scratch(work: Work, recipe: Recipe, data: Ref) -> dict[str, Any]:
    asked = source_columns(recipe)
    return run_child(
        work,
        "training.programs.create_model",
        python_argv("training.programs.create_model"),
        settings=CreateModelSettings(
            config=recipe.model.config or {},
            seed=recipe.model.seed,
            texts=asked.texts,
            writes=asked.task_type.generates_text,
        ),
        inputs={"data": data.path},
    )


def _copy(files: Mapping[str, Path], out: Path) -> None:
    for name, path in files.items():
        part = out / str(part_of(name))
        part.mkdir(exist_ok=True)
        shutil.copyfile(path, part / name)


def require_same_labels(lock: Lock, data: object, model: object) -> None:
    """Raises UserError where training starts from a champion of other labels than these rows have, or in another order:
    before anything is trained, and by a plan where both are there already.

    `data` and `model` are the artifacts of load_data and load_model; whatever else is not known yet.
    """
    if lock.started_from is None or not isinstance(data, Ref) or not isinstance(model, Ref):
        return
    labels = json.loads((data.path / "labels.json").read_text())
    if not labels:
        return
    named = read_json(model.path / "model" / "config.json").get("id2label", {})
    own = [named[number] for number in sorted(named, key=int)]
    if own != labels:
        told, mend = "names no labels", ""
        if own:
            told, mend = f"gives the labels {', '.join(own)}", "make them the same in data.label_names, or "
        message = (
            f"{lock.started_from}, which training starts from, {told}, and the rows have {', '.join(labels)}: "
            f"{mend}set this to base."
        )
        raise UserError([Problem(kind="model", where="model.start_from", message=message)])


def _of_part(folder: Path, part: str) -> list[Path]:
    return [file for file in sorted(folder.iterdir()) if part_of(file.name) == part]


def _downloaded(name: str, commit: str) -> dict[str, Path]:
    """The files of a commit in the clients' own cache, where whatever was loaded before is not loaded again."""
    from huggingface_hub import get_cached_repo_tree, snapshot_download

    with read_errors("model", name, commit):
        wanted = [*MODEL_FILES, *TOKENIZER_FILES]
        folder = snapshot_download(name, revision=commit, allow_patterns=wanted, ignore_patterns="*/*")
        # Another program may have left parts of the commit there: the listing kept beside them names the whole.
        paths = [file.path for file in get_cached_repo_tree(name, revision=commit)]
    files = {path: Path(folder, path) for path in paths if "/" not in path and part_of(path)}
    require_files(files, f"{name!r} at {commit[:12]}")
    return files
