"""A stage in a few words, for whoever follows a run: the figure that says most about its result, and what an evaluation
in its midst came to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tasks.cache.refs import Champion, Promotion, Publication, Ref, Verdict, Version
from tasks.tracking.reports import counted, score_told, value_told


def evaluation(event: Mapping[str, Any]) -> str | None:
    """`step 280: loss 0.7535, accuracy 0.7745`; None of other figures than an evaluation's."""
    found = {name: value for name, value in event["values"].items() if not name.endswith(("_second", "_runtime"))}
    if not any(name.startswith("eval_") for name in found):
        return None
    told = ", ".join(f"{name.removeprefix('eval_')} {value:.4g}" for name, value in found.items())
    return f"step {event['step']}: {told}"


def figure(stage: str, result: Any) -> str:
    """The one figure that says most about a stage's result."""
    if isinstance(result, Ref):
        describe = _FIGURES.get(stage)
        return describe(result.figures) if describe else ""
    if isinstance(result, Champion):
        return f"{result.name} version {result.version}"
    if isinstance(result, Verdict):
        return result.decision
    if isinstance(result, Version):
        return f"{result.name} version {result.version}"
    if isinstance(result, Publication):
        return f"{result.repo} at {result.revision}, commit {result.commit[:12]}"
    if isinstance(result, Promotion):
        before = f", before that version {result.previous}" if result.previous else ""
        return f"{result.name} version {result.version}: {result.alias}{before}"
    return ""


def _rows(figures: Mapping[str, Any]) -> str:
    splits = [f"{name.removesuffix('_rows')} {n:,}" for name, n in figures.items() if name.endswith("_rows")]
    warned = f"; {counted(figures['warnings'], 'warning')}" if figures.get("warnings") else ""
    labels = f"; {figures['labels']} labels" if figures["labels"] else ""
    return f"rows: {', '.join(splits)}{labels}{warned}"


def _size(figures: Mapping[str, Any]) -> str:
    return f"{figures['megabytes']:g} MB" if "megabytes" in figures else f"{figures['parameters']:,} parameters"


def _scores(figures: Mapping[str, Any]) -> str:
    """Each value, and the ends of its interval."""
    return "; ".join(
        f"{split} " + ", ".join(f"{name} {score_told(entry)}" for name, entry in metrics.items())
        for split, metrics in figures.items()
    )


def _rate(figures: Mapping[str, Any]) -> str:
    return f"{figures['rows']:,} rows, {figures['rows_per_second']:.0f} rows/s"


_FIGURES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "load_data": _rows,
    "load_model": _size,
    "tokenize": lambda f: f"{f['tokens']:,} tokens, {f['truncated']:,} rows cut",
    "fit": lambda f: f"{f['steps']:,} steps, {f['train_samples_per_second']:.0f} rows/s, loss {f['train_loss']:.3f}",
    "predict": _rate,
    "score": _scores,
    "predict_champion": _rate,
    "compare": lambda f: (
        f"{f['metric']} {value_told(f['value'])} beside {value_told(f['champion_value'])} of {f['champion']}"
    ),
}
