"""Names of flow runs, such as `sst2 · distilbert · lr 2e-5 · seed 7`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from prefect.runtime import flow_run
from pydantic import BaseModel

from training.problems import UserError
from training.recipe import Model, Recipe, Sweep, parse

MAX_LENGTH = 120  # characters; MLflow's database holds 250
COMMON_PARTS = {"base", "uncased"}
"""Parts of a model's name that tell nothing, because nearly all models have them."""
NAMED_FIELDS = frozenset(
    ("name", "model", "model.source", "model.path", "model.config", "model.start_from", "training.learning_rate")
)
"""Fields that are part of every name; other overrides are appended."""


def flow_run_name() -> str:
    """Prefect calls this at the start of a run, before it validates the recipe."""
    parameters = flow_run.get_parameters()
    recipe = parameters.get("recipe")
    if isinstance(recipe, Recipe):
        return run_name(recipe, parameters.get("overrides"))
    return str(recipe.get("name", "?")) if isinstance(recipe, Mapping) else "?"


def sweep_run_name() -> str:
    """Prefect calls this at the start of a sweep: `sst2 · sweep over learning_rate, num_train_epochs`."""
    parameters = flow_run.get_parameters()
    recipe, sweep = parameters.get("recipe"), parameters.get("sweep")
    given = sweep.model_dump(exclude_unset=True) if isinstance(sweep, Sweep) else sweep
    space = given.get("space") or given.get("variants") if isinstance(given, Mapping) else None
    name = recipe.name if isinstance(recipe, Recipe) else str((recipe or {}).get("name", "?"))
    fields = ", ".join(field.rpartition(".")[2] for field in space) if isinstance(space, Mapping) else "?"
    return f"{name} · sweep over {fields}"[:MAX_LENGTH]


def run_name(recipe: Recipe, overrides: Mapping[str, Any] | None = None) -> str:
    """Joins the recipe's name, the base model, the learning rate and the other overrides."""
    try:
        recipe = parse(recipe.model_dump(exclude_unset=True), overrides)
    except UserError:  # the run fails with this error
        return recipe.name
    others = {name: value for name, value in (overrides or {}).items() if name not in NAMED_FIELDS}
    rate = f"{recipe.training.learning_rate:.3g}"
    if recipe.training.learning_rate < 0.01:
        digits, _, exponent = f"{recipe.training.learning_rate:.2e}".partition("e")
        rate = f"{float(digits):g}e{int(exponent)}"  # 2e-5
    parts = [recipe.name, _model_name(recipe.model), f"lr {rate}"]
    for field, value in others.items():
        text = "…" if isinstance(value, BaseModel | Mapping | list) else str(value)
        parts.append(f"{field.rpartition('.')[2]} {text}")
    name = " · ".join(parts)
    return name if len(name) <= MAX_LENGTH else f"{name[: MAX_LENGTH - 1]}…"


def _model_name(model: Model) -> str:
    """`distilbert` for distilbert/distilbert-base-uncased; the model type for a model from scratch."""
    start = " from champion" if model.start_from == "champion" else ""
    if model.source == "scratch":
        return f"{(model.config or {}).get('model_type', 'model')}{start or ' from scratch'}"
    if model.source == "registry":
        return f"{model.path}{start}"
    path = PurePath(model.path or "")
    # A model of this project lies in artifacts/fit/KEY/model.
    name = path.parent.name[:12] if path.name == "model" and path.parent.name else path.name
    return ("-".join(part for part in name.split("-") if part not in COMMON_PARTS) or name) + start
