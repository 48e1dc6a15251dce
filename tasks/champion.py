"""Stages: the champion of the registry, and what it makes of today's rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.runtime import settings, store
from tasks.runtime.connection import MAX_LENGTH_TAG, MODEL_TAG, connect, failures_told
from tasks.runtime.jobs import run_child
from tasks.runtime.launch import predicting
from tasks.runtime.memory import Fits
from tasks.runtime.refs import Champion, Pins, Ref
from tasks.runtime.stage import Ingredients, Work, action, stage
from tasks.runtime.versions import find_model
from training.kinds import KINDS
from training.problems import Problem, UserError
from training.recipe import Recipe
from training.snapshot import part_of

# The folders in which mlflow.transformers keeps what a model is made of.
PARTS = {"model": "model", "tokenizer": "components/tokenizer"}


def ingredients(recipe: Recipe, trained: Ref, scores: Ref) -> Ingredients:
    """Where it is looked for, and the model that is to be compared with it."""
    return Ingredients(
        {
            "release": recipe.release.model_dump(include={"registry", "champion"}),
            "registry": settings.registry_place(),
            "upstream": {"fit": trained.parts["model"], "score": scores.digest},
        }
    )


@action(ingredients, gives=Champion)
def find_champion(work: Work, recipe: Recipe, trained: Ref, scores: Ref) -> Champion | None:
    """The version that the champion's alias points to; None where there is none, or where it is this very model."""
    name = recipe.release.registry
    if name is None:
        work.state = "skipped"
        return None
    with failures_told():
        client = connect()
        model = find_model(client, name)
        number = model.aliases.get(recipe.release.champion) if model else None
        if number is None:
            return None
        version = client.get_model_version(name, number)
    # One that was registered by other means is known by when it was: a server that is made anew counts from 1 again.
    unnamed = f"{settings.registry_place()}: {name}/{number}, {version.creation_timestamp}"
    digest = version.tags.get(MODEL_TAG) or unnamed
    if digest == trained.parts["model"]:
        return None
    return Champion(
        name=name,
        version=str(number),
        model=digest,
        key=version.tags.get("finetune.fit.key"),
        max_length=int(version.tags.get(MAX_LENGTH_TAG, 512)),
    )


def prediction_ingredients(recipe: Recipe, pins: Pins, data: Ref, champion: Champion) -> Ingredients:
    """The champion's model, how it reads a text, today's rows and labels, and the precision that it predicts in."""
    split = recipe.judged_split
    return Ingredients(
        {
            "kind": recipe.kind,
            "split": split,
            "tokens": {"max_length": champion.max_length},
            "compute": {"mixed_precision": pins.mixed_precision},
            "training": recipe.training.model_dump(include={"per_device_eval_batch_size"}),
            "upstream": {
                "champion": champion.model,
                "load_data": data.parts[f"{split}.arrow"],
                "labels": data.parts["labels.json"],
            },
        },
        code=["training.champion", KINDS[recipe.kind]],
        libraries=("torch", "transformers", "tokenizers", "pyarrow"),
    )


@stage(prediction_ingredients, where="there is a champion")
def predict_champion(work: Work, recipe: Recipe, pins: Pins, data: Ref, champion: Champion) -> Mapping[str, Any]:
    """Has the champion predict every row of the split that is judged, with its own tokenizer."""
    folders = _in_store(champion) or fetched(work, champion)
    launched = predicting("training.champion", pins)
    precision, batch_size = pins.mixed_precision, recipe.training.per_device_eval_batch_size
    return run_child(
        work,
        "training.champion",
        launched.argv,
        env=launched.env,
        settings={
            "kind": recipe.kind,
            "split": recipe.judged_split,
            "labels": json.loads((data.path / "labels.json").read_text()),
            "champion": f"{champion.name}/{champion.version}",
            "max_length": champion.max_length,
            "batch_size": batch_size,
            "mixed_precision": precision,
        },
        inputs={**folders, "data": data.path},
        fits=Fits(
            batch_size,
            folders["model"],
            program="training.champion",
            max_length=champion.max_length,
            mixed_precision=precision,
            num_processes=pins.num_processes,
        ),
    )


def _in_store(champion: Champion) -> dict[str, Path] | None:
    """The champion's folders, where the artifact that it came from is still here and whole."""
    try:
        trained = store.find("fit", champion.key) if champion.key else None
    except store.Damaged:  # made again by the next run that wants it
        return None
    if trained is None or trained.parts["model"] != champion.model:
        return None
    return dict.fromkeys(("model", "tokenizer"), trained.path / "model")


def fetched(work: Work, champion: Champion) -> dict[str, Path]:
    """The champion's folders, from MLflow: no file but the known ones, of which none is run."""
    place, aside = work.job / "champion", work.job / ".champion"
    folders = {part: place / part for part in PARTS}
    if place.is_dir():  # by a try that was killed later on
        return folders
    name = f"{champion.name}/{champion.version}"
    work.on_events([{"kind": "note", "message": f"{name} is fetched from MLflow"}])
    shutil.rmtree(aside, ignore_errors=True)
    with failures_told():
        uri = connect().get_model_version_download_uri(champion.name, champion.version)
        from mlflow.artifacts import download_artifacts, list_artifacts

        tracking_uri, found = settings.tracking_uri(), {}
        for part, folder in PARTS.items():
            listed = list_artifacts(artifact_uri=f"{uri}/{folder}", tracking_uri=tracking_uri)
            found[part] = [file for entry in listed if part_of(file := Path(entry.path).name) == part]
            (aside / part).mkdir(parents=True)
            for file in found[part]:
                source = f"{uri}/{folder}/{file}"
                download_artifacts(artifact_uri=source, dst_path=str(aside / part), tracking_uri=tracking_uri)
    if not all(found.values()) or not any(file.endswith(".safetensors") for file in found["model"]):
        message = (
            f"the champion {name} has no model in safetensors with its tokenizer in MLflow: give its alias to a "
            "version that finetune registered, or name another registry."
        )
        raise UserError([Problem(kind="release", where="release.registry", message=message)])
    aside.rename(place)
    return folders
