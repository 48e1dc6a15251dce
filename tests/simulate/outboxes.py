"""The scene of outboxes: runs write entries, and deliver them to a tracker that fails and is away.

A killed run is resumed, or ended and delivered by another process of the home. Promises, checked when nothing runs any
more and a last process has delivered what is left:

- Each entry that was put arrives. After a power loss, only those that were put since: the outbox is not synced.
- A run's end arrives, after its other entries.
"""

from __future__ import annotations

import errno
import functools
import math
import threading
from collections.abc import Mapping
from typing import Any

from tasks.tracking.outbox import Outbox
from tasks.tracking.tracker import Delivery, Run, Tracker, deliver_killed_runs
from tests.simulate.world import World


class NoAnswer(Exception):
    """The tracker did not answer."""


class Outboxes:
    """The scene."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.put: dict[str, list[str]] = {}
        """The names of the entries of each run, in order."""
        self.arrived: dict[str, list[str]] = {}
        self.disk_was_full = False
        self._number = 0
        self.machine = world.add_machine("m0")
        self.machine.on_power_loss.append(self.put.clear)
        self.runs = ["run1", "run2"][: world.random.choice((1, 2))]
        for run in self.runs:
            self._start(run)
        for _ in range(world.random.choice((0, 1, 2))):
            world.call_later(world.random.choice((0.5, 5.0, 60.0)), self._start_delivery)
        self.machine.on_start.append(self._start_again)

    def _start(self, run: str) -> None:
        def main() -> None:
            try:
                self._run(run)
            except OSError as error:  # it ends the run
                self.disk_was_full = error.errno == errno.ENOSPC
                if not self.disk_was_full:
                    raise

        self.world.start(self.machine, run, main)

    def _start_delivery(self) -> None:
        self.world.start(self.machine, "deliver", self._deliver)

    def _start_again(self) -> None:
        if self.world.random.random() < 0.5:
            self._start(self.world.random.choice(self.runs))
        else:
            self._start_delivery()

    # --- processes ---

    def _run(self, run: str) -> None:
        world, outbox = self.world, Outbox(run)
        with outbox.claim_run(math.inf):
            self._put(outbox, "start", experiment="demo")
            thread = threading.Thread(target=functools.partial(self._deliver_during, outbox), daemon=True)
            thread.start()
            for _ in range(world.random.choice((1, 3, 6))):
                self._number += 1
                self._put(outbox, "tags", values={f"tag{self._number}": "v"})
                world.sleep(world.random.choice((0.0, 0.1, 1.0)))
            self._put(outbox, "end", status="FINISHED")
            thread.join()
            if not outbox.unwritten:
                with outbox.claim_delivery() as claimed:
                    if claimed:
                        outbox.trim()

    def _deliver_during(self, outbox: Outbox) -> None:
        """As the thread of `RunTracker`."""
        for _ in range(self.world.random.choice((1, 3, 8))):
            self._deliver_once(outbox)
            self.world.sleep(self.world.random.choice((0.1, 1.0)))

    def _deliver_once(self, outbox: Outbox) -> None:
        try:
            with outbox.claim_delivery() as claimed:
                if claimed:
                    Delivery(outbox, self._open(outbox)).deliver()
        except (NoAnswer, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENOSPC:
                raise

    def _deliver(self) -> None:
        try:
            deliver_killed_runs(self._open)
        except (NoAnswer, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENOSPC:
                raise
        except LookupError:  # a run without a start yet
            self.world.count("runs without a start")

    def _put(self, outbox: Outbox, kind: str, **fields: Any) -> None:
        name = next(iter(fields["values"])) if kind == "tags" else kind
        outbox.put(kind, **fields)
        if outbox.unwritten:
            self.disk_was_full = True
        self.put.setdefault(outbox.run, []).append(name)

    def _open(self, outbox: Outbox) -> Tracker:
        return _SimulatedTracker(self, Run(outbox.run, "demo", 0.0))

    # --- promises ---

    def check_end(self) -> None:
        """Delivers what is left, and checks what has arrived."""
        self.world.faults.budget, self.world.faults.network_s = 0, 0.0
        self.machine.disk.full_until = 0.0
        for _ in range(2):
            self._start_delivery()
            self.world.run()
        if self.disk_was_full:
            return
        for run, names in self.put.items():
            arrived = self.arrived.get(run, [])
            if lost := [name for name in names if name not in arrived and name != "end"]:
                raise self.world.broken(f"{run}: {', '.join(lost)} did not arrive; put {names}, arrived {arrived}")
            if arrived[-1:] != ["end"]:
                raise self.world.broken(f"{run}: its end is not the last; put {names}, arrived {arrived}")


class _SimulatedTracker(Tracker):
    title, is_late = "simulated", True

    def __init__(self, scene: Outboxes, run: Run) -> None:
        super().__init__(run, lambda text: None)
        self._scene = scene

    def deliver(self, entry: Mapping[str, Any]) -> None:
        scene, world = self._scene, self._scene.world
        name = next(iter(entry["values"])) if entry["entry"] == "tags" else entry["entry"]
        world.step(f"tracker gets {name}")
        draw = world.random.random() if world.network_is_bad else 1.0
        world.sleep(world.random.choice((0.0, 0.01, 0.1)))
        if draw < world.faults.server_error:
            raise NoAnswer(name)
        arrived = scene.arrived.setdefault(self.run.id, [])
        for one in entry["values"] if entry["entry"] == "tags" else (name,):  # a summary has several tags
            arrived.append(one)
        if draw < world.faults.server_error + world.faults.lost_answer:
            raise NoAnswer(name)


def play(world: World) -> None:
    """One seed."""
    scene = Outboxes(world)
    world.run()
    scene.check_end()
