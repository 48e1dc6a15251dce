"""The user's consent to run code that a recipe from a server names.

    <home>/runs/<flow run>/code.json    the code that the run named when it began here

The home is trusted, as only its user may write there. A recipe from a registry or a Prefect server is not trusted:
everybody who may write to the server could name any importable function in it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tasks.home import home
from training.jobs.protocol import write_atomically
from training.problems import Problem, UserError
from training.recipe import Recipe
from training.recipe.field_types import named_code
from training.recipe.overrides import merge

OPTION = "--run-code"
OPTION_HELP = "run the code that the recipe names (module:name, metrics of the Hub): without this it is only listed"


def record_code(run: str, recipe: Recipe) -> None:
    """Records the code that a flow run names when it starts in this home. A resume needs no consent to the same
    code."""
    if code := list(named_code(Recipe, recipe.model_dump(mode="json"))):
        with contextlib.suppress(OSError):  # if the disk is full, `finetune resume` asks for consent
            write_atomically(home() / "runs" / run / "code.json", json.dumps(code).encode())


def require_consent(
    source: str,
    *recipes: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    run: str | None = None,
    named: Collection[str] = (),
) -> None:
    """Raises UserError with every field that names code. Call it before the recipe is parsed, as parsing imports the
    task type.

    Args:
        source: origin of the recipes, in words.
        recipes: the values of the fields, valid or not.
        overrides: fields by dotted name.
        run: the flow run; the code that was recorded when it started in this home needs no consent.
        named: code that the user has named, such as by --task.
    """
    recorded = _read_recorded(run)
    code = dict.fromkeys(
        entry
        for values in recipes
        if isinstance(values, Mapping)
        for entry in named_code(Recipe, merge(values, overrides or {}, Recipe)[0])
    )
    problems = [
        Problem(
            kind="option",
            where=field,
            message=f"{value!r} is code, and {source} named it: read it, then run the same command with {OPTION}.",
        )
        for field, value in code
        if (field, value) not in recorded and value not in named
    ]
    if problems:
        raise UserError(problems)


def _read_recorded(run: str | None) -> Sequence[tuple[str, str]]:
    if run is None:
        return []
    try:
        return [(field, value) for field, value in json.loads((home() / "runs" / run / "code.json").read_text())]
    except (OSError, ValueError):
        return []
