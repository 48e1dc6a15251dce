"""Tables and texts of an evaluation on rows whose labels arrived after the release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.tracking.reports import format_count, format_score, format_value, make_printable

WORST_GROUPS = 5  # of a slice


def tabulate_evaluation(evaluation: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each metric: now, as promised, and the difference."""
    table = []
    for name, score in evaluation["metrics"].items():
        promised = evaluation["promised"].get(name)
        difference = evaluation["differences"].get(name) or {}
        table.append(
            {
                "metric": name,
                "now": format_score(score),
                f"promised on {evaluation['split']}": format_score(_without_baseline(promised)) if promised else "",
                "difference": _format_difference(difference),
            }
        )
    return table


def _without_baseline(score: Mapping[str, float | None]) -> dict[str, float | None]:
    return {end: score.get(end) for end in ("value", "low", "high")}


def _format_difference(difference: Mapping[str, float | None]) -> str:
    value, low, high = (difference.get(end) for end in ("value", "low", "high"))
    if value is None:
        return ""
    return f"{value:+.4f}" + (f" ({low:+.4f} to {high:+.4f})" if low is not None and high is not None else "")


def describe_evaluation(evaluation: Mapping[str, Any]) -> list[str]:
    """Sentences on the rows, on figures outside of the gate's bounds, and on the worst groups."""
    shared = evaluation["shared_rows"]
    rows = f"{evaluation['version']}, evaluation {evaluation['number']}: {format_count(evaluation['rows'], 'row')}"
    if shared:
        rows += f", {shared:,} of them also in {evaluation['split']} and compared with themselves"
    lines = [f"{rows}."]
    if evaluation["below"]:
        lines.append(f"Outside of the gate's bounds: {', '.join(evaluation['below'])}.")
    for name, groups in evaluation["slices"].items():
        metric = next(iter(evaluation["metrics"]))
        scored = [group for group in groups if group["metrics"][metric]["value"] is not None]
        worst = sorted(scored, key=lambda group: float(group["metrics"][metric]["value"]))[:WORST_GROUPS]
        listed = ", ".join(
            f"{make_printable(group['group'])} {format_value(group['metrics'][metric]['value'])} ({group['rows']:,})"
            for group in worst
        )
        if listed:
            lines.append(f"{metric} by {make_printable(name)}, the lowest (rows): {listed}.")
    return lines


def summarize_evaluation(evaluation: Mapping[str, Any]) -> str:
    """One line: the metrics, and whether the gate would still accept them."""
    metrics = ", ".join(f"{name} {format_value(score['value'])}" for name, score in evaluation["metrics"].items())
    bounds = f"; outside of the gate's bounds: {', '.join(evaluation['below'])}" if evaluation["below"] else ""
    return f"{metrics} on {format_count(evaluation['rows'], 'row')}{bounds}"
