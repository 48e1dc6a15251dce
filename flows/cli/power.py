"""The command `power`: the gain that the gate can find, and the rows that it takes."""

from __future__ import annotations

import argparse
import math
from typing import Any

from flows.cli.shared import (
    COMPLETED,
    add_json_argument,
    add_recipe_arguments,
    add_task_argument,
    load_recipe,
    positive,
    write_json,
)
from flows.pipeline import prepare
from flows.reports.tables import align
from tasks.cache.planner import Planner
from tasks.cache.results import Artifact
from tasks.registry.monitored_versions import find_monitored, read_recipe
from tasks.registry.untrusted_code import OPTION, OPTION_HELP
from tasks.shared_store.bucket_remote import open_remote
from tasks.stages.preflight.gate_power import (
    ASSUMED_DIFFERING,
    JudgedEntries,
    clusters_of,
    confidence_of,
    count_groups,
    expect_comparison,
    find_obstacles,
    has_groups,
    last_comparison,
    measure_power,
    require_mcnemar,
)
from training.problems import UserError
from training.recipe import Recipe, parse, parse_set

GAINS = (0.005, 0.01, 0.02, 0.03, 0.05)


def add_power_arguments(parser: argparse.ArgumentParser) -> None:
    add_recipe_arguments(parser)
    parser.add_argument("--rows", metavar="N", type=positive, help="rows of the judged split (default: those stored)")
    parser.add_argument(
        "--differing",
        metavar="SHARE",
        type=_share,
        help="the share of rows that only one of the two models has right (default: that of the last comparison with a "
        f"champion, else {ASSUMED_DIFFERING:g})",
    )
    parser.add_argument(
        "--comparison",
        metavar="K",
        type=positive,
        help="with release.gate.control: all, the number of the comparison (default: the next one on these rows)",
    )
    parser.add_argument(
        "--gain", metavar="D", type=_share, action="append", help="a gain in accuracy, such as 0.02; repeatable"
    )
    add_task_argument(parser)
    parser.add_argument(OPTION, action="store_true", help=f"with the name of a model: {OPTION_HELP}")
    add_json_argument(parser, "the figures")


def power(arguments: argparse.Namespace) -> int:
    """Show the gain that the gate finds in four of five cases, and the rows that other gains take.

    FILE is a deployment file, or the name of a registered model for the recipe that registered it.
    """
    recipe = _find_recipe(arguments)
    require_mcnemar(recipe)
    data = prepare(Planner(recipe.name, remote=open_remote()), recipe).data
    stored = data if isinstance(data, Artifact) else None
    if stored is None and has_groups(recipe):
        message = "rows are held out by group, and the groups are not stored yet: run the recipe first."
        raise UserError.of("data", "data.split", message)
    if stored is None and arguments.rows is None:
        message = "the rows are not stored yet: run the recipe first, or give their number, such as --rows 1000."
        raise UserError.of("option", "--rows", message)
    judged = JudgedEntries.of(recipe, stored.path) if stored is not None else None
    rows, groups = (arguments.rows, None) if judged is None else (arguments.rows or judged.number, judged.groups)
    comparison = expect_comparison(recipe, stored)
    comparison = arguments.comparison if comparison is not None and arguments.comparison else comparison
    last = last_comparison(recipe)
    if arguments.differing is not None:
        differing, source = arguments.differing, "as --differing says"
    elif last is not None:
        differing = (last.gained + last.lost) / last.rows
        source = f"as in the last comparison, with {last.champion}"
    else:
        differing, source = ASSUMED_DIFFERING, "an assumption: no comparison with a champion is known; see --differing"
    gains = tuple(arguments.gain or GAINS)
    confidence = confidence_of(recipe, comparison)
    clusters = clusters_of(groups, last) if groups is not None else None
    count = count_groups(groups, rows) if groups is not None else None
    in_groups = "" if count is None else f" in {count:,} groups"
    found = measure_power(recipe, rows, differing, confidence, gains, clusters, count)
    numbered = f", comparison {comparison:,} on these rows" if comparison else ""
    print(f"{recipe.judged_split}: {rows:,} rows{in_groups}, {100 * confidence:g}% confidence{numbered}")
    print(f"Only one of the two models is right on {100 * differing:.3g}% of the rows ({source}).")
    if clusters is not None:
        because = "an assumption: all rows of a group gain or lose together"
        if last is not None and last.design_effect is not None:
            because = "as in the last comparison"
        print(f"They tell as much as {rows / clusters.design_effect:,.0f} rows without groups ({because}).")
    if (least := found["detectable_gain"]) is None:
        print("The gate finds no gain with a chance of 80 %.")
    else:
        print(f"The gate finds a gain of {least:.4f} in accuracy with a chance of 80 %.")
    table = [["gain", "found with these rows", "rows for 80 %"]]
    for one in found["gains"]:
        needs = "more than 10 million" if one["rows"] is None else f"about {_round_up(one['rows']):,}"
        table.append([f"{one['gain']:g}", f"{100 * one['chance']:.0f} %", needs])
    print("", *align(table), sep="\n")
    obstacles = list(find_obstacles(recipe, rows, comparison, groups))
    print(*(f"warning: {text}" for text in obstacles), sep="\n", end="\n" * bool(obstacles))
    figures: dict[str, Any] = {"split": recipe.judged_split, "rows": rows, "confidence": confidence}
    figures |= {"comparison": comparison, "differing": differing, "obstacles": obstacles}
    if groups is not None and clusters is not None:
        figures |= {"groups": len(groups.sizes), "design_effect": clusters.design_effect}
    write_json(arguments.json, figures | found)
    return COMPLETED


def _find_recipe(arguments: argparse.Namespace) -> Recipe:
    name = str(arguments.file)
    if arguments.file.exists() or arguments.file.suffix in (".yaml", ".yml") or arguments.entry:
        return load_recipe(arguments)
    recipe = read_recipe(find_monitored(name, arguments.task), arguments.run_code)
    return parse(recipe.model_dump(exclude_unset=True), parse_set(arguments.set))


def _round_up(number: int) -> int:
    """The next number with two digits and zeros."""
    unit = 10 ** max(0, len(str(number)) - 2)
    return -(-number // unit) * unit


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share between 0 and 1, such as 0.02")
    return value
