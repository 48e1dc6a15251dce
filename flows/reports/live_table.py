"""A live table of all stages on a terminal. It leaves the same lines that a run without a terminal prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from flows.reports.terminal import Terminal, stage_line
from tasks.cache.stage import Row
from tasks.reports.stage_summaries import STAGES, Pace
from training.problems import visible
from training.recipe import Recipe

REFRESHES_PER_SECOND = 4
INDENT = 4  # columns before the progress of the running stage


class LiveTable(Terminal):
    """Prints the line of each stage that ended; below, draws the running stage, its progress, and the other stages."""

    def __init__(self, recipe: Recipe | None = None) -> None:
        super().__init__(sys.stdout, sys.stderr, recipe)
        self._begun: set[str] = set()
        self._running: str | None = None
        self._since, self._bar_text = 0.0, ""
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
        self._running, self._since, self._bar_text, self._pace = stage, time.monotonic(), "", Pace()
        self._table.start()
        self._table.refresh()

    def stage_ended(self, row: Row, result: Any) -> None:
        """Prints the stage's line above the table."""
        self._running = None
        for text in self._stage_lines(row, result):
            self._console.print(Text(visible(text), "red" if row.state == "failed" else ""), soft_wrap=True)

    def close(self) -> None:
        """Removes the table."""
        self._running, self._begun = None, {*STAGES}  # rich draws a last frame, even one higher than the terminal
        self._table.stop()

    def clear(self) -> None:
        """Does nothing: `close` removes the table."""

    def _progress(self, stage: str, event: Mapping[str, Any]) -> None:
        self._bar_text = self._format_bar(event, self._console.width - INDENT)

    def _note(self, text: str) -> None:
        self._console.print(Text(visible(text)), soft_wrap=True)

    def _frame(self) -> Text:
        lines = []
        if self._running:
            seconds = f"{time.monotonic() - self._since:7.1f} s"
            lines.append(Text(stage_line(self._running, "running", seconds, ""), "bold"))
            lines += [Text(" " * INDENT + self._bar_text, "bold")] if self._bar_text else []
        expected = [stage for stage, entry in STAGES.items() if not entry.is_optional]
        waiting = [stage for stage in expected if stage not in self._begun]
        lines += [Text(stage_line(stage, "waiting", "", ""), "dim") for stage in waiting]
        return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)
