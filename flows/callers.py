"""The callers of flows: a command in this process, or a worker; and the ends of a run."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefect import Flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Failed

from flows.reports.result import build_result
from tasks.cache.executor import Executor
from tasks.cache.garbage_collection import in_use
from tasks.cache.stage import Listener
from tasks.jobs.launch import JobFailed
from tasks.prefect import events
from tasks.prefect.prefect_artifacts import PrefectProgress
from tasks.registry.monitored_versions import MonitoredVersion, find_monitored
from tasks.shared_store.bucket_remote import open_remote
from tasks.tracking.connection import MlflowFailed
from tasks.tracking.outbox import running
from training.problems import UserError


@dataclass(frozen=True)
class Caller:
    """The code that calls a flow in its own process. A worker calls flows with JSON parameters alone.

    Args:
        listeners: of the stages and of the result, besides the trackers.
        is_command: whether a person waits for a command. It ends without a Prefect server that is down; on a worker,
            Prefect tries for minutes to reach it.
    """

    listeners: Sequence[Listener] = ()
    is_command: bool = False

    def bind(self, flow: Flow[..., Any], function: Callable[..., Any], **options: Any) -> Flow[..., Any]:
        """Returns the flow with another function: of this caller, the flow's parameters, and options that are objects
        of this process."""

        @functools.wraps(flow.fn)
        def call(*values: Any, **named_values: Any) -> Any:
            return function(self, *values, **named_values, **options)

        # Prefect reads the parameters from it, and would look for the names of types in this module.
        call.__signature__ = inspect.signature(flow.fn, eval_str=True)  # type: ignore[attr-defined]
        bound = copy.copy(flow)  # a new Flow would compute the schema of its parameters, which takes most of a second
        bound.fn = call
        return bound

    def send(self, result: dict[str, Any]) -> None:
        """Sends the run's result to the listeners."""
        for listener in self.listeners:
            listener.run_ended(result)

    def report_removal(self) -> None:
        """Says why a run does not begin."""
        text = "This run waits until `finetune store --remove` has set folders of this home aside."
        get_run_logger().info(text)
        if self.is_command:  # a terminal does not show Prefect's log
            print(text, file=sys.stderr)


WORKER = Caller()
EXPECTED = (UserError, JobFailed, MlflowFailed)
"""Errors whose message is enough: mistakes, and failures of jobs and of MLflow."""


def fail(error: BaseException, message: str | None = None) -> State[Any]:
    """Returns the state of a flow that an expected error ended. Raises other errors, which need a traceback."""
    if isinstance(error, JobFailed) and error.failure.traceback:
        get_run_logger().error(error.failure.traceback)
    if isinstance(error, EXPECTED):
        return Failed(message=message or str(error))
    raise error


def run_for_version(
    caller: Caller,
    report_name: str,
    model: str,
    task: str,
    data: Mapping[str, Any] | None,
    warnings: list[str],
    *,
    stages: Callable[[Executor, MonitoredVersion], dict[str, Any]],
    announce: Callable[[MonitoredVersion, dict[str, Any]], None],
) -> dict[str, Any] | State[Any]:
    """Runs stages on a registered version in the current flow run. Returns the run's result, or the state of a failed
    run.

    Args:
        caller: The code that calls the flow in this process.
        report_name: The field of the result that has the report.
        model: NAME, NAME@ALIAS or NAME/VERSION; a NAME alone is its champion.
        task: The class of the model's task type if it is the user's own.
        data: Fields of the recipe's section data by which rows are read, in place of the recipe's values.
        warnings: The warnings of the stages.
        stages: Runs the stages. Returns their report, JSON values.
        announce: Logs the report and emits its event.
    """
    run, remote, progress = str(flow_run.get_id()), open_remote(), PrefectProgress()
    with events.emit_heartbeats(run), in_use(), running(run):
        remote.deliver_earlier()
        executor: Executor | None = None
        error: Exception | None = None
        report: dict[str, Any] | None = None
        version: MonitoredVersion | None = None
        try:
            version = find_monitored(model, task, data)
            executor = Executor(version.recipe, run, (progress, *caller.listeners), remote=remote)
            report = stages(executor, version)
        except EXPECTED as caught:
            error = caught
        rows = executor.rows if executor else []
        warnings += executor.end_uploads(wait=True) if executor else []
        progress.end()
        for warning in warnings:
            get_run_logger().warning(warning)
        result = build_result("failed" if error else "completed", rows, flow_run_id=run, error=error, where=report_name)
        result |= {"version": str(version.pinned) if version else None, report_name: report, "warnings": warnings}
        caller.send(result)
        if version is None or report is None:
            assert error is not None
            return fail(error)
        announce(version, report)
        return result
