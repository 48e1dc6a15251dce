"""The output of a run: one line for each stage and the progress of the running one, or a live table of all stages."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from flows.reports.tables import metric_lines
from tasks.cache.results import Artifact
from tasks.cache.stage import Listener, Row, fetch_event
from tasks.reports.model_reports import find_worst_groups
from tasks.reports.stage_summaries import STAGES, Pace, format_evaluation, summarize_row
from training.jobs.protocol import Event, Progress
from training.problems import visible
from training.recipe import Recipe

# Intervals of progress lines: a terminal redraws one line, a file gets a new line each time.
TERMINAL_INTERVAL_S, FILE_INTERVAL_S = 0.2, 15.0
REFRESHES_PER_SECOND = 4  # of the live table
BAR_WIDTH = 20  # columns
INDENT = 4  # columns before the progress of the running stage


class Terminal(Listener):
    """Prints a run's stages to `out`, and progress and warnings to `err`. With a recipe, also the worst slices."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None, recipe: Recipe | None = None) -> None:
        self.result: dict[str, Any] | None = None
        self._out, self._err, self._recipe = out or sys.stdout, err or sys.stderr, recipe
        self._redraws = can_redraw(self._err)
        self._progress_at = 0.0
        self._paces: dict[str, Pace] = {}

    def stage_started(self, stage: str, key: str) -> None:
        """Shows the stage's name."""
        self._progress_at, self._paces[stage] = time.monotonic(), Pace()
        if self._redraws:
            self._draw(f"  {stage} …")

    def stage_waits(self, stage: str) -> None:
        """Prints why the stage does not begin."""
        self._note(f"  {stage}: another run makes the same artifact; waiting for it")

    def stage_events(self, stage: str, events: list[Event]) -> None:
        """Prints warnings, waits and evaluations, and shows the progress."""
        for event in events:
            if event["kind"] in ("warning", "note", "waiting"):
                self._note(f"  {stage}: {event['message']}")
            elif event["kind"] == "metrics" and (metrics := format_evaluation(event)):
                self._note(f"  {stage}: {metrics}")
        progress = [event for event in events if event["kind"] == "progress" and event.get("total")]
        if progress:
            self._progress(stage, progress[-1])

    def stage_ended(self, row: Row, result: Any) -> None:
        """Prints the stage's line."""
        self.clear()
        self._out.write("".join(f"{visible(line)}\n" for line in self._stage_lines(row, result)))
        self._out.flush()

    def run_ended(self, result: dict[str, Any]) -> None:
        """Keeps the result for the caller of the run."""
        self.result = result

    def progress_of(self, stage: str) -> Callable[[int, int], None]:
        """Returns a function that shows the stage's progress."""
        return lambda done, total: self._progress(stage, {"kind": "progress", "done": done, "total": total})

    def fetch_progress_of(self, stage: str) -> Callable[[int, int], None]:
        """Returns a function that shows a download for the stage, in bytes."""
        return lambda done, total: self.stage_events(stage, [fetch_event(done, total)])

    def clear(self) -> None:
        """Removes the progress line."""
        if self._redraws:
            self._draw("")

    def close(self) -> None:
        """Ends the output of the run."""
        self.clear()

    def _progress(self, stage: str, event: Progress) -> None:
        now, text = time.monotonic(), f"  {stage:<16} {self._format_bar(stage, event)}"
        if now - self._progress_at < (TERMINAL_INTERVAL_S if self._redraws else FILE_INTERVAL_S):
            return
        self._progress_at = now
        if self._redraws:
            self._draw(text)
        else:
            self._note(text)

    def _format_bar(self, stage: str, event: Progress, width: int = 1000) -> str:
        """`██████░░░░ 280/560  train loss 0.754  927 rows/s  16 s left, until 14:05` within `width` columns."""
        done, total = event["done"], event["total"]
        text = f" {done:,}/{total:,}" + (f" {event['unit']}" if "unit" in event else "")
        text += f"  train loss {event['loss']:.3f}" if event.get("loss") is not None else ""
        text += f"  {event['rows_per_second']:,.0f} rows/s" if "rows_per_second" in event else ""
        if (left_s := self._paces.setdefault(stage, Pace()).left_s(done, total)) is not None:
            end = time.localtime(time.time() + left_s)
            clock = time.strftime("%H:%M" if left_s < 12 * 3600 else "%a %H:%M", end)
            text += f"  {left_s:,.0f} s left, until {clock}"
        length = min(BAR_WIDTH, max(0, width - len(text)))
        full = round(length * done / max(total, 1))
        return "█" * full + "░" * (length - full) + text

    def _stage_lines(self, row: Row, result: Any) -> list[str]:
        lines = [stage_line(row.name, row.state, f"{row.seconds:7.1f} s", summarize_row(row, result))]
        if row.name == "score" and isinstance(result, Artifact) and self._recipe:
            groups = find_worst_groups(self._recipe, result.path).values()
            lines += [stage_line("", "", "", f"slices: worst {group}") for group in groups]
        return lines

    def _note(self, text: str) -> None:
        self.clear()
        self._err.write(f"{visible(text)}\n")
        self._err.flush()

    def _draw(self, text: str) -> None:
        self._err.write(f"\r\033[K{text}")
        self._err.flush()


class LiveTable(Terminal):
    """Prints the line of each stage that ended, as elsewhere; below, draws the running stage, its progress, and the
    other stages."""

    def __init__(self, recipe: Recipe | None = None) -> None:
        super().__init__(sys.stdout, sys.stderr, recipe)
        self._begun: set[str] = set()
        self._running: str | None = None
        self._since, self._bar_text = dict[str, float](), ""
        self._console = Console(stderr=True, highlight=False)
        # Output of libraries appears above the table.
        self._table = Live(
            get_renderable=self._frame,
            console=self._console,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
        )

    def stage_started(self, stage: str, key: str) -> None:
        """Shows that the stage is running."""
        self._begun.add(stage)
        self._running, self._since[stage], self._bar_text, self._paces[stage] = stage, time.monotonic(), "", Pace()
        self._table.start()
        self._table.refresh()

    def stage_ended(self, row: Row, result: Any) -> None:
        """Prints the stage's line above the table."""
        self._running = None
        self._since.pop(row.name, None)
        for text in self._stage_lines(row, result):
            self._console.print(Text(visible(text), "red" if row.state == "failed" else ""), soft_wrap=True)

    def close(self) -> None:
        """Removes the table."""
        self._running, self._begun = None, {*STAGES}  # rich draws a last frame, even one higher than the terminal
        self._table.stop()

    def clear(self) -> None:
        """Does nothing: `close` removes the table."""

    def _progress(self, stage: str, event: Progress) -> None:
        if stage in self._since:  # of several at once, the one with the newest progress
            self._running = stage
        self._bar_text = self._format_bar(stage, event, self._console.width - INDENT)

    def _note(self, text: str) -> None:
        self._console.print(Text(visible(text)), soft_wrap=True)

    def _frame(self) -> Text:
        lines = []
        if self._running:
            seconds = f"{time.monotonic() - self._since[self._running]:7.1f} s"
            lines.append(Text(stage_line(self._running, "running", seconds, ""), "bold"))
            lines += [Text(" " * INDENT + self._bar_text, "bold")] if self._bar_text else []
        expected = [stage for stage, entry in STAGES.items() if not entry.is_optional]
        waiting = [stage for stage in expected if stage not in self._begun]
        lines += [Text(stage_line(stage, "waiting", "", ""), "dim") for stage in waiting]
        return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


class Quiet(Listener):
    """Prints only the metrics at the end."""

    def __init__(self) -> None:
        self.result: dict[str, Any] | None = None

    def run_ended(self, result: dict[str, Any]) -> None:
        """Prints the metrics of each split and keeps the result."""
        self.result = result
        for text in metric_lines(result["metrics"]):
            print(text)

    def fetch_progress_of(self, stage: str) -> Callable[[int, int], None]:
        """Returns a function that shows nothing."""
        return lambda done, total: None

    def close(self) -> None:
        """Does nothing."""


def open_terminal(recipe: Recipe, quiet: bool) -> Terminal | Quiet:
    """Returns the output of a run: a live table on a terminal, a line for each stage elsewhere."""
    if quiet:
        return Quiet()
    if can_redraw(sys.stdout) and can_redraw(sys.stderr):
        return LiveTable(recipe)
    return Terminal(recipe=recipe)


def can_redraw(stream: TextIO) -> bool:
    """Returns whether the stream is a terminal with control sequences."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def stage_line(name: str, state: str, middle: str, end: str) -> str:
    """Formats one line of a table of stages."""
    return f"  {name:<16} {state:<8} {middle:>9}   {end}".rstrip()
