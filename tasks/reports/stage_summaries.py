"""Stages as people see them: the table of stages in the order in which a run executes them, and the result and
progress of each in a few words. The table gives the values of `--force`, the lines of the terminal, the tables in
Prefect and the rows of the documentation. flows/pipeline.py connects the stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tasks.cache.results import Artifact, Champion, Promotion, Publication, Verdict, Version
from tasks.cache.stage import Row
from tasks.reports.formatting import format_count, format_score, format_size, format_value
from tasks.reports.model_reports import summarize_exports


class StageEntry(NamedTuple):
    """How a stage is shown."""

    summarize: Callable[[Mapping[str, Any]], str] | None = None
    """Describes the figures of its artifact in a few words; None for an action."""
    is_optional: bool = False
    """Whether some runs leave it out: it is listed when it starts."""
    has_report: bool = False
    """Whether its artifact holds a report on the rows."""


def _summarize_rows(figures: Mapping[str, Any]) -> str:
    splits = [f"{name.removesuffix('_rows')} {n:,}" for name, n in figures.items() if name.endswith("_rows")]
    warnings = f"; {format_count(figures['warnings'], 'warning')}" if figures.get("warnings") else ""
    labels = f"; {figures['labels']} labels" if figures["labels"] else ""
    return f"rows: {', '.join(splits)}{labels}{warnings}"


def _summarize_scores(figures: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{split} " + ", ".join(f"{name} {format_score(entry)}" for name, entry in metrics.items())
        for split, metrics in figures.items()
    )


def _summarize_rate(figures: Mapping[str, Any]) -> str:
    return f"{figures['rows']:,} rows, {figures['rows_per_second']:.0f} rows/s"


def _summarize_observed(figures: Mapping[str, Any]) -> str:
    part = "" if figures["observed"] == figures["rows"] else f" of {figures['rows']:,}"
    without = f", {figures['without_prediction']:,} without a prediction" if figures["without_prediction"] else ""
    return f"{figures['observed']:,}{part} rows{without}"


STAGES = {
    "resolve": StageEntry(),
    "load_data": StageEntry(_summarize_rows, has_report=True),
    "load_model": StageEntry(
        lambda f: f"{f['megabytes']:g} MB" if "megabytes" in f else f"{f['parameters']:,} parameters"
    ),
    "tokenize": StageEntry(lambda f: f"{f['tokens']:,} tokens, {f['truncated']:,} rows cut", has_report=True),
    "reference_logprobs": StageEntry(_summarize_rate, is_optional=True),
    "fit": StageEntry(
        lambda f: f"{f['steps']:,} steps, {f['train_samples_per_second']:.0f} rows/s, loss {f['train_loss']:.3f}"
    ),
    "predict": StageEntry(_summarize_rate),
    "score": StageEntry(_summarize_scores),
    "find_champion": StageEntry(),
    "predict_champion": StageEntry(_summarize_rate, is_optional=True),
    "count_comparison": StageEntry(is_optional=True),
    "compare": StageEntry(
        lambda f: (
            f"{f['metric']} {format_value(f['value'])} against {format_value(f['champion_value'])} of {f['champion']}"
        ),
        is_optional=True,
    ),
    "gate": StageEntry(),
    "export": StageEntry(
        lambda f: ", ".join(f"{name} {format_size(size)}" for name, size in f["bytes"].items()),
        is_optional=True,
    ),
    "compare_exports": StageEntry(summarize_exports, is_optional=True),
    "register": StageEntry(),
    "publish": StageEntry(is_optional=True),
    "promote": StageEntry(),
}


MONITORING_STAGES = {
    "profile": StageEntry(_summarize_observed),
    "observe": StageEntry(_summarize_observed),
    "count_look": StageEntry(),
    "drift": StageEntry(lambda f: f["verdict"]),
    "record_drift": StageEntry(),
    "load_labelled": StageEntry(_summarize_rows),
    "predict_labelled": StageEntry(_summarize_rate),
    "evaluate": StageEntry(
        lambda f: ", ".join(f"{name} {format_score(score)}" for name, score in f["metrics"].items())
    ),
    "record_evaluation": StageEntry(),
}
"""The stages of the flows that look at a registered version."""


STAGES_WITH_REPORT = tuple(name for name, entry in STAGES.items() if entry.has_report)


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
    if isinstance(result, Artifact):
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
