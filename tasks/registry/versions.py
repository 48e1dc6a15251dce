"""Registered models and versions: look-up, aliases, and the names of their tags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.cache import settings
from tasks.tracking.connection import search_all
from training.problems import Problem, UserError, nearest

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel

# Tags of a version; several have JSON values.
RECIPE_TAG = "finetune.recipe"
TASK_TAG = "finetune.task"
COLUMNS_TAG = "finetune.columns"
"""The recipe's names for the columns of the task type."""
DATA_TAG = "finetune.data"
ROWS_TAG = "finetune.rows_digest"
STARTED_FROM_TAG = "finetune.started_from"
DATA_COMMIT_TAG = "finetune.data_commit"
DATA_FILES_TAG = "finetune.data_files"
GIT_COMMIT_TAG = "finetune.git_commit"
VERDICT_TAG = "finetune.verdict"
REASON_TAG = "finetune.verdict_reason"
SPLIT_TAG = "finetune.judged_split"
FIGURES_TAG = "finetune.figures"
# Tags of a registered model: the names of its aliases, if its recipe renames them.
ALIAS_TAGS = {"champion": "finetune.champion", "challenger": "finetune.challenger"}

SHOWN_VERSIONS = 20


class Aliases(NamedTuple):
    """The names of a registered model's aliases."""

    champion: str = "champion"
    challenger: str = "challenger"


def read_alias_names(model: RegisteredModel) -> Aliases:
    """The names that the model's recipe gives its aliases."""
    return Aliases(*(model.tags.get(tag, usual) for usual, tag in ALIAS_TAGS.items()))


def find_model(client: MlflowClient, name: str) -> RegisteredModel | None:
    """The registered model; None if nothing is registered under the name yet."""
    return next((model for model in client.search_registered_models(f"name = '{name}'") if model.name == name), None)


def list_aliases(model: RegisteredModel, version: str) -> list[str]:
    """The aliases of a version."""
    return sorted(alias for alias, its in model.aliases.items() if str(its) == version)


def need_model(client: MlflowClient, name: str) -> RegisteredModel:
    """The registered model. Raises UserError, with a list of the models, if there is none of this name."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_registered_model(name)
    except MlflowException as error:
        there = sorted(model.name for model in search_all(client.search_registered_models))
        if name in there:
            raise
        where = settings.without_credentials(settings.tracking_uri())
        has = ", ".join(there) or "nothing is registered yet: finetune run registers a model"
        raise build_error(
            "NAME", f"no model {name!r} is registered in {where}: {has}.{nearest(name, there)}"
        ) from error


def need_version(client: MlflowClient, model: RegisteredModel, *, alias: str = "", version: str = "") -> ModelVersion:
    """The version with this number or this alias. Raises UserError, with a list of the versions, if there is none."""
    if alias and alias not in model.aliases:
        has = ", ".join(sorted(model.aliases)) or "none yet"
        raise build_error(
            "NAME", f"{model.name!r} has no alias {alias!r}: it has {has}.{nearest(alias, model.aliases)}"
        )
    number = str(model.aliases[alias]) if alias else version
    found = {str(one.version): one for one in list_versions(client, model.name)}
    if number not in found:
        shown = list(found)[:SHOWN_VERSIONS]
        has = ", ".join(shown) + (", …" if len(found) > len(shown) else "") if found else "none"
        raise build_error("VERSION", f"{model.name!r} has no version {number!r}: it has {has}.")
    return found[number]


def list_versions(client: MlflowClient, name: str) -> list[ModelVersion]:
    """All versions of a registered model, newest first."""
    quote = '"' if "'" in name else "'"  # names from other programs may hold either
    found = search_all(client.search_model_versions, filter_string=f"name = {quote}{name}{quote}")
    return sorted(found, key=lambda version: -int(version.version))


def read_figures(tags: Mapping[str, str]) -> dict[str, Any]:
    """`{"validation": {"accuracy": {"value": 0.8, …}}}` from a version's tags; empty if it has none."""
    try:
        return dict(json.loads(tags.get(FIGURES_TAG, "{}")))
    except ValueError:
        return {}


def build_error(where: str, message: str) -> UserError:
    """A UserError about the registry."""
    return UserError([Problem(kind="registry", where=where, message=message)])
