"""Stages: the model enters MLflow's registry, and gets the alias that it earned."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

from tasks.runtime import settings
from tasks.runtime.code import library_versions
from tasks.runtime.connection import (
    MAX_LENGTH_TAG,
    MODEL_TAG,
    connect,
    environment,
    exclusive,
    failures_told,
    find_or_create_run,
)
from tasks.runtime.jobs import run_child
from tasks.runtime.launch import python_argv
from tasks.runtime.refs import Pins, Promotion, Ref, Verdict, Version
from tasks.runtime.stage import Ingredients, Work, action
from training.recipe import Recipe

SERVED_WITH = ("torch", "transformers", "accelerate", "tokenizers", "safetensors")
PROBES = 8
# A registered model answers in full precision, alone or in another batch: equal but for rounding.
TOLERANCE = 1e-3
MIXED_TOLERANCE = 3e-2


def ingredients(recipe: Recipe, pins: Pins, data: Ref, trained: Ref, predictions: Ref, verdict: Verdict) -> Ingredients:
    """What is registered where, if at all."""
    return Ingredients(
        {
            "release": {"registry": recipe.release.registry},
            "registry": settings.registry_place(),
            "upstream": {"fit": trained.parts["model"]},
            "rejected": verdict.decision == "reject",
        }
    )


@action(ingredients, gives=Version)
def register(
    work: Work, recipe: Recipe, pins: Pins, data: Ref, trained: Ref, predictions: Ref, verdict: Verdict
) -> Version | None:
    """Registers the model once, whatever the number of runs, without an alias yet; not one that was rejected."""
    name = recipe.release.registry
    if name is None or verdict.decision == "reject":
        work.state = "skipped"
        return None
    # Two runs that end with the same model at once register it once.
    with failures_told(), exclusive(f"registry-{name}"):
        client = connect()
        version = _registered(client, name, trained)
        if version is None:
            run_id = find_or_create_run(client, recipe.name, work.run)
            version = _log_model(work, recipe, pins, run_id, data, trained, predictions)
            work.take_back = partial(_unregister, name, version)
    return Version(name=name, version=version)


def promotion_ingredients(recipe: Recipe, version: Version | None, verdict: Verdict) -> Ingredients:
    """The version and the alias that it earned."""
    return Ingredients(
        {
            "release": recipe.release.model_dump(include={"champion", "challenger"}),
            "registry": settings.registry_place(),
            "version": version.model_dump() if version else None,
            "decision": verdict.decision,
        }
    )


@action(promotion_ingredients, gives=Promotion)
def promote(work: Work, recipe: Recipe, version: Version | None, verdict: Verdict) -> Promotion | None:
    """Moves the champion's alias to the version, or the challenger's to one that has not earned that."""
    if version is None:
        work.state = "skipped"
        return None
    alias = recipe.release.champion if verdict.decision == "promote" else recipe.release.challenger
    with failures_told(), exclusive(f"registry-{version.name}"):
        client = connect()
        previous = client.get_registered_model(version.name).aliases.get(alias)
        client.set_registered_model_alias(version.name, alias, version.version)
        work.take_back = partial(_move_back, version.name, alias, None if previous is None else str(previous))
    moved = str(previous) if previous is not None and str(previous) != version.version else None
    return Promotion(name=version.name, version=version.version, alias=alias, previous=moved)


def _unregister(name: str, version: str) -> str:
    with failures_told(), exclusive(f"registry-{name}"):
        connect().delete_model_version(name, version)
    return f"{name} version {version} was removed again: a stage after it failed."


def _move_back(name: str, alias: str, previous: str | None) -> str:
    with failures_told(), exclusive(f"registry-{name}"):
        client = connect()
        if previous is None:
            client.delete_registered_model_alias(name, alias)
        else:
            client.set_registered_model_alias(name, alias, previous)
    return f"the alias {alias} of {name} is where it was: {f'version {previous}' if previous else 'nowhere'}."


def _log_model(work: Work, recipe: Recipe, pins: Pins, run_id: str, data: Ref, trained: Ref, predictions: Ref) -> str:
    """The new version, logged, reloaded and asked by a child program."""
    tags = {
        MODEL_TAG: trained.parts["model"],
        MAX_LENGTH_TAG: str(recipe.tokens.max_length),
        "finetune.recipe": recipe.name,
        "finetune.flow_run_id": work.run,
        **{f"finetune.{ref.kind}.key": ref.key for ref in (data, trained, predictions)},
        **{f"finetune.{ref.kind}.digest": ref.digest for ref in (data, trained, predictions)},
    }
    figures = run_child(
        work,
        "tasks.programs.log_model",
        python_argv("tasks.programs.log_model"),
        settings={
            "experiment": recipe.name,
            "run_id": run_id,
            "registry": recipe.release.registry,
            "task": "text-classification",
            "requirements": [f"{k}=={v}" for k, v in library_versions(SERVED_WITH).items() if k != "python"],
            "max_length": recipe.tokens.max_length,
            "tags": tags,
            "probes": _probes(data, predictions),
            "tolerance": TOLERANCE if pins.mixed_precision == "no" else MIXED_TOLERANCE,
        },
        inputs={"model": trained.path / "model"},
        env=environment(),
    )
    return str(figures["version"])


def _registered(client: Any, name: str, trained: Ref) -> str | None:
    found = client.search_model_versions(f"name = '{name}' and tags.`{MODEL_TAG}` = '{trained.parts['model']}'")
    return str(found[0].version) if found else None


def _probes(data: Ref, predictions: Ref) -> list[dict[str, Any]]:
    """The first rows of an evaluated split with the probabilities that were stored for them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    labels = json.loads((data.path / "labels.json").read_text())
    stored = sorted(predictions.path.glob("*.parquet"))[0]
    logits = pq.read_table(stored, columns=["logits"]).slice(0, PROBES)["logits"].to_pylist()
    with pa.memory_map(str(data.path / f"{stored.stem}.arrow")) as file:
        rows = pa.ipc.open_file(file).get_batch(0).slice(0, PROBES).to_pylist()
    return [
        {
            "inputs": {"text": row["text"], "text_pair": row["text_pair"]} if "text_pair" in row else row["text"],
            "probabilities": dict(zip(labels, _softmax(scores), strict=True)),
        }
        for row, scores in zip(rows, logits, strict=True)
    ]


def _softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    powers = [math.exp(value - top) for value in logits]
    return [power / sum(powers) for power in powers]
