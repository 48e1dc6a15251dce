"""What the gate can find with the rows that it judges by: its next comparison's confidence, and reasons why it can
promote nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tasks.cache.history import History
from tasks.cache.results import Artifact, Comparison
from tasks.registry.comparisons import JudgedRows, confidence_of_number, counts_comparisons, expect_number
from tasks.tracking.connection import has_database
from training import task_types
from training.data.ipc_files import ipc_reader
from training.evaluation.group_tests import Clusters, groups_for_gain, groups_for_share
from training.evaluation.row_groups import Groups
from training.evaluation.significance import (
    find_detectable_gain,
    find_needed_rows,
    promotion_chance,
    rows_for_share,
)
from training.problems import Problem, UserError
from training.recipe import Recipe
from training.recipe.rules.column_rules import source_columns
from training.recipe.tables.metrics import RANKINGS, RIGHT_OR_WRONG, TAGS
from training.recipe.task_specification import specification_class

ASSUMED_DIFFERING = 0.1
"""The share of rows that only one of two models has right, without a comparison that has shown it."""
LARGE_GAIN = 0.15
"""In accuracy. Rows that show no smaller gain are few."""


def require_mcnemar(recipe: Recipe) -> None:
    """Raises UserError if the gate does not compare by accuracy without a margin: other tests depend on more than the
    number of rows that differ."""
    kind, gate = specification_class(recipe.task).prediction_type, recipe.release.gate
    problems = []
    if recipe.compared_by != "accuracy" or kind not in RIGHT_OR_WRONG or kind == TAGS:
        where = "evaluation.metrics[0]" if gate.compare is None else "release.gate.compare"
        message = f"the power of the comparison by {recipe.compared_by} (task {recipe.task}) is not computed"
        problems.append((where, f"{message}: only that of accuracy is, by --set release.gate.compare=accuracy."))
    if gate.margin:
        message = f"the power with a margin, {gate.margin:g}, is not computed: see that without, by --set "
        problems.append(("release.gate.margin", f"{message}release.gate.margin=0."))
    if problems:
        raise UserError(Problem(kind="option", where=where, message=message) for where, message in problems)


@dataclass(frozen=True)
class JudgedEntries:
    """The entries of the judged split that the gate compares: its rows, or its queries."""

    number: int
    groups: Groups | None
    """Of the entries, if rows have groups."""

    @classmethod
    def of(cls, recipe: Recipe, data: Path) -> JudgedEntries:
        """From the folder of load_data."""
        split, task_type = recipe.judged_split, task_types.load(**recipe.task_and_options)
        groups = Groups.read(data, split)
        with ipc_reader(data / f"{split}.arrow") as reader:
            rows = reader.read_all()
            entries = task_type.rows_of_entries(rows)
            if entries is None:
                return cls(len(rows), groups)
            return cls(len(entries), groups.take(entries) if groups is not None else None)


def clusters_of(groups: Groups, last: Comparison | None) -> Clusters:
    """These groups with the design effect of the last comparison, else as if their rows gained or lost together."""
    size, effect = groups.usual_size, last.design_effect if last is not None else None
    return Clusters(size, size if effect is None else min(max(effect, 1.0), size))


def count_groups(groups: Groups, rows: int) -> int:
    """The number of groups that so many rows have, if their sizes are like these."""
    return round(len(groups.sizes) * rows / len(groups.numbers))


def has_groups(recipe: Recipe) -> bool:
    """Whether rows are held out by group."""
    return any(one.split is not None and one.split.by == "group" for one in recipe.data.sets)


def expect_comparison(recipe: Recipe, data: Artifact | None) -> int | None:
    """The number of the next comparison on these rows; None if each comparison has its own error level."""
    if not counts_comparisons(recipe):
        return None
    if data is None or not has_database():
        return 1
    file = f"{recipe.judged_split}.arrow"
    rows = JudgedRows(data.path / file, source_columns(recipe).inputs)
    return expect_number(str(recipe.release.registry), data.parts[file], rows)


def confidence_of(recipe: Recipe, comparison: int | None) -> float:
    """The confidence of the comparison with this number."""
    confidence = recipe.release.gate.confidence
    return confidence if comparison is None else confidence_of_number(comparison, confidence)


def last_comparison(recipe: Recipe) -> Comparison | None:
    """The comparison with a champion in the last completed run, if it shows how many rows differ."""
    found = ((History(recipe.name).last_completed() or {}).get("verdict") or {}).get("comparison")
    try:
        compared = Comparison.model_validate(found)
    except ValidationError:  # there is none, or it is of another version of this project
        return None
    shows = compared.method in ("mcnemar", "gaffke") and not compared.baseline
    return compared if shows and compared.split == recipe.judged_split else None


def measure_power(
    recipe: Recipe,
    rows: int,
    differing: float,
    confidence: float,
    gains: Sequence[float],
    clusters: Clusters | None = None,
    groups: int | None = None,
) -> dict[str, Any]:
    """The gain that is found with a chance of 80 %, and for each of `gains` the chance with these rows and the rows for
    80 %. None in place of what no number of rows gives. Of rows in groups: the `clusters`, and the number of `groups`.
    """
    flips = recipe.release.gate.flips
    given = differing, confidence, flips.max_share if flips else None
    chance_of = clusters.promotion_chance if clusters else promotion_chance
    enough = (rows if groups is None else groups) >= recipe.release.gate.min_rows
    return {
        "detectable_gain": find_detectable_gain(rows, *given, chance_of=chance_of) if enough else None,
        "gains": [
            {
                "gain": gain,
                "chance": chance_of(rows, gain, *given) if enough else 0.0,
                "rows": find_needed_rows(gain, *given, chance_of=chance_of),
            }
            for gain in gains
        ],
    }


def find_obstacles(recipe: Recipe, rows: int, comparison: int | None, groups: Groups | None = None) -> Iterator[str]:
    """Reasons why no model can be promoted with so many rows or queries, as sentences. `groups`: of those that are
    stored, if they have any; so many are in as many groups of such sizes."""
    gate, split, confidence = recipe.release.gate, recipe.judged_split, confidence_of(recipe, comparison)
    named = "queries" if specification_class(recipe.task).prediction_type == RANKINGS else "rows"
    numbered = f" (comparison {comparison:,} on these rows)" if comparison else ""
    if groups is None:
        units, unit, what = rows, named, f"{rows:,} {named} of {split}"
        # Of N rows that all differ, all are gained by chance in one of 2 ** N cases; so in a permutation test.
        least = math.ceil(-math.log2(1 - confidence) - 1e-9)
    else:
        units, unit = count_groups(groups, rows), "groups"
        what = f"{rows:,} {named} of {split} in {units:,} groups"
        least = groups_for_gain(groups, confidence)
    if units < gate.min_rows:
        counts = ", and counts groups" if groups else ""
        yield f"{what} promote no model: release.gate.min_rows is {gate.min_rows:,}{counts}."
    if gate.margin >= 0 and units < least:
        confident = f"{100 * confidence:g}% confidence{numbered}"
        yield f"{what} promote no model at {confident}: it takes {least:,}{' groups' if groups else ''} at least."
    if gate.flips is None:
        return
    share = gate.flips.max_share
    needs = groups_for_share(groups, share, confidence) if groups else rows_for_share(share, confidence)
    if units < needs:
        limit = f"release.gate.flips.max_share, {share:g},"
        yield (
            f"{what} replace no champion: {limit} takes {needs:,} {unit} without any flip at "
            f"{100 * confidence:g}% confidence{numbered}."
        )


def describe_few_rows(recipe: Recipe, rows: int) -> str | None:
    """The gain that the gate's next comparison finds with so many rows, as a sentence; None if it is no large one, or
    if the gate does not compare by accuracy."""
    try:
        require_mcnemar(recipe)
    except UserError:
        return None
    confidence = confidence_of(recipe, expect_comparison(recipe, None))
    gain = measure_power(recipe, rows, ASSUMED_DIFFERING, confidence, ())["detectable_gain"]
    if gain is None or gain <= LARGE_GAIN:
        return None
    return (
        f"{rows:,} rows of {recipe.judged_split} are few: the gate finds only gains of {gain:.2f} and more in accuracy "
        "(`finetune power` has the rows that smaller ones take)."
    )
