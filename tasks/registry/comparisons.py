"""Numbers of the comparisons on the same test rows, for alpha spending: one tag of the registered model each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.registry.versions import find_model
from tasks.tracking.connection import connect, mlflow_errors, named_lock

if TYPE_CHECKING:
    from mlflow import MlflowClient

COMPARISON_TAG = "finetune.comparison."
CLAIM = "claimed "
DIGITS = 16


def number_comparison(name: str, rows: str, pair: str) -> int:
    """The number, from 1, of a comparison among all on the same rows. A comparison that is known keeps its number.

    Args:
        name: The registered model, which is created if there is none.
        rows: Digest of the test rows.
        pair: Digest of both models' predictions and of the metric.

    Two homes may count at the same time. Each claims a number in its own tag, reads the other tags, and settles on the
    number if no other tag has it. If two homes claim the same number, at least one of them reads the other's claim and
    claims another number, so no number is settled twice. A settled number never changes.
    """
    rows_tag = f"{COMPARISON_TAG}{rows[:DIGITS]}."
    own = f"{rows_tag}{pair[:DIGITS]}"
    with mlflow_errors(), named_lock(f"registry-{name}"):
        client = connect()
        settled, claimed = _numbers(client, name, rows_tag)
        while own not in settled:
            mine = claimed.get(own)
            claimants = sorted(tag for tag, number in claimed.items() if number == mine)
            if claimants == [own] and mine not in settled.values():
                value = str(mine)
            else:
                # All claimants may move at once: each to a number of its own.
                place = claimants.index(own) if claimants else 0
                value = f"{CLAIM}{max([*settled.values(), *claimed.values()], default=0) + 1 + place}"
            client.set_registered_model_tag(name, own, value)
            settled, claimed = _numbers(client, name, rows_tag)
    return settled[own]


def _numbers(client: MlflowClient, name: str, rows_tag: str) -> tuple[dict[str, int], dict[str, int]]:
    """Settled and claimed numbers, by tag."""
    model = find_model(client, name) or client.create_registered_model(name)
    tags = {tag: value for tag, value in model.tags.items() if tag.startswith(rows_tag)}
    settled = {tag: int(value) for tag, value in tags.items() if value.isdecimal()}
    claims = {tag: value.removeprefix(CLAIM) for tag, value in tags.items() if value.startswith(CLAIM)}
    return settled, {tag: int(number) for tag, number in claims.items() if number.isdecimal()}
