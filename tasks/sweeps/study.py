"""The study of a sweep: its trials, kept by Optuna.

    <home>/sweeps/<key>/journal.log    the trials, unless FINETUNE_SWEEPS names a database
    <home>/sweeps/<key>/sweep.json     the sweep and the recipe, for people
    <home>/sweeps/<key>/lock           held by the process that runs the sweep

A trial is stored whole when it is proposed, each evaluation by one entry, and its end by a last one, so after a kill at
any instant the same command repeats at most one of them, with the same result. A paused trial is Optuna's PRUNED. If it
is resumed, it has one more row with the same settings, because Optuna changes no row that has ended.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.cache.code import code_behind, library_versions
from tasks.cache.digests import digest_of
from tasks.cache.results import Artifact, Lock
from tasks.home import SWEEPS, home, without_credentials
from tasks.locks import exclusive_lock
from tasks.reports.formatting import first_line
from tasks.sweeps.search_algorithms import (
    NoPruner,
    OptunaPruner,
    Pruner,
    SuccessiveHalving,
    build_optuna_pruner,
    propose,
    settings_from,
)
from tasks.sweeps.trial_state import Trial, TrialState
from training import task_types
from training.jobs.protocol import write_atomically
from training.problems import UserError
from training.recipe import Recipe, Sweep, settings_of
from training.recipe.tables.searches import PRUNERS

if TYPE_CHECKING:
    import optuna
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

LIMITS = ("trials", "parallel", "timeout_s", "max_failures")
"""Fields of a sweep that change no trial: with other values, a study continues."""
TRIAL, RESUMED_AFTER, FLOW_RUN = "trial", "resumed_after", "flow_run_id"
LOW, HIGH, SECONDS, REASON = "low", "high", "seconds", "reason"
PROGRAMS = ("training.programs.fit", "training.programs.predict", "training.programs.score")


_OF_RELEASE: Any = {"release": True, "data": True, "evaluation": {"folds", "parallel_folds"}}
"""Of the recipe, what trials do not read; the key has the rows themselves."""


def study_key(
    recipe: Recipe, sweep: Sweep, lock: Lock, data: Artifact, model: Artifact, of_variants: Sequence[Lock] = ()
) -> str:
    """The study's name: a digest of everything that a trial's figures depend on beside its settings. `of_variants` are
    the locks of the teachers, and of the rows without labels, that variants name."""
    code = code_behind([*PROGRAMS, *task_types.code_modules(recipe.task)])
    absent = () if sweep.variants else ("variants", "seeds")
    unlabelled = [[pin.sha256 for pin in one.unlabelled] for one in (lock, *of_variants)]
    return digest_of(
        {
            "sweep": sweep.model_dump(mode="json", exclude={*LIMITS, *absent}),
            "recipe": recipe.model_dump(mode="json", exclude=_OF_RELEASE),
            "compute": {"num_processes": lock.num_processes, "mixed_precision": lock.mixed_precision},
            "upstream": {"load_data": data.digest, "load_model": model.digest},
            "teachers": [one.teacher for one in (lock, *of_variants)],
            **({"unlabelled": unlabelled} if any(unlabelled) else {}),
            "code": code.digests,
            "libraries": library_versions(["torch", "transformers", "accelerate", "optuna", *code.distributions]),
        }
    )[:40]


class Study:
    """The trials of a sweep. Threads may use it at once.

    Args:
        key: of the study.
        recipe: the recipe that the trials vary.
        sweep: with all defaults resolved.
    """

    def __init__(self, key: str, recipe: Recipe, sweep: Sweep) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.folder = home() / "sweeps" / key
        self._sweep, self._turn = sweep, threading.RLock()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        values = {"sweep": sweep.model_dump(mode="json"), "recipe": recipe.model_dump(mode="json")}
        write_atomically(self.folder / "sweep.json", json.dumps(values, indent=1).encode())
        self.name = f"{recipe.name}-{key[:12]}"
        # Proposals come from `propose`: this sampler only lets Optuna write.
        self.optuna: optuna.Study = optuna.create_study(
            storage=_open_storage(self.folder / "journal.log"),
            study_name=self.name,
            sampler=optuna.samplers.RandomSampler(),
            direction=sweep.direction,
            load_if_exists=True,
        )
        self._pruner = self._build_pruner()
        self._active: set[int] = set()
        """The trials that run in this process."""

    @property
    def trials(self) -> list[Trial]:
        """All trials, by number."""
        with self._turn:
            return list(self._read().values())

    @property
    def best(self) -> Trial | None:
        """The completed trial with the best value; the first of equals."""
        completed = [trial for trial in self.trials if trial.value is not None and trial.state == "completed"]
        return min(completed, key=lambda trial: (self.rank(trial.value or 0.0), trial.number), default=None)

    def last_rows(self) -> list[FrozenTrial]:
        """Optuna's last row of each trial, by number."""
        with self._turn:
            rows = {row.user_attrs[TRIAL]: row for row in self._rows()}
            return [rows[number] for number in sorted(rows)]

    def rank(self, value: float) -> float:
        """Maps a value of the metric to one of which less is better."""
        if math.isnan(value):
            return math.inf
        return -value if self._sweep.direction == "maximize" else value

    def next(self) -> Trial | None:
        """The trial to run now: one that was killed, or a paused one that continues, or a new one.

        None if there is none now: all are done, or others have to end first.
        """
        with self._turn:
            trials = self.trials
            killed = [trial for trial in trials if trial.state == "interrupted"]
            if killed:
                return self._begin(killed[0])
            open_for_more = len(trials) < (self._sweep.trials or 0)
            at_end = not open_for_more and not self._active
            if resumable := self._pruner.find_resumable(trials, at_end):
                return self._begin(self._resume(resumable))
            return self._begin(self._propose(len(trials) + 1)) if open_for_more else None

    def evaluated(self, trial: Trial, evaluation: int, value: float) -> bool:
        """Stores the metric after an evaluation, counted from 1. Returns whether the trial pauses now."""
        with self._turn:
            current = self._read()[trial.number]
            if evaluation not in current.evaluations:
                self._write(trial).report(value, evaluation)
                current = self._read()[trial.number]
            if evaluation <= current.resumed_after or evaluation < max(current.evaluations):
                return False
            return self._pruner.pauses(current, evaluation, self.trials)

    def record(self, trial: Trial, evaluations: Mapping[int, float]) -> None:
        """Stores evaluations of a training that another run has completed."""
        with self._turn:
            for evaluation in evaluations.keys() - self._read()[trial.number].evaluations.keys():
                self._write(trial).report(evaluations[evaluation], evaluation)

    def set_flow_run(self, trial: Trial, flow_run_id: str) -> None:
        """Stores the trial's first flow run."""
        self._write(trial).set_user_attr(FLOW_RUN, flow_run_id)

    def pause(self, trial: Trial, seconds: float) -> None:
        """Ends the trial's run after an evaluation at which it pauses."""
        self._end(trial, "PRUNED", None, {SECONDS: seconds})

    def complete(self, trial: Trial, value: float, low: float | None, high: float | None, seconds: float) -> None:
        """Ends the trial with its value and the interval."""
        self._end(trial, "COMPLETE", value, {LOW: low, HIGH: high, SECONDS: seconds})

    def fail(self, trial: Trial, reason: str, seconds: float) -> None:
        """Ends the trial without a value."""
        self._end(trial, "FAIL", None, {REASON: reason[:2000], SECONDS: seconds})

    def release(self, trial: Trial) -> None:
        """Leaves an interrupted trial to the next sweep."""
        with self._turn:
            self._active.discard(trial.number)

    def _end(self, trial: Trial, state: str, value: float | None, attributes: Mapping[str, Any]) -> None:
        from optuna.trial import TrialState

        with self._turn:
            row = self._write(trial)
            for name, attribute in attributes.items():
                if attribute is not None:
                    row.set_user_attr(name, attribute)
            self.optuna.tell(row.number, value, TrialState[state])
            self._active.discard(trial.number)

    def _begin(self, trial: Trial) -> Trial:
        self._active.add(trial.number)
        return trial

    def _propose(self, number: int) -> Trial:
        from optuna.trial import TrialState, create_trial

        proposed = propose(self._sweep, self._rows(), number)
        self.optuna.add_trial(
            create_trial(
                state=TrialState.RUNNING,
                params=proposed.params,
                distributions=proposed.distributions,
                system_attrs=proposed.system_attrs,
                user_attrs={TRIAL: number},
            )
        )
        return self._read()[number]

    def _resume(self, paused: Trial) -> Trial:
        """Adds a row for a paused trial that continues."""
        from optuna.trial import TrialState, create_trial

        row = self.last_rows()[paused.number - 1]
        kept = {name: value for name, value in row.user_attrs.items() if name in (TRIAL, FLOW_RUN)}
        self.optuna.add_trial(
            create_trial(
                state=TrialState.RUNNING,
                params=row.params,
                distributions=row.distributions,
                intermediate_values=row.intermediate_values,
                system_attrs=row.system_attrs,
                user_attrs={**kept, RESUMED_AFTER: max(paused.evaluations)},
            )
        )
        return self._read()[paused.number]

    def _rows(self) -> Sequence[FrozenTrial]:
        return self.optuna.get_trials(deepcopy=False)

    def _write(self, trial: Trial) -> optuna.Trial:
        """The trial's last row, to be written."""
        import optuna

        return optuna.Trial(self.optuna, self.last_rows()[trial.number - 1]._trial_id)

    def _read(self) -> dict[int, Trial]:
        """The trials by number: each as its last row has it."""
        found: dict[int, Trial] = {}
        seconds: dict[int, float] = {}
        for row in self._rows():
            number = row.user_attrs[TRIAL]
            if row.state.is_finished():
                seconds[number] = seconds.get(number, 0.0) + row.user_attrs.get(SECONDS, 0.0)
            found[number] = self._trial(row, number, seconds.get(number, 0.0))
        return dict(sorted(found.items()))

    def _trial(self, row: FrozenTrial, number: int, seconds: float) -> Trial:
        states: dict[str, TrialState] = {"COMPLETE": "completed", "PRUNED": "paused", "FAIL": "failed"}
        attributes = row.user_attrs
        return Trial(
            number=number,
            settings=settings_from(self._sweep, row.params, number),
            state=states.get(row.state.name, "running" if number in self._active else "interrupted"),
            evaluations=dict(row.intermediate_values),
            value=row.value if row.state.name == "COMPLETE" else None,
            low=attributes.get(LOW),
            high=attributes.get(HIGH),
            resumed_after=attributes.get(RESUMED_AFTER, 0),
            flow_run_id=attributes.get(FLOW_RUN),
            seconds=seconds,
            reason=attributes.get(REASON),
        )

    def _build_pruner(self) -> Pruner:
        name, values = settings_of(self._sweep.pruner, PRUNERS)
        if name == "none":
            return NoPruner()
        if name in ("asha", "hyperband"):
            return SuccessiveHalving(self.rank, **values)
        pruner = build_optuna_pruner(name, values)
        return OptunaPruner(lambda number: pruner.prune(self.optuna, self.last_rows()[number - 1]))


@contextlib.contextmanager
def only_sweep(key: str) -> Iterator[None]:
    """Keeps other processes of this home from running the study in the block. Raises UserError if one does."""
    folder = home() / "sweeps" / key
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with exclusive_lock(folder / "lock") as is_ours:
        if not is_ours:
            message = "another process runs this sweep over this home: wait for its end, or stop it."
            raise UserError.of("sweep", "sweep", message)
        yield


def _open_storage(journal: Path) -> BaseStorage:
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    if url := os.environ.get(SWEEPS):
        try:
            return RDBStorage(url)
        except Exception as error:
            reason = without_credentials(first_line(error))
            message = f"the database of studies cannot be used ({reason}): correct the URL, or leave it out."
            raise UserError.of("sweep", SWEEPS, message) from error
    _remove_cut_line(journal)

    class WholeLines(JournalFileBackend):
        """Leaves no part of a line on a full disk: a line that follows it could not be read."""

        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            size = journal.stat().st_size
            try:
                super().append_logs(logs)
            except OSError:
                os.truncate(journal, size)
                raise

    return JournalStorage(WholeLines(str(journal), _NoLock()))  # type: ignore[arg-type]


class _NoLock:
    """Optuna's own locks outlive a process that is killed; `only_sweep` keeps other processes out."""

    def acquire(self) -> bool:
        """True."""
        return True

    def release(self) -> None:
        """Does nothing."""


def _remove_cut_line(journal: Path) -> None:
    """Removes a last line that a kill has cut: Optuna refuses to read anything after it."""
    with contextlib.suppress(FileNotFoundError), journal.open("rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
