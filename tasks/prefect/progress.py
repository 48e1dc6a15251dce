"""Progress of a run in Prefect: a bar for each long stage, log lines, and the state of a run that waits. Results:
tasks/prefect/artifacts.py."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from tasks.cache.results import Artifact
from tasks.cache.stage import Listener, Row
from tasks.prefect.artifacts import (
    ArtifactSender,
    Bar,
    Running,
    build_result_artifacts,
    link_run,
    tabulate_data_report,
)
from tasks.reports.row_reports import read_report
from tasks.reports.stage_summaries import STAGES_WITH_REPORT, Pace, format_evaluation, summarize_row
from training.problems import Problem

UPDATE_S = 2.0
"""The shortest time between two updates of a progress bar. The server needs about 40 ms for one."""


class PrefectProgress(Listener):
    """Shows a run in Prefect.

    Args:
        pages: returns the addresses of the run's pages that are known, by the name of the tracker.
    """

    def __init__(self, pages: Callable[[], Mapping[str, str]] = dict) -> None:
        self._pages = pages
        self._linked: set[str] = set()
        self._artifacts = ArtifactSender()
        self._reports: dict[str, dict[str, Any]] = {}
        self._updated_at = 0.0
        self._pace = Pace()
        self._has_bar = False
        """Whether the present stage has a bar; a cached stage has none."""
        self._waits = False

    def stage_started(self, stage: str, key: str) -> None:
        """Links the pages of trackers, once."""
        self._end_wait()
        self._has_bar, self._pace = False, Pace()
        self._link_pages()

    def stage_waits(self, stage: str) -> None:
        """Logs that another run makes the same artifact, and shows this one as waiting."""
        self._wait(stage, "another run makes the same artifact; waiting for it")

    def stage_events(self, stage: str, events: list[dict[str, Any]]) -> None:
        """Moves the bar, at most every two seconds, logs evaluations, warnings and notes, and shows waits."""
        for event in events:
            if event["kind"] == "waiting":
                self._wait(stage, event["message"])
                continue
            self._end_wait()
            if event["kind"] in ("warning", "note"):
                level = logging.WARNING if event["kind"] == "warning" else logging.INFO
                get_run_logger().log(level, "%s: %s", stage, event["message"])
            elif event["kind"] == "metrics" and (line := format_evaluation(event)):
                get_run_logger().info("%s: %s", stage, line)
        steps = [event for event in events if event["kind"] == "progress" and event.get("total")]
        if steps:
            left_s = self._pace.left_s(steps[-1]["done"], steps[-1]["total"])
            if time.monotonic() - self._updated_at >= UPDATE_S:
                self._updated_at, self._has_bar = time.monotonic(), True
                self._artifacts.put(stage, _build_bar(stage, steps[-1], left_s))

    def stage_ended(self, row: Row, result: Any) -> None:
        """Logs one line, completes the bar of a stage that did not fail, and shows the stage's result."""
        self._end_wait()
        ended = f"{row.name}: {row.state}, {row.seconds:,.0f} s"
        get_run_logger().info("  ".join(filter(None, [ended, summarize_row(row, result)])))
        if self._has_bar and row.state != "failed":
            self._artifacts.put(row.name, Bar(100.0, ended))
        if row.name in STAGES_WITH_REPORT and isinstance(result, Artifact):
            self._reports[row.name] = read_report(result.path)
            self.refused([])
        for name, artifact in build_result_artifacts(row, result).items():
            self._artifacts.put(name, artifact)

    def refused(self, problems: Iterable[Problem]) -> None:
        """Shows the problems that stopped the run above those of the data report."""
        refused = [problem.model_dump() for problem in problems]
        self._artifacts.put("data-report", tabulate_data_report(self._reports, refused))

    def end(self) -> None:
        """Sends the remaining artifacts, for some seconds. Call it inside the flow."""
        self._link_pages()
        self._artifacts.end()

    def _wait(self, stage: str, reason: str) -> None:
        get_run_logger().info("%s: %s", stage, reason)
        self._show_state("Waiting", f"{stage}: {reason}")
        self._waits = True

    def _end_wait(self) -> None:
        if self._waits:
            self._show_state("Running")
            self._waits = False

    def _show_state(self, name: str, message: str = "") -> None:
        if run := flow_run.get_id():
            self._artifacts.put("state", Running(UUID(run), name, message))

    def _link_pages(self) -> None:
        for title, url in self._pages().items():
            if title not in self._linked:
                self._linked.add(title)
                self._artifacts.put(f"{title.lower().replace('&', '')}-run", link_run(title, url))


def _build_bar(stage: str, event: Mapping[str, Any], left_s: float | None) -> Bar:
    """`step 280 of 560, loss 0.754, 927 rows/s, ends about 14:05 UTC`"""
    done, total = event["done"], event["total"]
    if "unit" in event:
        parts = [f"{done:,} of {total:,} {event['unit']}"]
    else:
        parts = [f"{'step ' if stage == 'fit' else ''}{done:,} of {total:,}"]
    if event.get("phase") == "evaluate":
        parts.append("evaluating")
    if event.get("loss") is not None:
        parts.append(f"loss {event['loss']:.3f}")
    if "samples_per_second" in event:
        parts.append(f"{event['samples_per_second']:,.0f} rows/s")
    if left_s is not None:
        end = datetime.now(UTC) + timedelta(seconds=left_s)
        parts.append(f"ends about {end:{'%H:%M' if left_s < 12 * 3600 else '%a %H:%M'}} UTC")
    return Bar(100.0 * done / total, f"{stage}: {', '.join(parts)}")
