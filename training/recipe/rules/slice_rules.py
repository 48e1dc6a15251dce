"""Rules of a recipe about slices: groups of the scored rows, and the least values of their metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from training.problems import nearest
from training.recipe.data_fields import DATASET, entries_of
from training.recipe.rules.column_rules import columns_of
from training.recipe.rules.rule import WrittenRecipe

LABEL, LENGTH = "label", "length_bucket"
BUILT_IN_SLICES = (LABEL, LENGTH)
"""The slices of every dataset; a column with one of these names cannot be a slice."""
FEWEST_ROWS = 10
"""A group with fewer rows has no confidence intervals, and the floor of every group does not apply to it. Rows count
here also if data.split names groups: a floor is compared with the figure itself."""
MOST_GROUPS = 50
"""The largest groups of a slice that are shown. Minimums apply to all groups."""
_LISTED_COLUMNS = 10  # that were not kept, with the reason
_LISTED_GROUPS = 20  # to choose from


def with_usual_slice(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the recipe's values. A mixture is sliced by its sets if no slices are named."""
    evaluation = values.get("evaluation") or {}
    if not entries_of(values.get("data")) or not isinstance(evaluation, Mapping) or "slices" in evaluation:
        return values
    splits = evaluation.get("splits")
    if isinstance(splits, list) and "train" in splits:  # whose rows are not stored with their set
        return values
    return {**values, "evaluation": {**evaluation, "slices": [DATASET]}}


def named_groups(floors: Iterable[str], slices: Sequence[str]) -> dict[str, list[str]]:
    """Returns the single groups that floors name, by slice: fiction of `genre` for `genre=fiction`."""
    groups: dict[str, list[str]] = {}
    for key in floors:
        if (slice_and_group := slice_of(key, slices)) and slice_and_group[1] is not None:
            groups.setdefault(slice_and_group[0], []).append(slice_and_group[1])
    return groups


def slice_of(key: str, slices: Sequence[str]) -> tuple[str, str | None] | None:
    """Returns the slice of a group's floor, and its group (None: every group); None if no slice matches.

    `genre=fiction` is the group fiction of genre, unless `genre=fiction` is itself a slice.
    """
    if key in slices:
        return key, None
    candidates = [name for name in slices if key.startswith(f"{name}=")]
    longest = max(candidates, key=len, default=None)
    return None if longest is None else (longest, key.removeprefix(f"{longest}="))


def unfitting_floor(name: str, group: str | None, groups: Iterable[str], split: str) -> str | None:
    """Returns why a floor does not fit a slice's group (None: every group), given the groups in the split; None if it
    fits."""
    existing = list(groups)
    if not existing:
        advice = "set release.gate.split to another, or leave it out"
        return f"{split} is the gate's split and has no column {name!r}: {advice}."
    if group is None or group in existing:
        return None
    rest = f" and {len(existing) - _LISTED_GROUPS:,} more" if len(existing) > _LISTED_GROUPS else ""
    choices = f"choose from {', '.join(existing[:_LISTED_GROUPS])}{rest}.{nearest(group, existing)}"
    return f"{name} has no group {group!r} in {split}: {choices}"


def unknown_slices(
    slices: Sequence[str], kept: Sequence[str], left_out: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yields the fields that name a slice which these rows do not have, with the choices.

    Args:
        kept: the columns that load_data kept.
        left_out: the other columns, with the reason, such as "is of type double".
    """
    choices = [*(name for name in kept if name not in BUILT_IN_SLICES), *BUILT_IN_SLICES]
    reasons = [f"{name} {reason}" for name, reason in left_out.items()]
    rest = f", and {len(reasons) - _LISTED_COLUMNS:,} more" if len(reasons) > _LISTED_COLUMNS else ""
    hint = f" Not kept: {'; '.join(reasons[:_LISTED_COLUMNS])}{rest}." if reasons else ""
    for index, name in enumerate(slices):
        if name not in choices:
            message = f"{name!r} is not a slice of these rows: choose from {', '.join(choices)}."
            yield f"evaluation.slices[{index}]", f"{message}{nearest(name, choices)}{hint}"


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
        elif name in BUILT_IN_SLICES:
            continue
        elif name == DATASET and written["data.mix"]:
            if "train" in written["evaluation.splits"]:
                yield where, f"{name!r} is not stored for train: leave train out of evaluation.splits, or the slice."
        elif name == label:
            yield where, f"{name!r} is the column of labels: write {LABEL}."
        elif name in used:
            role = "of texts" if used[name].form == "text" else f"that the task type uses as {used[name].name}"
            yield where, f"{name!r} is a column {role}: choose another, or {LENGTH} for groups by their length."
        elif "train" in written["evaluation.splits"]:
            yield where, f"{name!r} is not stored for train: leave train out of evaluation.splits, or slice by {LABEL}."
