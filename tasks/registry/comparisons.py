"""Numbers of the comparisons on the same test rows, for alpha spending; each is a tag of the registered model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.home import named_lock
from tasks.registry.versions import find_model
from tasks.tracking.connection import connect, mlflow_errors

if TYPE_CHECKING:
    from mlflow import MlflowClient

COMPARISON_TAG = "finetune.comparison."
CLAIM = "claimed "
DIGITS = 16


def number_comparison(name: str, rows: str, pair: str) -> int:
    """Returns the number of a comparison, counted from 1 among all comparisons on the same rows. A repeated comparison
    keeps its number.

    Args:
        name: the registered model, which is created if missing.
        rows: digest of the test rows.
        pair: digest of both models' predictions and of the metric.

    Two homes may count at the same time. Each claims a number in its own tag, reads the other tags, and settles on the
    number if no other tag has it. If two homes claim the same number, at least one of them reads the other's claim and
    claims another number, so no number is settled twice. A settled number never changes.
    """
    rows_tag = f"{COMPARISON_TAG}{rows[:DIGITS]}."
    tag = f"{rows_tag}{pair[:DIGITS]}"
    with mlflow_errors(), named_lock(f"registry-{name}"):
        client = connect()
        settled, claimed = _read_numbers(client, name, rows_tag)
        while tag not in settled:
            number = claimed.get(tag)
            claimants = sorted(other for other, claim in claimed.items() if claim == number)
            if claimants == [tag] and number not in settled.values():
                value = str(number)
            else:
                # All claimants of a number may look for another at the same time, so each takes a different one.
                place = claimants.index(tag) if claimants else 0
                value = f"{CLAIM}{max([*settled.values(), *claimed.values()], default=0) + 1 + place}"
            client.set_registered_model_tag(name, tag, value)
            settled, claimed = _read_numbers(client, name, rows_tag)
    return settled[tag]


def _read_numbers(client: MlflowClient, name: str, rows_tag: str) -> tuple[dict[str, int], dict[str, int]]:
    """Reads the settled and the claimed numbers, by tag."""
    model = find_model(client, name) or client.create_registered_model(name)
    tags = {tag: value for tag, value in model.tags.items() if tag.startswith(rows_tag)}
    settled = {tag: int(value) for tag, value in tags.items() if value.isdecimal()}
    claims = {tag: value.removeprefix(CLAIM) for tag, value in tags.items() if value.startswith(CLAIM)}
    return settled, {tag: int(number) for tag, number in claims.items() if number.isdecimal()}
