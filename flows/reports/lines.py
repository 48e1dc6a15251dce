"""What a person sees while a run goes on: one line a stage, and how far the present one is. On a terminal
flows/reports/live.py draws the same as a table."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from flows.reports.tables import metric_lines
from tasks.cache.refs import Ref
from tasks.cache.stage import Listener, Row
from tasks.tracking.reports import find_worst_groups
from tasks.tracking.stage_summary import Pace, format_evaluation, summarize_result
from training.recipe import Recipe

# On a terminal the line is drawn anew; into a file a line now and then is enough.
TERMINAL_S, FILE_S = 0.2, 15.0
BAR = 20  # columns


class Terminal(Listener):
    """Watches a run and prints it. The table goes to `out`, what is gone in a moment to `err`; the recipe says by what
    models are judged."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None, recipe: Recipe | None = None) -> None:
        self.result: dict[str, Any] | None = None
        self._out, self._err, self._recipe = out or sys.stdout, err or sys.stderr, recipe
        self._live = draws(self._err)
        self._shown_at = 0.0
        self._pace = Pace()

    def stage_started(self, stage: str, key: str) -> None:
        """Says which stage is at work."""
        self._shown_at, self._pace = time.monotonic(), Pace()
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
            elif event["kind"] == "metrics" and (figures := format_evaluation(event)):
                self._note(f"  {stage}: {figures}")
        done = [event for event in events if event["kind"] == "progress" and event.get("total")]
        if done:
            self._progress(stage, done[-1])

    def stage_ended(self, row: Row, result: Any) -> None:
        """Prints the stage's line of the table."""
        self.clear()
        self._print(self._lines(row, result))

    def run_ended(self, result: dict[str, Any]) -> None:
        """Keeps the result for the caller of the run."""
        self.result = result

    def _progress(self, stage: str, event: Mapping[str, Any]) -> None:
        now, text = time.monotonic(), self._bar(event)
        if now - self._shown_at < (TERMINAL_S if self._live else FILE_S):
            return
        self._shown_at = now
        text = f"  {stage:<16} {text}"
        self._err.write(f"\r\033[K{text}" if self._live else f"{text}\n")
        self._err.flush()

    def _bar(self, event: Mapping[str, Any], room: int | None = None) -> str:
        """`██████░░░░ 280/560  loss 0.754  927 rows/s  16 s left, until 14:05`, the bar shorter where there is little
        room, in columns."""
        done, total = event["done"], event["total"]
        left_s = self._pace.left_s(done, total)
        more = f" {done:,}/{total:,}"
        more += f"  loss {event['loss']:.3f}" if event.get("loss") is not None else ""
        more += f"  {event['samples_per_second']:,.0f} rows/s" if "samples_per_second" in event else ""
        more += _left(left_s) if left_s is not None else ""
        length = BAR if room is None else min(BAR, max(0, room - len(more)))
        return "█" * (full := round(length * done / max(total, 1))) + "░" * (length - full) + more

    def _lines(self, row: Row, result: Any) -> list[str]:
        """The lines of a stage that ended."""
        lines = [line(row.name, row.state, f"{row.seconds:7.1f} s", summarize_result(row.name, result))]
        if row.name == "score" and isinstance(result, Ref) and self._recipe:
            worst = find_worst_groups(self._recipe, result.path).values()
            lines += [line("", "", "", f"slices: worst {group}") for group in worst]
        return lines

    def _print(self, lines: Sequence[str]) -> None:
        self._out.write("".join(f"{line}\n" for line in lines))
        self._out.flush()

    def _note(self, text: str) -> None:
        self.clear()
        self._err.write(text + "\n")
        self._err.flush()

    def progress_of(self, stage: str) -> Callable[[int, int], None]:
        """A function that shows how far the stage is."""
        return lambda done, total: self._progress(stage, {"done": done, "total": total})

    def close(self) -> None:
        """Leaves the terminal as it was, but for what was printed."""
        self.clear()

    def clear(self) -> None:
        """Removes what is gone in a moment."""
        if self._live:
            self._err.write("\r\033[K")
            self._err.flush()


class Quiet(Terminal):
    """Shows no stages. Prints the figures at the end, and keeps the result."""

    def run_ended(self, result: dict[str, Any]) -> None:
        """Prints the figures of each split, which the stages would have shown."""
        super().run_ended(result)
        self._print(metric_lines(result["metrics"]))

    def stage_started(self, stage: str, key: str) -> None:
        """Not shown."""

    def stage_waits(self, stage: str) -> None:
        """Not shown."""

    def stage_events(self, stage: str, events: list[dict[str, Any]]) -> None:
        """Not shown."""

    def stage_ended(self, row: Row, result: Any) -> None:
        """Not shown."""


def draws(stream: TextIO) -> bool:
    """Whether a line can be drawn anew there: on a terminal, but on none that knows no control sequences."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def _left(seconds: float) -> str:
    """How long it still takes, and until what time of the clock."""
    end = time.localtime(time.time() + seconds)
    return f"  {seconds:,.0f} s left, until {time.strftime('%H:%M' if seconds < 12 * 3600 else '%a %H:%M', end)}"


def line(name: str, state: str, middle: str, end: str) -> str:
    """One line of a table of stages."""
    return f"  {name:<16} {state:<8} {middle:>9}   {end}".rstrip()
