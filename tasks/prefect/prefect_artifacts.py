"""A run as Prefect shows it: log lines, its state while it waits, and Prefect artifacts (progress bars, the tables of
the data report, the scores and the verdict, and links).

Artifacts are sent by a thread, so that a slow or dead server delays no stage.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_link_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.objects import State, StateType
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from tasks.cache.results import Artifact, Publication, Verdict, Version
from tasks.cache.stage import Listener, Row, without_number
from tasks.reports.formatting import escape_markdown, limit_rows
from tasks.reports.label_reports import summarize_suspects, tabulate_suspects
from tasks.reports.model_reports import (
    describe_drift,
    describe_verdict,
    find_worst_errors,
    name_out_of_fold,
    summarize_calibration,
    tabulate_answered,
    tabulate_checks,
    tabulate_drift,
    tabulate_exports,
    tabulate_scores,
    tabulate_slices,
)
from tasks.reports.row_reports import describe_rows, read_report, tabulate_problems
from tasks.reports.stage_summaries import STAGES_WITH_REPORT, Pace, format_evaluation, summarize_row
from tasks.tracking.connection import version_url
from training.jobs.protocol import Event, Progress
from training.problems import Problem

UPDATE_S = 2.0
"""The shortest time between two updates of a progress bar. The server needs about 40 ms for one."""
END_WAIT_S = 5.0
"""How long the end of a run waits for a slow server."""
# A busy server sometimes refuses a request, and no later update makes up for a stage's last one.
TRIES = 3
RETRY_S = 0.5


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
        self._updated_at: dict[str, float] = {}
        """When the bar of each running stage was updated; a cached stage has none."""
        self._paces: dict[str, Pace] = {}
        self._waits = False

    def stage_started(self, stage: str, key: str) -> None:
        """Links the pages of trackers, once."""
        self._end_wait()
        self._paces[stage] = Pace()
        self._link_pages()

    def stage_waits(self, stage: str) -> None:
        """Logs that another run makes the same artifact, and shows this one as waiting."""
        self._wait(stage, "another run makes the same artifact; waiting for it")

    def stage_events(self, stage: str, events: list[Event]) -> None:
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
            left_s = self._paces.setdefault(stage, Pace()).left_s(steps[-1]["done"], steps[-1]["total"])
            if time.monotonic() - self._updated_at.get(stage, -UPDATE_S) >= UPDATE_S:
                self._updated_at[stage] = time.monotonic()
                self._artifacts.put(stage, _build_bar(stage, steps[-1], left_s))

    def stage_ended(self, row: Row, result: Any) -> None:
        """Logs one line, completes the bar of a stage that did not fail, and shows the stage's result."""
        self._end_wait()
        ended = f"{row.name}: {row.state}, {row.seconds:,.0f} s"
        get_run_logger().info("  ".join(filter(None, [ended, summarize_row(row, result)])))
        if self._updated_at.pop(row.name, None) is not None and row.state != "failed":
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
                link = Link(url, f"The {title} run", "Curves, files and the load of the machine.")
                self._artifacts.put(f"{title.lower().replace('&', '')}-run", link)


def _build_bar(stage: str, event: Progress, left_s: float | None) -> Bar:
    """`step 280 of 560, train loss 0.754, 927 rows/s, ends about 14:05 UTC`"""
    done, total = event["done"], event["total"]
    if "unit" in event:
        parts = [f"{done:,} of {total:,} {event['unit']}"]
    else:
        parts = [f"{'step ' if without_number(stage) in ('fit', 'fit_fold') else ''}{done:,} of {total:,}"]
    if event.get("phase") == "evaluate":
        parts.append("evaluating")
    if event.get("loss") is not None:
        parts.append(f"train loss {event['loss']:.3f}")
    if "rows_per_second" in event:
        parts.append(f"{event['rows_per_second']:,.0f} rows/s")
    if left_s is not None:
        end = datetime.now(UTC) + timedelta(seconds=left_s)
        parts.append(f"ends about {end:{'%H:%M' if left_s < 12 * 3600 else '%a %H:%M'}} UTC")
    return Bar(100.0 * done / total, f"{stage}: {', '.join(parts)}")


def tabulate_data_report(reports: Mapping[str, Mapping[str, Any]], refused: Sequence[Mapping[str, Any]]) -> Table:
    """The problems of the rows below a description of the splits, from the reports of `load_data` and `tokenize` as far
    as they exist. Problems that stopped the run come first."""
    problems = [*refused, *(problem for report in reports.values() for problem in report["problems"])]
    splits = describe_rows(reports.get("load_data"), reports.get("tokenize"))
    return Table(tabulate_problems(problems), f"The rows of each split, and the problems that were found.\n\n{splits}")


def build_result_artifacts(row: Row, result: Any) -> dict[str, PrefectArtifact]:
    """The artifacts that show a stage's result, by name; empty for most stages."""
    found: dict[str, PrefectArtifact] = {}
    if row.name == "score" and isinstance(result, Artifact):
        tables = {
            "figures": (tabulate_scores(result.result), "Metrics of each split, with 95 % intervals."),
            "worst-errors": (find_worst_errors(result.path), "The wrong predictions with the highest confidence."),
            "slices": (tabulate_slices(result.path), "Metrics of each group, with 95 % intervals."),
        }
        found |= {name: Table(rows, description) for name, (rows, description) in tables.items() if rows}
    if row.name == "score_folds" and isinstance(result, Artifact):
        rows = tabulate_scores(name_out_of_fold(result.result))
        found["out-of-fold"] = Table(rows, "Metrics of all training rows, each predicted by a model without it.")
    if row.name == "calibrate" and isinstance(result, Artifact):
        thresholds = limit_rows(tabulate_answered(result.result), "prediction", "calibrate/calibration.json")
        if thresholds:
            found["thresholds"] = Table(thresholds, escape_markdown(summarize_calibration(result.result)))
    if row.name == "compare_exports" and isinstance(result, Artifact):
        found["exports"] = Table(tabulate_exports(result.result), "Exports of the model, compared with it row by row.")
    if row.name == "drift" and isinstance(result, Artifact):
        report = result.result.model_dump(mode="json")
        found["drift"] = Table(tabulate_drift(report), escape_markdown(describe_drift(report)))
    if row.name == "list_labels" and isinstance(result, Artifact):
        suspects = tabulate_suspects(one.model_dump() for one in result.result.first)
        if suspects:
            found["labels"] = Table(suspects, escape_markdown(f"{summarize_suspects(result.result)}."))
    if isinstance(result, Verdict):
        checks = limit_rows(tabulate_checks(result), "figure", "gate/verdict.json")
        found["verdict"] = Table(checks, describe_verdict(result))
    if isinstance(result, Version) and (url := version_url(result.name, result.version)):
        text = f"{result.name} version {result.version}"
        found["registered-version"] = Link(url, text, "The model in MLflow's registry.")
    if isinstance(result, Publication):
        found["hub"] = Link(result.url, result.repo, "The model on the Hugging Face Hub.")
    return found


@dataclass(frozen=True)
class Bar:
    """A stage's progress."""

    percent: float
    description: str

    def create(self, key: str) -> Any:
        return create_progress_artifact(self.percent, key=key, description=self.description)

    def update(self, artifact: UUID) -> None:
        update_progress_artifact(artifact_id=artifact, progress=self.percent, description=self.description)


@dataclass(frozen=True)
class Table:
    """Rows below a description in Markdown. The UI shows cells as Markdown too."""

    rows: list[dict[str, str]]
    description: str

    def create(self, key: str) -> Any:
        return create_table_artifact(self.cells(), key=key, description=self.description)

    def cells(self) -> list[dict[str, str]]:
        """The rows with their texts as they are."""
        return [{escape_markdown(name): escape_markdown(cell) for name, cell in row.items()} for row in self.rows]

    def update(self, artifact: UUID) -> None:
        # A second table of the same key would appear next to the first one on the run's page.
        update = ArtifactUpdate(data=json.dumps(self.cells()), description=self.description)
        with get_client(sync_client=True) as client:
            client.update_artifact(artifact, update)


@dataclass(frozen=True)
class Link:
    """A link to another server; it never changes."""

    url: str
    text: str
    description: str

    def create(self, key: str) -> Any:
        return create_link_artifact(self.url, self.text, key=key, description=self.description)

    def update(self, artifact: UUID) -> None:
        pass


@dataclass(frozen=True)
class Running:
    """The state of a flow run: `Waiting`, with the reason, or `Running`. Its type is RUNNING in both."""

    run: UUID
    name: str
    message: str = ""

    def create(self, key: str) -> Any:
        self.update(self.run)
        return self.run

    def update(self, run: UUID) -> None:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(run).state
            if state is not None and state.is_running():  # not if it is being cancelled
                client.set_flow_run_state(run, State(type=StateType.RUNNING, name=self.name, message=self.message))


PrefectArtifact = Bar | Table | Link | Running


class ArtifactSender:
    """Sends artifacts from a thread: it creates an artifact at its first appearance, and updates it afterwards."""

    def __init__(self) -> None:
        # Updates pile up behind a slow server: only the newest of each artifact is sent.
        self._newest: dict[str, PrefectArtifact] = {}
        # An artifact belongs to the task run or the flow run in which it first appeared.
        self._contexts: dict[str, contextvars.Context] = {}
        self._changed, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._send_until_ended, name="prefect-artifacts", daemon=True)
        self._thread.start()

    def put(self, name: str, artifact: PrefectArtifact) -> None:
        """Sends the artifact soon; `name` identifies it within the run."""
        self._contexts.setdefault(name, contextvars.copy_context())
        self._newest[name] = artifact
        self._changed.set()

    def end(self) -> None:
        """Sends the remaining artifacts, for at most END_WAIT_S. Call it inside the flow, which has the connection to
        the server."""
        self._ended = True
        self._changed.set()
        self._thread.join(END_WAIT_S)

    def _send_until_ended(self) -> None:
        ids: dict[str, UUID] = {}
        last = False
        while not last:
            self._changed.wait()
            self._changed.clear()
            last = self._ended
            for name in list(self._newest):
                self._send(name, self._newest.pop(name), ids)

    def _send(self, name: str, artifact: PrefectArtifact, ids: dict[str, UUID]) -> None:
        # The context has the server's address: without it, Prefect would start another server.
        context = self._contexts[name]
        for _ in range(TRIES):
            with contextlib.suppress(Exception):
                if name in ids:
                    context.run(artifact.update, ids[name])
                else:
                    ids[name] = context.run(artifact.create, f"finetune-{name.replace('_', '-')}")
                return
            time.sleep(RETRY_S)
