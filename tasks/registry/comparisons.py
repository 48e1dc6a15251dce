"""Numbers of comparisons that share one error level, for alpha spending: those on the same judged rows, and the looks
at one version for drift. Two splits are the same rows if they share any, so the count goes on while rows are added.

Tags of the registered model:
finetune.comparison.DIGEST.PAIR   the number of a comparison, or the claim of one
finetune.judged_rows.DIGEST       the sketch of a judged split, and the earlier splits that it shares rows with
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tasks.home import named_lock
from tasks.registry.versions import find_model
from tasks.tracking.connection import connect, mlflow_errors
from training.data.duplicates import Hashes, hash_rows
from training.data.ipc_files import read_batches
from training.evaluation.significance import alpha_spent
from training.recipe.source_columns import StoredColumn

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from training.recipe import Recipe

COMPARISON_TAG = "finetune.comparison."
JUDGED_ROWS_TAG = "finetune.judged_rows."
CLAIM = "claimed "
DIGITS = 16
SKETCH_ROWS = 256
"""Rows of a split in its sketch. A later split that has a share s of the earlier one's rows meets none of them with a
chance of (1 - s) ** 256: 2 in a million for 5 %, and 0 if it has all of them. A tag has 5,000 characters in MLflow."""


@dataclass(frozen=True)
class JudgedRows:
    """The rows of a judged split that load_data has stored, read when they are needed. Rows with equal inputs are the
    same row, also if its label was corrected."""

    file: Path
    inputs: Sequence[StoredColumn]

    @cached_property
    def hashes(self) -> Hashes:
        """Hashes of the distinct inputs, sorted."""
        batches = read_batches(self.file)
        found = b"".join(hash_rows(batch, self.inputs).astype("<u8").tobytes() for batch in batches)
        # Hashed once more: training/data/holdout.py draws splits by intervals of the first hash, and the smallest ones
        # of such a split would depend on its size.
        again = b"".join(
            hashlib.blake2b(found[start : start + 8], digest_size=8).digest() for start in range(0, len(found), 8)
        )
        return np.unique(np.frombuffer(again, "<u8")).astype(np.uint64)

    @cached_property
    def sketch(self) -> str:
        """The smallest hashes, in base64: a random sample of the rows, and the same one in every split that has them
        (Broder, On the resemblance and containment of documents, 1997)."""
        return base64.b64encode(self.hashes[:SKETCH_ROWS].astype("<u8").tobytes()).decode()

    def meet(self, sketch: str) -> bool:
        """Whether rows of another split's sketch are among these."""
        try:
            others = np.frombuffer(base64.b64decode(sketch, validate=True), "<u8")
        except ValueError:
            return False
        places = np.searchsorted(self.hashes, others)
        inside = places < len(self.hashes)
        return bool((self.hashes[places[inside]] == others[inside]).any())


def counts_comparisons(recipe: Recipe) -> bool:
    """Whether all comparisons on the same rows share one error level. Without a registry nothing is promoted."""
    return recipe.release.gate.control == "all" and recipe.release.registry is not None


def confidence_of_number(number: int, confidence: float) -> float:
    """The confidence that the comparison of this number needs, so that all comparisons together have `confidence`."""
    return 1 - alpha_spent(number, 1 - confidence)


def number_comparison(name: str, digest: str, pair: str, rows: JudgedRows | None = None) -> int:
    """Returns the number of a comparison, counted from 1 among all that share its error level. A repeated comparison
    keeps its number.

    Args:
        name: the registered model, which is created if missing.
        digest: names the comparisons that share an error level: for judged rows, the digest of the split.
        pair: digest of both models' predictions and of the metric.
        rows: the judged rows. The comparisons on splits that share rows with them count too, those on splits that share
            rows with these splits, and so on. If a split joins several counts, they go on as one, from the highest
            number.

    Two homes may count at the same time. Each claims a number in its own tag, reads the other tags, and settles on the
    number if no other tag has it. If two homes claim the same number, at least one of them reads the other's claim and
    claims another number, so no number is settled twice. A settled number never changes.
    """
    digest = digest[:DIGITS]
    tag = f"{COMPARISON_TAG}{digest}.{pair[:DIGITS]}"
    with mlflow_errors(), named_lock(f"registry-{name}"):
        client = connect()
        tags = _read_tags(client, name)
        if tags.get(tag, "").isdecimal() and (rows is None or f"{JUDGED_ROWS_TAG}{digest}" in tags):
            return int(tags[tag])
        settled, claimed = _read_numbers(client, name, digest, rows)
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
            settled, claimed = _read_numbers(client, name, digest, rows)
    return settled[tag]


def expect_number(name: str, digest: str, rows: JudgedRows) -> int:
    """Returns the number that `number_comparison` would give to a new pair. Records nothing."""
    with mlflow_errors():
        model = find_model(connect(), name)
    digest, tags = digest[:DIGITS], dict(model.tags) if model else {}
    tags[f"{JUDGED_ROWS_TAG}{digest}"] = _describe(digest, rows, tags)
    settled, claimed = _parse_numbers(digest, tags)
    return max([*settled.values(), *claimed.values()], default=0) + 1


def _read_numbers(
    client: MlflowClient, name: str, digest: str, rows: JudgedRows | None
) -> tuple[dict[str, int], dict[str, int]]:
    """Reads the settled and the claimed numbers that count, by tag. First records the splits that share these rows."""
    from mlflow.exceptions import MlflowException

    tags, rows_tag = _read_tags(client, name), f"{JUDGED_ROWS_TAG}{digest}"
    while rows is not None and (before := tags.get(rows_tag)) != (value := _describe(digest, rows, tags)):
        try:
            client.set_registered_model_tag(name, rows_tag, value)
            tags = _read_tags(client, name)
        except MlflowException:
            # MLflow refuses a tag that another home, with the same rows, creates at the same time.
            if (tags := _read_tags(client, name)).get(rows_tag) == before:
                raise
    return _parse_numbers(digest, tags)


def _parse_numbers(digest: str, tags: Mapping[str, str]) -> tuple[dict[str, int], dict[str, int]]:
    counted = tuple(f"{COMPARISON_TAG}{one}." for one in _find_connected(digest, tags))
    tags = {tag: value for tag, value in tags.items() if tag.startswith(counted)}
    settled = {tag: int(value) for tag, value in tags.items() if value.isdecimal()}
    claims = {tag: value.removeprefix(CLAIM) for tag, value in tags.items() if value.startswith(CLAIM)}
    return settled, {tag: int(number) for tag, number in claims.items() if number.isdecimal()}


def _read_tags(client: MlflowClient, name: str) -> dict[str, str]:
    return dict((find_model(client, name) or client.create_registered_model(name)).tags)


def _describe(digest: str, rows: JudgedRows, tags: Mapping[str, str]) -> str:
    """The value of the tag of these rows: their sketch, and one split of each connected group that they share rows
    with."""
    sketch, *joined = (tags.get(f"{JUDGED_ROWS_TAG}{digest}") or rows.sketch).split()
    connected = _find_connected(digest, tags)
    for tag, value in sorted(tags.items()):
        other = tag.removeprefix(JUDGED_ROWS_TAG)
        if other != tag and other not in connected and rows.meet(value.partition(" ")[0]):
            joined.append(other)
            connected |= _find_connected(other, tags)
    return " ".join([sketch, *joined])


def _find_connected(digest: str, tags: Mapping[str, str]) -> set[str]:
    """The splits that are connected with this one by recorded shared rows, in any number of steps, and itself."""
    links = [
        {tag.removeprefix(JUDGED_ROWS_TAG), *value.split()[1:]}
        for tag, value in tags.items()
        if tag.startswith(JUDGED_ROWS_TAG)
    ]
    found, before = {digest}, 0
    while len(found) > before:
        before = len(found)
        found = found.union(*(link for link in links if not link.isdisjoint(found)))
    return found
