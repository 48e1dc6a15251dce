"""Prefect artifacts of a run: progress bars, the tables of the data report, the scores and the verdict, and links. Also
its state while it waits.

They are sent by a thread, so that a slow or dead server delays no stage.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

from tasks.cache.results import Artifact, Publication, Verdict, Version
from tasks.cache.stage import Row
from tasks.reports.formatting import escape_markdown, limit_rows
from tasks.reports.model_reports import (
    describe_verdict,
    find_worst_errors,
    tabulate_checks,
    tabulate_exports,
    tabulate_scores,
    tabulate_slices,
)
from tasks.reports.monitoring_reports import describe_drift, tabulate_drift
from tasks.reports.row_reports import describe_rows, tabulate_problems
from tasks.tracking.connection import version_url

END_WAIT_S = 5.0
"""How long the end of a run waits for a slow server."""
# A busy server sometimes refuses a request, and no later update makes up for a stage's last one.
TRIES = 3
RETRY_S = 0.5


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


def link_run(tracker: str, url: str) -> Link:
    """The link to the run's page in a tracker."""
    return Link(url, f"The {tracker} run", "Curves, files and the load of the machine.")


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
            "figures": (tabulate_scores(result.figures), "Metrics of each split, with 95 % intervals."),
            "worst-errors": (find_worst_errors(result.path), "The wrong predictions with the highest confidence."),
            "slices": (tabulate_slices(result.path), "Metrics of each group, with 95 % intervals."),
        }
        found |= {name: Table(rows, description) for name, (rows, description) in tables.items() if rows}
    if row.name == "compare_exports" and isinstance(result, Artifact):
        found["exports"] = Table(tabulate_exports(result.figures), "Exports of the model, compared with it row by row.")
    if row.name == "drift" and isinstance(result, Artifact):
        found["drift"] = Table(tabulate_drift(result.figures), escape_markdown(describe_drift(result.figures)))
    if isinstance(result, Verdict):
        checks = limit_rows(tabulate_checks(result), "figure", "gate/verdict.json")
        found["verdict"] = Table(checks, describe_verdict(result))
    if isinstance(result, Version) and (url := version_url(result.name, result.version)):
        text = f"{result.name} version {result.version}"
        found["registered-version"] = Link(url, text, "The model in MLflow's registry.")
    if isinstance(result, Publication):
        found["hub"] = Link(result.url, result.repo, "The model on the Hugging Face Hub.")
    return found
