"""Texts and tables about the training rows whose labels are probably wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tasks.reports.formatting import format_count, shorten
from training.evaluation.scores import SuspectLabels

LONGEST_TEXT = 60
"""Characters of a text, and of a label, in a table."""


def summarize_suspects(result: SuspectLabels) -> str:
    """`214 of 8,950 labels are suspects, 61% of them wrong (48% to 73%)`"""
    found = f"{result.suspects:,} of {result.rows:,} labels are suspects"
    if (share := result.share) is None:
        return found
    return f"{found}, {share.expected:.0%} of them wrong ({share.low:.0%} to {share.high:.0%})"


def describe_suspects(report: Mapping[str, Any]) -> Iterator[str]:
    """Sentences on a report of the flow `labels`: the suspects and what is known of them, then the other rows."""
    found = SuspectLabels.model_validate({name: report[name] for name in SuspectLabels.model_fields})
    yield f"{report['recipe']}: {summarize_suspects(found)}."
    if found.share is not None and found.share.low == 0:
        yield "The list may hold no error: the model alone may be wrong. Look at the first rows before you go on."
    if found.share is None and found.suspects:
        yield "How many of them are wrong is unknown: the right numbers have outliers, too."
    if found.differing is not None:
        yield f"{format_count(found.differing, 'row')} with another label in the other source."
    if found.conflicts:
        yield f"{format_count(found.conflicts, 'text')} with different labels in different rows."
    if found.repeats or found.known:
        known = "" if found.known is None else f", and {found.known:,} a label that is certain to a model without them"
        yield f"Rows that teach little: {found.repeats:,} repeat a text with its label{known}."
    if found.decided:
        yield f"{format_count(found.decided, 'row')} of train {'is' if found.decided == 1 else 'are'} decided already."


def tabulate_suspects(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """One row per suspect, the surest first."""
    return [
        {
            "text": shorten(row["text"], LONGEST_TEXT),
            "label": shorten(row["label"], LONGEST_TEXT),
            "suggestion": shorten(row["suggestion"], LONGEST_TEXT),
            "wrong": "" if row["chance"] is None else f"{row['chance']:.0%}",
        }
        for row in rows
    ]
