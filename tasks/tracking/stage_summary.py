"""A stage's result and progress in a few words, for terminal, log and Prefect."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tasks.cache.refs import Champion, Promotion, Publication, Ref, Verdict, Version
from tasks.cache.stage import Row
from tasks.tracking.reports import format_size
from tasks.tracking.stage_table import MONITORING_STAGES, STAGES


def format_evaluation(event: Mapping[str, Any]) -> str | None:
    """`step 280: loss 0.7535, accuracy 0.7745`; None if the metrics are not of an evaluation."""
    found = {name: value for name, value in event["values"].items() if not name.endswith(("_second", "_runtime"))}
    if not any(name.startswith("eval_") for name in found):
        return None
    listed = ", ".join(f"{name.removeprefix('eval_')} {value:.4g}" for name, value in found.items())
    return f"step {event['step']}: {listed}"


def summarize_row(row: Row, result: Any) -> str:
    """`fetched 12 MB`, if the artifact was downloaded, and the main figures of the result."""
    fetched = "" if row.fetched_bytes is None else f"fetched {format_size(row.fetched_bytes)}"
    return "  ".join(filter(None, [fetched, summarize_result(row.name, result)]))


def summarize_result(stage: str, result: Any) -> str:
    """The main figures of a stage's result; empty if it has none."""
    if isinstance(result, Ref):
        summarize = (STAGES | MONITORING_STAGES)[stage].summarize
        return summarize(result.figures) if summarize else ""
    if isinstance(result, Champion | Version):
        return f"{result.name} version {result.version}"
    if isinstance(result, Verdict):
        return result.decision
    if isinstance(result, Publication):
        return f"{result.repo} at {result.revision}, commit {result.commit[:12]}"
    if isinstance(result, Promotion):
        before = f", before that version {result.previous}" if result.previous else ""
        return f"{result.name} version {result.version}: {result.alias}{before}"
    return ""


class Pace:
    """Estimates how long a stage still takes, from its first progress on: imports take seconds, and a resumed training
    starts in the middle."""

    def __init__(self) -> None:
        self._first: tuple[float, int, int] | None = None

    def left_s(self, done: int, total: int) -> float | None:
        """Seconds until all is done, at the speed so far; None until there is a speed."""
        now = time.monotonic()
        if self._first is None or done < self._first[1] or total != self._first[2]:  # another part has begun
            self._first = (now, done, total)
        since, before, _ = self._first
        return (now - since) / (done - before) * (total - done) if done > before else None
