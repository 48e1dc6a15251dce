"""Rules of a recipe about slices: groups of the scored rows, and the floors of their metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from training.problems import nearest
from training.recipe.rules.column_rules import columns_of
from training.recipe.rules.rule import WrittenRecipe

LABEL, LENGTH = "label", "length_bucket"
MADE = (LABEL, LENGTH)
"""The slices of every dataset; a column of such a name cannot be a slice."""
FEWEST_ROWS = 10
"""A group with fewer rows has no confidence intervals, and a floor for every group does not apply to it."""
MOST_GROUPS = 50
"""The largest groups of a slice that are shown. Floors apply to all groups."""
_LISTED_COLUMNS = 10  # that were not kept, with the reason
_LISTED_GROUPS = 20  # to choose from


def named_groups(floors: Iterable[str], slices: Sequence[str]) -> dict[str, list[str]]:
    """The groups that floors name one by one, by their slice: `genre=fiction` of `genre`."""
    named: dict[str, list[str]] = {}
    for key in floors:
        if (found := slice_of(key, slices)) and found[1] is not None:
            named.setdefault(found[0], []).append(found[1])
    return named


def slice_of(key: str, slices: Sequence[str]) -> tuple[str, str | None] | None:
    """The slice of a floor, and its group (None: every group); None if no slice matches.

    `genre=fiction` is the group fiction of genre, unless there is a slice of that whole name.
    """
    if key in slices:
        return key, None
    meant = [name for name in slices if key.startswith(f"{name}=")]
    longest = max(meant, key=len, default=None)
    return None if longest is None else (longest, key.removeprefix(f"{longest}="))


def unfitting_floor(name: str, group: str | None, groups: Iterable[str], split: str) -> str | None:
    """Why a floor does not fit that group of the slice, or every group (None), given the split's groups; None if it
    does."""
    there = list(groups)
    if not there:
        return f"{split} is judged, and has no column {name!r}: set release.gate.split to another, or leave it out."
    if group is None or group in there:
        return None
    more = f" and {len(there) - _LISTED_GROUPS:,} more" if len(there) > _LISTED_GROUPS else ""
    choices = f"choose from {', '.join(there[:_LISTED_GROUPS])}{more}.{nearest(group, there)}"
    return f"{name} has no group {group!r} in {split}: {choices}"


def unknown_slices(
    slices: Sequence[str], kept: Sequence[str], left_out: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """The fields that name a slice which these rows do not have, with the choices.

    Args:
        kept: the columns that load_data kept.
        left_out: the others, and why, such as "is of type double".
    """
    there = [*(name for name in kept if name not in MADE), *MADE]
    reasons = [f"{name} {reason}" for name, reason in left_out.items()]
    more = f", and {len(reasons) - _LISTED_COLUMNS:,} more" if len(reasons) > _LISTED_COLUMNS else ""
    others = f" Not kept: {'; '.join(reasons[:_LISTED_COLUMNS])}{more}." if reasons else ""
    for index, name in enumerate(slices):
        if name not in there:
            message = f"{name!r} is not a slice of these rows: choose from {', '.join(there)}."
            yield f"evaluation.slices[{index}]", f"{message}{nearest(name, there)}{others}"


def slices_of_any_rows(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    slices, label = written["evaluation.slices"], written["data.label"]
    used = {column.source_name: column for column in columns_of(written)} if slices else {}
    for index, name in enumerate(slices):
        where = f"evaluation.slices[{index}]"
        if name in slices[:index]:
            yield where, f"{name!r} is listed twice."
        elif name == LABEL and all(column.form != "label" for column in columns_of(written)):
            message = f"'{LABEL}' needs one label a row, unlike task {written['task']}: choose another slice"
            yield where, f"{message}, such as {LENGTH}."
        elif name in MADE:
            continue
        elif name == label:
            yield where, f"{name!r} is the column of labels: write {LABEL}."
        elif name in used:
            role = "of texts" if used[name].form == "text" else f"that the task type uses as {used[name].name}"
            yield where, f"{name!r} is a column {role}: choose another, or {LENGTH} for groups by their length."
        elif "train" in written["evaluation.splits"]:
            yield where, f"{name!r} is not kept of train: leave that out of evaluation.splits, or slice by {LABEL}."
