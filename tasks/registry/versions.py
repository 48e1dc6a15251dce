"""Registered models and versions: look-up, aliases, tags, recorded moves of the champion's alias, and their list."""

from __future__ import annotations

import contextlib
import re
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from tasks.cache.results import Name
from tasks.home import registry_place, tracking_uri, without_credentials
from tasks.tracking.connection import (
    FIT_TAG,
    FLOW_RUN_TAG,
    MAX_LENGTH_TAG,
    MODEL_TAG,
    REASON_TAG,
    VERDICT_TAG,
    connect,
    mlflow_errors,
    search_all,
)
from training.evaluation.scores import SplitScores
from training.problems import UserError, nearest

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

# Tags of a version; several have JSON values.
RECIPE_TAG = "finetune.recipe"
TASK_TAG = "finetune.task"
COLUMNS_TAG = "finetune.columns"
"""The recipe's names for the columns of the task type."""
READING_TAG = "finetune.reading"
"""How the recipe reads rows: `sets` of training.recipe.reading_rules."""
PRECISION_TAG = "finetune.mixed_precision"
"""The number format in which the version was trained and evaluated."""
DATA_TAG = "finetune.data"
ROWS_TAG = "finetune.rows_digest"
STARTED_FROM_TAG = "finetune.started_from"
BASE_VERSION_TAG = "finetune.base_model_version"
"""The registered version that is the base model, for `model.source: registry`."""
DATA_COMMIT_TAG = "finetune.data_commit"
DATA_FILES_TAG = "finetune.data_files"
GIT_COMMIT_TAG = "finetune.git_commit"
SPLIT_TAG = "finetune.judged_split"
METRICS_TAG = "finetune.figures"  # its name in the first versions of this project
WEIGHTS_TAG = "finetune.weights"
"""SHA-256 of the files of weights by name, as JSON."""
EXPORTS_TAG = "finetune.exports"
"""The figures of the released exports by format. Their files are in the version's MLflow run, under `export/`."""
CALIBRATION_TAG = "finetune.calibration"
"""The content of calibration.json: training.evaluation.stored_calibration. A version without it is not calibrated."""
PROFILE_TAG = "finetune.profile.key"
"""The artifact with the profile that drift reports compare new rows with."""
EVALUATIONS_TAG = "finetune.evaluations"
"""The history of figures on rows whose labels arrived later."""
DRIFT_TAG = "finetune.drift"
"""The verdict of the last drift report."""
LOAD_DATA_TAG = "finetune.load_data.key"
"""The artifact with its rows."""
PREDICT_TAG = "finetune.predict.key"
"""The artifact with its predictions on the judged split."""
SIGNED_TAG = "finetune.signed_by"
"""The id of the key that signed the version: tasks/registry/version_signatures.py."""
BOUND_TAGS = (
    *(MODEL_TAG, FIT_TAG, TASK_TAG, COLUMNS_TAG, READING_TAG, MAX_LENGTH_TAG, PRECISION_TAG, CALIBRATION_TAG),
    *(WEIGHTS_TAG, ROWS_TAG, STARTED_FROM_TAG, BASE_VERSION_TAG, RECIPE_TAG, EXPORTS_TAG, FLOW_RUN_TAG),
)
"""The tags by which a version is used: they are signed with it."""
# Tags of a registered model: the names of its aliases, if its recipe renames them.
ALIAS_TAGS = {"champion": "finetune.champion", "challenger": "finetune.challenger"}

LONGEST_TAG = 100_000
"""Characters that MLflow allows in a tag of a version."""
MOVE_TAG = "finetune.move."
MOVE = re.compile(re.escape(MOVE_TAG) + r"(\d+)-[0-9a-f]{8}")
"""The tag of a registered model with a move of the champion's alias: see tasks/registry/promotions.py."""

LOGGED_PARTS = {"model": "model", "tokenizer": "components/tokenizer"}
"""Folders of a model that mlflow.transformers has logged."""
LOGGED_BY_CODE = "artifacts/model"
"""The folder of a model and its tokenizer that was logged with the code that serves it."""
LOGGED_IMAGE_PROCESSOR = "components/image_processor"
"""The place of an image processor, which models of images have in place of a tokenizer."""

SHOWN_VERSIONS = 20
SHOWN_CHARACTERS = 80
MAX_PAGE = 10_000
"""The most versions in one answer of MLflow."""


MaxLength = Annotated[int, Field(ge=1, lt=2**31)]
"""The value of MAX_LENGTH_TAG."""


class TaskTag(TypedDict):
    """The value of TASK_TAG, as `task_types.load` takes it."""

    task: str
    options: dict[str, Any]


class Aliases(NamedTuple):
    """The names of a registered model's aliases."""

    champion: str = "champion"
    challenger: str = "challenger"


def logged_parts(*, images: bool) -> dict[str, str]:
    """The folders of a logged model, by part, of texts or of images."""
    return {**LOGGED_PARTS, "tokenizer": LOGGED_IMAGE_PROCESSOR} if images else LOGGED_PARTS


def read_alias_names(model: RegisteredModel) -> Aliases:
    """Reads the recipe's names of the aliases from the model's tags."""
    return Aliases(*(model.tags.get(tag, default) for default, tag in ALIAS_TAGS.items()))


def find_model(client: MlflowClient, name: str) -> RegisteredModel | None:
    """Finds the registered model; None if nothing is registered under the name yet."""
    return next((model for model in client.search_registered_models(_select(name)) if model.name == name), None)


def list_aliases(model: RegisteredModel, version: str) -> list[str]:
    """Lists the aliases of a version."""
    return sorted(alias for alias, number in model.aliases.items() if str(number) == version)


def need_model(client: MlflowClient, name: str) -> RegisteredModel:
    """Returns the registered model. Raises UserError, with a list of the models, if there is none of this name."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_registered_model(name)
    except MlflowException as error:
        names = sorted(model.name for model in search_all(client.search_registered_models))
        if name in names:
            raise
        where = without_credentials(tracking_uri())
        registered = ", ".join(names) or (
            "nothing is registered there. finetune run registers a model; one of another home is found with --home"
        )
        raise UserError.of(
            "registry", "NAME", f"no model {name!r} is registered in {where}: {registered}.{nearest(name, names)}"
        ) from error


def need_version(client: MlflowClient, model: RegisteredModel, *, alias: str = "", version: str = "") -> ModelVersion:
    """Returns the version with this number or alias. Raises UserError, with the list of versions, if there is none."""
    number = _need_alias(model, alias) if alias else version
    if found := find_version(client, model.name, number):
        return found
    numbers = [str(entry.version) for entry in list_versions(client, model.name, SHOWN_VERSIONS + 1)]
    shown = ", ".join(numbers[:SHOWN_VERSIONS]) + (", …" if len(numbers) > SHOWN_VERSIONS else "") or "none"
    raise UserError.of("registry", "VERSION", f"{model.name!r} has no version {number!r}: it has {shown}.")


def _need_alias(model: RegisteredModel, alias: str) -> str:
    """The number of the version that has the alias. Raises UserError, with the list of aliases, if none has it."""
    if alias in model.aliases:
        return str(model.aliases[alias])
    aliases = ", ".join(sorted(model.aliases)) or "none yet"
    near = nearest(alias, model.aliases)
    message = f"{model.name!r} has no alias {alias!r}: it has {aliases}.{near}"
    if alias == read_alias_names(model).champion and not near:
        other = f"name another, such as {model.name}@{sorted(model.aliases)[0]}, or " if model.aliases else ""
        message += f" No version has been promoted: {other}promote one by finetune promote {model.name} VERSION."
    raise UserError.of("registry", "NAME", message)


def find_version(client: MlflowClient, name: str, number: str) -> ModelVersion | None:
    """Finds a version of a registered model by its number; None if there is none."""
    if not re.fullmatch(r"[1-9]\d{0,9}", number, re.ASCII):
        return None
    filter_string = f"{_select(name)} AND version_number = {number}"
    return next(iter(client.search_model_versions(filter_string=filter_string, max_results=1)), None)


def find_version_number(name: str, alias: str) -> str:
    """Finds the version that has the alias; an empty one is the champion's. Raises UserError, and MlflowFailed."""
    with mlflow_errors():
        model = need_model(connect(), name)
        return _need_alias(model, alias or read_alias_names(model).champion)


def list_versions(client: MlflowClient, name: str, limit: int) -> list[ModelVersion]:
    """Lists the last `limit` versions of a registered model, newest first."""
    versions = search_all(
        client.search_model_versions,
        filter_string=_select(name),
        max_results=min(limit, MAX_PAGE),
        order_by=["version_number DESC"],
    )
    return list(islice(versions, limit))


def _select(name: str) -> str:
    quote = '"' if "'" in name else "'"  # names from other programs may contain a quotation mark
    return f"name = {quote}{name}{quote}"


def read_tag(version: ModelVersion, tag: str, kind: Any, missing: str = "null") -> Any:
    """Reads the JSON value of a version's tag, of a type `kind`. `missing` is the text of a tag that the version lacks.

    Raises UserError for a damaged tag.
    """
    text = version.tags.get(tag, missing)
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        raise damaged_tag(version, tag, text) from error


def read_name(version: ModelVersion, tag: str) -> str | None:
    """Reads a version's tag with a key or with the name of a recipe, which is a folder's name in the home; None if it
    has none. Raises UserError for a damaged tag."""
    text = version.tags.get(tag)
    try:
        return None if text is None else str(TypeAdapter(Name).validate_python(text))
    except ValidationError as error:
        raise damaged_tag(version, tag, str(text)) from error


def identify(version: ModelVersion) -> str:
    """The digest of a version's model. A version without one is identified by its time of registration too: a new
    server counts from 1 again."""
    return (
        version.tags.get(MODEL_TAG)
        or f"{registry_place()}: {version.name}/{version.version}, {version.creation_timestamp}"
    )


def damaged_tag(version: ModelVersion, tag: str, text: str) -> UserError:
    """The error of a tag whose value cannot be used."""
    shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
    message = f"its tag {tag} is damaged, {shown!r}: set it to its former value in MLflow, or use another version."
    return UserError.of("registry", f"{version.name}/{version.version}", message)


def read_metrics(version: ModelVersion) -> SplitScores:
    """Reads `{"validation": {"accuracy": {"value": 0.8, …}}}` from a version's tag; empty if it has none. Raises
    UserError as `read_tag` does."""
    return dict(read_tag(version, METRICS_TAG, SplitScores, "{}"))


class Move(BaseModel):
    """One move of the champion's alias."""

    model_config = ConfigDict(frozen=True)

    alias: str
    before: str | None
    """The version that had the alias before."""
    to: str
    """The version that has the alias after the move."""
    by: Literal["run", "promote", "rollback"]
    """A run whose model passed the gate, or a person's command."""
    flow_run: str | None = None
    user: str
    host: str
    home: str = ""
    """Digest of the home. A home makes one move at a time, so its earlier moves are not pending."""
    time: str
    """Time of the move in UTC, such as 2026-01-31T12:00:00+00:00."""
    why: str = ""


def read_moves(model: RegisteredModel) -> list[Move]:
    """Reads the recorded moves of a registered model, oldest first."""
    return [move for _, _, move in read_numbered_moves(model)]


def read_numbered_moves(model: RegisteredModel) -> list[tuple[int, str, Move]]:
    """The moves with their numbers and tags, in order. Two moves with one number were announced at the same time, and
    at most one of them happened."""
    moves = []
    for tag, text in model.tags.items():
        if match := MOVE.fullmatch(tag):
            try:
                move = Move.model_validate_json(text)
            except ValidationError:  # edited by hand, or of a later version of the project
                continue
            moves.append((int(match[1]), move.time, tag, move))
    return [(number, tag, move) for number, _, tag, move in sorted(moves, key=lambda entry: entry[:3])]


def list_models(name: str | None, limit: int) -> list[dict[str, Any]]:
    """Lists all registered models, or the model of this name, as JSON values: `name`, `aliases`, the last `limit`
    `versions` newest first, whether it `has_more`, and `moves` of the champion's alias, oldest first.

    Raises UserError if there is no model of this name, and MlflowFailed if MLflow does not answer.
    """
    with mlflow_errors():
        client = connect()
        models = [need_model(client, name)] if name else list(search_all(client.search_registered_models))
        return [_build_model(model, list_versions(client, model.name, limit + 1), limit) for model in models]


def _build_model(model: RegisteredModel, versions: list[ModelVersion], limit: int) -> dict[str, Any]:
    return {
        "name": model.name,
        "aliases": {alias: str(version) for alias, version in model.aliases.items()},
        "versions": [_build_row(model, version) for version in versions[:limit]],
        "has_more": len(versions) > limit,
        "moves": [move.model_dump() for move in read_moves(model)],
    }


def _build_row(model: RegisteredModel, version: ModelVersion) -> dict[str, Any]:
    number, figures = str(version.version), SplitScores()
    with contextlib.suppress(UserError):  # a damaged tag of one version must not hide the others
        figures = read_metrics(version)
    return {
        "version": number,
        "aliases": list_aliases(model, number),
        "registered_ms": version.creation_timestamp,
        "verdict": version.tags.get(VERDICT_TAG),
        "reason": version.tags.get(REASON_TAG),
        "split": version.tags.get(SPLIT_TAG),
        "figures": figures,
        "data": version.tags.get(DATA_TAG),
        "data_commit": version.tags.get(DATA_COMMIT_TAG),
        "tags": dict(version.tags),
    }
