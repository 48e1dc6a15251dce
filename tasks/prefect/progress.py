"""Prefect's view of a run: a progress bar of each long stage, log lines at each evaluation, as tables the report on
the rows, the figures, the worst errors, the groups of slices and the verdict, and links to what MLflow and the Hub have
of it. Bars, tables and links are what Prefect calls artifacts."""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
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
from prefect.logging import get_run_logger

from tasks.cache.refs import Publication, Ref, Verdict, Version
from tasks.cache.stage import Listener, Row
from tasks.tracking.connection import version_url
from tasks.tracking.reports import (
    as_markdown,
    checks_table,
    first_rows,
    problems_table,
    read_report,
    scores_table,
    slices_table,
    verdict_markdown,
    worst_errors,
)
from tasks.tracking.stage_summary import Pace, evaluation, figure
from training.problems import Problem

# One update costs the server some 40 ms.
UPDATE_S = 2.0
# How long a run that has ended waits for a server that answers slowly.
END_WAIT_S = 5.0
# A busy server refuses now and then; nothing comes after a stage's last update to make up for it.
TRIES = 3
RETRY_S = 0.5
# The stages whose reports make the table of the rows, and the tables' names.
REPORTING = ("load_data", "tokenize")
TABLE = "data-report"
FIGURES = "figures"
ERRORS = "worst-errors"
GROUPS = "slices"
VERDICT = "verdict"
TRACKED, REGISTERED, PUBLISHED = "mlflow-run", "registered-version", "hub"


@dataclass(frozen=True)
class _Bar:
    """How far a stage is, in percent and in words."""

    percent: float
    description: str

    def create(self, name: str) -> UUID:
        made = create_progress_artifact(self.percent, key=_key(name), description=self.description)
        assert isinstance(made, UUID)  # a coroutine only inside an event loop
        return made

    def update(self, artifact: UUID) -> None:
        update_progress_artifact(artifact_id=artifact, progress=self.percent, description=self.description)


@dataclass(frozen=True)
class _Table:
    """Such as the problems of the rows, below what the splits hold."""

    rows: list[dict[str, str]]
    description: str

    def create(self, name: str) -> UUID:
        made = create_table_artifact(self.rows, key=_key(name), description=self.description)
        assert isinstance(made, UUID)
        return made

    def update(self, artifact: UUID) -> None:
        # One table a run, which grows: a second one under its key would stand beside it in the run's own view.
        update = ArtifactUpdate(data=json.dumps(self.rows), description=self.description)
        with get_client(sync_client=True) as client:
            client.update_artifact(artifact, update)


@dataclass(frozen=True)
class _Link:
    """To what the run made elsewhere; it never changes."""

    url: str
    text: str
    description: str

    def create(self, name: str) -> UUID:
        made = create_link_artifact(self.url, self.text, key=_key(name), description=self.description)
        assert isinstance(made, UUID)
        return made

    def update(self, artifact: UUID) -> None:
        pass


class PrefectProgress(Listener):
    """Watches a run and tells Prefect, from a thread, so that a slow or dead server delays no stage.

    Args:
        mlflow_run: gives the address of the MLflow run, once it is known.
    """

    def __init__(self, mlflow_run: Callable[[], str | None] = lambda: None) -> None:
        self._mlflow_run = mlflow_run
        # Behind a slow server updates pile up: of each stage only the newest is worth sending.
        self._newest: dict[str, _Bar | _Table | _Link] = {}
        self._reports: dict[str, dict[str, Any]] = {}
        # A bar belongs to the task run in which the stage's progress is first told, the table to the flow run.
        self._contexts: dict[str, contextvars.Context] = {}
        self._news, self._ended = threading.Event(), False
        self._sent_at = 0.0
        self._pace = Pace()
        self._last: _Bar | None = None
        """How far the present stage was when that was last told."""
        self._thread = threading.Thread(target=self._update, name="prefect-progress", daemon=True)
        self._thread.start()

    def stage_started(self, stage: str, key: str) -> None:
        """Links the MLflow run, once. No bar yet: a cached stage has none."""
        self._last, self._pace = None, Pace()
        self._link_mlflow_run()

    def stage_waits(self, stage: str) -> None:
        """Says in the log that another run makes the same thing."""
        get_run_logger().info("%s: another run makes the same artifact; waiting for it", stage)

    def stage_events(self, stage: str, events: list[dict[str, Any]]) -> None:
        """Moves the bar, at most every two seconds, and logs evaluations and warnings; MLflow has the curve."""
        for event in events:
            if event["kind"] in ("warning", "note"):
                level = logging.WARNING if event["kind"] == "warning" else logging.INFO
                get_run_logger().log(level, "%s: %s", stage, event["message"])
            elif event["kind"] == "metrics" and (told := evaluation(event)):
                get_run_logger().info("%s: %s", stage, told)
        done = [event for event in events if event["kind"] == "progress" and event.get("total")]
        if done:
            left_s = self._pace.left_s(done[-1]["done"], done[-1]["total"])
            if time.monotonic() - self._sent_at >= UPDATE_S:
                self._show(stage, _bar(stage, done[-1], left_s))

    def stage_ended(self, row: Row, result: Any) -> None:
        """Logs the stage in a line, fills the bar of one that ended well, and shows what it found, decided or made."""
        get_run_logger().info("  ".join(filter(None, [_ended(row), figure(row.name, result)])))
        if self._last is not None and row.state != "failed":
            self._show(row.name, _Bar(100.0, _ended(row)))
        if row.name in REPORTING and isinstance(result, Ref) and (report := read_report(result.path)):
            self._reports[row.name] = report
            self._table([problem for found in self._reports.values() for problem in found["problems"]])
        if row.name == "score" and isinstance(result, Ref) and (table := scores_table(result.figures)):
            self._put(FIGURES, _Table(table, "What was measured on each split, with 95 % intervals."))
        if row.name == "score" and isinstance(result, Ref) and (errors := worst_errors(result.path)):
            self._put(ERRORS, _Table(errors, "The wrong predictions of which the model is most sure."))
        if row.name == "score" and isinstance(result, Ref) and (groups := slices_table(result.path)):
            self._put(GROUPS, _Table(groups, "The figures of each group, with their 95 % intervals."))
        if isinstance(result, Verdict):
            checks = first_rows(checks_table(result), "figure", "gate/verdict.json")
            self._put(VERDICT, _Table(checks, verdict_markdown(result)))
        self._link(result)

    def refused(self, problems: Iterable[Problem]) -> None:
        """Shows why the rows were refused, beside what is known of them."""
        self._table([*problems, *(problem for found in self._reports.values() for problem in found["problems"])])

    def end(self) -> None:
        """Sends what is left, within reason. To be called inside the flow, whose connection to the server it uses."""
        self._link_mlflow_run()
        self._ended = True
        self._news.set()
        self._thread.join(END_WAIT_S)

    def _show(self, stage: str, bar: _Bar) -> None:
        self._sent_at = time.monotonic()
        self._last = bar
        self._put(stage, bar)

    def _link_mlflow_run(self) -> None:
        if TRACKED not in self._contexts and (url := self._mlflow_run()):
            self._put(TRACKED, _Link(url, "The MLflow run", "Curves, files, the full logs, the load of the machine."))

    def _link(self, result: Any) -> None:
        if isinstance(result, Version) and (url := version_url(result.name, result.version)):
            text = f"{result.name} version {result.version}"
            self._put(REGISTERED, _Link(url, text, "The model in MLflow's registry."))
        if isinstance(result, Publication):
            self._put(PUBLISHED, _Link(result.url, result.repo, "The model on the Hugging Face Hub."))

    def _table(self, problems: list[Any]) -> None:
        held = as_markdown(*(self._reports.get(stage) for stage in REPORTING))
        self._put(
            TABLE, _Table(problems_table(problems), f"What the splits hold, and what the checks found.\n\n{held}")
        )

    def _put(self, name: str, newest: _Bar | _Table | _Link) -> None:
        self._contexts.setdefault(name, contextvars.copy_context())
        self._newest[name] = newest
        self._news.set()

    def _update(self) -> None:
        made: dict[str, UUID] = {}
        last = False
        while not last:
            self._news.wait()
            self._news.clear()
            last = self._ended
            for name in list(self._newest):
                self._send(name, self._newest.pop(name), made)

    def _send(self, name: str, newest: _Bar | _Table | _Link, made: dict[str, UUID]) -> None:
        """Makes or changes a bar or a table. A server that stays down costs its view, and nothing else."""
        # The context knows the server, too: without it Prefect would start another one for the update.
        context = self._contexts[name]
        for _ in range(TRIES):
            with contextlib.suppress(Exception):
                if name in made:
                    context.run(newest.update, made[name])
                else:
                    made[name] = context.run(newest.create, name)
                return
            time.sleep(RETRY_S)


def _ended(row: Row) -> str:
    """`fit: ran, 108 s`"""
    return f"{row.name}: {row.state}, {row.seconds:,.0f} s"


def _bar(stage: str, event: Mapping[str, Any], left_s: float | None) -> _Bar:
    """`step 280 of 560, loss 0.754, 927 rows/s, ends about 14:05 UTC`"""
    done, total = event["done"], event["total"]
    told = [f"{'step ' if stage == 'fit' else ''}{done:,} of {total:,}"]
    if event.get("phase") == "evaluate":
        told.append("evaluating")
    if event.get("loss") is not None:
        told.append(f"loss {event['loss']:.3f}")
    if "samples_per_second" in event:
        told.append(f"{event['samples_per_second']:,.0f} rows/s")
    if left_s is not None:
        end = datetime.now(UTC) + timedelta(seconds=left_s)
        told.append(f"ends about {end:{'%H:%M' if left_s < 12 * 3600 else '%a %H:%M'}} UTC")
    return _Bar(100.0 * done / total, f"{stage}: {', '.join(told)}")


def _key(name: str) -> str:
    return f"finetune-{name.replace('_', '-')}"
