"""What a person at a terminal sees of a run: a table of all its stages, drawn anew while they run. At the end the same
lines are left that a run without a terminal prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from flows.reports.lines import Terminal, line
from tasks.cache.stage import Row
from tasks.tracking.stage_summary import Pace
from tasks.tracking.stage_table import STAGES
from training.recipe import Recipe

STYLES = {"waiting": "dim", "at work": "bold", "failed": "red"}
REFRESHES_PER_SECOND = 4
ASIDE, UNDER = 40, 4  # columns before how far a stage is: on the stage's own line, on the next one
WIDE = 120  # columns of a terminal on which both fit on one line


class LiveTable(Terminal):
    """Watches a run and draws it on the terminal that stdout and stderr are."""

    def __init__(self, recipe: Recipe | None = None) -> None:
        super().__init__(sys.stdout, sys.stderr, recipe)
        self._ended: dict[str, tuple[str, list[str]]] = {}  # stage -> its state, and its lines
        self._now: str | None = None  # the stage at work, since when, and how far it is
        self._since, self._far = 0.0, ""
        self._console = Console(stderr=True, highlight=False)
        # What others print meanwhile comes to stand above the table.
        self._table = Live(
            get_renderable=self._frame,
            console=self._console,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
        )

    def stage_started(self, stage: str, key: str) -> None:
        """Shows that it is at work."""
        self._now, self._since, self._far, self._pace = stage, time.monotonic(), "", Pace()
        self._table.start()

    def stage_ended(self, row: Row, result: Any) -> None:
        """Shows what came of it."""
        self._ended[row.name], self._now = (row.state, self._lines(row, result)), None

    def close(self) -> None:
        """Leaves the lines of what ended, in full, and the terminal as it was."""
        self._table.stop()
        self._print([line for _, lines in self._ended.values() for line in lines])

    def clear(self) -> None:
        """Nothing: the table goes when it is closed."""

    def _progress(self, stage: str, event: Mapping[str, Any]) -> None:
        width = self._console.width
        self._far = self._bar(event, width - (ASIDE if width >= WIDE else UNDER))

    def _note(self, text: str) -> None:
        self._console.print(Text(text))

    def _frame(self) -> Text:
        shown = [Text(one, STYLES.get(state, "")) for state, lines in [*self._ended.values()] for one in lines]
        shown += [Text(one, STYLES["at work"]) for one in self._at_work()]
        expected = [stage for stage, entry in STAGES.items() if not entry.is_optional]
        waiting = [stage for stage in expected if stage not in {*self._ended, self._now}]
        waits = [Text(line(stage, "waiting", "", ""), STYLES["waiting"]) for stage in waiting]
        # A frame as high as the terminal would scroll, and what scrolls away cannot be drawn anew.
        most = max(2, self._console.height - 1)
        if len(shown) + len(waits) > most:
            waits = [Text(f"  … {len(waiting)} waiting", STYLES["waiting"])] if waiting else []
            shown = shown[len(waits) - most :]
        return Text("\n", no_wrap=True, overflow="ellipsis").join(shown + waits)

    def _at_work(self) -> list[str]:
        if self._now is None:
            return []
        middle = f"{time.monotonic() - self._since:7.1f} s"
        if self._console.width >= WIDE:
            return [line(self._now, "at work", middle, self._far)]
        return [line(self._now, "at work", middle, ""), *([" " * UNDER + self._far] if self._far else [])]
