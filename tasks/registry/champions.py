"""The registry's champion: its version, its training rows, and its files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tasks.cache import settings, store
from tasks.cache.code import code_digests, users_code
from tasks.cache.digests import digest_of
from tasks.cache.refs import Champion, Lock, PinnedRows
from tasks.cache.stage import Work
from tasks.registry.versions import ROWS_TAG, STARTED_FROM_TAG, TASK_TAG, find_model
from tasks.shared_store.opening import open_remote
from tasks.tracking.connection import MAX_LENGTH_TAG, MODEL_TAG, connect, has_database, mlflow_errors
from training.models.repository_files import part_of
from training.problems import Problem, UserError
from training.recipe import Data, Recipe
from training.recipe.mixture import OF_MIXTURE

PARTS = ("model", "tokenizer")
# Folders of a model that mlflow.transformers has logged.
_LAYOUT = {"model": "model", "tokenizer": "components/tokenizer"}
# Folder of both parts, if the model was logged with code that serves it.
_SERVED_BY_CODE = "artifacts/model"
# Fields of a recipe's data that do not change the rows.
_NOT_IN_DIGEST = {"revision", "max_file_gb", "checks"}


class CurrentChampion(NamedTuple):
    """The champion, and the tags of its version."""

    champion: Champion
    tags: Mapping[str, str]


def find_current(recipe: Recipe) -> CurrentChampion | None:
    """Finds the version that has the champion's alias now; None if there is none. Raises MlflowFailed."""
    name = recipe.release.registry
    if name is None or not has_database():  # a plan creates no database
        return None
    with mlflow_errors():
        client = connect()
        model = find_model(client, name)
        number = model.aliases.get(recipe.release.champion) if model else None
        if number is None:
            return None
        version = client.get_model_version(name, number)
    task = json.loads(version.tags.get(TASK_TAG, "{}"))
    # A version without a digest is identified by its time of registration too: a new server counts from 1 again.
    identity = f"{settings.registry_place()}: {name}/{number}, {version.creation_timestamp}"
    champion = Champion(
        name=name,
        version=str(number),
        model=version.tags.get(MODEL_TAG) or identity,
        key=version.tags.get("finetune.fit.key"),
        max_length=int(version.tags.get(MAX_LENGTH_TAG, 512)),
        options=task["options"] if task.get("task") == recipe.task else None,
    )
    return CurrentChampion(champion, version.tags)


def digest_rows(recipe: Recipe, lock: Lock) -> str:
    """Returns the digest of the training rows: the content of the training split, and how it is read. It covers neither
    the paths of files nor other splits."""
    data = recipe.data
    if data.mix is None:
        return digest_of(_describe_rows(data, lock.sets[0]))
    sets = [
        {"weight": entry.weight, "epochs": entry.epochs, **_describe_rows(one, pinned)}
        for entry, one, pinned in zip(data.mix, data.sets, lock.sets, strict=True)
    ]
    return digest_of({"sets": sets, **data.model_dump(mode="json", include={*OF_MIXTURE[1:]})})


def _describe_rows(data: Data, pinned: PinnedRows) -> dict[str, Any]:
    """Describes one set of rows by JSON values."""
    replaced_by_files = {"path", "config", "splits"} if pinned.files else set()
    code, _ = users_code({"data.path": data.path} if data.source == "python" else {})
    return {
        "data": data.model_dump(mode="json", exclude=_NOT_IN_DIGEST | replaced_by_files | {*OF_MIXTURE}),
        "files": [pin.sha256 for pin in pinned.files.get("train", ())],
        "commit": pinned.hub.commit if pinned.hub else None,
        "fingerprint": pinned.fingerprint,
        "code": code_digests(code),
    }


def find_start(recipe: Recipe, lock: Lock) -> tuple[Champion | None, str]:
    """Finds the version that a training on these rows starts from, None for the base model. Also returns a sentence
    that explains the choice.

    A training starts from the champion. If the champion was trained on exactly these rows, the training starts from the
    same version as the champion's training: so no model is trained twice on the same rows, and a promotion alone causes
    no training. If rows are added to the data, the new training learns the earlier rows again. A new commit on the Hub
    counts as new rows, and so do the rows of a version without a digest. Raises MlflowFailed.
    """
    current = find_current(recipe)
    if current is None:
        return None, f"{recipe.release.registry} has no {recipe.release.champion} yet: training starts from the base"
    champion, tags = current
    if tags.get(ROWS_TAG) != lock.rows:
        return champion, f"training starts from {champion}, the {recipe.release.champion}"
    start = tags.get(STARTED_FROM_TAG)
    earlier = Champion.model_validate_json(start) if start else None
    return earlier, f"{champion} was trained on these rows: training starts from {earlier or 'the base'}, as it did"


def find_folders(work: Work, champion: Champion, where: str) -> dict[str, Path]:
    """Finds the folders of the champion's model and tokenizer, by part: one folder in the store if this home or the
    shared store has it, otherwise folders downloaded from MLflow.

    Raises UserError for the recipe's field `where`, and MlflowFailed."""
    return _find_in_store(champion) or fetch_folders(work, champion, where)


def _find_in_store(champion: Champion) -> dict[str, Path] | None:
    if champion.key is None:
        return None
    try:
        trained = store.find("fit", champion.key) or open_remote().find("fit", champion.key)
    except store.Damaged:  # the next run that needs the artifact creates it again
        return None
    if trained is None or trained.parts["model"] != champion.model:
        return None
    return dict.fromkeys(PARTS, trained.path / "model")


def fetch_folders(work: Work, champion: Champion, where: str) -> dict[str, Path]:
    """Downloads the champion's folders from MLflow. Files with unknown names are skipped, and none is executed."""
    destination, incomplete = work.job / "champion", work.job / ".champion"
    folders = {part: destination / part for part in PARTS}
    if destination.is_dir():  # of an earlier try
        return folders
    work.on_events([{"kind": "note", "message": f"{champion} is fetched from MLflow"}])
    shutil.rmtree(incomplete, ignore_errors=True)
    with mlflow_errors():
        from mlflow.artifacts import download_artifacts, list_artifacts

        uri, tracking_uri, files = _find_uri(champion, where), settings.tracking_uri(), {}
        served_by_code = bool(list_artifacts(artifact_uri=f"{uri}/{_SERVED_BY_CODE}", tracking_uri=tracking_uri))
        for part in PARTS:
            folder = _SERVED_BY_CODE if served_by_code else _LAYOUT[part]
            listed = list_artifacts(artifact_uri=f"{uri}/{folder}", tracking_uri=tracking_uri)
            files[part] = [file for entry in listed if part_of(file := Path(entry.path).name) == part]
            (incomplete / part).mkdir(parents=True)
            for file in files[part]:
                source = f"{uri}/{folder}/{file}"
                download_artifacts(artifact_uri=source, dst_path=str(incomplete / part), tracking_uri=tracking_uri)
    if not all(files.values()) or not any(file.endswith(".safetensors") for file in files["model"]):
        raise _build_error(champion, where, "has no model in safetensors with its tokenizer in MLflow")
    incomplete.rename(destination)
    return folders


def _find_uri(champion: Champion, where: str) -> str:
    from mlflow.exceptions import MlflowException

    try:
        return str(connect().get_model_version_download_uri(champion.name, champion.version))
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise _build_error(champion, where, "is no longer in MLflow") from error


def _build_error(champion: Champion, where: str, reason: str) -> UserError:
    subject, step = _MESSAGES[where]
    return UserError([Problem(kind="release", where=where, message=f"{subject.format(champion)} {reason}{step}")])


# By the recipe's field: the role of the version, and the next step.
_MESSAGES = {
    "release.registry": (
        "the champion {}",
        ": give its alias to a version that finetune registered, or name another registry.",
    ),
    "model.start_from": (
        "the version {}, which training starts from,",
        ": set this to base, and begin a new run (a resumed run keeps its start).",
    ),
    "NAME": ("the version {}", ": run its recipe again to register one that has."),
    "VERSION": ("the version {}, which training started from,", ": so the model cannot be reproduced here."),
}
