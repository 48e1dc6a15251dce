"""The table of stages, in the order in which a run executes them: it gives the values of `--force`, the lines of the
terminal, the tables in Prefect and the rows of the documentation. flows/pipeline.py connects the stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tasks.tracking.export_reports import summarize_exports
from tasks.tracking.reports import format_count, format_score, format_size, format_value


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
