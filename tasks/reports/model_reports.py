"""Tables and texts of a model: scores, errors, slices, verdict and exports. `training.programs.score` writes the sample
of predictions and the slices."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.cache.results import Comparison, Verdict
from tasks.reports.formatting import (
    escape_markdown,
    format_markdown,
    format_score,
    format_size,
    format_value,
    limit_rows,
    make_printable,
    shorten,
)
from training.recipe import FEWEST_ROWS, Recipe, fits_slice, more_is_better

SAMPLE = "log/predictions_sample.csv"
SLICES = "slices.json"
TABLE_ERRORS = 20


def tabulate_scores(figures: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> list[dict[str, str]]:
    """One row per split and metric of `score`: value, interval, and the baseline if any metric has one."""
    table = []
    baselines = any("baseline" in score for metrics in figures.values() for score in metrics.values())
    for split, metrics in figures.items():
        for metric, score in metrics.items():
            low, high = score.get("low"), score.get("high")
            interval = "-" if low is None or high is None else f"{low:.4f} to {high:.4f}"
            row = {"split": split, "metric": metric, "value": format_value(score["value"]), "95 % interval": interval}
            table.append(row | ({"baseline": format_value(score.get("baseline"))} if baselines else {}))
    return table


def find_worst_errors(scores: Path) -> list[dict[str, str]]:
    """The wrong predictions with the highest confidence, with their texts."""
    csv.field_size_limit(2**31 - 1)
    with (scores / SAMPLE).open(newline="", encoding="utf-8") as file:
        wrong = [row for row in csv.DictReader(file) if row["label"] != row["prediction"]]
    wrong.sort(key=lambda row: -float(row["probability"]))
    return [{name: shorten(cell) for name, cell in row.items()} for row in wrong[:TABLE_ERRORS]]


def read_slices(scores: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The groups of each slice, by split and slice, each with its rows and metrics; empty if the recipe has no
    slices."""
    file = scores / SLICES
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def find_worst_groups(recipe: Recipe, scores: Path) -> dict[str, str]:
    """The worst group of each slice on the judged split, by the slice's name:
    `genre=horror accuracy 0.7115 (0.663 to 0.760), 312 rows`.

    The metric is the one that models are compared by, or else the first that has a meaning within the slice; a slice
    without such a metric is left out. Small groups count only if all groups are small.
    """
    worst = {}
    for name, groups in read_slices(scores).get(recipe.judged_split, {}).items():
        metrics = [*groups[0]["metrics"]]
        preferred = [recipe.compared_by] if recipe.compared_by in metrics else []
        metric = next((metric for metric in preferred + metrics if fits_slice(metric, name)), None)
        if metric is None:
            continue
        sign = 1 if metric in recipe.release.gate.maximum or not more_is_better(metric) else -1
        known = [group for group in groups if group["metrics"][metric]["value"] is not None]
        large = [group for group in known if group["rows"] >= FEWEST_ROWS] or known
        if large:
            found = max(large, key=lambda group: sign * group["metrics"][metric]["value"])
            score = format_score(found["metrics"][metric])
            group = f"{make_printable(name)}={make_printable(found['group'])}"
            worst[name] = f"{group} {metric} {score}, {found['rows']:,} rows"
    return worst


def tabulate_slices(scores: Path) -> list[dict[str, str]]:
    """One row per group: its split, slice, name and number of rows, and its metrics with their intervals."""
    table = [
        {
            **{"split": split, "slice": name, "group": shorten(group["group"]), "rows": f"{group['rows']:,}"},
            **{metric: format_score(score) for metric, score in group["metrics"].items()},
        }
        for split, slices in read_slices(scores).items()
        for name, groups in slices.items()
        for group in groups
    ]
    return limit_rows(table, "group", f"score/{SLICES}")


def tabulate_checks(verdict: Verdict) -> list[dict[str, str]]:
    """One row per bound: figure, value, bound, and whether it holds. Bounds on all rows come first, then those on
    groups, the missed ones first."""
    return [
        {
            "figure": check.figure,
            "value": format_value(check.value),
            "bound": f"≥ {check.minimum:g}" if check.minimum is not None else f"≤ {check.maximum:g}",
            "held": "yes" if check.passed else "no",
        }
        for check in sorted(verdict.checks, key=lambda check: check.group is not None and 1 + check.passed)
    ]


def tabulate_comparison(verdict: Verdict) -> list[dict[str, str]]:
    """One row that compares the model with the champion or the baseline; none without either."""
    if (comparison := verdict.comparison) is None:
        return []
    return [
        {
            "figure": f"{comparison.split}.{comparison.metric}",
            "new": f"{comparison.value:.4f}",
            comparison.champion: f"{comparison.champion_value:.4f}",
            "gain": f"{comparison.gain:+.4f}",
            f"at least, {100 * comparison.confidence:g}%": f"{comparison.at_least:+.4f}",
            "margin": f"{comparison.margin:g}",
            "p": f"{comparison.p_value:.2g}",
            "test": comparison.method,
        }
    ]


def tabulate_answers(verdict: Verdict) -> list[dict[str, str]]:
    """One row per figure of the answers of the model and its opponent."""
    found = verdict.comparison.answers if verdict.comparison else []
    return [
        {
            "figure": one.metric,
            "new": f"{one.value:.4f}",
            one.opponent: f"{one.champion_value:.4f}",
            "difference": f"{one.value - one.champion_value:+.4f}",
            "95 % interval": f"{one.low:+.4f} to {one.high:+.4f}",
            "prompts": f"{one.rows:,}",
        }
        for one in found
    ]


def describe_verdict(verdict: Verdict) -> str:
    """The decision, its reason, the comparison and the warnings, as Markdown."""
    tables = [table for table in (tabulate_comparison(verdict), tabulate_answers(verdict)) if table]
    parts = [f"**{verdict.decision}**: {escape_markdown(verdict.reason)}", *map(format_markdown, tables)]
    return "\n\n".join([*parts, *(f"Warning: {escape_markdown(warning)}" for warning in verdict.warnings)])


def summarize_exports(figures: Mapping[str, Any]) -> str:
    """`onnx-int8 released, 812 rows/s (3.4 times torch)`, for each export."""
    return "; ".join(
        f"{name} {'released' if one['released'] else 'not released'}, {one['rows_per_second']:,.0f} rows/s "
        f"({one['rows_per_second'] / one['torch_rows_per_second']:.1f} times torch)"
        for name, one in figures.items()
    )


def tabulate_exports(figures: Mapping[str, Any]) -> list[dict[str, str]]:
    """One row per export: file, size, speed beside that of torch, and the metric beside that of the model."""
    table = []
    for name, one in figures.items():
        comparison = Comparison.model_validate(one["comparison"])
        precision = {"no": "fp32"}.get(one["torch_precision"], one["torch_precision"])
        table.append(
            {
                "export": name,
                "released": "yes" if one["released"] else "no",
                "size": format_size(one["bytes"]),
                "rows/s": f"{one['rows_per_second']:,.0f}",
                f"torch {precision}, rows/s": f"{one['torch_rows_per_second']:,.0f}",
                f"{comparison.split}.{comparison.metric}": format_value(comparison.value),
                "of the model": format_value(comparison.champion_value),
                f"worse by at most, {100 * comparison.confidence:g}%": format_value(-min(comparison.at_least, 0.0)),
                "allowed": f"{-comparison.margin:g}",
            }
        )
    return table


def describe_refused(name: str, figures: Mapping[str, Any]) -> str:
    """The reason why an export is not released, and the next step."""
    found = Comparison.model_validate(figures["comparison"])
    rows = f"{found.rows:,} rows of {found.split}"
    values = f"{found.metric} {format_value(found.value)} against {format_value(found.champion_value)} of the model"
    if found.gain < found.margin:
        reason = f"it is worse by more than {-found.margin:g}"
        step = "allow a larger release.export_margin, or leave this export out"
    else:
        reason = f"a loss of more than {-found.margin:g} is not ruled out at {100 * found.confidence:g}% confidence"
        step = f"add rows to {found.split}, allow a larger release.export_margin, or leave this export out"
    return f"{name} is not released: {values} on the same {rows}, so {reason}: {step}."
