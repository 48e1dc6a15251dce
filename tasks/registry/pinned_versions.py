"""Registered versions that a run uses: the champion, and versions that the recipe names.

A run pins the number of each version and the digest of its model.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.cache import store
from tasks.cache.code import code_digests, users_code
from tasks.cache.digests import digest_of
from tasks.cache.results import Artifact, FileName, Lock, PinnedRows, PinnedVersion, VersionOfTask
from tasks.cache.stage import Work
from tasks.home import home, named_lock, tracking_uri
from tasks.jobs.job import Files
from tasks.registry.version_signatures import SignedVersion, verify_tags, verify_version
from tasks.registry.versions import (
    CALIBRATION_TAG,
    LOAD_DATA_TAG,
    LOGGED_BY_CODE,
    LOGGED_IMAGE_PROCESSOR,
    ROWS_TAG,
    STARTED_FROM_TAG,
    TASK_TAG,
    WEIGHTS_TAG,
    MaxLength,
    TaskTag,
    find_model,
    identify,
    logged_parts,
    need_model,
    need_version,
    read_name,
    read_tag,
)
from tasks.shared_store.bucket_remote import find_artifact
from tasks.tracking.connection import FIT_TAG, MAX_LENGTH_TAG, MODEL_TAG, connect, has_database, mlflow_errors
from training.evaluation.stored_calibration import Calibration
from training.jobs.protocol import sha256
from training.local_files import find_foreign
from training.models.repository_files import (
    REGISTRY_ROOMS,
    has_weights,
    part_of,
    read_json,
    require_no_other_files,
)
from training.problems import Problem, UserError
from training.recipe import Data, Recipe
from training.recipe.data_fields import OF_MIXTURE
from training.recipe.field_types import ABSTAIN, split_version_name
from training.recipe.task_specification import specification_class

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

PARTS = ("model", "tokenizer")
FETCHED = "fetch_version"
"""The name among the artifacts of signed versions that were fetched from MLflow."""
_NO_MODEL = "has no whole model in safetensors with its tokenizer in MLflow (an adapter of peft alone is none)"
# Fields of a recipe's data that do not change the rows.
_NOT_IN_DIGEST = {"revision", "max_file_gb", "checks", "corrections", "negatives", "unlabelled"}


class CurrentChampion(NamedTuple):
    """The champion, the tags of its version, and the version that its training started from."""

    champion: PinnedVersion
    tags: Mapping[str, str]
    started_from: PinnedVersion | None


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
    return CurrentChampion(
        _describe(version, recipe.task), version.tags, read_tag(version, STARTED_FROM_TAG, PinnedVersion | None)
    )


def _describe(version: ModelVersion, task_type: str) -> PinnedVersion:
    """Describes a version for a recipe of this task type. Raises UserError if its signature is refused."""
    verify_tags(version)
    task = read_tag(version, TASK_TAG, TaskTag | None)
    return PinnedVersion(
        name=version.name,
        version=str(version.version),
        model=identify(version),
        key=read_name(version, FIT_TAG),
        max_length=read_tag(version, MAX_LENGTH_TAG, MaxLength, "512"),
        options=task["options"] if task and task["task"] == task_type else None,
    )


def find_base(recipe: Recipe) -> PinnedVersion:
    """Finds the version that `model.path` names, which is the base model. Raises UserError, with the models, aliases or
    versions that exist, if there is none; UserError if another program registered it without a whole model; and
    MlflowFailed."""
    where = "model.path"
    version = _find_named(str(recipe.model.path), where)
    pinned = _describe(version, recipe.task)
    if MODEL_TAG not in version.tags:
        _require_whole_model(pinned, where)
    return pinned


def find_retriever(recipe: Recipe) -> VersionOfTask:
    """Finds the version that `data.negatives.path` names, with which negatives are found. Raises UserError as
    `find_base` does, and for one that this project did not register or that gives no embeddings; and MlflowFailed."""
    assert recipe.data.negatives is not None
    where = "data.negatives.path"
    version = _find_named(str(recipe.data.negatives.path), where)
    task = read_tag(version, TASK_TAG, TaskTag | None)
    name = f"{version.name}/{version.version}"
    if task is None or not specification_class(task["task"]).embeds:
        kind = "was not registered by finetune" if task is None else f"is a model of {task['task']}"
        message = f"{name} {kind}, and negatives are found by a model of embeddings: name one of those, or set source "
        raise UserError.of("data", where, f"{message}to bm25.")
    described = _describe(version, task["task"])
    return VersionOfTask(**dict(described), task=task["task"])


def find_teacher(recipe: Recipe) -> VersionOfTask:
    """Finds the version that `training.teacher.path` names. Raises UserError as `find_base` does, and for one of
    another task type than the recipe's; and MlflowFailed."""
    assert recipe.training.teacher is not None
    where = "training.teacher.path"
    version = _find_named(recipe.training.teacher.path, where)
    task = read_tag(version, TASK_TAG, TaskTag | None)
    if task is None or not _can_teach(task["task"], recipe.task):
        kind = "was not registered by finetune" if task is None else f"is a model of {task['task']}"
        message = (
            f"{version.name}/{version.version} {kind}, and the teacher of a model of {recipe.task} must be one of "
        )
        raise UserError.of("training", where, f"{message}that too: name another version.")
    rows = read_name(version, LOAD_DATA_TAG)
    found = VersionOfTask(**dict(_describe(version, task["task"])), task=task["task"], load_data=rows)
    if recipe.training.teacher.unlabelled_min_confidence != ABSTAIN:
        return found
    calibration = read_tag(version, CALIBRATION_TAG, Calibration | None)
    if calibration is None or calibration.abstain is None:
        message = f"abstain needs the thresholds of the teacher, and {found} has none: set release.abstain in its "
        where = "training.teacher.unlabelled_min_confidence"
        raise UserError.of("training", where, f"{message}recipe, or give a number here, such as 0.9.")
    return found.model_copy(update={"calibration": calibration.model_dump(mode="json")})


def find_training_rows(version: VersionOfTask) -> Artifact | None:
    """Finds the artifact of load_data with the rows that a teacher was trained on, here or in the shared store; None if
    it cannot be had."""
    found = find_artifact("load_data", version.load_data) if version.load_data is not None else None
    return found if found is not None and "train.arrow" in found.parts else None


def _can_teach(task: str, learning: str) -> bool:
    """Whether a model of one task type teaches one of another: causal language models teach one another."""
    if task == learning:
        return True
    own = specification_class(learning)
    return own.teacher_outputs == "tokens" and specification_class(task).auto_class == own.auto_class


def _find_named(path: str, where: str) -> ModelVersion:
    """The version of this name in the recipe's field `where`."""
    name, alias, number = split_version_name(path)
    if not has_database():  # a plan creates no database
        message = f"no model {name!r} is registered: nothing is registered in {home()} yet. Run the recipe "
        raise UserError.of("model", where, f"{message}that registers it.")
    try:
        with mlflow_errors():
            client = connect()
            return need_version(client, need_model(client, name), alias=alias, version=number)
    except UserError as error:
        advice = f"Name a version that exists, or run the recipe that registers {name}"
        advice += f" and give a version this alias: finetune promote {name} VERSION --alias {alias}." if alias else "."
        raise UserError(
            Problem(kind="model", where=where, message=f"{problem.message} {advice}") for problem in error.problems
        ) from None


def _require_whole_model(pinned: PinnedVersion, where: str) -> None:
    """Raises UserError for the recipe's field `where` if the version has no weights, or only those of an adapter."""
    with mlflow_errors():
        _, _, names = _list_files(pinned, ["model"], where)["model"]
    if not has_weights(names):
        raise _build_error(pinned, where, _NO_MODEL)


def digest_rows(recipe: Recipe, lock: Lock) -> str:
    """Returns the digest of the training rows: the content of the training split, how it is read, the corrections of
    labels, and the choice of negatives. It covers neither the paths of files nor other splits."""
    source, more = _digest_source(recipe, lock), dict[str, Any]()
    if lock.corrections:
        more["corrections"] = lock.corrections.sha256
    if recipe.data.negatives:
        more["negatives"] = recipe.data.negatives.model_dump(mode="json", exclude={"path"}, exclude_defaults=True)
        if recipe.data.negatives.corpus:
            more["corpus"] = [pin.sha256 for pin in lock.corpus]
    if lock.unlabelled:
        more["unlabelled"] = [pin.sha256 for pin in lock.unlabelled]
    if lock.negatives_version:
        more["negatives_model"] = lock.negatives_version.model
    return digest_of({"source": source, **more}) if more else source


def _digest_source(recipe: Recipe, lock: Lock) -> str:
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
        # data.corpus is no part of the rows. It is None and not left out, so that digests of before hold.
        "data": data.model_copy(update={"corpus": None}).model_dump(
            mode="json", exclude=_NOT_IN_DIGEST | replaced_by_files | {*OF_MIXTURE}
        ),
        "files": [pin.sha256 for pin in pinned.files.get("train", ())],
        "commit": pinned.hub.commit if pinned.hub else None,
        "fingerprint": pinned.fingerprint,
        **({"images": pinned.images.sha256} if pinned.images else {}),
        "code": code_digests(code),
    }


def find_start(recipe: Recipe, lock: Lock) -> tuple[PinnedVersion | None, str]:
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
    champion, tags, earlier = current
    if tags.get(ROWS_TAG) != lock.rows:
        return champion, f"training starts from {champion}, the {recipe.release.champion}"
    return earlier, f"{champion} was trained on these rows: training starts from {earlier or 'the base'}, as it did"


def files_of_version(pinned: PinnedVersion, where: str) -> dict[str, Files]:
    """The folders `model` and `tokenizer` of a version, which a job reads: they are found, or fetched from MLflow, when
    its program is about to run. Then `find_folders` raises its errors."""
    found: dict[str, Path] = {}

    def find(part: str, work: Work) -> Path:
        if not found:
            found.update(find_folders(work, pinned, where))
        return found[part]

    return {part: Files(partial(find, part), {"champion": pinned.model}) for part in PARTS}


def find_folders(work: Work, pinned: PinnedVersion, where: str) -> dict[str, Path]:
    """Finds the folders of the version's model and tokenizer, by part: the one that the version brings, else one in the
    store if this home or the shared store has it, otherwise folders downloaded from MLflow.

    Raises UserError for the recipe's field `where` and for a version whose signature is refused, and MlflowFailed."""
    if pinned.folder is not None:
        return dict.fromkeys(PARTS, pinned.folder)
    signed = _verify(pinned, work)
    return _find_in_store(pinned, signed) or _fetch_folders(work, pinned, signed, where)


@contextlib.contextmanager
def find_folders_for_job(name: str, pinned: PinnedVersion) -> Iterator[tuple[Work, dict[str, Path]]]:
    """A job without a stage, whose files go at the end of the block, and the folders of the version that it reads.

    Raises UserError for the parameter NAME, and MlflowFailed.
    """
    work = Work(f"{name}-{uuid.uuid4().hex[:12]}", Path(os.devnull), "")
    try:
        yield work, find_folders(work, pinned, "NAME")
    finally:
        shutil.rmtree(work.job, ignore_errors=True)


def _verify(pinned: PinnedVersion, work: Work | None = None) -> SignedVersion | None:
    """The signed version; None for one that may be used unsigned, with a warning in the events of `work`."""
    tags = {MODEL_TAG: pinned.model, FIT_TAG: pinned.key} if pinned.key else {}
    verified = verify_version(pinned.name, pinned.version, tags)
    if verified.warning and work is not None:
        work.warning(verified.warning)
    return verified.signed


def _find_in_store(pinned: PinnedVersion, signed: SignedVersion | None) -> dict[str, Path] | None:
    """The version's folder in a store. Its content has the digest of the version's tag, which is signed."""
    trained = find_artifact("fit", pinned.key) if pinned.key is not None else None
    if trained is None or trained.parts["model"] != pinned.model:
        return None
    if signed is not None and signed.tags[MODEL_TAG] != pinned.model:
        return None
    return dict.fromkeys(PARTS, trained.path / "model")


def _fetch_folders(work: Work, pinned: PinnedVersion, signed: SignedVersion | None, where: str) -> dict[str, Path]:
    """Downloads the version's folders from MLflow. Files with unknown names are skipped, and none is executed."""
    if signed is not None:
        kept = _find_fetched(signed) or _fetch_into_store(work, pinned, signed, where)
        return {part: kept / part for part in PARTS}
    destination, incomplete = work.job / "fetched", work.job / ".fetched"
    if not destination.is_dir():  # of an earlier try
        shutil.rmtree(incomplete, ignore_errors=True)
        _download_whole(work, pinned, None, incomplete, where)
        if changed := _find_changed_weights(pinned, incomplete / "model"):
            raise _build_error(pinned, where, f"is damaged in MLflow: {changed} has changed since it was registered")
        incomplete.rename(destination)
    return {part: destination / part for part in PARTS}


def _find_fetched(signed: SignedVersion) -> Path | None:
    """The folder of a signed version that was fetched before: its key is the digest of the signed files, so their
    sha256 is computed only once."""
    try:
        found = store.find(FETCHED, digest_of(signed.files))
    except store.Damaged as error:
        store.discard(FETCHED, digest_of(signed.files), str(error))
        return None
    return found.path if found else None


def _fetch_into_store(work: Work, pinned: PinnedVersion, signed: SignedVersion, where: str) -> Path:
    key = digest_of(signed.files)
    with named_lock(f"{FETCHED}-{key}"):  # publishing again would move the folder that another process reads
        if (found := _find_fetched(signed)) is None:
            with store.filling(FETCHED, key) as aside:
                _download_whole(work, pinned, signed, aside, where)
                found = store.publish(aside, FETCHED, key, {"version": str(pinned)}, None).path
    return found


def _download_whole(work: Work, pinned: PinnedVersion, signed: SignedVersion | None, out: Path, where: str) -> None:
    work.note(f"{pinned} is fetched from MLflow")
    _download(pinned, signed, {part: out / part for part in PARTS}, where)
    names = {file.name for file in (out / "model").iterdir()}
    if not has_weights(names) or "config.json" not in names or not any((out / "tokenizer").iterdir()):
        raise _build_error(pinned, where, _NO_MODEL)


def _find_changed_weights(pinned: PinnedVersion, folder: Path) -> str | None:
    """The name of a file of weights that is missing or has other bytes than at the registration. MLflow's copy may be
    the same file as that of a damaged artifact."""
    with mlflow_errors():
        version = connect().get_model_version(pinned.name, pinned.version)
        digests = read_tag(version, WEIGHTS_TAG, dict[FileName, str], "{}")
    files = {name: folder / name for name in digests}
    return next((name for name, file in files.items() if not file.is_file() or sha256(file) != digests[name]), None)


def find_tokenizer(pinned: PinnedVersion, out: Path, where: str) -> Path:
    """Finds the version's folder with its tokenizer in a store; otherwise downloads the tokenizer from MLflow into
    `out`. Raises UserError for the recipe's field `where`, and MlflowFailed."""
    signed = _verify(pinned)
    if found := _find_in_store(pinned, signed):
        return found["tokenizer"]
    _download(pinned, signed, {"tokenizer": out}, where)
    return out


def fetch_config(pinned: PinnedVersion, where: str) -> dict[str, Any]:
    """Downloads the version's config.json from MLflow, unless the version brings its folder; empty if it has none.
    Raises UserError for the recipe's field `where`, and MlflowFailed."""
    if pinned.folder is not None:
        return read_json(pinned.folder / "config.json")
    with tempfile.TemporaryDirectory(prefix="finetune-") as folder:
        _download(pinned, _verify(pinned), {"model": Path(folder)}, where, only="config.json")
        require_no_other_files(Path(folder))
        return read_json(Path(folder, "config.json"))


def _download(
    pinned: PinnedVersion,
    signed: SignedVersion | None,
    folders: Mapping[str, Path],
    where: str,
    only: str | None = None,
) -> None:
    """Downloads the files of these parts, or only the file of a name, from MLflow into new or empty folders. Raises
    UserError if they are not the signed ones."""
    with mlflow_errors():
        from mlflow.artifacts import download_artifacts
        from mlflow.utils.file_utils import local_file_uri_to_path
        from mlflow.utils.uri import is_local_uri

        for part, (folder, inner, every_name) in _list_files(pinned, folders.keys(), where).items():
            folders[part].mkdir(parents=True, exist_ok=True)
            names = [name for name in every_name if part_of(name) == part and only in (None, name)]
            here = local_file_uri_to_path(folder) if is_local_uri(folder) else None
            if here and (foreign := find_foreign((f"{here}/{name}" for name in names), REGISTRY_ROOMS, "model")):
                raise UserError(foreign)
            for name in names:
                source, out = f"{folder}/{name}", str(folders[part])
                download_artifacts(artifact_uri=source, dst_path=out, tracking_uri=tracking_uri())
            if signed is not None:
                signed.require_files(inner, every_name, folders[part], names)


def _list_files(pinned: PinnedVersion, parts: Iterable[str], where: str) -> dict[str, tuple[str, str, list[str]]]:
    """Of each part's folder in MLflow the URI, the path below the version's folder, and the names of all its files."""
    from mlflow.artifacts import list_artifacts

    uri, server = _find_uri(pinned, where), tracking_uri()
    served_by_code, has_images = (
        bool(list_artifacts(artifact_uri=f"{uri}/{folder}", tracking_uri=server))
        for folder in (LOGGED_BY_CODE, LOGGED_IMAGE_PROCESSOR)
    )
    found = {}
    for part in parts:
        inner = LOGGED_BY_CODE if served_by_code else logged_parts(images=has_images)[part]
        entries = list_artifacts(artifact_uri=f"{uri}/{inner}", tracking_uri=server)
        found[part] = f"{uri}/{inner}", inner, [Path(entry.path).name for entry in entries if not entry.is_dir]
    return found


def _find_uri(pinned: PinnedVersion, where: str) -> str:
    from mlflow.exceptions import MlflowException

    try:
        return str(connect().get_model_version_download_uri(pinned.name, pinned.version))
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise _build_error(pinned, where, "is no longer in MLflow") from error


def _build_error(pinned: PinnedVersion, where: str, reason: str) -> UserError:
    subject, step = _MESSAGES[where]
    return UserError.of("release", where, f"{subject.format(pinned)} {reason}{step}")


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
    "model.path": (
        "the version {}, which training starts from,",
        ": name another one, and begin a new run (a resumed run keeps its start).",
    ),
    "data.negatives.path": (
        "the version {}, by which negatives are found,",
        ": name another one, and begin a new run (a resumed run keeps its version).",
    ),
    "training.teacher.path": (
        "the version {}, which is the teacher,",
        ": name another one, and begin a new run (a resumed run keeps its version).",
    ),
    "NAME": ("the version {}", ": run its recipe again to register another version."),
    "VERSION": ("the version {}, which training started from,", ": so the model cannot be reproduced here."),
}
