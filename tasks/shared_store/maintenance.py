"""Maintenance of the bucket: what it holds, and the removal of what nothing needs.

Kept are the artifacts and checkpoints of the keys that the caller names, all that is younger than a grace time by the
bucket's clock, the objects of every artifact that is kept, and those of uploads that are going on (see `leases`).
Manifests are removed before their objects: a removal that is killed leaves whole artifacts and objects that no manifest
names, which the next one removes. A machine that reads an artifact meanwhile finds it damaged, and makes it again.

Only names that this project writes count: other files of the bucket are neither listed nor removed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from tasks.cache.stage import without_number
from tasks.home import named_lock
from tasks.shared_store.bucket import VARIABLE, Bucket, BucketError, Entry, Forbidden, NotFound
from tasks.shared_store.leases import ANNOUNCEMENTS, REMOVAL, Leases
from tasks.shared_store.shared_artifacts import DamagedObject, manifest_name, parse_manifest
from training.problems import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

REQUESTS_AT_ONCE = 16
BATCH = 100
"""Objects that are removed between two looks at the lease."""
GRACE = timedelta(days=1)
"""Younger objects are never removed: MLflow may not have the records of their run yet."""
_ARTIFACT = re.compile(r"artifacts/(?P<stage>\w+)/(?P<key>\w{40})\.json")
_CHECKPOINT = re.compile(r"checkpoints/(?P<key>\w{40})/(\d{10}\.json|objects/../[0-9a-f]{64})")
_OBJECT = re.compile(r"objects/../(?P<sha256>[0-9a-f]{64})")
_ANNOUNCEMENT = re.compile(rf"{ANNOUNCEMENTS}/(?P<stage>\w+)/(?P<key>\w{{40}})\.[0-9a-f]{{8}}\.json")
_LEASE = re.compile(r"leases/(\w+/\w{40}|removal/all)\.json")
_PROBE = re.compile(r"(clock|doctor)/[0-9a-f]{32}")


class LeaseLost(BucketError):
    """A removal ended because another machine may have taken its lease over."""


@dataclass(frozen=True)
class Content:
    """What a bucket holds, from one listing."""

    artifacts: dict[Entry, tuple[str, str]] = field(default_factory=dict)
    """Stage and key of each manifest."""
    checkpoints: dict[str, list[Entry]] = field(default_factory=dict)
    """The objects of a training's checkpoints, by its key."""
    objects: dict[str, Entry] = field(default_factory=dict)
    """By sha256."""
    announced: dict[Entry, tuple[str, str]] = field(default_factory=dict)
    """Stage and key of each upload."""
    leases: list[Entry] = field(default_factory=list)
    probes: list[Entry] = field(default_factory=list)
    """Objects that were written to read the bucket's clock, or to see what the credentials allow."""

    @property
    def entries(self) -> list[Entry]:
        """All objects."""
        checkpoints = [entry for group in self.checkpoints.values() for entry in group]
        return [*self.artifacts, *checkpoints, *self.objects.values(), *self.announced, *self.leases, *self.probes]

    @property
    def bytes(self) -> int:
        """Of all objects."""
        return sum(entry.bytes for entry in self.entries)


@dataclass(frozen=True)
class Plan:
    """What would be removed."""

    artifacts: tuple[Entry, ...]
    """Their manifests."""
    objects: tuple[Entry, ...]
    checkpoints: tuple[Entry, ...]
    leftovers: tuple[Entry, ...]
    """Old leases, announcements and probes of processes that were killed."""

    @property
    def steps(self) -> list[list[Entry]]:
        """All of it, in the order of its removal: manifests before objects."""
        manifests = [entry for entry in self.checkpoints if entry.name.endswith(".json")]
        rest = [entry for entry in self.checkpoints if not entry.name.endswith(".json")]
        return [[*self.artifacts, *manifests], [*self.objects, *rest, *self.leftovers]]

    @property
    def entries(self) -> list[Entry]:
        """All of it."""
        return [entry for step in self.steps for entry in step]

    @property
    def bytes(self) -> int:
        """Of all that would be removed."""
        return sum(entry.bytes for entry in self.entries)


class Maintenance:
    """A bucket that is inspected or cleaned up.

    Args:
        bucket: the bucket.
        find_needed: finds the keys that are needed.
        grace: the age from which anything is removed.
    """

    def __init__(self, bucket: Bucket, find_needed: Callable[[], Collection[str]], grace: timedelta) -> None:
        self.url, self._bucket, self._find_needed, self._grace = bucket.url, bucket, find_needed, grace

    @classmethod
    def of_environment(cls, find_needed: Callable[[], Collection[str]]) -> Maintenance:
        """The store of FINETUNE_STORE. Raises UserError if the variable is missing or no URL of a store."""
        url = os.environ.get(VARIABLE)
        if not url:
            message = "is not set: name the shared store, such as s3://bucket/prefix."
            raise UserError.of("store", VARIABLE, message)
        return cls(Bucket(url), find_needed, GRACE)

    def list_content(self) -> Content:
        """What the bucket holds. Raises UserError if it cannot be listed."""
        with _as_user_errors():
            return read_content(self._bucket)

    def inspect(self) -> tuple[Content, Plan]:
        """What the bucket holds, and what could be removed. Raises UserError if it cannot be read."""
        with _as_user_errors():
            content = read_content(self._bucket)
            # The bucket's clock is read by writing to it, which a removal does.
            oldest_kept = datetime.now(UTC) - self._grace
            return content, make_plan(self._bucket, content, self._find_needed(), oldest_kept)

    def remove(self, chosen: Plan, on_wait: Callable[[str], None]) -> list[Entry]:
        """Removes what is chosen and still unneeded, and returns what it was. Raises UserError if the bucket refuses or
        does not answer."""
        leases = Leases(self._bucket)
        # A lease of the same home is taken over at once, so that of a killed removal delays no machine.
        with _as_user_errors(), named_lock("removal"):
            return remove(self._bucket, leases, self._find_needed, chosen.entries, self._grace, on_wait)


@contextlib.contextmanager
def _as_user_errors() -> Iterator[None]:
    try:
        yield
    except Forbidden as error:
        message = (
            f"the credentials do not suffice ({error}). To show needs the rights to read and to list, --remove also "
        )
        message += "those to write and to delete."
        raise UserError.of("store", VARIABLE, message) from error
    except BucketError as error:
        raise UserError.of("store", VARIABLE, f"{error}.") from error


def read_content(bucket: Bucket) -> Content:
    """Lists the bucket. Raises BucketError."""
    content = Content()
    # A listing of many objects takes time. An upload that ends meanwhile is in the first listing as an announcement, or
    # in the second as an artifact.
    for entry in dict.fromkeys([*bucket.entries(ANNOUNCEMENTS), *bucket.entries()]):
        if found := _ARTIFACT.fullmatch(entry.name):
            content.artifacts[entry] = (found["stage"], found["key"])
        elif found := _CHECKPOINT.fullmatch(entry.name):
            content.checkpoints.setdefault(found["key"], []).append(entry)
        elif found := _OBJECT.fullmatch(entry.name):
            content.objects[found["sha256"]] = entry
        elif found := _ANNOUNCEMENT.fullmatch(entry.name):
            content.announced[entry] = (found["stage"], found["key"])
        elif _LEASE.fullmatch(entry.name):
            content.leases.append(entry)
        elif _PROBE.fullmatch(entry.name):
            content.probes.append(entry)
    return content


def make_plan(bucket: Bucket, content: Content, needed: Collection[str], oldest_kept: datetime) -> Plan:
    """Finds what nothing needs and is older than `oldest_kept`. Reads the manifests of the artifacts that are kept.

    Raises BucketError.
    """

    def is_old(entry: Entry) -> bool:
        return entry.modified < oldest_kept

    removed = [entry for entry, (_, key) in content.artifacts.items() if key not in needed and is_old(entry)]
    leftovers = filter(is_old, [*content.announced, *content.leases, *content.probes])
    kept = {entry.name: place for entry, place in content.artifacts.items() if entry not in {*removed}}
    kept |= {entry.name: place for entry, place in content.announced.items() if not is_old(entry)}
    named = set(_list_contents(bucket, kept))
    made = {key for stage, key in content.artifacts.values() if without_number(stage) in ("fit", "fit_fold")}
    checkpoints = [
        entry
        for key, entries in content.checkpoints.items()
        if (key in made or key not in needed) and all(map(is_old, entries))
        for entry in entries
    ]
    return Plan(
        tuple(removed),
        tuple(entry for sha256, entry in content.objects.items() if sha256 not in named and is_old(entry)),
        tuple(checkpoints),
        tuple(leftovers),
    )


def remove(
    bucket: Bucket,
    leases: Leases,
    find_needed: Callable[[], Collection[str]],
    chosen: Collection[Entry],
    grace: timedelta,
    on_wait: Callable[[str], None] = lambda owner: None,
) -> list[Entry]:
    """Removes those of the chosen objects that nothing needs now, while new uploads wait. Returns what was removed.

    Args:
        bucket: the bucket.
        leases: those of this process.
        find_needed: the keys that are needed; called while uploads wait.
        chosen: what may be removed.
        grace: the age from which anything is removed.
        on_wait: called with the owner of another removal that this one waits for.

    Raises:
        BucketError: if the bucket refuses or does not answer, or this process was too slow to keep its lease; what is
            left to remove is removed by the next removal.
    """
    leases.acquire(*REMOVAL, lambda: False, on_wait)
    try:
        content = read_content(bucket)
        plan = make_plan(bucket, content, find_needed(), bucket.now() - grace)
        may_go, removed = {*chosen}, list[Entry]()
        for batch in (batch for step in plan.steps for batch in _batches([entry for entry in step if entry in may_go])):
            if not leases.is_held(*REMOVAL):
                raise LeaseLost(f"{bucket.url}: this machine did not answer for too long. Start the removal again.")
            _in_threads(lambda entry: bucket.remove(entry.name), batch)
            removed += batch
        return removed
    finally:
        leases.release(*REMOVAL)


def _batches(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    for start in range(0, len(entries), BATCH):
        yield entries[start : start + BATCH]


def _list_contents(bucket: Bucket, manifests: dict[str, tuple[str, str]]) -> Iterator[str]:
    """The sha256 of every file that the manifests name."""

    def read(name: str) -> list[str]:
        stage, key = manifests[name]
        # An upload that has ended since has its manifest in place of its announcement.
        for place in (name, manifest_name(stage, key)):
            with contextlib.suppress(NotFound, DamagedObject):
                return [file.sha256 for file in parse_manifest(bucket.read(place), stage, key)[1]]
        return []  # an artifact that cannot be fetched keeps no objects

    for contents in _in_threads(read, list(manifests)):
        yield from contents


def _in_threads(call: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    with concurrent.futures.ThreadPoolExecutor(REQUESTS_AT_ONCE, "requests") as pool:
        return list(pool.map(call, items))
