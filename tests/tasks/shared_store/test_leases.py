"""Leases in a bucket: one machine works, the others wait, and a dead one delays them only briefly."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasks.shared_store.bucket import Bucket, Unavailable
from tasks.shared_store.leases import Leases
from tests.s3 import S3
from tests.tasks.shared import QUICK, bucket, on_s3, s3, url

__all__ = ["bucket", "on_s3", "s3", "url"]

NAME = ("fit", "k1")
OBJECT = "leases/fit/k1.json"


class Machines:
    """Machines with a home each."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, bucket: Bucket) -> None:
        self._folder, self._monkeypatch, self._bucket = folder, monkeypatch, bucket
        self._count = 0

    def __call__(self, home: str = "", *, beat_s: float = 0.1, stale_s: float = 0.8) -> Leases:
        self._count += 1
        self._monkeypatch.setenv("FINETUNE_HOME", str(self._folder / (home or f"home{self._count}")))
        return Leases(self._bucket, beat_s=beat_s, stale_s=stale_s, poll_s=0.05)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: Bucket) -> Machines:
    return Machines(tmp_path, monkeypatch, bucket)


def killed(owner: str = "gpu-1:/home:7:ab") -> bytes:
    """The lease of a process that counts no beats."""
    return json.dumps({"owner": owner, "beat": 3}).encode()


def never() -> bool:
    return False


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.mark.slow
def test_the_second_machine_waits_and_works_when_the_first_gives_the_lease_back(machine: Machines) -> None:
    first, second = machine(), machine()
    assert first.acquire(*NAME, never)
    owners: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(second.acquire, *NAME, never, owners.append)
        until(lambda: owners)
        time.sleep(1.2)  # longer than a lease without a beat lasts
        assert not waits.done() and owners == [first.owner]
        first.release(*NAME)
        assert waits.result(60)


def test_the_second_machine_stops_waiting_when_the_artifact_is_made(machine: Machines) -> None:
    first, second = machine(), machine()
    assert first.acquire(*NAME, never)
    assert not second.acquire(*NAME, lambda: True)


def test_a_machine_that_died_loses_its_lease(machine: Machines, bucket: Bucket) -> None:
    bucket.write(OBJECT, killed())
    began = time.monotonic()
    assert machine().acquire(*NAME, never)
    assert 0.8 <= time.monotonic() - began < 10


def test_of_two_waiters_for_a_dead_machine_the_later_leaves_the_lease_to_the_earlier(
    machine: Machines, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = machine(stale_s=1000)
    dead, earlier = killed(later.owner), killed("gpu-2:/home:7:cd")  # a lease of its own home need not become stale
    bucket.write(OBJECT, dead)
    read, reads = bucket.read, list[bytes]()

    def read_and_be_overtaken(name: str) -> bytes:
        reads.append(read(name))
        if len(reads) == 1:
            bucket.write(OBJECT, earlier)
        return reads[-1]

    monkeypatch.setattr(bucket, "read", read_and_be_overtaken)
    assert not later.acquire(*NAME, lambda: True)
    assert reads[:2] == [dead, earlier] and read(OBJECT) == earlier


def test_a_killed_run_does_not_delay_the_next_run_of_its_home(machine: Machines, bucket: Bucket) -> None:
    first, second = machine("one"), machine("one", stale_s=1000)
    bucket.write(OBJECT, killed(first.owner))
    assert second.acquire(*NAME, never)


def test_the_lease_that_a_killed_run_left_ends_with_the_upload_of_a_later_run_of_its_home(
    machine: Machines, bucket: Bucket
) -> None:
    earlier, later, other = machine("one"), machine("one"), machine("two")
    bucket.write(OBJECT, killed(earlier.owner))
    other.end(*NAME)
    assert bucket.size(OBJECT) is not None
    later.end(*NAME)
    assert bucket.size(OBJECT) is None


def test_release_all_ends_each_lease_of_the_process(machine: Machines, bucket: Bucket) -> None:
    leases = machine()
    for stage in ("fit", "predict"):
        assert leases.acquire(stage, "k1", never)
    leases.release_all()
    assert list(bucket.names("leases")) == []


def test_a_bucket_that_is_away_delays_the_end_of_all_leases_once(
    on_s3: str, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = Machines(tmp_path, monkeypatch, Bucket(on_s3, QUICK))(beat_s=1000)
    for key in ("k1", "k2", "k3"):
        assert leases.acquire("fit", key, never)
    s3.requests.clear()
    s3.fault = lambda request: 503
    leases.release_all()
    # The leases of other tests beat on.
    assert len({request for request in s3.requests if on_s3.removeprefix("s3:/") in request}) == 1
    assert not leases.is_held("fit", "k3")


def test_a_bucket_that_is_deleted_ends_neither_the_beats_nor_the_run(
    on_s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Bucket(on_s3, QUICK)
    leases, read, failed = Machines(tmp_path, monkeypatch, bucket)(), bucket.read, list[str]()

    def deleted(name: str) -> bytes:
        failed.append(name)
        return Bucket("s3://nothing/here", QUICK).read(name)

    monkeypatch.setattr(bucket, "read", deleted)
    assert leases.acquire("fit", "k1", never) and leases.acquire("fit", "k2", never)
    until(lambda: len(failed) >= 4)
    leases.release("fit", "k1")
    leases.end("fit", "k1")
    leases.release_all()
    monkeypatch.setattr(bucket, "read", read)
    assert leases.acquire(*NAME, never)
    until(lambda: beats(bucket) >= 2)


def beats(bucket: Bucket) -> int:
    return int(json.loads(bucket.read(OBJECT))["beat"])


@pytest.mark.slow
def test_a_machine_that_comes_back_after_its_lease_was_taken_leaves_it_to_the_new_owner(
    machine: Machines, bucket: Bucket
) -> None:
    first, second = machine(beat_s=1.5), machine(stale_s=0.2)
    assert first.acquire(*NAME, never) and second.acquire(*NAME, never)
    until(lambda: not first._held)  # its next beat finds the new owner
    first.release(*NAME)
    assert second.owner.encode() in bucket.read(OBJECT)
    second.release(*NAME)
    assert bucket.size(OBJECT) is None


def test_a_damaged_lease_is_taken_over(machine: Machines, bucket: Bucket) -> None:
    bucket.write(OBJECT, b"not JSON")
    assert machine(stale_s=0.2).acquire(*NAME, never)


def test_of_many_machines_at_once_one_works_at_a_time(machine: Machines) -> None:
    at_work: list[int] = []
    machines = [machine(stale_s=20) for _ in range(6)]

    def work(number: int) -> int:
        leases = machines[number]
        assert leases.acquire(*NAME, never)
        at_work.append(number)
        most = len(at_work)
        time.sleep(0.05)
        at_work.remove(number)
        leases.release(*NAME)
        return most

    with ThreadPoolExecutor(6) as pool:
        assert max(pool.map(work, range(6))) == 1


def test_without_a_bucket_the_caller_gets_an_error_in_bounded_time(
    on_s3: str, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.fault = lambda request: 503
    with pytest.raises(Unavailable):
        Machines(tmp_path, monkeypatch, Bucket(on_s3, QUICK))().acquire(*NAME, never)
