"""Checks of leakage between splits: equal and nearly equal rows, shared groups, and columns by which rows should have
been held out instead of by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from training.data.checks import Places, SplitCheck, SplitProblem
from training.data.duplicates import DuplicateTexts
from training.data.ipc_files import SPLITS
from training.data.near_duplicates import find_near_duplicates
from training.data.near_images import find_near_images
from training.data.row_groups import RowGroups
from training.data.row_statistics import SplitStatistics
from training.data.split_signs import SplitSigns
from training.recipe.source_columns import SourceColumns


def shared_rows(statistics: SplitStatistics, places: Places, texts: DuplicateTexts) -> Iterator[SplitProblem]:
    """Rows whose text is in another split too: a model that memorized them scores too high."""
    for other in texts.before(statistics.split):
        if equal := texts.shared(other, statistics.split):
            later, earlier = equal.first
            rows = "1 row of {} is" if equal.count == 1 else f"{equal.count:,} rows of {{}} are"
            message = (
                f"{rows.format(statistics.split)} in {other}, too (this one {earlier.relative_to(later)}: "
                f"{equal.text}): figures on them flatter the model; take them out of {other}."
            )
            yield SplitProblem(str(later), message)


def near_duplicates(statistics: SplitStatistics, places: Places, texts: DuplicateTexts) -> Iterator[SplitProblem]:
    """Rows that are nearly equal to a row of another split, such as paraphrases and templates: at least 60% of their
    strings of 6 bytes, without case and spaces, are the same. Needs the extra near-duplicates, and some seconds for
    each 100,000 rows. Images need no extra: those are nearly equal whose gray levels have a correlation of 0.98, such
    as one photograph in two sizes."""
    search = find_near_images if texts.has_images else find_near_duplicates
    for other in texts.before(statistics.split):
        if near := search(texts, other, statistics.split):
            later, earlier = near.rows
            rows = "1 row of {} is" if near.count == 1 else f"{near.count:,} rows of {{}} are"
            message = (
                f"{rows.format(statistics.split)} nearly equal to rows of {other} (this one to "
                f"{earlier.relative_to(later, 'row')}, {near.alike}): figures on them flatter the model; take them out "
                f"of {other}, or keep them together by a group, in data.split."
            )
            yield SplitProblem(str(later), message)


def shared_groups(groups: RowGroups, wanted: SourceColumns) -> Iterator[SplitProblem]:
    """Groups of data.split with rows in several of the splits that the source has: a model that knows a group scores
    too high on its other rows."""
    for split in SPLITS:
        for other in groups.before(split):
            if equal := groups.shared(other, split):
                later, earlier = equal.first
                rows = "1 row of {} is" if equal.count == 1 else f"{equal.count:,} rows of {{}} are"
                count = groups.count_shared(other, split)
                of_groups = "a group" if count == 1 else f"{count:,} groups"
                message = (
                    f"{rows.format(split)} of {of_groups} with rows in {other}, too (this one of {equal.text}, like "
                    f"{earlier.relative_to(later, 'row')}): figures on them flatter the model; move each group into "
                    f"one split, or leave {split} out of data.splits, so that groups are held out."
                )
                yield SplitProblem(str(later), message)


def group_like(signs: SplitSigns) -> Iterator[SplitProblem]:
    """Rows held out by chance, and a column that looks like a group: its values repeat in train, and rows with one
    value share their label or their words far more than others. Only columns that can be slices are looked at."""
    if sign := signs.groups():
        alike = (
            f"the label of such a row is right for {sign.agreement:.0%} of them, and that of any row for"
            if sign.of == "labels"
            else f"they share {sign.agreement:.0%} of their words with it, and with any row"
        )
        message = (
            f"column {sign.column!r} looks like a group: {sign.shared:.0%} of the rows that are held out have a row of "
            f"theirs in train, and {alike} {sign.chance:.0%}. If the model will meet new ones, its figures flatter it: "
            f"set data.split: {{by: group, column: {sign.column}}}; if not, data.checks.group_like: ignore."
        )
        yield SplitProblem("data.split", message)


def time_like(signs: SplitSigns) -> Iterator[SplitProblem]:
    """Rows held out by chance, and a column of times with which the labels change: the newest rows are what the model
    will meet. Only columns that can be slices are looked at."""
    if sign := signs.times():
        message = (
            f"the labels change with the time in column {sign.column!r}: {sign.label!r} is {sign.newest:.0%} of the "
            f"newest fifth of the rows and {sign.before:.0%} of those before, and the model will meet newer ones: set "
            f"data.split: {{by: time, column: {sign.column}}}; if that does not matter, data.checks.time_like: ignore."
        )
        yield SplitProblem("data.split", message)


SHARED_TEXT_CHECKS: dict[str, SplitCheck] = {
    "shared_rows": shared_rows,
    "near_duplicates": near_duplicates,
}
"""As SPLIT_CHECKS: each compares a split with those before it."""

GroupCheck = Callable[[RowGroups, SourceColumns], Iterator[SplitProblem]]

GROUP_CHECKS: dict[str, GroupCheck] = {
    "shared_groups": shared_groups,
}
"""Each takes the groups of all splits."""

SignCheck = Callable[[SplitSigns], Iterator[SplitProblem]]

SIGN_CHECKS: dict[str, SignCheck] = {
    "group_like": group_like,
    "time_like": time_like,
}
"""Each takes the first rows of a set whose held-out rows are chosen by chance."""
