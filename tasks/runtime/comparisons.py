"""Comparisons on the same test rows, as the registry remembers them: one tag of the registered model each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.runtime.connection import connect, exclusive, failures_told
from tasks.runtime.versions import find_model

if TYPE_CHECKING:
    from mlflow import MlflowClient

COMPARISON_TAG = "finetune.comparison."
DIGITS = 16


def count_of(name: str, rows: str, pair: str) -> int:
    """The number, from 1, of a comparison among all on the same rows. A comparison that is known keeps its number.

    Args:
        name: The registered model, which is created if there is none.
        rows: Digest of the test rows.
        pair: Digest of both models and of the metric.

    Two homes may count at the same time. Each has a tag of its own, so no comparison is lost; if both take one number,
    the second to look moves on to the next.
    """
    rows_tag = f"{COMPARISON_TAG}{rows[:DIGITS]}."
    own = f"{rows_tag}{pair[:DIGITS]}"
    with failures_told(), exclusive(f"registry-{name}"):
        client = connect()
        numbers = _numbers(client, name, rows_tag)
        while own not in numbers or _taken_twice(numbers, own):
            number = max(numbers.values(), default=0) + 1
            client.set_registered_model_tag(name, own, str(number))
            numbers = _numbers(client, name, rows_tag)
    return numbers[own]


def _taken_twice(numbers: dict[str, int], own: str) -> bool:
    return any(number == numbers[own] and tag != own for tag, number in numbers.items())


def _numbers(client: MlflowClient, name: str, rows_tag: str) -> dict[str, int]:
    """Number by tag."""
    model = find_model(client, name) or client.create_registered_model(name)
    return {tag: int(number) for tag, number in model.tags.items() if tag.startswith(rows_tag) and number.isdecimal()}
