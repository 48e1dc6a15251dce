"""The schema of a recipe as forms that are made from it want it."""

from __future__ import annotations

from typing import Any


def any_of(schema: Any) -> None:
    """Prefect's form offers the choices of an `anyOf`, one level deep; of a `oneOf` it shows nothing."""
    for inside in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(inside, dict | list):
            any_of(inside)
    if isinstance(schema, dict) and "oneOf" in schema:
        schema["anyOf"] = schema.pop("oneOf")
    if isinstance(schema, dict) and "anyOf" in schema:
        schema["anyOf"] = [deeper for one in schema["anyOf"] for deeper in one.get("anyOf", [one])]
