"""The drift report of a batch prediction: the rows that are new in a run against the version's validation rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flows.batch_plan import PreparedBatch, history_name, history_of
from flows.monitoring import announce_drift, run_drift_stages
from tasks.cache.executor import Executor
from tasks.cache.remote import Remote
from tasks.cache.stage import Listener
from tasks.jobs.launch import JobFailed
from tasks.prediction.drift_samples import Monitoring
from tasks.registry.monitoring import find_rows
from tasks.reports.formatting import format_count
from tasks.tracking.connection import MlflowFailed
from training.problems import UserError


def remember_earlier_rows(prepared: PreparedBatch) -> None:
    """Remembers the rows that are not new. Call it before anything is predicted: the rows of a run that is killed, and
    of one with too few of them, are new in the next run too."""
    if isinstance(prepared.monitoring, Monitoring):
        history_of(prepared.prediction).remember_compared(prepared.monitoring.new_rows.before)


def compare_new_rows(
    prepared: PreparedBatch, run: str, remote: Remote, listeners: Sequence[Listener]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Runs the stages of the report, emits its event, and remembers the rows that it compared.

    Returns the report and warnings. The report has a `reason` if nothing was compared, and is None if nothing was to
    be. Its failure is a warning, since the predictions are complete; the rows are new in the next run too.
    """
    monitoring = prepared.monitoring
    if not isinstance(monitoring, Monitoring):
        return _undecided(monitoring, 0) if monitoring else None, []
    version, section, new = monitoring.version, monitoring.section, monitoring.new_rows
    if prepared.scan.unfiltered:
        reason = f"the training rows were filtered, and these rows are not: {prepared.scan.unfiltered[0]}. Set "
        return _undecided(f"{reason}data.filter to null, or to a condition on columns that they have", new.total), []
    at_least = f"at least {section.min_rows:,} are needed (release.drift.min_rows)"
    if not new.total:
        return _undecided("no rows are new", 0), []
    if new.total < section.min_rows:
        rows = f"{format_count(new.total, 'row')} wait for more"
        return _undecided(f"{rows}: {at_least}", new.total), []
    try:
        reference = find_rows(version).figures.get(f"{version.split}_rows", section.min_rows)
        if reference < section.min_rows:
            split = f"{version.champion} has {format_count(reference, f'{version.split} row')}"
            return _undecided(f"{split}: {at_least}", new.total), []
        executor = Executor(history_name(prepared.prediction), run, listeners, remote=remote)
        report = run_drift_stages(executor, version, section, new.draw(), list(new.files))
    except (UserError, JobFailed, MlflowFailed) as error:
        return _undecided(str(error), new.total), [f"The new rows were not compared (drift): {error}"]
    announce_drift(version, report, prepared.prediction.input)
    history_of(prepared.prediction).remember_compared(new.all)
    return report, []


def _undecided(reason: str, rows: int) -> dict[str, Any]:
    return {"verdict": "undecided", "reason": reason, "rows": {"new": rows}}
