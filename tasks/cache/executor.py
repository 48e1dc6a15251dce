"""The executor: runs each stage as a Prefect task, cached by Prefect's extension points.

Prefect's defaults do not fit: the default key contains the flow run's id, so nothing is reused across runs; the default
serializer would return a path whose files are missing; the file lock outlives a killed holder.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import Task
from prefect.cache_policies import NO_CACHE, CachePolicy
from prefect.client.schemas.objects import State
from prefect.context import TaskRunContext
from prefect.serializers import Serializer
from prefect.states import Cancelled, Completed
from prefect.transactions import IsolationLevel, Transaction, transaction

from tasks.cache import store
from tasks.cache.history import History
from tasks.cache.remote import Remote
from tasks.cache.results import Artifact
from tasks.cache.stage import Listener, Paused, Prepared, Result, Row, Stage, Work, without_number
from tasks.home import home
from tasks.locks import FlockManager
from training.jobs.protocol import Event, read_outcome

_logger = logging.getLogger(__name__)

PAUSED = "Paused"
"""The name of the state of a paused stage's task run."""


@dataclass
class GivenKey(CachePolicy):
    """A key computed in advance: if Prefect failed to compute a key, it would log that and run uncached."""

    given: str = ""

    def compute_key(
        self, task_ctx: TaskRunContext, inputs: dict[str, Any], flow_parameters: dict[str, Any], **kwargs: Any
    ) -> str:
        """The path of Prefect's record inside the artifact's folder."""
        return self.given


class ArtifactSerializer(Serializer):
    """Writes an artifact as JSON, and reads it only if it is intact: Prefect treats an error as a cache miss."""

    type: str = "finetune-artifact"

    def dumps(self, obj: Artifact) -> bytes:
        """JSON. Raises AttributeError for other objects, so that only artifacts are cached."""
        return obj.model_dump_json().encode()

    def loads(self, blob: bytes) -> Artifact:
        """The artifact. Raises `store.Damaged` if the artifact is absent or damaged."""
        claimed = Artifact.model_validate_json(blob)
        found = store.find(claimed.stage, claimed.key)
        if found != claimed:
            raise store.Damaged(f"{claimed.location} differs from its record")
        return claimed


class Executor:
    """Runs a composition of stages inside a Prefect flow. Several threads with the flow's context may call it.

    Args:
        recipe: its name, for the history.
        run: the flow run's id.
        listeners: receive each stage's start, events and end; an error in one fails no stage, and Paused pauses it.
        force: the stages to run although their output is stored.
        remote: artifacts of other machines.
    """

    executes = True

    def __init__(
        self,
        recipe: str,
        run: str,
        listeners: Sequence[Listener] = (),
        force: frozenset[str] = frozenset(),
        remote: Remote | None = None,
    ) -> None:
        self.rows: list[Row] = []
        self._history = History(recipe)
        self._run = run
        self._listeners = _Listeners(listeners)
        self._force = force
        self._remote = remote or Remote()
        self._uncommitted: list[Callable[[], None]] | None = None
        """History entries of an open transaction."""

    def __call__(self, stage: Stage[Result], *arguments: Any) -> Result:
        """The stage's result."""
        started = time.monotonic()
        key, state = "", "failed"
        result: Any = None
        try:
            prepared = stage.prepare(*arguments)
            flat, _ = stage.flatten_inputs(prepared)
            key = stage.key(flat)
            self._listeners.stage_started(stage.name, key)
            earlier = tuple(self.rows)
            work = Work(key, self._place(stage, key), self._run, (self._listeners,), stage.name, earlier, "cached")
            # The task has the arguments for Prefect, which draws the run's graph by them.
            result = self._task(stage, prepared, work, flat)(*arguments)
            if isinstance(result, State):  # Prefect returns a state of the body unchanged
                if result.name == PAUSED:
                    state, result = "paused", None
                    raise Paused
                result = result.result()
            state = work.state
            if stage.cached:
                self._remote.upload(result, made=state != "cached")
                result = stage.open(result)
        finally:
            artifact = result.location if isinstance(result, Artifact) else None
            fetched = self._remote.fetched_bytes(stage.name, key) if state == "cached" else None
            ended = datetime.now(UTC).isoformat(timespec="milliseconds")
            row = Row(stage.name, key or None, state, time.monotonic() - started, artifact, fetched, ended)
            self.rows.append(row)
            self._listeners.stage_ended(row, result)
        if self._uncommitted is None:
            self._remember(stage, key, result)
        else:
            self._uncommitted.append(lambda: self._remember(stage, key, result))
        return result

    def progress_of(self, stage: str, unit: str) -> Callable[[int, int], None]:
        """Returns a function that shows the progress of work before the stage, as a number of units and their total."""
        self._listeners.stage_started(stage, "")

        def report(done: int, total: int) -> None:
            self._listeners.stage_events(stage, [{"kind": "progress", "done": done, "total": total, "unit": unit}])

        return report

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """A Prefect transaction around actions: if one fails, those before it are rolled back.

        A cached stage must not run in it: its lock would be held until the end. A killed process rolls nothing back;
        the next run continues from there.
        """
        self._uncommitted = []
        try:
            with transaction():
                yield
            for remember in self._uncommitted:
                remember()
        finally:
            self._uncommitted = None

    def end_uploads(self, wait: bool) -> list[str]:
        """Waits for the uploads of the run, or leaves them to a later run. Returns warnings."""
        return self._remote.end_run(
            wait, lambda text: self._listeners.stage_events("shared store", [{"kind": "note", "message": text}])
        )

    def _remember(self, stage: Stage[Any], key: str, result: Any) -> None:
        self._history.remember_key(stage.name, key)
        if stage.gives is not None:
            self._history.remember_result(stage.name, key, result)

    def _place(self, stage: Stage[Any], key: str) -> Path:
        """The folder of a stage's files; those of an action belong to the run."""
        if stage.cached:
            return store.folder(stage.name, key)
        return home() / "runs" / self._run / stage.name

    def _task(self, stage: Stage[Any], prepared: Prepared, work: Work, flat: dict[str, Any]) -> Task[..., Any]:
        if not stage.cached:
            return Task(
                fn=_action_body(stage, prepared, work, self._remote),
                name=stage.name,
                cache_policy=NO_CACHE,
                persist_result=False,
                on_rollback=[_make_rollback(work)],
            )
        locks = FlockManager(
            home() / "locks", on_wait=lambda _: self._listeners.stage_waits(stage.name), cancellable=True
        )
        policy = GivenKey(given=f"{stage.name}/{work.key}/{store.RECORD}")
        forced = without_number(stage.name) in self._force
        return Task(
            fn=artifact_body(stage, prepared, work, flat, forced, self._remote),
            name=stage.name,
            cache_policy=policy.configure(lock_manager=locks, isolation_level=IsolationLevel.SERIALIZABLE),
            result_storage=home() / "artifacts",
            result_serializer=ArtifactSerializer(),
            cache_result_in_memory=False,
            persist_result=True,
            refresh_cache=forced,
        )


class _Listeners(Listener):
    """Calls every listener, for one thread after the other. Errors are logged once per listener and not raised, except
    Paused."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners, self._turn = listeners, threading.RLock()
        self._failed: set[int] = set()

    def stage_started(self, stage: str, key: str) -> None:
        self._notify(lambda listener: listener.stage_started(stage, key))

    def stage_waits(self, stage: str) -> None:
        self._notify(lambda listener: listener.stage_waits(stage))

    def stage_events(self, stage: str, events: list[Event]) -> None:
        self._notify(lambda listener: listener.stage_events(stage, events))

    def stage_ended(self, row: Row, result: Any) -> None:
        self._notify(lambda listener: listener.stage_ended(row, result))

    def _notify(self, notify: Callable[[Listener], None]) -> None:
        with self._turn:
            for listener in self._listeners:
                try:
                    notify(listener)
                except Paused:
                    raise
                except Exception:
                    if id(listener) not in self._failed:
                        _logger.warning("%s cannot follow this run", type(listener).__name__, exc_info=True)
                    self._failed.add(id(listener))


def artifact_body(
    stage: Stage[Any], prepared: Prepared, work: Work, flat: dict[str, Any], forced: bool, remote: Remote
) -> Any:
    """The function of a cached stage's task: finds its artifact here or in the shared store, or makes it."""

    def body(*arguments: Any) -> Artifact | State[Artifact]:
        found = None if forced else _find_or_discard(work)
        if found is None and not forced:
            found = remote.find_or_lease(
                stage.name, work.key, work.fetch_progress, lambda owner: _note_wait(work, owner)
            )
        if found is not None:
            # Complete except for Prefect's record: fetched, or an earlier run was killed between the two.
            shutil.rmtree(work.job, ignore_errors=True)
            return Completed(name="Cached", data=found)
        if forced:
            _forget_finished(work.job)
        work.state = "ran"
        try:
            with store.filling(stage.name, work.key) as aside:
                work.out = aside
                result = prepared.run(work)
                artifact = store.publish(aside, stage.name, work.key, flat, result)
        except Paused as paused:
            remote.release(stage.name, work.key)
            return Cancelled(name=PAUSED, message=str(paused))
        except BaseException:
            remote.release(stage.name, work.key)
            raise
        # The job is kept until then, so that a killed run can resume it.
        shutil.rmtree(work.job, ignore_errors=True)
        return artifact

    body.__name__ = stage.name
    body.__doc__ = stage.description
    return body


def _action_body(stage: Stage[Any], prepared: Prepared, work: Work, remote: Remote) -> Any:
    def body(*arguments: Any) -> Any:
        work.state = "ran"
        work.one_at_a_time = lambda: remote.one_at_a_time(stage.name, work.key, lambda owner: _note_wait(work, owner))
        shutil.rmtree(work.out, ignore_errors=True)
        # External systems may have changed since the last time: the result of a finished job is not used again.
        _forget_finished(work.job)
        result = prepared.run(work)
        shutil.rmtree(work.job, ignore_errors=True)
        return result

    body.__name__ = stage.name
    body.__doc__ = stage.description
    return body


def _make_rollback(work: Work) -> Callable[[Transaction], None]:
    def rollback(transaction: Transaction) -> None:
        if work.rollback is None:
            return
        try:
            message = work.rollback()
        except Exception as error:  # the run reports the first failure
            work.warning(f"its changes could not be rolled back: {error}")
        else:
            work.note(message)

    return rollback


def _note_wait(work: Work, owner: str) -> None:
    message = f"another machine does the same; waiting for it ({owner})"
    work.on_events([{"kind": "waiting", "message": message}])


def _forget_finished(job: Path) -> None:
    """Removes a finished job, which would only return its result again; a killed job is resumed."""
    outcome = read_outcome(job)
    if outcome is not None and outcome.state == "finished":
        shutil.rmtree(job)


def _find_or_discard(work: Work) -> Artifact | None:
    """The stored artifact. A damaged one is moved away, with a warning: it may be the first sign of a failing disk."""
    try:
        return store.find(work.stage, work.key)
    except store.Damaged as damage:
        kept = store.discard(work.stage, work.key, str(damage))
        message = f"{damage}: this artifact of {work.stage} is damaged and is made again; its files are now in {kept}"
        if (count := store.count_damaged()) > 1:
            message += f". {count} damaged artifacts are there: check the disk"
        work.warning(message)
        return None
