"""Tables and texts of a registered version: drift of new rows, and evaluations on rows whose labels arrived later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.reports.formatting import format_count, format_score, format_value, make_printable

UNITS = {"cohens_w": "Cohen's w", "distance": "KS distance", "auc": "AUC"}
CAVEAT = "It is estimated from the model's confidence, and cannot see labels that changed their meaning."
SHOWN_WORDS = 5
WORST_GROUPS = 5  # of a slice


def tabulate_drift(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each comparison: drifted ones first, then those to watch."""
    order = ("drifted", "watch", "steady")
    lines = sorted(report["comparisons"], key=lambda line: order.index(line["verdict"]))
    return [
        {
            "comparison": make_printable(line["name"]),
            "effect": f"{line['value']:.3f}",
            "95% interval": f"{line['low']:.3f} to {line['high']:.3f}",
            "threshold": f"{line['threshold']:g}",
            "unit": UNITS[line["unit"]],
            "p, any": f"{line['p_value']:.2g}",
            "p, above threshold": f"{line['p_threshold']:.2g}",
            "verdict": line["verdict"],
        }
        for line in lines
    ]


def describe_drift(report: Mapping[str, Any]) -> str:
    """One sentence on the verdict, and one on the estimated accuracy."""
    return " ".join(filter(None, [summarize_drift(report), describe_accuracy(report), describe_words(report)]))


def summarize_drift(report: Mapping[str, Any]) -> str:
    """The verdict with the differences behind it."""
    rows, verdict = report["rows"], report["verdict"]
    if verdict == "undecided":
        return f"undecided: there are {rows['new']:,} new rows and {rows['reference']:,} validation rows, too few."
    found = [make_printable(line["name"]) for line in report["comparisons"] if line["verdict"] != "steady"]
    differences = f" in {', '.join(found)}" if found else ""
    return f"{verdict}{differences}: {rows['new']:,} new rows against {rows['reference']:,} validation rows."


def describe_accuracy(report: Mapping[str, Any]) -> str:
    """The estimated accuracy with its interval and its caveat; empty without one."""
    if not (found := report["estimated_accuracy"]):
        return ""
    interval = f"{found['value']:.3f} ({found['low']:.3f} to {found['high']:.3f})"
    return f"Estimated accuracy {interval}, on validation rows {found['reference']:.3f}. {CAVEAT}"


def describe_words(report: Mapping[str, Any]) -> str:
    """The words that are most typical of new rows; empty if the words do not differ."""
    for line in report["comparisons"]:
        if line["name"] == "words" and line["verdict"] != "steady":
            typical = [word for word in line["words"] if word["speaks_for"] == "new"][:SHOWN_WORDS]
            listed = ", ".join(f"{make_printable(w['word'])} ({w['reference']:.1%} → {w['new']:.1%})" for w in typical)
            return f"Typical of new rows: {listed}." if typical else ""
    return ""


def tabulate_evaluation(evaluation: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each metric: now, as expected at its registration, and the difference."""
    table = []
    for name, score in evaluation["metrics"].items():
        expected = evaluation["expected"].get(name)
        difference = evaluation["differences"].get(name) or {}
        table.append(
            {
                "metric": name,
                "now": format_score(score),
                f"expected from {evaluation['split']}": format_score(_without_baseline(expected)) if expected else "",
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
