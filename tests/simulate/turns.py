"""The scene of turns: processes of one home want one lock, and machines want one lease, again and again.

Promises:

- One process at a time holds the lock, also if one waits for a lock file that its holder removes.
- Without faults, one machine at a time holds the lease, however long it works.
- A process takes a lease for its own (`is_held`) for at most STALE_S / 2 after it was written in its name. It may be
  another's before that: a waiter that found it stale removes it without a condition, as `tasks/shared_store/leases.py`
  says.
- Every process ends.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field

from tasks.home import home
from tasks.locks import FlockManager
from tasks.shared_store.bucket import Bucket, BucketError
from tasks.shared_store.leases import STALE_S, Leases
from tests.simulate.bucket import ObjectStore, as_obstore
from tests.simulate.world import Machine, Process, World

LOCK, STAGE, KEY = "fit/1/record", "fit", "1"


@dataclass
class Turns:
    """The scene."""

    world: World
    inside: Process | None = None
    """The process that holds the lock."""
    holders: list[Process] = field(default_factory=list)
    """The processes that have got the lease and have not ended it."""
    written: dict[str, float] = field(default_factory=dict)
    """The time of the last write of a lease in the name of each owner."""

    def __post_init__(self) -> None:
        world, draw = self.world, self.world.random
        world.faults.full_disk = 0.0  # no file is written
        self.objects = ObjectStore(world, on_write=self._note_owner)
        if draw.random() < 0.3:
            world.faults.budget, world.faults.network_s = 0, 0.0
        self.is_calm = not world.faults.budget and not world.faults.network_s
        self.wants_lease = draw.random() < 0.5
        self.work_s = draw.choice((1.0, 2 * STALE_S)) if self.wants_lease else draw.choice((0.0, 0.001, 0.1))
        machines = [world.add_machine(f"m{number}") for number in range(draw.choice((2, 3)) if self.wants_lease else 1)]
        program = self._lease if self.wants_lease else self._lock
        for machine in machines:
            for _ in range(1 if self.wants_lease else draw.choice((2, 3, 4))):
                self._start(machine, program)
            machine.on_start.append(functools.partial(self._start, machine, program))

    def _start(self, machine: Machine, program: object) -> None:
        self.world.start(machine, "turn", program)  # type: ignore[arg-type]

    def _lock(self) -> None:
        world = self.world
        for _ in range(world.random.choice((2, 5))):
            locks, process = FlockManager(home() / "locks"), world.process
            locks.acquire_lock(LOCK, "holder")
            if (other := self.inside) is not None and other.is_alive:
                raise world.broken(f"{process.name} and {other.name} hold the lock at once")
            self.inside = process
            world.sleep(world.random.uniform(0, self.work_s))
            self.inside = None if self.inside is process else self.inside
            world.count("locks held")
            locks.release_lock(LOCK, "holder")

    def _note_owner(self, name: str, content: bytes, created: bool) -> None:
        self.written[json.loads(content)["owner"]] = self.world.now

    def _lease(self) -> None:
        world, bucket = self.world, Bucket("s3://simulated")
        for _ in range(world.random.choice((1, 2))):
            leases, process = Leases(bucket), world.process
            try:
                leases.acquire(STAGE, KEY, lambda: False)
            except BucketError:
                world.count("gave up")
                return
            if self.is_calm and (others := [other.name for other in self.holders if other.is_alive]):
                raise world.broken(f"{process.name} and {others[0]} hold the lease, and there is no fault")
            self.holders.append(process)
            ends = world.now + world.random.uniform(0, self.work_s)
            while world.now < ends:
                world.sleep(1.0)
                if leases.is_held(STAGE, KEY) and world.now >= self.written[leases.owner] + STALE_S / 2:
                    raise world.broken(f"{process.name} takes a lease for its own that it has not written for long")
            self.holders.remove(process)
            world.count("leases held")
            leases.release(STAGE, KEY)


def play(world: World) -> None:
    """One seed."""
    scene = Turns(world)
    with as_obstore(scene.objects):
        world.run()
