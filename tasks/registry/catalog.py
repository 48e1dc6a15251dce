"""The list of registered models with their versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasks.registry.promotions import moves_of
from tasks.registry.versions import (
    DATA_COMMIT_TAG,
    DATA_TAG,
    REASON_TAG,
    SPLIT_TAG,
    VERDICT_TAG,
    aliases_given,
    figures_in,
    need_model,
    versions_of,
)
from tasks.tracking.connection import connect, mlflow_errors, search_all

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel


def list_models(name: str | None = None) -> list[dict[str, Any]]:
    """All registered models, or the one of this name, as JSON values: `name`, `aliases`, `versions` newest first, and
    `moves` of the champion's alias, oldest first.

    Raises UserError if there is no model of this name, and MlflowFailed if MLflow does not answer.
    """
    with mlflow_errors():
        client = connect()
        models = [need_model(client, name)] if name else list(search_all(client.search_registered_models))
        return [
            {
                "name": model.name,
                "aliases": {alias: str(version) for alias, version in model.aliases.items()},
                "versions": [_as_json(model, version) for version in versions_of(client, model.name)],
                "moves": [move.model_dump() for move in moves_of(model)],
            }
            for model in models
        ]


def _as_json(model: RegisteredModel, version: ModelVersion) -> dict[str, Any]:
    number = str(version.version)
    return {
        "version": number,
        "aliases": aliases_given(model, number),
        "registered_ms": version.creation_timestamp,
        "verdict": version.tags.get(VERDICT_TAG),
        "reason": version.tags.get(REASON_TAG),
        "split": version.tags.get(SPLIT_TAG),
        "figures": figures_in(version.tags),
        "data": version.tags.get(DATA_TAG),
        "data_commit": version.tags.get(DATA_COMMIT_TAG),
        "tags": dict(version.tags),
    }
