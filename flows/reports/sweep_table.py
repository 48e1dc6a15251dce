"""The trials of a sweep as a table: live on a terminal, a line a trial elsewhere, and for Prefect."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from flows.reports.tables import align_records
from flows.reports.terminal import REFRESHES_PER_SECOND, can_redraw
from tasks.cache.stage import Listener
from tasks.reports.formatting import format_score
from tasks.sweeps.trial_state import Trial, short_names
from training.jobs.protocol import Event
from training.recipe import Sweep

MOST_SHOWN = 30
"""Trials in a live table at most: the running ones, then the newest."""


def tabulate_trials(trials: Sequence[Trial], sweep: Sweep, progress: Mapping[int, str]) -> list[dict[str, str]]:
    """A row for each trial: its settings, its metric with the interval, its state.

    `progress`: of the trials that run, by number.
    """
    return [
        {
            "trial": str(trial.number),
            **{
                name: _format_setting(trial.settings[field]) if field in trial.settings else ""
                for field, name in short_names(sweep.fields).items()
            },
            str(sweep.metric): _format_metric(trial),
            "state": _format_state(trial, progress.get(trial.number, "")),
            "time": f"{trial.seconds:,.0f} s" if trial.seconds else "",
        }
        for trial in trials
    ]


def trial_line(trial: Trial, sweep: Sweep) -> str:
    """`trial 3  completed  accuracy 0.912 (0.897 to 0.926)  learning_rate 3.1e-05`"""
    metric = _format_metric(trial)
    parts = [_format_state(trial, ""), f"{sweep.metric} {metric}" if metric else "", format_settings(trial.settings)]
    return "  ".join([f"trial {trial.number:<3}", *filter(None, parts)])


def format_settings(settings: Mapping[str, Any]) -> str:
    """`learning_rate 3.1e-05 · num_train_epochs 2`: the values of a trial by the last part of their fields."""
    return " · ".join(f"{name} {_format_setting(settings[field])}" for field, name in short_names(settings).items())


def _format_setting(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _format_metric(trial: Trial) -> str:
    if trial.value is not None:
        return format_score({"value": trial.value, "low": trial.low, "high": trial.high, "baseline": None})
    return "" if trial.last_value is None else f"{trial.last_value:.4g}"


def _format_state(trial: Trial, progress: str) -> str:
    if trial.state == "paused":
        return f"paused after evaluation {max(trial.evaluations, default=0)}"
    if trial.state == "failed":
        return f"failed: {(trial.reason or '').partition(chr(10))[0][:80]}"
    return f"running {progress}".rstrip() if trial.state == "running" else trial.state


class SweepTerminal:
    """Shows the trials of a sweep on the terminal.

    Args:
        sweep: with all defaults resolved.
        quiet: whether to show nothing.
    """

    def __init__(self, sweep: Sweep, quiet: bool = False) -> None:
        self._sweep, self._quiet = sweep, quiet
        self._trials: list[Trial] = []
        self._headline = ""
        self.progress: dict[int, str] = {}
        """The progress of the trials that run, by number."""
        self._redraws = not quiet and can_redraw(sys.stderr)
        self._console = Console(stderr=True, highlight=False)
        self._live = Live(
            get_renderable=self._frame,
            console=self._console,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
        )

    def show(self, trials: Sequence[Trial], headline: str) -> None:
        """Shows the trials as they are now. `headline`: the best so far, and the time left."""
        ended = {trial.number: trial.state for trial in self._trials}
        self._trials, self._headline = list(trials), headline
        if self._redraws:
            self._live.start()
            self._live.refresh()
            return
        for trial in trials:
            if trial.state != ended.get(trial.number) and trial.state != "running":
                self.note(f"  {trial_line(trial, self._sweep)}")

    def note(self, text: str) -> None:
        """Prints a line above the table."""
        if self._redraws:
            self._console.print(Text(text), soft_wrap=True)
        elif not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Removes the table."""
        self._trials, self._headline = [], ""
        self._live.stop()

    def _frame(self) -> Text:
        hidden = max(0, len(self._trials) - MOST_SHOWN)
        shown = [trial for trial in self._trials if trial.state == "running"]
        others = [trial for trial in reversed(self._trials) if trial.state != "running"]
        shown += others[: max(0, MOST_SHOWN - len(shown))]
        rows = tabulate_trials(sorted(shown, key=lambda trial: trial.number), self._sweep, self.progress)
        lines = [*align_records(rows), *([f"and {hidden} more"] if hidden else []), self._headline]
        return Text("\n", no_wrap=True, overflow="ellipsis").join(map(Text, filter(None, lines)))


class TrialProgress(Listener):
    """Keeps the progress of a trial's training for the table."""

    def __init__(self, number: int, terminal: SweepTerminal) -> None:
        self._number, self._terminal = number, terminal

    def stage_started(self, stage: str, key: str) -> None:
        """Shows the stage."""
        self._terminal.progress[self._number] = stage

    def stage_events(self, stage: str, events: list[Event]) -> None:
        """Shows the steps, and prints warnings."""
        for event in events:
            if event["kind"] == "progress" and event.get("total"):
                self._terminal.progress[self._number] = f"{stage} {event['done']:,}/{event['total']:,}"
            elif event["kind"] == "warning":
                self._terminal.note(f"  trial {self._number}: {stage}: {event['message']}")
