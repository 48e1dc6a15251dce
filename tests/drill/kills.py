"""Random kills: trainings one after another, in which parts of a run get SIGKILL until all kills are spent."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

from tasks.jobs.retries import RETRIED, TRIES
from tests.drill.compare import Left, left_by, tracking_faults
from tests.drill.ground import WAYS, Ground, Run, victims
from tests.drill.watch import Watch

WAITING = "waiting launcher"
PARTS = ("flow", "fork server", WAITING, "supervisor", "launcher", "rank")
"""Who is drawn. Before there is a launcher or a rank, the next part above it dies in its place."""
SHORT = 2.5
"""Bends the draw of delays towards short ones: many kills come upon one training, since a run that was killed goes on
where it was. By the few long ones it gets through every stage."""
OWN_SERVER_EVERY = 4
"""Of so many trainings, one has runs that start Prefect's server themselves."""
END_WITHIN_S = 900.0
BEFORE_TRAINING = ("start", "load_data", "load_model", "tokenize")
"""Values of `Run.stage`."""


@dataclass
class Undisturbed:
    """A run without kills."""

    left: Left
    seconds: float
    """The shortest that one has taken so far: kills that are drawn from longer might never fall."""


@dataclass
class Kills:
    """The kills, and the differences and faults that followed."""

    by_stage: Counter[tuple[str, str]] = field(default_factory=Counter)
    by_way: Counter[tuple[str, str]] = field(default_factory=Counter)
    trainings: int = 0
    runs: int = 0
    given_up: list[int] = field(default_factory=list)
    """Of each run that gave up a job which was killed again and again, its kills."""
    differences: int = 0
    faults: list[str] = field(default_factory=list)


def undisturbed(ground: Ground, way: str) -> tuple[Undisturbed, Path]:
    """The run that all others are held against, and its home."""
    home = ground.folder / f"undisturbed-{way}"
    run = ground.start(home, *WAYS[way])
    if run.ended_within(END_WITHIN_S):
        raise RuntimeError(f"the undisturbed run failed: {run.ending()}")
    seconds = time.monotonic() - run.started
    return Undisturbed(left_by(home, run.result()), seconds), home


@dataclass(frozen=True)
class Planned:
    """One kill to come."""

    part: str
    after: float
    """The kill's distance from the one before, or from the start: a share of an undisturbed run's duration."""
    which: float
    """Chooses among several ranks, 0 to 1."""


def plan(kills: int, seed: int) -> list[Planned]:
    """The kills, in order; the same for the same seed."""
    draw = random.Random(seed)
    return [Planned(draw.choice(PARTS), draw.random() ** SHORT, draw.random()) for _ in range(kills)]


def random_kills(ground: Ground, watch: Watch, whole: Mapping[str, Undisturbed], kills: int, seed: int) -> Kills:
    """Kills as planned, training after training, taking turns between the ways to train."""
    waiting = plan(kills, seed)[::-1]
    done = Kills()
    for way in cycle(whole):
        if not waiting:
            return done
        done.trainings += 1
        Training(ground, watch, whole[way], way, done).survive(waiting)
    raise AssertionError("there is always a next training")


class Training:
    """One home, from empty to its model, through as many kills as come upon it."""

    def __init__(self, ground: Ground, watch: Watch, whole: Undisturbed, way: str, done: Kills) -> None:
        self._ground, self._watch, self._whole, self._way, self._done = ground, watch, whole, way, done
        self._home = ground.folder / f"home-{done.trainings}"
        self._own_server = done.trainings % OWN_SERVER_EVERY == 0
        self._name = f"training {done.trainings}, {way}"

    def survive(self, waiting: list[Planned]) -> None:
        """Takes kills off the list until the training ends, and compares. A kill of the waiting launcher comes first:
        it waits only before a job has started."""
        first = next((kill for kill in reversed(waiting) if kill.part == WAITING), None)
        waiting.sort(key=lambda kill: kill is first)
        if first is not None:  # with a server at hand, the few rows are ready before the launcher waits for them
            self._own_server = True
        run = self._start()
        began, parts_killed, planned = run.started, 0, len(waiting)
        while True:
            since = time.monotonic()
            delay_s = waiting[-1].after * self._whole.seconds if waiting else END_WITHIN_S
            if waiting and waiting[-1].part == WAITING:
                delay_s = 0.0
            if self._watch.look_until(since + delay_s, run):
                if not waiting:
                    self._fault(f"no end within {END_WITHIN_S:g} s: {run.ending()}")
                    os.kill(run.process.pid, signal.SIGKILL)
                    run.process.wait()
                    return self._watch.condemn(run)
                part = self._kill(run, waiting[-1])
                if part:  # else it has just ended, which is seen next, and the kill falls on a later run
                    waiting.pop()
                    parts_killed += 1
                if part == "flow":
                    self._watch.condemn(run)
                    run, parts_killed = self._start(), 0
                continue
            self._watch.condemn(run)
            if run.process.returncode == 0:
                if len(waiting) == planned:
                    self._whole.seconds = min(self._whole.seconds, time.monotonic() - began)
                return self._compare(run)
            if reason := not_to_be_given_up(run, parts_killed):
                return self._fault(f"{reason}: {run.ending()}")
            self._done.given_up.append(parts_killed)
            print(f"       {self._name}: given up after {parts_killed} kills", flush=True)
            run, parts_killed = self._start(), 0

    def _start(self) -> Run:
        self._done.runs += 1
        return self._ground.start(self._home, *WAYS[self._way], embedded=self._own_server)

    def _kill(self, run: Run, planned: Planned) -> str | None:
        """Kills the wanted part, or one that exists instead. Returns its name; None where the run has ended."""
        above = {
            "rank": ("rank", "program", "launcher", "supervisor"),
            "launcher": ("launcher", "program", "supervisor"),
            WAITING: (WAITING, "supervisor"),
        }
        if planned.part == WAITING:
            _wait_for_launcher(run, planned.which)
        while run.process.poll() is None:
            alive = victims(run.process.pid)
            part = next((part for part in above.get(planned.part, (planned.part,)) if part in alive), "flow")
            stage, pids = run.stage(), alive[part]
            seconds = time.monotonic() - run.started
            try:
                os.kill(pids[int(planned.which * len(pids))], signal.SIGKILL)
            except ProcessLookupError:
                continue  # ended in between: drawn again from the processes alive now
            # The kernel takes a signal to a flow that has just ended: only its exit status shows it.
            if part == "flow" and run.process.wait() != -signal.SIGKILL:
                return None
            number = sum(self._done.by_stage.values()) + 1
            print(f"{number:5}  {self._name}: {part} killed {seconds:.1f} s after the start, in {stage}", flush=True)
            self._done.by_stage[part, stage] += 1
            self._done.by_way[part, self._way] += 1
            return part
        return None

    def _compare(self, run: Run) -> None:
        left = left_by(self._home, run.result())
        differences = self._whole.left.differences(left)
        self._done.differences += len(differences)
        faults = [*differences, *tracking_faults(self._home, run.result(), left.curve)]
        faults += [f"{job} is left" for job in (self._home / "jobs").iterdir()]
        for fault in faults:
            self._fault(fault)
        print(f"       {self._name}: ended with {'the same bytes' if not differences else 'DIFFERENCES'}", flush=True)

    def _fault(self, what: str) -> None:
        print(f"       {self._name}: FAULT: {what}", flush=True)
        self._done.faults.append(f"{self._name}: {what}")


def _wait_for_launcher(run: Run, share: float) -> None:
    """Waits until a launcher waits, and a share of its time, or until the run trains."""
    while run.process.poll() is None and run.stage() in BEFORE_TRAINING:
        if WAITING in victims(run.process.pid):
            return time.sleep(share * 0.3)
        time.sleep(0.02)


def not_to_be_given_up(run: Run, parts_killed: int) -> str | None:
    """Why a run may not have ended as it did after so many kills of its parts; None where a job was given up rightly.

    A job that is killed under the same run again and again is given up; the next run goes on.
    """
    status = run.process.returncode
    kinds = {problem["kind"] for problem in run.result()["problems"]} if run.out.is_file() else set()
    if status == 1 and parts_killed >= TRIES and kinds and kinds <= set(RETRIED):
        return None
    reported = ", ".join(sorted(kinds)) or "no problem"
    return f"exit status {status} after {parts_killed} kills of its parts, with {reported} reported"
