"""Stages: the champion of the registry, and what it makes of today's rows."""

from __future__ import annotations

from tasks.runtime import settings
from tasks.runtime.connection import MAX_LENGTH_TAG, MODEL_TAG, connect, failures_told
from tasks.runtime.refs import Champion, Ref
from tasks.runtime.stage import Ingredients, Work, action
from training.recipe import Recipe


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
        models = {model.name: model.aliases for model in client.search_registered_models(f"name = '{name}'")}
        number = models.get(name, {}).get(recipe.release.champion)
        if number is None:
            return None
        version = client.get_model_version(name, number)
    digest = version.tags.get(MODEL_TAG, "")
    if digest == trained.parts["model"]:
        return None
    return Champion(
        name=name,
        version=str(number),
        model=digest,
        key=version.tags.get("finetune.fit.key"),
        max_length=int(version.tags.get(MAX_LENGTH_TAG, 512)),
    )
