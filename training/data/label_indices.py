"""The labels of rows: their order, the index of each as rows spell it, and labels that are whole numbers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from training.data.arrow_columns import flat_values, is_list, lists_like, rows_with_any
from training.problems import UserError

if TYPE_CHECKING:
    from training.recipe.column_types import Mask

_WHOLE_NUMBER = re.compile(r"[+-]?(0|[1-9][0-9]{0,18})(\.0*)?")


def label_places(
    chosen: Sequence[str] | None, stored: Sequence[str], seen: Collection[str], others: Iterable[str] = ()
) -> tuple[list[str], dict[str, int]]:
    """Returns the label names in order, and the index of each label as rows spell it.

    The order is the source's own if it defines its labels, else `in_order` of the labels in the training rows. The
    recipe's label names replace it. Rows may then spell these names, or count them by whole numbers from 0, or have as
    many other whole numbers, which are matched in increasing order. Raises UserError for any other numbers.

    If all labels are whole numbers, `1.0` and `+1` are other spellings of `1`, in the training rows and in `others`,
    those of other splits.
    """
    numbers = {label: number for label in seen if (number := whole_number(label))}
    are_numbers = not stored and len(numbers) == len(seen)
    natural = list(stored) or in_order(dict.fromkeys(numbers.values() if are_numbers else seen))
    if chosen is None:
        names, places = natural, {label: place for place, label in enumerate(natural)}
    else:
        names = list(chosen)
        places = {name: place for place, name in enumerate(names)}
    if natural and all(map(_is_number, natural)):
        by_number = {whole_number(name) or name: place for place, name in enumerate(names)}
        if not set(stored or seen) <= set(names) and not set(natural) <= by_number.keys():
            places = by_number = _places_by_number(names, natural)
        spellings = {label: whole_number(label) for label in (*seen, *others)} if are_numbers else {}
        known = {label: by_number[number] for label, number in spellings.items() if number in by_number}
        places = known | places
    return names, places


def _places_by_number(names: Sequence[str], labels: Iterable[str]) -> dict[str, int]:
    """Returns the index of each whole number among the names."""
    numbers = sorted(labels, key=int)
    if "0" in numbers and all(0 <= int(label) < len(names) for label in numbers):
        return {str(place): place for place in range(len(names))}
    if len(numbers) == len(names):
        return {label: place for place, label in enumerate(numbers)}
    message = (
        f"{len(names)} names do not match the labels of train, {', '.join(numbers[:20])}: numbers count "
        "the names from 0, or there are as many of them. Write the names into the rows, or give more rows."
    )
    raise UserError.of("data", "data.label_names", message)


def in_order(labels: Iterable[str]) -> list[str]:
    """Sorts labels: by value if all are whole numbers, else by spelling."""
    distinct = list(labels)
    return sorted(distinct, key=int if all(map(_is_number, distinct)) else str)


def _is_number(label: str) -> bool:
    """Whether it is the usual spelling of a whole number: `-1`, but not `01` or `1.0`."""
    return whole_number(label) == label


def label_indices(labels: pa.Array, spelt: pa.Array, places: pa.Array) -> pa.Array:
    """Returns the index of each label; every label has one."""
    indices = places.take(pc.index_in(flat_values(labels), value_set=spelt))
    return lists_like(labels, indices) if is_list(labels.type) else indices


def whole_number(label: str) -> str | None:
    """Returns `1` for a label such as `1`, `1.0` or `+1`; None for one that is no whole number, such as `01` or `x`."""
    return str(int(label.partition(".")[0])) if _WHOLE_NUMBER.fullmatch(label) else None


def has_unknown(labels: pa.Array, names: pa.Array) -> Mask:
    """Returns the mask of rows with an unknown label."""
    unknown = pc.invert(pc.is_in(flat_values(labels), value_set=names))
    return rows_with_any(labels, unknown) if is_list(labels.type) else unknown.to_numpy(zero_copy_only=False)
