"""The list of registered models with their versions."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from tasks.registry.promotions import read_moves
from tasks.registry.versions import (
    DATA_COMMIT_TAG,
    DATA_TAG,
    REASON_TAG,
    SPLIT_TAG,
    VERDICT_TAG,
    list_aliases,
    list_versions,
    need_model,
    read_figures,
)
from tasks.tracking.connection import connect, mlflow_errors, search_all
from training.problems import UserError

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel


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
    number, figures = str(version.version), dict[str, Any]()
    with contextlib.suppress(UserError):  # a damaged tag of one version must not hide the others
        figures = read_figures(version)
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
