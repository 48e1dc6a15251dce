"""Removal of what nothing needs from a bucket: nothing that is needed, young or being uploaded goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from tasks.cache import store
from tasks.shared_store import maintenance
from tasks.shared_store.bucket import Bucket, Entry, Forbidden
from tasks.shared_store.leases import Leases, announce
from tasks.shared_store.maintenance import LeaseLost, Maintenance, Plan
from tasks.shared_store.shared_artifacts import SharedStore
from tests.s3 import S3
from tests.tasks.shared import QUICK, bucket, on_s3, s3, url
from tests.waiting import wait_until

__all__ = ["bucket", "on_s3", "s3", "url"]

AT_ONCE = timedelta(days=-1)
"""A grace time after which everything is old."""
A, B, OLD, NEW, ENDED = ("a" * 40, "b" * 40, "0" * 40, "1" * 40, "e" * 40)
"""Keys of artifacts."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / "home"))


def make(stage: str, key: str, **files: str) -> None:
    with store.filling(stage, key) as aside:
        for name, content in files.items():
            (aside / name).write_text(content)
        store.publish(aside, stage, key, {}, {})


def upload(bucket: Bucket, stage: str, key: str, **files: str) -> None:
    make(stage, key, **files)
    SharedStore(bucket, quick_leases(bucket)).upload(stage, key)  # which may wait for the lease of a killed removal


def quick_leases(bucket: Bucket) -> Leases:
    return Leases(bucket, beat_s=0.1, stale_s=1.0, poll_s=0.02)


def remove(bucket: Bucket, *needed: str, grace: timedelta = AT_ONCE) -> list[str]:
    """Removes all that may go; gives the names."""
    chosen = maintenance.read_content(bucket).entries
    gone = maintenance.remove(bucket, quick_leases(bucket), lambda: needed, chosen, grace)
    return [entry.name for entry in gone]


def whole(bucket: Bucket, stage: str, key: str) -> bool:
    found = SharedStore(bucket).look_up(stage, key)
    return found is not None and all(bucket.size(file.object) == file.bytes for file in found.files)


def test_what_is_needed_stays_with_the_files_that_it_shares(bucket: Bucket) -> None:
    upload(bucket, "fit", A, weights="one", config="shared")
    upload(bucket, "fit", B, weights="two", config="shared")
    gone = remove(bucket, A)
    assert [name for name in gone if name.startswith("artifacts")] == [f"artifacts/fit/{B}.json"]
    assert len([name for name in gone if name.startswith("objects")]) == 1
    assert whole(bucket, "fit", A) and SharedStore(bucket).look_up("fit", B) is None
    assert remove(bucket, A) == []


def test_what_is_younger_than_the_grace_time_stays(bucket: Bucket) -> None:
    upload(bucket, "fit", A, weights="one")
    assert remove(bucket, grace=timedelta(minutes=5)) == []
    assert whole(bucket, "fit", A)


def test_checkpoints_go_when_their_training_has_ended_or_nothing_needs_it(bucket: Bucket) -> None:
    manifest, content = f"{40:010}.json", f"objects/aa/{'a' * 64}"
    for key in (ENDED, A, B):
        bucket.write(f"checkpoints/{key}/{manifest}", b"{}")
        bucket.write(f"checkpoints/{key}/{content}", b"state")
    upload(bucket, "fit", ENDED, weights="one")
    gone = remove(bucket, ENDED, B)
    assert sorted(gone) == [f"checkpoints/{key}/{name}" for key in (A, ENDED) for name in (manifest, content)]


def test_what_killed_processes_left_goes(bucket: Bucket) -> None:
    left = [f"clock/{'0' * 32}", f"doctor/{'0' * 32}", f"leases/fit/{A}.json", f"uploads/fit/{A}.{'0' * 8}.json"]
    for name in left:
        bucket.write(name, b"{}")
    assert sorted(remove(bucket)) == left
    assert bucket.names("leases") == []


def test_files_of_others_are_neither_counted_nor_removed(bucket: Bucket) -> None:
    theirs = [
        "artifacts/run/metrics.json",
        "checkpoints/llama/model.safetensors",
        f"checkpoints/{A}/model.safetensors",
        "leases/contract.pdf",
        "objects/ab/cat.png",
        "uploads/picture.png",
        "uploads/2024/picture.small.png",
    ]
    for name in theirs:
        bucket.write(name, b"theirs")
    assert maintenance.read_content(bucket).entries == [] == remove(bucket)
    assert sorted(entry.name for entry in bucket.entries()) == sorted(theirs)


@pytest.mark.slow
def test_an_upload_that_begins_before_the_removal_keeps_the_objects_that_it_found(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(bucket, "fit", OLD, weights="same")
    time.sleep(1.1)  # S3 has times in seconds
    make("fit", NEW, weights="same")
    manifest = (store.folder("fit", NEW) / store.MANIFEST).read_bytes()
    with announce(bucket, quick_leases(bucket), "fit", NEW, manifest):
        (announced,) = bucket.entries("uploads")
        monkeypatch.setattr(bucket, "now", lambda: announced.modified)
        gone = remove(bucket, grace=timedelta())
    assert f"artifacts/fit/{OLD}.json" in gone and not any(name.startswith("objects") for name in gone)


@pytest.mark.slow
@pytest.mark.parametrize("during_listing", [True, False])
def test_an_upload_that_ends_while_the_removal_looks_keeps_the_objects_that_it_found(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, during_listing: bool
) -> None:
    upload(bucket, "fit", OLD, weights="same")
    time.sleep(1.1)  # S3 has times in seconds
    make("fit", NEW, weights="same")
    manifest, announcement = (
        (store.folder("fit", NEW) / store.MANIFEST).read_bytes(),
        f"uploads/fit/{NEW}.12345678.json",
    )
    bucket.create(announcement, manifest)
    (announced,) = bucket.entries("uploads")
    chosen = maintenance.read_content(bucket).entries
    list_now = bucket.entries

    def end_upload() -> None:
        bucket.write(f"artifacts/fit/{NEW}.json", manifest)
        bucket.remove(announcement)

    def entries(above: str | None = None) -> list[Entry]:
        if above is not None:
            return list_now(above)
        before = list_now()
        end_upload()
        if not during_listing:
            return before
        # The first answer of a listing in several requests, and then the last.
        return [entry for entry in before if entry != announced]

    monkeypatch.setattr(bucket, "entries", entries)
    monkeypatch.setattr(bucket, "now", lambda: announced.modified)
    maintenance.remove(bucket, quick_leases(bucket), lambda: {NEW}, chosen, timedelta())
    assert whole(bucket, "fit", NEW)
    assert SharedStore(bucket).look_up("fit", OLD) is None


def test_an_upload_that_begins_during_the_removal_waits_and_then_sends_what_is_gone(bucket: Bucket) -> None:
    upload(bucket, "fit", OLD, weights="same")
    make("fit", NEW, weights="same")
    started, leases = threading.Event(), quick_leases(bucket)

    def find_needed() -> Collection[str]:
        started.set()
        with pytest.raises(TimeoutError):
            uploading.result(0.3)
        return ()

    def upload_new() -> None:
        assert started.wait(60)
        SharedStore(bucket, quick_leases(bucket)).upload("fit", NEW)

    with ThreadPoolExecutor(1) as pool:
        uploading = pool.submit(upload_new)
        chosen = maintenance.read_content(bucket).entries
        gone = maintenance.remove(bucket, leases, find_needed, chosen, AT_ONCE)
        assert any(entry.name.startswith("objects") for entry in gone)
        uploading.result(60)
    assert whole(bucket, "fit", NEW)


def test_a_removal_that_lost_its_lease_removes_nothing_more(bucket: Bucket) -> None:
    upload(bucket, "fit", A, weights="one")
    leases = quick_leases(bucket)

    def find_needed() -> Collection[str]:
        bucket.write("leases/removal/all.json", b'{"owner": "another", "beat": 1}')
        leases.wait_for_end("fit", "none", lambda: False)
        wait_until(lambda: not leases.is_held("removal", "all"))  # a beat finds the new owner
        return ()

    with pytest.raises(LeaseLost, match="again"):
        maintenance.remove(bucket, leases, find_needed, maintenance.read_content(bucket).entries, AT_ONCE)
    assert whole(bucket, "fit", A)


def test_removals_of_one_home_work_one_after_the_other(bucket: Bucket) -> None:
    began, nothing = list[threading.Thread](), Plan((), (), (), ())
    first_began, may_end = threading.Event(), threading.Event()

    def find_needed() -> Collection[str]:
        began.append(threading.current_thread())
        first_began.set()
        assert may_end.wait(60)
        return ()

    def remove_nothing() -> None:
        Maintenance(bucket, find_needed, AT_ONCE).remove(nothing, lambda owner: None)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(remove_nothing)
        assert first_began.wait(60)
        second = pool.submit(remove_nothing)
        with pytest.raises(TimeoutError):
            second.result(0.5)
        assert len(began) == 1
        may_end.set()
        first.result(60)
        second.result(60)
    assert len(began) == 2


@pytest.mark.slow
def test_a_removal_killed_at_any_request_leaves_whole_artifacts(on_s3: str, s3: S3) -> None:
    bucket, number = Bucket(on_s3, QUICK), 0
    deletes: Iterator[int] = iter(())

    def fail_one(request: str) -> int | None:
        return 403 if request.startswith("DELETE") and next(deletes, 0) == 0 else None

    while True:
        for key in (A, B):
            upload(bucket, "fit", key, weights=key, config="shared")
        deletes = iter(range(number, -1, -1))
        s3.fault = fail_one
        try:
            remove(bucket, A)
            ended = True
        except Forbidden:
            ended = False
        s3.fault = lambda request: None
        assert whole(bucket, "fit", A)
        assert SharedStore(bucket).look_up("fit", B) is None or whole(bucket, "fit", B)
        if ended:
            break
        number += 1
    assert number >= 2


def test_the_bucket_tells_its_own_time(bucket: Bucket) -> None:
    bucket.write("some", b"")
    (entry,) = [one for one in bucket.entries() if isinstance(one, Entry) and one.name == "some"]
    assert timedelta() <= bucket.now() - entry.modified < timedelta(minutes=1)
    assert bucket.names("clock") == []
