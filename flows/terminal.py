"""What a person sees while a run goes on: one line a stage, and how far the present one is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from flows.tables import counted
from tasks.runtime.refs import Champion, Promotion, Publication, Ref, Verdict, Version
from tasks.runtime.reports import score_told, value_told, worst_groups
from tasks.runtime.stage import Row
from training.recipe import Recipe

# On a terminal the line is drawn anew; into a file a line now and then is enough.
TERMINAL_S, FILE_S = 0.2, 15.0


class Terminal:
    """Watches a run and prints it. The table goes to `out`, what is gone in a moment to `err`; the recipe says by what
    models are judged."""

    def __init__(self, out: TextIO = sys.stdout, err: TextIO = sys.stderr, recipe: Recipe | None = None) -> None:
        self.result: dict[str, Any] | None = None
        self._out, self._err, self._recipe = out, err, recipe
        self._live = err.isatty()
        self._shown_at = 0.0
        self._first: tuple[float, int] | None = None  # when the stage's first progress was seen, and what it was

    def stage_started(self, stage: str, key: str) -> None:
        """Says which stage is at work."""
        self._shown_at, self._first = time.monotonic(), None
        if self._live:
            self._err.write(f"\r\033[K  {stage} …")
            self._err.flush()

    def stage_waits(self, stage: str) -> None:
        """Says why nothing seems to happen."""
        self._note(f"  {stage}: another run makes the same artifact; waiting for it")

    def stage_events(self, stage: str, events: list[dict[str, Any]]) -> None:
        """Shows warnings, evaluations, and how far the stage is."""
        for event in events:
            if event["kind"] in ("warning", "note"):
                self._note(f"  {stage}: {event['message']}")
            elif event["kind"] == "metrics" and any(name.startswith("eval_") for name in event["values"]):
                shown = ", ".join(f"{n.removeprefix('eval_')} {v:.4g}" for n, v in _told(event["values"]).items())
                self._note(f"  {stage}: step {event['step']}: {shown}")
        done = [event for event in events if event["kind"] == "progress" and event.get("total")]
        if done:
            self._progress(stage, done[-1])

    def stage_ended(self, row: Row, result: Any) -> None:
        """Prints the stage's line of the table."""
        self.clear()
        self._out.write(line(row.name, row.state, f"{row.seconds:7.1f} s", figure(row.name, result)) + "\n")
        if row.name == "score" and isinstance(result, Ref) and self._recipe:
            for worst in worst_groups(self._recipe, result.path).values():
                self._out.write(line("", "", "", f"slices: worst {worst}") + "\n")
        self._out.flush()

    def run_ended(self, result: dict[str, Any]) -> None:
        """Keeps the result for whoever started the run."""
        self.result = result

    def _progress(self, stage: str, event: Mapping[str, Any]) -> None:
        now, done, total = time.monotonic(), event["done"], event["total"]
        since, before = self._first = self._first or (now, done)
        if now - self._shown_at < (TERMINAL_S if self._live else FILE_S):
            return
        self._shown_at = now
        # Counted from the first sign of progress: imports take seconds, and a resumed training starts in the middle.
        left = _left((now - since) / (done - before) * (total - done)) if done > before else ""
        loss = f"  loss {event['loss']:.3f}" if event.get("loss") is not None else ""
        loss += f"  {event['samples_per_second']:,.0f} rows/s" if "samples_per_second" in event else ""
        bar = "█" * round(20 * done / total)
        text = f"  {stage:<16} {bar:░<20} {done:,}/{total:,}{loss}{left}"
        self._err.write(f"\r\033[K{text}" if self._live else f"{text}\n")
        self._err.flush()

    def _note(self, text: str) -> None:
        self.clear()
        self._err.write(text + "\n")
        self._err.flush()

    def progress_of(self, stage: str) -> Callable[[int, int], None]:
        """A function that shows how far the stage is."""
        return lambda done, total: self._progress(stage, {"done": done, "total": total})

    def clear(self) -> None:
        """Removes what is gone in a moment."""
        if self._live:
            self._err.write("\r\033[K")
            self._err.flush()


def _left(seconds: float) -> str:
    """How long it still takes, and until what time of the clock."""
    end = time.localtime(time.time() + seconds)
    return f"  {seconds:,.0f} s left, until {time.strftime('%H:%M' if seconds < 12 * 3600 else '%a %H:%M', end)}"


def line(name: str, state: str, middle: str, end: str) -> str:
    """One line of a table of stages."""
    return f"  {name:<16} {state:<8} {middle:>9}   {end}".rstrip()


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


def _told(values: Mapping[str, float]) -> dict[str, float]:
    """An evaluation's own figures, without the seconds that it took."""
    return {name: value for name, value in values.items() if not name.endswith(("_second", "_runtime"))}


def _rows(figures: Mapping[str, Any]) -> str:
    splits = [f"{name.removesuffix('_rows')} {n:,}" for name, n in figures.items() if name.endswith("_rows")]
    warned = f"; {counted(figures['warnings'], 'warning')}" if figures.get("warnings") else ""
    return f"rows: {', '.join(splits)}; {figures['labels']} labels{warned}"


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
