"""The flow `trial`: one trial of a sweep, from data to metrics, as a subflow of the sweep."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed

from flows.naming import MAX_LENGTH
from flows.pipeline import Scored, train_and_score
from flows.reports.sweep_table import format_settings
from tasks.cache.executor import Executor
from tasks.cache.results import Artifact, Lock
from tasks.cache.stage import Listener, Paused, Row
from tasks.jobs.launch import JobFailed
from tasks.prefect import events
from tasks.prefect.prefect_artifacts import PrefectProgress
from tasks.shared_store.bucket_remote import open_remote
from tasks.stages.score import ScoreArtifact
from tasks.sweeps.study import Study
from tasks.sweeps.trial_state import UNFINISHED, Trial
from tasks.tracking.run_tracker import RunTracker
from tasks.tracking.tracker import STUDY_TAG, TRIAL_STATE_TAG, TRIAL_TAG
from training.jobs.protocol import EVENTS, Event, read_events
from training.problems import DISK, NETWORK, UserError
from training.recipe import Recipe, parse

VALIDATION = "validation"
OF_THE_MACHINE = {DISK, NETWORK}
"""Kinds of problems that no other settings avoid: they end the sweep, and the trial is resumed by the next."""


def trial_name() -> str:
    """Prefect calls this at the start of a trial: `trial 3 · learning_rate 3.1e-05`."""
    parameters = flow_run.get_parameters()
    return f"trial {parameters['number']} · {format_settings(parameters['settings'])}"[:MAX_LENGTH]


@dataclass
class TrialRun:
    """One run of a trial: a new one, or one that continues.

    Args:
        recipe: the sweep's recipe.
        parent: the sweep's flow run.
        lock: what the sweep's run resolved; None if the settings change what is resolved.
        deadline: when the trial is stopped with a checkpoint, in seconds of the monotonic clock.
    """

    trial: Trial
    study: Study
    recipe: Recipe
    metric: str
    parent: str
    lock: Lock | None
    listeners: Sequence[Listener] = ()
    deadline: float | None = None
    scored: Scored | None = None
    """The artifacts of a trial that has completed."""
    error: BaseException | None = None
    """What ends the sweep."""

    def run(self) -> None:
        """Runs the flow. Raises what ends the sweep: an interruption, or a problem of the machine or of Prefect."""

        @flow(name="trial", flow_run_name=trial_name)
        def trial(number: int, settings: dict[str, Any]) -> State[Any]:
            """Trains and scores a model with some settings of a sweep.

            Args:
                number: The trial's number in its sweep.
                settings: Values by dotted field of the recipe.
            """
            run = str(flow_run.get_id())
            with events.emit_heartbeats(run):
                return self._execute(run)

        # Trials in threads share the counter behind the keys of subflows, and a repeated sweep would find the flow
        # runs of other trials by them: a detached context has keys of its own.
        parent = FlowRunContext.get()
        with parent.model_copy(update={"detached": True}) if parent else nullcontext():
            trial(self.trial.number, dict(self.trial.settings), return_state=True)
        if self.error is not None:
            raise self.error

    def _execute(self, run: str) -> State[Any]:
        """Builds the stages in the flow run `run`, stores the end in the study, and returns the flow's state."""
        began, study = time.monotonic(), self.study
        if self.trial.flow_run_id is None:
            study.set_flow_run(self.trial, run)
            self.trial = replace(self.trial, flow_run_id=run)
        name = f"trial {self.trial.number}"
        tracking = RunTracker(
            self.recipe.name, str(self.trial.flow_run_id), name, self.parent, self.recipe.training.report_to
        )
        with closing(tracking) as tracker:
            tracker.log_params({field: str(value) for field, value in self.trial.settings.items()})
            tracker.set_tags({TRIAL_TAG: str(self.trial.number), STUDY_TAG: study.name})
            progress = _TrainingProgress(PrefectProgress(lambda: tracker.pages))
            watch = _Evaluations(self)
            executor = Executor(
                self.recipe.name, run, (tracker, progress, *self.listeners, watch), remote=open_remote()
            )
            try:
                self.scored = train_and_score(
                    executor, trial_recipe(self.recipe, self.trial.settings, self.metric), self.lock
                )
                state = self._complete(self.scored.scores, time.monotonic() - began)
                status = "FINISHED"
            except Paused as paused:
                state, status = self._pause(str(paused), time.monotonic() - began), "KILLED"
            except (UserError, JobFailed) as error:
                status, state = "FAILED", Failed(message=str(error))
                if _is_of_the_machine(error):
                    self.error = error
                    study.release(self.trial)
                else:
                    study.fail(self.trial, str(error), time.monotonic() - began)
            except BaseException as error:
                status, self.error = "KILLED", error
                study.release(self.trial)
                raise
            finally:
                progress.end()
                if (ended := study.trials[self.trial.number - 1].state) not in UNFINISHED:
                    tracker.set_tags({TRIAL_STATE_TAG: ended})
                tracker.end(status)
        return state

    def _complete(self, scores: ScoreArtifact, seconds: float) -> State[Any]:
        metrics = scores.result[VALIDATION]
        if self.metric not in metrics:
            message = f"{self.metric!r} is none of the metrics of the trials: choose from {', '.join(metrics)}."
            raise UserError.of("sweep", "sweep.metric", message)
        score = metrics[self.metric]
        value = score["value"]
        if value is None or value != value:
            reason = f"{self.metric} has no value on {VALIDATION}: docs/reference/metrics.md says when it has none"
            self.study.fail(self.trial, reason, seconds)
            return Failed(message=reason)
        self.study.complete(self.trial, value, score.get("low"), score.get("high"), seconds)
        return Completed(message=f"{self.metric} {value:.4g}")

    def _pause(self, reason: str, seconds: float) -> State[Any]:
        if self.error is not None:
            self.study.release(self.trial)
            return Failed(message=reason)
        if self.is_over_time:
            self.study.release(self.trial)
            return Cancelled(name="TimedOut", message="the sweep's time is over; the next sweep resumes this trial")
        self.study.pause(self.trial, seconds)
        return Cancelled(name="Paused", message=reason)

    @property
    def is_over_time(self) -> bool:
        """Whether the sweep's time is over."""
        return self.deadline is not None and time.monotonic() > self.deadline


def trial_recipe(recipe: Recipe, settings: Mapping[str, Any], metric: str) -> Recipe:
    """The recipe of a trial: judged on validation alone, compared by the sweep's metric, and never published."""
    gate = recipe.release.gate
    compared = {"compare": metric, "confidence": gate.confidence, "baseline": gate.baseline}
    values = recipe.model_dump(exclude_unset=True) | {
        "evaluation": {"splits": [VALIDATION], "metrics": list(recipe.evaluation.metrics)},
        "release": {"registry": recipe.release.registry, "champion": recipe.release.champion, "gate": compared},
    }
    return parse(values, settings)


def _is_of_the_machine(error: UserError | JobFailed) -> bool:
    problems = error.problems if isinstance(error, UserError) else error.failure.problems
    return any(problem.kind in OF_THE_MACHINE for problem in problems)


class _Evaluations(Listener):
    """Stores the metric after each evaluation during training, and pauses the trial where the pruner says so."""

    def __init__(self, run: TrialRun) -> None:
        self._run, self._metric = run, f"eval_{run.metric}"
        self._count = 0
        self._steps: int | None = None

    def stage_events(self, stage: str, events: list[Event]) -> None:
        """Raises Paused after an evaluation that is not the last one, or when the sweep's time is over."""
        if stage != "fit":
            return
        trial, study = self._run.trial, self._run.study
        for event in events:
            if event["kind"] == "progress":
                self._steps = event.get("total")
            elif event["kind"] == "metrics" and self._metric in event["values"]:
                self._count += 1
                value = event["values"][self._metric]
                pauses = self._store(partial(study.evaluated, trial, self._count, value))
                if pauses and event["step"] != self._steps:
                    raise Paused(f"{self._run.metric} {value:.4g} after evaluation {self._count}")
            if event["kind"] in ("progress", "metrics") and self._run.is_over_time:  # it trains, and can save
                raise Paused("the sweep's time is over")

    def stage_ended(self, row: Row, result: Any) -> None:
        """Stores the evaluations of a training that another run has completed."""
        if row.name == "fit" and row.state == "cached" and isinstance(result, Artifact):
            found = read_events(result.path / "log" / EVENTS, 0, ["metrics"])[0]
            values = [event["values"][self._metric] for event in found if self._metric in event["values"]]
            self._store(partial(self._run.study.record, self._run.trial, dict(enumerate(values, 1))))

    def _store(self, write: Callable[[], Any]) -> Any:
        """Writes to the study. An error of it ends the sweep: without an evaluation, later decisions would differ."""
        try:
            return write()
        except Exception as error:
            self._run.error = error
            raise Paused("the study cannot be written") from error


class _TrainingProgress(Listener):
    """Prefect's progress of the stages of a trial that are not those of the whole sweep."""

    STAGES = ("fit", "predict", "score")

    def __init__(self, progress: PrefectProgress) -> None:
        self._progress = progress

    def stage_started(self, stage: str, key: str) -> None:
        """As PrefectProgress."""
        if stage in self.STAGES:
            self._progress.stage_started(stage, key)

    def stage_waits(self, stage: str) -> None:
        """As PrefectProgress."""
        self._progress.stage_waits(stage)

    def stage_events(self, stage: str, events: list[Event]) -> None:
        """As PrefectProgress."""
        self._progress.stage_events(stage, events)

    def stage_ended(self, row: Row, result: Any) -> None:
        """As PrefectProgress."""
        if row.name in self.STAGES:
            self._progress.stage_ended(row, result)

    def end(self) -> None:
        """As PrefectProgress."""
        self._progress.end()
