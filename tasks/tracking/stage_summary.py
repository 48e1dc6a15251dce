"""A stage in a few words, for terminal, log and Prefect: its key figure, its evaluations, and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from tasks.cache.refs import Champion, Promotion, Publication, Ref, Verdict, Version
from tasks.tracking.reports import counted, score_told, value_told


def evaluation(event: Mapping[str, Any]) -> str | None:
    """`step 280: loss 0.7535, accuracy 0.7745`; None if the event is no evaluation."""
    found = {name: value for name, value in event["values"].items() if not name.endswith(("_second", "_runtime"))}
    if not any(name.startswith("eval_") for name in found):
        return None
    listed = ", ".join(f"{name.removeprefix('eval_')} {value:.4g}" for name, value in found.items())
    return f"step {event['step']}: {listed}"


def figure(stage: str, result: Any) -> str:
    """The most telling figure of a stage's result, in words."""
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


class Pace:
    """Estimates how long a stage still takes, from its first progress on: imports take seconds, and a resumed training
    starts in the middle."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None

    def left_s(self, done: int, total: int) -> float | None:
        """Seconds until all is done, at the speed so far; None before there is any."""
        now = time.monotonic()
        if self._first is None or done < self._first[1]:  # another part of the stage has begun
            self._first = (now, done)
        since, before = self._first
        return (now - since) / (done - before) * (total - done) if done > before else None
