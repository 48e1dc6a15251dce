"""The progress of a batch prediction as one stage, its result as JSON, and its lines for a terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flows.batch_plan import PreparedBatch
from flows.reports.result import list_problems, state_of
from tasks.cache.stage import Listener, Row
from tasks.prediction.input_rows import MAX_REASONS
from tasks.reports.formatting import format_count
from tasks.reports.model_reports import describe_drift
from training.jobs.protocol import Event

STAGE = "predict"


class Shards(Listener):
    """Shows the shards of a run to its listeners as one stage."""

    def __init__(self, followers: Sequence[Listener]) -> None:
        self._followers, self._started = followers, time.monotonic()
        self._ended = False
        self.states = Counter[str]()
        """The number of shards by state."""
        for follower in followers:
            follower.stage_started(STAGE, "")

    def stage_waits(self, stage: str) -> None:
        """Passes it on."""
        for follower in self._followers:
            follower.stage_waits(STAGE)

    def stage_events(self, stage: str, events: list[Event]) -> None:
        """Passes them on."""
        for follower in self._followers:
            follower.stage_events(STAGE, events)

    def stage_ended(self, row: Row, result: Any) -> None:
        """Counts the shard."""
        self.states[row.state] += 1

    def end(self, failed: bool = False) -> None:
        """Ends the stage, once."""
        if self._ended:
            return
        self._ended = True
        state = "failed" if failed or self.states["failed"] else "ran" if self.states["ran"] else "cached"
        row = Row(STAGE, None, state, time.monotonic() - self._started)
        for follower in self._followers:
            follower.stage_ended(row, None)


def build_result(
    run: str | None,
    prepared: PreparedBatch | None,
    began_s: float,
    error: BaseException | None = None,
    review: int | None = None,
) -> dict[str, Any]:
    """The result of a run, plain JSON. `review`: the rows for a person."""
    return {
        "state": state_of(error),
        "flow_run_id": run,
        "output": prepared.prediction.output if prepared else None,
        "counts": count(prepared, review) if prepared else None,
        "drift": None,
        "seconds": round(time.time() - began_s, 1),
        "problems": list_problems(error, STAGE),
        "warnings": [],
    }


def count(prepared: PreparedBatch, review: int | None = None) -> dict[str, Any]:
    """The counts of a batch prediction: `new` are the usable rows that were not predicted before, `review` those for a
    person, if the version marks any."""
    scan, model = prepared.scan, prepared.model
    return {
        "model": model.name,
        "version": model.version,
        "model_digest": model.digest,
        "files": scan.files,
        "shards": len(scan.shards),
        "rows": scan.rows,
        "new": prepared.new_rows,
        "errors": dict(scan.errors.most_common()),
        **({} if review is None else {"review": review}),
    }


def describe(result: Mapping[str, Any]) -> list[str]:
    """`8,192 rows in 2 files, predicted by demo version 1, 4,096 of them now: answers`, and lines for the rows for a
    person, the errors and the drift."""
    counts = result["counts"]
    files = format_count(counts["files"], "file")
    rows, version = format_count(counts["rows"], "row"), f"{counts['model']} version {counts['version']}"
    lines = [f"{rows} in {files}, predicted by {version}, {counts['new']:,} of them now: {result['output']}"]
    return [*lines, *_describe_review(counts), *describe_errors(counts["errors"]), *_describe_drift(result["drift"])]


def _describe_review(counts: Mapping[str, Any]) -> list[str]:
    """A line for the rows for a person; none if the version marks none."""
    if "review" not in counts:
        return []
    predicted = counts["rows"] - sum(counts["errors"].values())
    return [f"For a person: {format_count(counts['review'], 'row')} ({counts['review'] / max(1, predicted):.1%})"]


def _describe_drift(drift: Mapping[str, Any] | None) -> list[str]:
    if drift is None or "reason" in drift:
        return [f"Drift: {drift['verdict']}: {drift['reason']}"] if drift else []
    return [f"Drift: {describe_drift(drift)}"]


def describe_errors(errors: Mapping[str, int]) -> list[str]:
    """A line for the rows without a prediction, by reason; none without such rows."""
    if not errors:
        return []
    reasons = [f"{reason}: {format_count(number, 'row')}" for reason, number in [*errors.items()][:MAX_REASONS]]
    more = [f"{len(errors) - len(reasons)} further reasons"] if len(errors) > len(reasons) else []
    return [f"Without a prediction: {format_count(sum(errors.values()), 'row')} ({'; '.join([*reasons, *more])})"]
