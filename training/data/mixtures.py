"""The training rows of a mixture: how many rows of each set, which ones, and in which order.

The counts are exact, by the largest remainder, and do not depend on chance. A set that is not passed a whole number of
times is passed as often as possible, and then the rows with the smallest seeded hash of their text are added: rows that
are added to the set displace few of them. The sets are spread evenly over the mixture, each in the order of its rows.

Memory: some bytes a row of the mixture, and one block of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from training.data.ipc_files import BLOCK_ROWS
from training.problems import Problem, UserError

if TYPE_CHECKING:
    from training.data.duplicates import Hashes
    from training.recipe import Data
    from training.recipe.column_types import Mask

MOST_GROWTH = 100
"""The largest size of a mixture, in rows of its sets. Weights that need more are probably a mistake."""

Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True)
class SetSize:
    """The training rows of one set."""

    name: str
    rows: int
    characters: int
    """Of all texts in the rows, targets included."""
    tokens: int | None = None
    """Of the same texts, without special tokens; None if they were not counted."""


def mixed_counts(data: Data, sizes: Sequence[SetSize]) -> list[int]:
    """Returns how many rows of each set the mixture `data.mix` has. Raises UserError for a set that has none."""
    mix = data.mix or []
    problems = [
        Problem(
            kind="data", where=f"data.mix[{index}]", message=f"{size.name!r} has no rows to train on: leave it out."
        )
        for index, size in enumerate(sizes)
        if not size.rows
    ]
    if problems:
        raise UserError(problems)
    if any(one.weight is None for one in mix):
        counts = [_round(_exact(one.epochs or 1.0) * size.rows) for one, size in zip(mix, sizes, strict=True)]
    else:
        rates = [_exact(one.weight or 0.0) * _rows_in_unit(data, size) for one, size in zip(mix, sizes, strict=True)]
        counts = round_by_largest_remainder([_scale(data, sizes, rates) * rate for rate in rates])
    for index, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        if not count:
            message = f"{size.name!r} has a share of {size.rows:,} rows in which there is not one: raise it."
            where = f"data.mix[{index}].{'epochs' if mix[index].weight is None else 'weight'}"
            problems.append(Problem(kind="data", where=where, message=message))
    total, available = sum(counts), sum(size.rows for size in sizes)
    if total > MOST_GROWTH * available:
        message = f"the mixture would have {total:,} rows, made of {available:,}: lower the weights or the epochs of "
        message += "small sets. training.num_train_epochs passes the mixture more often."
        problems.append(Problem(kind="data", where="data.mix", message=message))
    if problems:
        raise UserError(problems)
    return counts


def describe_sets(
    data: Data, sizes: Sequence[SetSize], counts: Sequence[int], evaluated: Sequence[Mapping[str, int]]
) -> list[dict[str, Any]]:
    """Returns the table of the sets of `data.mix`: for each its name, rows and characters, its weight, and the rows,
    passes and shares of the mixture; if tokens were counted, also these and their share.

    Args:
        counts: The rows of each set in the mixture.
        evaluated: The rows of each set in other splits than train, by split, which the table has too.
    """
    total = sum(counts)
    characters = [count * size.characters / size.rows for size, count in zip(sizes, counts, strict=True)]
    tokens = [count * (size.tokens or 0) / size.rows for size, count in zip(sizes, counts, strict=True)]
    return [
        {
            "dataset": size.name,
            "rows": size.rows,
            "characters": size.characters,
            "weight": entry.weight,
            "mixed": count,
            "passes": count / size.rows,
            "share": count / total,
            "character_share": characters[index] / (sum(characters) or 1),
            **_token_share(size.tokens, tokens[index], sum(tokens)),
            **others,
        }
        for index, (entry, size, count, others) in enumerate(zip(data.mix or (), sizes, counts, evaluated, strict=True))
    ]


def _token_share(tokens: int | None, mixed: float, total: float) -> dict[str, Any]:
    return {} if tokens is None else {"tokens": tokens, "token_share": mixed / (total or 1)}


def _exact(number: float) -> Fraction:
    """Returns the number as a recipe writes it: 7/10 for 0.7."""
    return Fraction(str(number))


def _rows_in_unit(data: Data, size: SetSize) -> Fraction:
    """Returns the rows of a set for one unit of its weight."""
    units = {"rows": size.rows, "characters": size.characters, "tokens": size.tokens}
    length = units[data.weight_by]
    assert length is not None, "tokens were not counted"
    return Fraction(size.rows, max(1, length))


def _scale(data: Data, sizes: Sequence[SetSize], rates: Sequence[Fraction]) -> Fraction:
    """Returns the factor between the sets' rates and their rows in the mixture."""
    passes = [size.rows / rate for size, rate in zip(sizes, rates, strict=True)]
    for one, once in zip(data.mix or (), passes, strict=True):
        if one.epochs is not None:
            return _exact(one.epochs) * once
    return min(passes) if data.stopping_strategy == "first_exhausted" else max(passes)


def _round(quota: Fraction) -> int:
    return int(quota + Fraction(1, 2))


def round_by_largest_remainder(quotas: Sequence[Fraction]) -> list[int]:
    """Returns whole numbers with the sum of the quotas, rounded: each is its quota, rounded down or up."""
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda index: counts[index] - quotas[index])
    for index in by_remainder[: _round(sum(quotas, Fraction(0))) - sum(counts)]:
        counts[index] += 1
    return counts


def choose_rows(hashes: Hashes, count: int, seed: int) -> Mask:
    """Returns the mask of the rows with the `count` smallest seeded hashes; of equal ones the earlier rows."""
    mask = np.zeros(len(hashes), bool)
    mask[np.argsort(_seeded(hashes, seed), kind="stable")[:count]] = True
    return mask


def _seeded(hashes: Hashes, seed: int) -> Hashes:
    """Returns other hashes for each seed, by the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    mixed = hashes + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def spread_evenly(counts: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Returns the set of each row of the mixture: row j of a set with n rows is at the share (j + 0.5) / n of it."""
    places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    sets = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return sets[np.argsort(places, kind="stable")]


def passes(read: Callable[[], Batches], rows: int, count: int, hashes: Callable[[], Hashes], seed: int) -> Batches:
    """Yields `count` rows of a set with `rows`: whole passes, and then the chosen rows of one more pass.

    `read` yields the set's rows once, `hashes` returns the hash of each row's text.
    """
    whole, remainder = divmod(count, rows)
    for _ in range(whole):
        yield from read()
    if remainder:
        mask, done = choose_rows(hashes(), remainder, seed), 0
        for batch in read():
            yield batch.filter(pa.array(mask[done : done + batch.num_rows]))
            done += batch.num_rows


def mixed_rows(sets: Sequence[Batches], counts: Sequence[int], schema: pa.Schema) -> Batches:
    """Yields the rows of all sets in the order of the mixture, in batches of at most BLOCK_ROWS."""
    order, streams = spread_evenly(counts), [_Stream(batches, schema) for batches in sets]
    for start in range(0, len(order), BLOCK_ROWS):
        part = order[start : start + BLOCK_ROWS]
        needed = np.bincount(part, minlength=len(streams)).tolist()
        rows = pa.concat_tables([stream.take(number) for stream, number in zip(streams, needed, strict=True)])
        places = np.empty(len(part), np.int64)
        places[np.argsort(part, kind="stable")] = np.arange(len(part))  # rows lie one set after the other
        yield from rows.take(pa.array(places)).combine_chunks().to_batches()


class _Stream:
    """Rows of one set, taken from its batches in order."""

    def __init__(self, batches: Batches, schema: pa.Schema) -> None:
        self._batches, self._held = batches, schema.empty_table()

    def take(self, count: int) -> pa.Table:
        """Returns the next rows."""
        while self._held.num_rows < count:
            batch = pa.Table.from_batches([next(self._batches)])
            self._held = pa.concat_tables([self._held, batch])
        taken, self._held = self._held.slice(0, count), self._held.slice(count)
        return taken
