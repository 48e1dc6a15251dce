"""Tables and texts of a drift report, from the figures of the stage `drift`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.tracking.reports import make_printable

UNITS = {"cohens_w": "Cohen's w", "distance": "KS distance", "auc": "AUC"}
CAVEAT = "It is estimated from the model's confidence, and cannot see labels that changed their meaning."
SHOWN_WORDS = 5


def tabulate_drift(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each comparison, those that count first."""
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
