"""Stages: the model enters MLflow's registry, and gets the alias that it earned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tasks.cache import settings
from tasks.cache.code import git_commit, library_versions
from tasks.cache.digests import digest_of
from tasks.cache.refs import Lock, Promotion, Ref, Verdict, Version
from tasks.cache.stage import Inputs, Row, Work, action
from tasks.jobs.child import run_child
from tasks.jobs.launch import python_argv
from tasks.registry import lineage, promotions
from tasks.registry.model_card import description
from tasks.registry.versions import (
    COLUMNS_TAG,
    DATA_COMMIT_TAG,
    DATA_FILES_TAG,
    DATA_TAG,
    FIGURES_TAG,
    GIT_COMMIT_TAG,
    REASON_TAG,
    RECIPE_TAG,
    ROWS_TAG,
    SPLIT_TAG,
    STARTED_FROM_TAG,
    TASK_TAG,
    VERDICT_TAG,
    Aliases,
    aliases_given,
    find_model,
    need_model,
)
from tasks.tracking.connection import (
    FLOW_RUN_TAG,
    MAX_LENGTH_TAG,
    MODEL_TAG,
    connect,
    environment,
    exclusive,
    find_or_create_run,
    mlflow_errors,
)
from training.problems import NETWORK, Problem, UserError
from training.recipe import Recipe
from training.recipe.column_types import EXAMPLES
from training.recipe.rules.column_rules import source_columns

SERVED_WITH = ("torch", "transformers", "accelerate", "tokenizers", "safetensors")
MADE_WITH = ("torch", "transformers", "accelerate", "tokenizers", "datasets", "pyarrow", "mlflow", "prefect")
PROBES = 8
LOGGED_EXAMPLES = 2
# A registered model answers in full precision, alone or in another batch: equal but for rounding.
TOLERANCE = 1e-3
MIXED_TOLERANCE = 3e-2


# MLflow's databases hold 5000 characters of a description; of a tag 100,000 are allowed.
LONGEST_DESCRIPTION, LONGEST_TAG = 5000, 100_000


def inputs(recipe: Recipe, lock: Lock, verdict: Verdict, *made: Ref | None) -> Inputs:
    """What is registered where, if at all."""
    return Inputs(
        {
            "release": {"registry": recipe.release.registry},
            "registry": settings.registry_place(),
            "upstream": {"fit": _by_stage(made)["fit"].parts["model"]},
            "rejected": verdict.decision == "reject",
        }
    )


@action(inputs, gives=Version)
def register(work: Work, recipe: Recipe, lock: Lock, verdict: Verdict, *made: Ref | None) -> Version | None:
    """Registers the model once, whatever the number of runs, without an alias yet; not one that was rejected.

    `made` are the artifacts behind it. A model that is there already is told what was now found of it.
    """
    name = recipe.release.registry
    if name is None or verdict.decision == "reject":
        work.state = "skipped"
        return None
    artifacts, champion = _by_stage(made), recipe.release.champion
    judged = _judged(recipe, verdict, artifacts)
    # Two runs that end with the same model at once register it once.
    with mlflow_errors(), exclusive(f"registry-{name}"):
        client = connect()
        model = find_model(client, name)
        now = model.aliases.get(champion) if model else None
        version = _registered(client, name, artifacts["fit"], now)
        taken = promotions.taken_from(model, champion, version) if model and version else None
        if not taken:
            _need_compared(now, name, version, verdict)
        if version is None:
            run_id = find_or_create_run(client, recipe.name, work.run)
            tags = _origin(recipe, lock, work.run, artifacts) | judged
            # First, so that no version is ever without it.
            rows = [Row(ref.stage, ref.key, "", 0.0, ref.location) for ref in made if ref is not None]
            told = lineage.record(recipe, work.run, rows, mlflow_run=run_id, verdict=verdict)
            client.log_text(run_id, lineage.keep(told), lineage.LINEAGE)
            if (adapter := artifacts["fit"].path / "adapter").is_dir():
                client.log_artifacts(run_id, str(adapter), "fit/adapter")
            version = _log_model(work, recipe, lock, run_id, tags, artifacts)
            work.rollback = partial(_unregister, name, version)
        if str(now) == version and (verdict.comparison is None or verdict.comparison.baseline):
            judged |= _verdict_of_then(client, name, version)
        data, trained, predicted, scored = (artifacts[name] for name in ("load_data", "fit", "predict", "score"))
        card = description(recipe, lock, data, trained, predicted, scored, verdict)
        text = f"{judged[VERDICT_TAG]}: {judged[REASON_TAG]}\n\n{card}"
        _tell(client, name, version, judged, text[:LONGEST_DESCRIPTION])
    return Version(name=name, version=version, taken=taken)


def promotion_inputs(recipe: Recipe, version: Version | None, verdict: Verdict) -> Inputs:
    """The version and the alias that it earned."""
    return Inputs(
        {
            "release": recipe.release.model_dump(include={"champion", "challenger"}),
            "registry": settings.registry_place(),
            "version": version.model_dump() if version else None,
            "decision": verdict.decision,
        }
    )


@action(promotion_inputs, gives=Promotion)
def promote(work: Work, recipe: Recipe, version: Version | None, verdict: Verdict) -> Promotion | None:
    """Moves the champion's alias to the version, or the challenger's to one that has not earned that.

    What a person has taken the alias from does not get it back from a run.
    """
    if version is None:
        work.state = "skipped"
        return None
    names = Aliases(recipe.release.champion, recipe.release.challenger)
    with mlflow_errors(), exclusive(f"registry-{version.name}"):
        client = connect()
        model = need_model(client, version.name)
        promotions.call_aliases(client, model, names)
        held = {alias: None if (at := model.aliases.get(alias)) is None else str(at) for alias in names}
        if verdict.decision != "promote" and held[names.champion] != version.version:
            client.set_registered_model_alias(version.name, names.challenger, version.version)
            before, alias = model.aliases.get(names.challenger), names.challenger
        elif taken := promotions.taken_from(model, names.champion, version.version):
            work.on_events([{"kind": "note", "message": f"{version.name} version {version.version} {taken}"}])
            work.state = "skipped"
            return None
        else:
            before, alias = model.aliases.get(names.champion), names.champion
            _need_compared(before, version.name, version.version, verdict)
            promotions.set_champion_alias(
                client, model, version.version, names, by="run", why=verdict.reason, flow_run=work.run
            )
        work.rollback = partial(_put_back, version.name, held, version.version)
    moved = str(before) if before is not None and str(before) != version.version else None
    return Promotion(name=version.name, version=version.version, alias=alias, previous=moved)


def _need_compared(champion: object, name: str, version: str | None, verdict: Verdict) -> None:
    """Raises UserError where a model is to be promoted, and another version became champion since it was compared, or
    found to have nobody to be compared with."""
    compared = verdict.comparison.champion if verdict.comparison else None
    if verdict.decision != "promote" or champion is None or f"{name}/{champion}" in (compared, f"{name}/{version}"):
        return
    message = (
        f"version {champion} of {name!r} became champion while this run went on, and the model was not compared with "
        "it: run the same command again."
    )
    raise UserError([Problem(kind=NETWORK, where="release.registry", message=message)])


def _unregister(name: str, version: str) -> str:
    with mlflow_errors(), exclusive(f"registry-{name}"):
        client = connect()
        # Another run or a person may have given it one, or this run, and only the answer was lost.
        if given := aliases_given(need_model(client, name), version):
            return f"{name} version {version} stays, although a stage after it failed: it is {', '.join(given)} now."
        client.delete_model_version(name, version)
    return f"{name} version {version} was removed again: a stage after it failed."


def _put_back(name: str, before: Mapping[str, str | None], version: str) -> str:
    """Moves the version's aliases back, except those that somebody has moved since."""
    with mlflow_errors(), exclusive(f"registry-{name}"):
        client = connect()
        for alias, was in before.items():
            now = need_model(client, name).aliases.get(alias)
            if str(now) != version and not (now is None and was == version):
                continue  # this run did not move it, or another one has since
            if was is None:
                client.delete_registered_model_alias(name, alias)
            else:
                client.set_registered_model_alias(name, alias, was)
    return f"the aliases of {name} are where they were."


def _by_stage(made: tuple[Ref | None, ...]) -> dict[str, Ref]:
    return {ref.stage: ref for ref in made if ref is not None}


def _origin(recipe: Recipe, lock: Lock, run: str, artifacts: Mapping[str, Ref]) -> dict[str, str]:
    """What the model was made of, as tags: it stays what it is."""
    tags = {
        MODEL_TAG: artifacts["fit"].parts["model"],
        RECIPE_TAG: recipe.name,
        "finetune.recipe_digest": digest_of(recipe.model_dump(mode="json")),
        FLOW_RUN_TAG: run,
        DATA_TAG: " ".join(filter(None, [recipe.data.path, recipe.data.config])),
        "finetune.libraries": json.dumps(library_versions(MADE_WITH)),
    }
    if lock.data_hub:
        tags[DATA_COMMIT_TAG] = lock.data_hub.commit
    if lock.data_files:
        files = {s: [f"{Path(f.path).name} {f.sha256}" for f in pinned] for s, pinned in lock.data_files.items()}
        told = json.dumps(files, ensure_ascii=False)
        # The digest of load_data tells as much of so many files, but not of which one.
        tags[DATA_FILES_TAG] = told if len(told) <= LONGEST_TAG else json.dumps({s: len(files[s]) for s in files})
    if lock.model_hub:
        tags["finetune.base_model_commit"] = lock.model_hub.commit
    if lock.rows:
        tags[ROWS_TAG] = lock.rows
    if lock.started_from:
        tags[STARTED_FROM_TAG] = lock.started_from.model_dump_json()
    if git := git_commit():
        tags |= {GIT_COMMIT_TAG: git.commit, "finetune.git_dirty": str(git.dirty).lower()}
    return tags


def _judged(recipe: Recipe, verdict: Verdict, artifacts: Mapping[str, Ref]) -> dict[str, str]:
    """How the model is asked, and what was found of it, as tags: a later run may find more, and ask otherwise."""
    inputs = source_columns(recipe).inputs
    tags = {
        MAX_LENGTH_TAG: str(recipe.tokens.max_length),
        TASK_TAG: json.dumps(recipe.task_and_options, ensure_ascii=False),
        COLUMNS_TAG: json.dumps({column.name: column.source_name for column in inputs}, ensure_ascii=False),
        VERDICT_TAG: verdict.decision,
        REASON_TAG: verdict.reason,
        SPLIT_TAG: recipe.judged_split,
        FIGURES_TAG: json.dumps(artifacts["score"].figures),
    }
    for stage, ref in artifacts.items():
        tags |= {f"finetune.{stage}.key": ref.key, f"finetune.{stage}.digest": ref.digest}
    return tags


def _verdict_of_then(client: Any, name: str, version: str) -> dict[str, str]:
    """What made the champion what it is: now it has nobody to be compared with."""
    tags = client.get_model_version(name, version).tags
    return {tag: tags[tag] for tag in (VERDICT_TAG, REASON_TAG) if tag in tags}


def _tell(client: Any, name: str, version: str, judged: Mapping[str, str], text: str) -> None:
    """Has the registry know what was found of the version, where it knows otherwise."""
    known = client.get_model_version(name, version)
    for tag, value in judged.items():
        if known.tags.get(tag) != value:
            client.set_model_version_tag(name, version, tag, value)
    if known.description != text:
        client.update_model_version(name, version, text)


def _log_model(
    work: Work, recipe: Recipe, lock: Lock, run_id: str, tags: Mapping[str, str], artifacts: Mapping[str, Ref]
) -> str:
    """The new version, logged, reloaded and asked by a child program about rows of a split that was evaluated."""
    split = recipe.judged_split
    figures = run_child(
        work,
        "tasks.registry.log_model",
        python_argv("tasks.registry.log_model"),
        settings={
            "experiment": recipe.name,
            "run_id": run_id,
            "registry": recipe.release.registry,
            **recipe.task_and_options,
            "inputs": [column.name for column in source_columns(recipe).inputs],
            "labels": json.loads((artifacts["load_data"].path / "labels.json").read_text()),
            "requirements": [f"{k}=={v}" for k, v in library_versions(SERVED_WITH).items() if k != "python"],
            "max_length": recipe.tokens.max_length,
            "tags": dict(tags),
            "probes": PROBES,
            "examples": LOGGED_EXAMPLES,
            "tolerance": TOLERANCE if lock.mixed_precision == "no" else MIXED_TOLERANCE,
        },
        inputs={
            "model": artifacts["fit"].path / "model",
            "rows": artifacts["load_data"].path / f"{split}.arrow",
            "predictions": artifacts["predict"].path / f"{split}.parquet",
        },
        env=environment(),
    )
    return str(figures["version"])


def _registered(client: Any, name: str, trained: Ref, champion: object) -> str | None:
    """The version that is this model; of several, which two homes may have made at once, the champion."""
    found = client.search_model_versions(f"name = '{name}' and tags.`{MODEL_TAG}` = '{trained.parts['model']}'")
    numbers = [str(version.version) for version in found]
    return str(champion) if str(champion) in numbers else next(iter(numbers), None)


def asking(recipe: Recipe) -> str:
    """What `finetune predict` is given behind the model's name: `"some text"`, and whatever else a row of it has."""
    own = f" --task {recipe.task}" if ":" in recipe.task else ""
    columns = source_columns(recipe).inputs
    return (
        " ".join(f"'{EXAMPLES[one.form]}'" if one.form in EXAMPLES else f'"some {one.source_name}"' for one in columns)
        + own
    )
