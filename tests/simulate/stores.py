"""The scene of artifacts: machines that share a bucket run the same stages, clean up, and fail.

A process runs stages as the executor does, under the stage's lock: it finds the artifact in its home or in the bucket,
or takes the lease and makes it; then it uploads it. Other processes remove what is not needed from homes and from the
bucket. Promises, checked while the seed runs and after a last power loss of every machine:

- An artifact that is read has the bytes that one maker gave it.
- An artifact that a process has stored is there after every fault, until a removal takes it. A killed process and a
  power loss leave an artifact whole or absent.
- An artifact whose upload was reported is in the bucket, whole, until a removal takes it.
- A manifest in the bucket is never replaced, and a home makes an artifact once; without faults, one machine does.
- One process of a home at a time is in the section that a lock protects.
- No run of a home is running when its needs are read, right before what is not needed is set aside.
- Every process ends, without an error that is not its user's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tasks.cache import garbage_collection, store
from tasks.cache.executor import artifact_body
from tasks.cache.results import Artifact
from tasks.cache.stage import Work
from tasks.home import home
from tasks.locks import FlockManager
from tasks.shared_store.bucket import Bucket, BucketError
from tasks.shared_store.bucket_remote import BucketRemote
from tasks.shared_store.leases import Leases
from tasks.shared_store.maintenance import make_plan, read_content, remove
from tasks.shared_store.shared_artifacts import manifest_name, parse_manifest
from tests.simulate.bucket import ObjectStore, as_obstore
from tests.simulate.disk import Node, is_full
from tests.simulate.world import START_S, Machine, Process, World
from training.problems import UserError

STAGES = ("fit", "predict")
GRACE = timedelta(seconds=100)


def _bucket() -> Bucket:
    return Bucket("s3://simulated")


def content_of(stage: str, key: str, path: str, variant: int) -> bytes:
    """The bytes of a file. Two makers of one artifact may give it different ones."""
    if path.startswith("model/shared"):
        return b"the same in all artifacts of all stages"
    return f"{stage} {key[:4]} {path} {variant} ".encode() * 3


PATHS = ("model/weights", "model/shared", "rows.json", "log/events.jsonl")


class Stores:
    """The scene."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.objects = ObjectStore(world, on_write=self._check_write)
        draw = world.random
        self.keys = [f"{number:x}" * 40 for number in range(1, draw.choice((2, 3)))]
        self.machines = [world.add_machine(f"m{number}") for number in range(draw.choice((1, 2, 2, 3)))]
        self.stored: dict[tuple[str, str, str], str] = {}
        """Artifacts that a process has stored: machine, stage and key, and the digest."""
        self.kept: dict[tuple[str, str], float] = {}
        """Artifacts whose upload was reported: the time of the report."""
        self.inside: dict[tuple[str, str], Process] = {}
        self.runs: list[Process] = []
        """Runs that use the home of their machine."""
        self.needed = set(self.keys) if draw.random() < 0.7 else {self.keys[0]}
        self.needed_from_s = 0.0
        """The time before which runs make only what is not needed later."""
        self.made: dict[tuple[str, str], int] = {}
        self.is_calm = not world.faults.budget and not world.faults.network_s
        self.damages = 0
        """Files of homes that were damaged so far."""
        self.has_damage = not self.is_calm and draw.random() < 0.3
        processes = draw.choice((1, 1, 2))
        # Processes of one home wait by looking often: a long wait would be most of the seed.
        durations_s = (0.0, 1.0, 120.0) if processes == 1 else (0.0, 1.0, 3.0)
        self.makes = {key: draw.choice(durations_s) for key in self.keys}
        for machine in self.machines:
            for _ in range(processes):
                self._start(machine, self._run)
            machine.on_start.append(functools.partial(self._start, machine, self._run))
        if self.has_damage:
            for _ in range(3):
                self._later(draw.choice((1.0, 20.0, 60.0)), draw.choice((self._damage_home, self._damage_bucket)))
                self._later(draw.choice((30.0, 90.0)), functools.partial(self._start, self.machines[0], self._run))
        if not self.is_calm and draw.random() < 0.3:
            machine = draw.choice(self.machines)
            self._later(draw.choice((0.0, 5.0, 150.0)), lambda: self._start(machine, self._clean_home))
        if not self.is_calm and draw.random() < 0.4:
            for machine in draw.sample(self.machines, draw.randint(1, len(self.machines))):
                at_s = draw.choice((0.0, 5.0, 130.0, 200.0))
                self._later(at_s, functools.partial(self._start, machine, self._clean_bucket))
                other = draw.choice(self.machines)  # uploads while the other removes
                self._later(at_s + draw.uniform(0, 2), functools.partial(self._start, other, self._run))
            if len(self.needed) < len(self.keys) and draw.random() < 0.5:
                self.needed_from_s = 100.0

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.world.call_later(delay_s, call)

    def _start(self, machine: Machine, program: Callable[[Machine], None]) -> None:
        def main() -> None:
            try:
                program(machine)
            except (UserError, OSError) as error:
                if not is_full(error):
                    raise
                self.world.count("ended by a full disk")

        self.world.start(machine, program.__name__.strip("_"), main)

    # --- processes ---

    def _run(self, machine: Machine) -> None:
        """A run of all stages."""
        world, reported = self.world, list[tuple[str, str]]()
        with garbage_collection.in_use():
            self.runs.append(world.process)
            try:
                remote = BucketRemote(_bucket(), Leases(_bucket()))
                remote.deliver_earlier()
                keys = [(stage, key) for key in self.keys for stage in STAGES]
                if world.now < START_S + self.needed_from_s:
                    keys = [place for place in keys if place[1] not in self.needed]
                world.random.shuffle(keys)
                for stage, key in keys[: world.random.choice((1, 2, len(keys)))]:
                    damages = self.damages
                    ref, made = self._stage(machine, remote, stage, key)
                    self._read(machine, ref, damages)
                    remote.upload(ref, made=made)
                    reported.append((stage, key))
                warnings = remote.end_run(wait=True)
            finally:
                self.runs.remove(world.process)
        if not warnings:
            for place in reported:
                self.kept.setdefault(place, world.now)
            world.count("runs without warnings")

    def _stage(self, machine: Machine, remote: BucketRemote, stage: str, key: str) -> tuple[Artifact, bool]:
        """The artifact, and whether this machine has made it."""
        world = self.world
        locks, name = FlockManager(home() / "locks"), f"{stage}/{key}/record"
        locks.acquire_lock(name, "holder")
        section, process = (machine.name, name), world.process
        if (other := self.inside.get(section)) is not None and other.is_alive:
            raise self.world.broken(f"{process.name} and {other.name} hold the lock {name} at once")
        self.inside[section] = process
        try:
            place = store.folder(stage, key)
            work = Work(key, place, "run", (), stage, state="cached")
            prepared = SimpleNamespace(run=lambda work: self._make(machine, stage, key, work.out))
            named = SimpleNamespace(name=stage, description="")
            result = artifact_body(named, prepared, work, {"key": key}, False, remote)()  # type: ignore[arg-type]
            ref: Artifact = result if isinstance(result, Artifact) else result.data
            self.stored[machine.name, stage, key] = ref.digest
        finally:
            self.inside.pop(section, None) if self.inside.get(section) is process else None
            locks.release_lock(name, "holder")
        return ref, work.state != "cached"

    def _make(self, machine: Machine, stage: str, key: str, out: Path) -> Any:
        world = self.world
        if (machine.name, stage, key) in self.stored:
            raise self.world.broken(f"{stage} {key[:4]} is made again on {machine.name}, which has stored it")
        world.count("made")
        self.made[stage, key] = self.made.get((stage, key), 0) + 1
        if self.is_calm and self.made[stage, key] > 1:
            raise self.world.broken(f"{stage} {key[:4]} is made by two machines, and there is no fault")
        variant = world.random.randrange(2)
        if self.makes[key]:
            world.sleep(world.random.uniform(0, self.makes[key]))
        for path in PATHS:
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            (out / path).write_bytes(content_of(stage, key, path, variant))
        return {"rows": variant}

    def _clean_home(self, machine: Machine) -> None:
        """Removes what is not needed from the home."""

        def find_needs() -> garbage_collection.Needs:
            for run in self.runs:
                if run.machine is machine and run.is_alive:
                    raise self.world.broken(f"{machine.name} is cleaned while {run.name} uses it")
            needed = {key: ["a run"] for key in self.needed}
            for place in [*self.stored]:
                if place[0] == machine.name and place[2] not in self.needed:
                    del self.stored[place]
            return garbage_collection.Needs(needed, self.keys, {})

        try:
            pieces = garbage_collection.find_pieces(
                garbage_collection.Needs({key: ["a"] for key in self.needed}, (), {})
            )
            garbage_collection.remove([piece.path for piece in pieces if not piece.needed_by], find_needs)
            self.world.count("homes cleaned")
        except UserError as error:
            if "a run is running" not in str(error):
                raise

    def _clean_bucket(self, machine: Machine) -> None:
        """Removes what is not needed from the bucket."""
        try:
            content = read_content(_bucket())
            plan = make_plan(_bucket(), content, self.needed, _bucket().now() - GRACE)
            remove(_bucket(), Leases(_bucket()), lambda: self.needed, plan.entries, GRACE)
            self.world.count("buckets cleaned")
        except BucketError as error:
            self.world.note(machine.name, f"removal ended: {error}")

    # --- damage ---

    def _damage_home(self) -> None:
        """Changes a byte of a stored file: the disk is bad, or somebody edits it."""
        for name, stage, key in sorted(self.stored):
            file = self._file(name, stage, key, self.world.random.choice((*PATHS, "model/shared", "model/shared")))
            if file is not None and file.data:
                self.damages += 1
                file.data[0] ^= 1
                file.mtime_ns = file.ctime_ns = int(self.world.now * 1e9)
                self.world.note(name, f"--- damage of {stage} {key[:4]} ---")
                for place in [*self.stored]:  # artifacts share files by links
                    if place[0] == name:
                        del self.stored[place]
                return

    def _file(self, name: str, stage: str, key: str, path: str) -> Node | None:
        disk = self.world.machines[name].disk
        try:
            return disk.find(f"{disk.root_path}/home/artifacts/{stage}/{key}/{path}")
        except OSError:  # a run replaces it
            return None

    def _damage_bucket(self) -> None:
        names = sorted(name for name in self.objects.objects if name.startswith("objects/"))
        if names:
            name = self.world.random.choice(names)
            content, time_s = self.objects.objects[name]
            self.objects.objects[name] = (bytes([content[0] ^ 1]) + content[1:], time_s)
            self.world.note("bucket", f"--- damage of {name} ---")

    # --- promises ---

    def _check_write(self, name: str, content: bytes, created: bool) -> None:
        if name.startswith("artifacts/"):
            if not created:
                raise self.world.broken(f"{name} was written without the condition that it is absent")
            if (found := self.objects.objects.get(name)) and found[0] != content:
                raise self.world.broken(f"{name} was replaced")

    def _read(self, machine: Machine, ref: Artifact, damages: int) -> None:
        """Checks the bytes of an artifact that a process may use, unless there was damage since it was verified."""
        contents = {path: (ref.path / path).read_bytes() for path in PATHS}
        right = [{path: content_of(ref.stage, ref.key, path, variant) for path in PATHS} for variant in (0, 1)]
        if contents not in right and damages == self.damages:
            raise self.world.broken(f"{machine.name} read wrong bytes as {ref.stage} {ref.key[:4]}: {contents}")

    def check_end(self) -> None:
        """Checks what is left after a last power loss of every machine, when nothing runs any more."""
        world = self.world
        world.faults.budget = 0
        for machine in self.machines:
            machine.disk.lose_power(world.random)
            world.start(machine, "check", functools.partial(self._check_home, machine))
        world.run()
        for stage, key in () if self.has_damage else self.kept:
            if key in self.needed:
                self._check_object(stage, key)

    def _check_home(self, machine: Machine) -> None:
        if not self.has_damage:
            for above in (home() / "artifacts").glob("[!.]*"):
                for place in above.glob("[!.]*"):
                    self._find(machine, above.name, place.name)
            if store.count_damaged():
                raise self.world.broken(f"{machine.name} has damaged artifacts, and nothing has damaged them")
        for (name, stage, key), digest in self.stored.items():
            if name == machine.name:
                ref = self._find(machine, stage, key)
                if ref is None or ref.digest != digest:
                    raise self.world.broken(f"{name} stored {stage} {key[:4]}, and after a power loss it has {ref}")
                self._read(machine, ref, self.damages)

    def _find(self, machine: Machine, stage: str, key: str) -> Artifact | None:
        try:
            return store.find(stage, key)
        except store.Damaged as damage:
            raise self.world.broken(f"after a power loss, {damage}") from damage

    def _check_object(self, stage: str, key: str) -> None:
        objects = self.objects.objects
        manifest = objects.get(manifest_name(stage, key))
        if manifest is None:
            raise self.world.broken(f"the upload of {stage} {key[:4]} was reported, and the bucket lacks its manifest")
        variant = json.loads(manifest[0])["ref"]["result"]["rows"]
        for file in parse_manifest(manifest[0], stage, key)[1]:
            if file.object not in objects:
                raise self.world.broken(
                    f"the upload of {stage} {key[:4]} was reported, and the bucket lacks {file.path}"
                )
            if file.path in PATHS and objects[file.object][0] != content_of(stage, key, file.path, variant):
                raise self.world.broken(f"{file.path} of {stage} {key[:4]} has other bytes in the bucket")


def play(world: World) -> None:
    """One seed."""
    scene = Stores(world)
    with as_obstore(scene.objects):
        world.run()
        scene.check_end()
