"""Slices: groups of the judged rows, as a recipe names them, and the floors that they must reach."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from training.problems import nearest
from training.recipe.rules.column_rules import columns_of
from training.recipe.rules.rule import WrittenRecipe

LABEL, LENGTH = "label", "length_bucket"
MADE = (LABEL, LENGTH)
"""The slices that every data set has; a column of such a name is none."""
FEWEST_ROWS = 10
"""Of fewer rows a figure tells too little: it has no interval, and no floor for each group judges it."""
MOST_GROUPS = 50
"""A slice shows as many groups, those with most rows. It limits no floor."""
_TOLD = 10  # columns that were not kept, of which it is told why
_LISTED = 20  # groups to choose from


def named_groups(floors: Iterable[str], slices: Sequence[str]) -> dict[str, list[str]]:
    """The groups that floors name one by one, by their slice: `genre=fiction` of `genre`."""
    named: dict[str, list[str]] = {}
    for key in floors:
        if (found := slice_of(key, slices)) and found[1] is not None:
            named.setdefault(found[0], []).append(found[1])
    return named


def slice_of(key: str, slices: Sequence[str]) -> tuple[str, str | None] | None:
    """The slice that a floor is for, and the group (None: each of its groups); None where no slice is meant.

    `genre=fiction` is the group fiction of genre, unless there is a slice of that whole name.
    """
    if key in slices:
        return key, None
    meant = [name for name in slices if key.startswith(f"{name}=")]
    longest = max(meant, key=len, default=None)
    return None if longest is None else (longest, key.removeprefix(f"{longest}="))


def unfitting_floor(name: str, group: str | None, groups: Iterable[str], split: str) -> str | None:
    """Why a floor cannot be for that group of the slice, or for each (None), where the split has these groups; None if
    it can."""
    there = list(groups)
    if not there:
        return f"{split} is judged, and has no column {name!r}: set release.gate.split to another, or leave it out."
    if group is None or group in there:
        return None
    more = f" and {len(there) - _LISTED:,} more" if len(there) > _LISTED else ""
    choices = f"choose from {', '.join(there[:_LISTED])}{more}.{nearest(group, there)}"
    return f"{name} has no group {group!r} in {split}: {choices}"


def unknown_slices(
    slices: Sequence[str], kept: Sequence[str], left_out: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Where a slice is named that these rows do not have, and what to choose.

    Args:
        kept: the columns that load_data kept.
        left_out: the others, and why, such as "is of type double".
    """
    there = [*(name for name in kept if name not in MADE), *MADE]
    reasons = [f"{name} {reason}" for name, reason in left_out.items()]
    more = f", and {len(reasons) - _TOLD:,} more" if len(reasons) > _TOLD else ""
    others = f" Not kept: {'; '.join(reasons[:_TOLD])}{more}." if reasons else ""
    for index, name in enumerate(slices):
        if name not in there:
            message = f"{name!r} is no slice of these rows: choose from {', '.join(there)}."
            yield f"evaluation.slices[{index}]", f"{message}{nearest(name, there)}{others}"


def slices_of_any_rows(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    slices, label = written["evaluation.slices"], written["data.label"]
    used = {column.source_name: column for column in columns_of(written)} if slices else {}
    for index, name in enumerate(slices):
        where = f"evaluation.slices[{index}]"
        if name in slices[:index]:
            yield where, f"{name!r} is listed twice."
        elif name == LABEL and all(column.form != "label" for column in columns_of(written)):
            message = f"'{LABEL}' is for kinds of one label a row, and {written['task']} is none: choose another slice"
            yield where, f"{message}, such as {LENGTH}."
        elif name in MADE:
            continue
        elif name == label:
            yield where, f"{name!r} is the column of labels: write {LABEL}."
        elif name in used:
            what = "of texts" if used[name].form == "text" else f"that the task type has as {used[name].name}"
            yield where, f"{name!r} is a column {what}: choose another, or {LENGTH} for groups by their length."
        elif "train" in written["evaluation.splits"]:
            yield where, f"{name!r} is not kept of train: leave that out of evaluation.splits, or slice by {LABEL}."
