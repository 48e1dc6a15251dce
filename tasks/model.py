"""Stage: the base model and its tokenizer, as a snapshot of files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.runtime.hub import told
from tasks.runtime.jobs import run_child
from tasks.runtime.launch import python_argv
from tasks.runtime.refs import Pins, Ref
from tasks.runtime.stage import Ingredients, Work, stage
from training.recipe import Recipe
from training.snapshot import MODEL_FILES, TOKENIZER_FILES, need_parts, need_vocabulary, part_of


def ingredients(recipe: Recipe, pins: Pins, data: Ref | None) -> Ingredients:
    """The commit, the files' content, or the configuration, the seed and the rows that the tokenizer learns from.

    `data` is given for a model from scratch alone.
    """
    model, pinned = recipe.model, pins.model_hub
    if data is not None:
        return Ingredients(
            {
                "model": model.model_dump(include={"config", "seed"}),
                "upstream": {"load_data": data.parts["train.arrow"]},
            },
            code=["training.scratch"],
            libraries=("tokenizers", "transformers", "torch", "safetensors"),
        )
    files = {name: pin.sha256 for name, pin in pins.model_files.items()}
    return Ingredients(
        {"model": {"commit": pinned.commit, "path": model.path} if pinned else {}, "files": files},
        names={
            "model.commit": f"{model.path} at {model.revision or 'main'}",
            **{f"files.{name}": pin.path for name, pin in pins.model_files.items()},
        },
    )


@stage(ingredients)
def load_model(work: Work, recipe: Recipe, pins: Pins, data: Ref | None) -> Mapping[str, Any]:
    """Fetches, copies or creates the model into `model/` and `tokenizer/`; weights in safetensors only."""
    if data is not None:
        return run_child(
            work,
            "training.scratch",
            python_argv("training.scratch"),
            settings={
                "config": recipe.model.config,
                "seed": recipe.model.seed,
                "texts": ["text", "text_pair"][: len(recipe.data.text)],
            },
            inputs={"data": data.path},
        )
    if pins.model_hub is None:
        files = {name: Path(pin.path) for name, pin in pins.model_files.items()}
    else:
        files = _downloaded(str(recipe.model.path), pins.model_hub.commit)
    for name, path in files.items():
        part = work.out / str(part_of(name))
        part.mkdir(exist_ok=True)
        shutil.copyfile(path, part / name)
    need_vocabulary(work.out / "tokenizer", str(recipe.model.path))
    size = sum(path.stat().st_size for path in (work.out / "model").glob("*.safetensors"))
    return {"megabytes": round(size / 1e6, 1)}


def _downloaded(name: str, commit: str) -> dict[str, Path]:
    """The files of a commit in the clients' own cache, where whatever was loaded before is not loaded again."""
    from huggingface_hub import get_cached_repo_tree, snapshot_download

    with told("model", name, commit):
        wanted = [*MODEL_FILES, *TOKENIZER_FILES]
        folder = snapshot_download(name, revision=commit, allow_patterns=wanted, ignore_patterns="*/*")
        # Another program may have left parts of the commit there: the listing kept beside them names the whole.
        paths = [file.path for file in get_cached_repo_tree(name, revision=commit)]
    files = {path: Path(folder, path) for path in paths if "/" not in path and part_of(path)}
    need_parts(files, f"{name!r} at {commit[:12]}")
    return files
