"""What a run is called: `sst2 · distilbert · lr 2e-5`, and behind that what was overridden for it alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel

from training.problems import UserError
from training.recipe import Model, Recipe, parse

LONGEST = 120  # characters; MLflow's database holds 250
LONGEST_VALUE = 24
SAY_NOTHING = {"base", "uncased"}
"""Of the parts of a model's name, those that nearly all have."""
SAID = {"name", "model", "model.source", "model.path", "model.config", "model.start_from", "training.learning_rate"}
"""Fields that every name tells of."""


def flow_run_name() -> str:
    """Prefect asks for it when a run begins; a run whose recipe has mistakes has a name, too."""
    from prefect.runtime import flow_run

    given = flow_run.get_parameters()
    recipe, overrides = given.get("recipe"), given.get("overrides")
    if isinstance(recipe, Recipe):
        return run_name(recipe, overrides)
    return str(recipe.get("name", "?")) if isinstance(recipe, Mapping) else "?"


def run_name(recipe: Recipe, overrides: Mapping[str, Any] | None = None) -> str:
    """The recipe's name, the base model, the learning rate, and what else this run has that the recipe has not."""
    try:
        recipe = parse(recipe.model_dump(exclude_unset=True), overrides)
    except UserError:  # its run will tell
        return recipe.name
    parts = [recipe.name, _model(recipe.model), f"lr {_rate(recipe.training.learning_rate)}"]
    parts += [
        f"{name.rpartition('.')[2]} {_value(value)}" for name, value in (overrides or {}).items() if name not in SAID
    ]
    name = " · ".join(parts)
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def _model(model: Model) -> str:
    """`distilbert` of distilbert/distilbert-base-uncased, its type of one from scratch; and what it starts from."""
    start = " from champion" if model.start_from == "champion" else ""
    if model.source == "scratch":
        return f"{(model.config or {}).get('model_type', 'model')}{start or ' from scratch'}"
    path = PurePath(model.path or "")
    # An export of this project lies in artifacts/fit/KEY/model.
    name = path.parent.name[:12] if path.name == "model" and path.parent.name else path.name
    return ("-".join(part for part in name.split("-") if part not in SAY_NOTHING) or name) + start


def _rate(value: float) -> str:
    """`2e-5`, and 0.01 where that is as short."""
    if value >= 0.01:
        return f"{value:.3g}"
    digits, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(digits):g}e{int(exponent)}"


def _value(value: Any) -> str:
    if isinstance(value, BaseModel | Mapping | list):
        return "…"
    text = str(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"
