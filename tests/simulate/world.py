"""A simulated world: machines with a disk, processes with threads, and one clock, in a single thread.

Each thread of a simulated process is a greenlet. Exactly one runs at a time. Each call of the system (see
`system_calls.py`) and each request to the bucket is a step: there the world may let another thread run, kill the
process, cut the power of its machine, fill its disk or suspend the process. Random numbers of one seed decide, so a
seed always gives the same steps.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from greenlet import getcurrent, greenlet

from tests.simulate.disk import Disk, OpenFile

START_S = 1.8e9
MOST_STEPS = 60_000
"""Steps after which a seed has made no progress."""


class Killed(BaseException):
    """Ends the threads of a process that was killed: no code of the product catches it."""


class Violation(Exception):
    """A promise that the code under simulation did not keep."""


@dataclass
class Faults:
    """The probability of each fault at a step, and their greatest number in all."""

    kill: float = 0.0
    power_loss: float = 0.0
    full_disk: float = 0.0
    suspend: float = 0.0
    partition: float = 0.0
    server_error: float = 0.0
    """Probabilities of requests to the bucket or to MLflow, as the two below."""
    lost_answer: float = 0.0
    late: float = 0.0
    network_s: float = 0.0
    """The time from which the network and its servers answer."""
    switch: float = 0.3
    budget: int = 6

    @classmethod
    def draw(cls, random: Random) -> Faults:
        """Some kinds of faults, at some rate. Seeds that have few kinds find what a mixture of all would hide."""

        def rate(*rates: float) -> float:
            return random.choice((0.0, *rates))

        return cls(
            kill=rate(0.002, 0.01),
            power_loss=rate(0.002, 0.01),
            full_disk=rate(0.0, 0.005),
            suspend=rate(0.0, 0.002, 0.01),
            partition=rate(0.0, 0.005),
            server_error=rate(0.0, 0.05),
            lost_answer=rate(0.0, 0.05),
            late=rate(0.0, 0.05),
            network_s=random.choice((0.0, 10.0, 60.0, 300.0)),
            switch=random.choice((0.05, 0.3, 0.8)),
            budget=random.choice((0, 1, 2, 6)),
        )


class Task(greenlet):
    """A thread of a simulated process. It is ready from `ready_at` on, or as soon as `waits` returns true."""

    def __init__(self, process: Process, name: str, target: Callable[[], Any]) -> None:
        super().__init__(self._run, process.world.hub)
        self.process, self.name, self._target = process, name, target
        self.ready_at, self.waits = 0.0, None  # type: float, Callable[[], object] | None
        self.ended = False
        process.tasks.append(self)

    def _run(self) -> None:
        try:
            self._target()
        except Killed:
            pass
        except BaseException as error:
            if self.process.is_alive:
                self.process.world.fail(f"{self.process.name}, thread {self.name}: {error!r}", error)
        finally:
            self.ended = True


@dataclass
class Process:
    """A process: its threads, and the files that it has open."""

    world: World
    machine: Machine
    name: str
    number: int
    tasks: list[Task] = field(default_factory=list)
    files: dict[int, OpenFile] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)
    """Its values of variables of modules, by name: see `OfProcess`."""
    is_alive: bool = True
    suspended_until: float = 0.0

    def end(self) -> None:
        """Ends the process at once, as SIGKILL does: its locks are released, its files closed, no code of it runs."""
        self.is_alive = False
        for file in self.files.values():
            file.close()
        self.files.clear()


@dataclass
class Machine:
    """A machine: its disk and its clocks, of which each runs differently."""

    world: World
    name: str
    disk: Disk
    wall_skew_s: float
    monotonic_start_s: float
    processes: list[Process] = field(default_factory=list)
    partitioned_until: float = 0.0
    on_power_loss: list[Callable[[], None]] = field(default_factory=list)
    on_start: list[Callable[[], None]] = field(default_factory=list)
    """Called when the machine is up again after a power loss, or one of its processes was killed."""

    @property
    def home(self) -> str:
        """The home folder of its processes."""
        return f"{self.disk.root_path}/home"


class World:
    """The clock and the scheduler of one seed."""

    current: World | None = None

    def __init__(self, seed: int, faults: Faults | None = None, trace: bool = False) -> None:
        self.seed, self.random = seed, Random(seed)
        self.faults = faults or Faults.draw(self.random)
        self.now, self.steps = START_S, 0
        self.machines: dict[str, Machine] = {}
        self.trace: list[tuple[float, str, str]] | None = [] if trace else None
        self._digest = hashlib.blake2b(digest_size=8)
        self.violation: Violation | None = None
        self.counts: dict[str, int] = {}
        self.hub = getcurrent()
        self._dead: list[Process] = []
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    # --- machines and processes ---

    def add_machine(self, name: str) -> Machine:
        """A machine with an empty disk."""
        disk = Disk(f"/simulated/{name}", self)
        machine = Machine(self, name, disk, self.random.uniform(-5, 5), self.random.uniform(0, 1e6))
        self.machines[name] = machine
        return machine

    def start(self, machine: Machine, name: str, target: Callable[[], Any]) -> Process:
        """Starts a process, whose other threads end with its main one."""
        from tasks.home import with_this_home

        self._number += 1
        process = Process(self, machine, f"{machine.name}.{name}.{self._number}", 1000 + self._number)
        machine.processes.append(process)
        os.environ["FINETUNE_HOME"] = machine.home
        inside = with_this_home(target)

        def main() -> None:
            inside()
            process.end()
            self._dead.append(process)

        Task(process, "main", main)
        return process

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Calls it at that time, outside any process."""
        self._number += 1
        self._calls.append((self.now + delay_s, self._number, call))

    @property
    def process(self) -> Process:
        """The process that runs now."""
        return getcurrent().process  # type: ignore[attr-defined]

    # --- what a thread may do ---

    def step(self, what: str) -> None:
        """A point at which the thread may be interrupted. Called before each call of the system takes effect."""
        task = getcurrent()
        process = task.process  # type: ignore[attr-defined]
        if not process.is_alive:
            raise Killed
        self.steps += 1
        if self.steps > MOST_STEPS:
            self.fail(f"no end after {MOST_STEPS} steps")
            raise Killed
        self.note(process.name, what)
        self.now += 1e-4
        draw = self.random.random()
        if draw < self.faults.switch:
            task.ready_at = self.now
            self._switch(process)
        elif self.faults.budget > 0:
            self._perhaps_fail(process, draw)

    def sleep(self, seconds: float) -> None:
        """Sleeps on the simulated clock."""
        self.wait(None, seconds)

    def wait(self, until: Callable[[], object] | None, timeout_s: float = math.inf) -> None:
        """Waits until the condition holds or the time is over."""
        task = getcurrent()
        if not task.process.is_alive:  # type: ignore[attr-defined]
            raise Killed
        task.ready_at, task.waits = self.now + timeout_s, until  # type: ignore[attr-defined]
        self._switch(task.process)  # type: ignore[attr-defined]
        task.waits = None  # type: ignore[attr-defined]

    def _switch(self, process: Process) -> None:
        self.hub.switch()
        if not process.is_alive:
            raise Killed

    # --- faults ---

    @property
    def network_is_bad(self) -> bool:
        """Whether requests may fail."""
        return self.now < START_S + self.faults.network_s

    def _perhaps_fail(self, process: Process, draw: float) -> None:
        draw, faults, machine = (draw - self.faults.switch) / (1 - self.faults.switch), self.faults, process.machine
        for name in ("kill", "power_loss", "full_disk", "suspend", "partition"):
            if draw < (rate := getattr(faults, name)):
                break
            draw -= rate
        else:
            return
        faults.budget -= 1
        self.count(name)
        self.note(process.name, f"--- {name} ---")
        if name == "kill":
            self.kill(process)
            raise Killed
        if name == "power_loss":
            self.cut_power(machine)
            raise Killed
        if name == "full_disk":
            machine.disk.full_until = self.now + self.random.uniform(0.01, 3)
        elif name == "suspend":
            process.suspended_until = self.now + self.random.choice((1.0, 10.0, 30.0, 70.0))
            getcurrent().ready_at = self.now  # type: ignore[attr-defined]
            self._switch(process)
        else:
            machine.partitioned_until = self.now + self.random.choice((1.0, 30.0, 90.0))

    def kill(self, process: Process) -> None:
        """Kills a process. Another one starts later in its place."""
        process.end()
        self._dead.append(process)
        self._restart(process.machine, self.random.choice((0.0, 0.1, 5.0, 60.0)))

    def cut_power(self, machine: Machine) -> None:
        """Ends all processes of the machine. Its disk keeps what was synced, and some of the rest."""
        for process in machine.processes:
            if process.is_alive:
                process.end()
                self._dead.append(process)
        machine.disk.lose_power(self.random)
        for call in machine.on_power_loss:
            call()
        self._restart(machine, self.random.choice((1.0, 60.0)))

    def _restart(self, machine: Machine, delay_s: float) -> None:
        for call in machine.on_start:
            self.call_later(delay_s, call)

    # --- the run of a seed ---

    def run(self) -> None:
        """Runs until all processes have ended. Raises Violation."""
        World.current = self
        try:
            while self.violation is None:
                if self._dead:
                    self._reap()
                tasks = [task for machine in self.machines.values() for one in machine.processes for task in one.tasks]
                ready = [task for task in tasks if self._is_ready(task)]
                due = [entry for entry in self._calls if entry[0] <= self.now] if self._calls else ()
                if due:
                    self._calls.remove(due[0])
                    due[0][2]()
                elif ready:
                    task = ready[int(self.random.random() * len(ready))]
                    task.switch()
                    if task.ended and task in task.process.tasks:
                        task.process.tasks.remove(task)
                elif not self._advance(tasks):
                    break
            for machine in self.machines.values():
                for process in machine.processes:
                    process.end()
                    self._dead.append(process)
            self._reap()
        finally:
            World.current = None
        if self.violation:
            raise self.violation

    def _is_ready(self, task: Task) -> bool:
        if task.process.suspended_until > self.now:
            return False
        return task.ready_at <= self.now or bool(task.waits and task.waits())

    def _advance(self, tasks: list[Task]) -> bool:
        """Moves the clock to the next time at which something happens. Returns whether there is one."""
        times = [max(task.ready_at, task.process.suspended_until) for task in tasks]
        times += [task.process.suspended_until for task in tasks if task.process.suspended_until > self.now]
        times += [time for time, _, _ in self._calls]
        if not tasks and not self._calls:
            return False
        if (earliest := min(times)) == math.inf:
            names = ", ".join(f"{task.process.name} {task.name}" for task in tasks)
            self.fail(f"deadlock: {names} wait for ever")
            return False
        self.now = earliest
        return True

    def _reap(self) -> None:
        """Unwinds the threads of processes that have ended. Their calls of the system have no effect."""
        while self._dead:
            process = self._dead.pop()
            for task in process.tasks:
                if not task.ended and task is not getcurrent():
                    task.throw(Killed) if task else None
            process.tasks.clear()
            if process in process.machine.processes:
                process.machine.processes.remove(process)

    # --- records ---

    def note(self, who: str, what: str) -> None:
        """Adds a line to the log of steps."""
        self._digest.update(f"{self.now} {who} {what}\n".encode())
        if self.trace is not None:
            self.trace.append((self.now - START_S, who, what))

    @property
    def digest(self) -> str:
        """Of the log of steps: the same each time that the seed is played."""
        return self._digest.hexdigest()

    def count(self, name: str) -> None:
        """Counts an event for the report."""
        self.counts[name] = self.counts.get(name, 0) + 1

    def broken(self, message: str) -> Violation:
        """A violation to raise. It counts even if the code under simulation catches it."""
        self.fail(message)
        return Violation(message)

    def fail(self, message: str, cause: BaseException | None = None) -> None:
        """Records the first violation and ends the seed."""
        if self.violation is None:
            self.violation = cause if isinstance(cause, Violation) else Violation(message)
            self.violation.__cause__ = None if cause is self.violation else cause


def process() -> Process:
    """The simulated process that runs now."""
    return getcurrent().process  # type: ignore[attr-defined]


class OfProcess:
    """A variable of a module, a set or a dictionary, in place of the module's: each simulated process has its own, and
    begins with an empty one."""

    def __init__(self, name: str, kind: Callable[[], Any]) -> None:
        self._name, self._kind = name, kind

    def _value(self) -> Any:
        return process().variables.setdefault(self._name, self._kind())

    def __contains__(self, item: object) -> bool:
        return item in self._value()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value(), name)


def is_simulated() -> bool:
    """Whether this is a thread of a simulated process."""
    return type(getcurrent()) is Task


def world() -> World:
    """The world of the seed that runs."""
    assert World.current is not None
    return World.current
