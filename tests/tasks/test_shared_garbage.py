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
from tasks.shared_store import garbage_collection
from tasks.shared_store.announcements import announce
from tasks.shared_store.artifacts import SharedStore
from tasks.shared_store.bucket import Bucket, Entry, Forbidden
from tasks.shared_store.garbage_collection import LeaseLost
from tasks.shared_store.leases import Leases
from tests.s3 import S3
from tests.tasks.shared import QUICK, bucket, on_s3, s3, url

__all__ = ["bucket", "on_s3", "s3", "url"]

AT_ONCE = timedelta(days=-1)
"""A grace time after which everything is old."""


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
    SharedStore(bucket).upload(stage, key)


def quick_leases(bucket: Bucket) -> Leases:
    return Leases(bucket, beat_s=0.1, stale_s=1.0, poll_s=0.02)


def remove(bucket: Bucket, *needed: str, grace: timedelta = AT_ONCE) -> list[str]:
    """Removes all that may go; gives the names."""
    chosen = garbage_collection.read_content(bucket).entries
    gone = garbage_collection.remove(bucket, quick_leases(bucket), lambda: needed, chosen, grace)
    return [entry.name for entry in gone]


def whole(bucket: Bucket, stage: str, key: str) -> bool:
    found = SharedStore(bucket).look_up(stage, key)
    return found is not None and all(bucket.size(file.object) == file.bytes for file in found.files)


def test_what_is_needed_stays_with_the_files_that_it_shares(bucket: Bucket) -> None:
    upload(bucket, "fit", "a", weights="one", config="shared")
    upload(bucket, "fit", "b", weights="two", config="shared")
    gone = remove(bucket, "a")
    assert [name for name in gone if name.startswith("artifacts")] == ["artifacts/fit/b.json"]
    assert len([name for name in gone if name.startswith("objects")]) == 1
    assert whole(bucket, "fit", "a") and SharedStore(bucket).look_up("fit", "b") is None
    assert remove(bucket, "a") == []


def test_what_is_younger_than_the_grace_time_stays(bucket: Bucket) -> None:
    upload(bucket, "fit", "a", weights="one")
    assert remove(bucket, grace=timedelta(minutes=5)) == []
    assert whole(bucket, "fit", "a")


def test_checkpoints_go_when_their_training_has_ended_or_nothing_needs_it(bucket: Bucket) -> None:
    for key in ("ended", "unneeded", "wanted"):
        bucket.write(f"checkpoints/{key}/40.json", b"{}")
        bucket.write(f"checkpoints/{key}/objects/aa/{'a' * 64}", b"state")
    upload(bucket, "fit", "ended", weights="one")
    gone = remove(bucket, "ended", "wanted")
    assert sorted(gone) == [
        f"checkpoints/{key}/{name}" for key in ("ended", "unneeded") for name in ("40.json", f"objects/aa/{'a' * 64}")
    ]


def test_leases_and_announcements_of_killed_processes_go(bucket: Bucket) -> None:
    bucket.write("leases/fit/a.json", b"{}")
    bucket.write("uploads/fit/a.1.json", b"{}")
    assert sorted(remove(bucket)) == ["leases/fit/a.json", "uploads/fit/a.1.json"]
    assert bucket.names("leases") == []


def test_an_upload_that_begins_before_the_removal_keeps_the_objects_that_it_found(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(bucket, "fit", "old", weights="same")
    time.sleep(1.1)  # S3 has times in seconds
    make("fit", "new", weights="same")
    manifest = (store.folder("fit", "new") / store.MANIFEST).read_bytes()
    with announce(bucket, quick_leases(bucket), "fit", "new", manifest):
        (announced,) = bucket.entries("uploads")
        monkeypatch.setattr(bucket, "now", lambda: announced.modified)
        gone = remove(bucket, grace=timedelta())
    assert "artifacts/fit/old.json" in gone and not any(name.startswith("objects") for name in gone)


def test_an_upload_that_begins_during_the_removal_waits_and_then_sends_what_is_gone(bucket: Bucket) -> None:
    upload(bucket, "fit", "old", weights="same")
    make("fit", "new", weights="same")
    started, leases = threading.Event(), quick_leases(bucket)

    def find_needed() -> Collection[str]:
        started.set()
        with pytest.raises(TimeoutError):
            uploading.result(0.3)
        return ()

    def upload_new() -> None:
        assert started.wait(10)
        SharedStore(bucket, quick_leases(bucket)).upload("fit", "new")

    with ThreadPoolExecutor(1) as pool:
        uploading = pool.submit(upload_new)
        chosen = garbage_collection.read_content(bucket).entries
        gone = garbage_collection.remove(bucket, leases, find_needed, chosen, AT_ONCE)
        assert any(entry.name.startswith("objects") for entry in gone)
        uploading.result(20)
    assert whole(bucket, "fit", "new")


def test_a_removal_that_lost_its_lease_removes_nothing_more(bucket: Bucket) -> None:
    upload(bucket, "fit", "a", weights="one")
    leases = quick_leases(bucket)

    def find_needed() -> Collection[str]:
        bucket.write("leases/removal/all.json", b'{"owner": "another", "beat": 1}')
        leases.wait_for_end("fit", "none", lambda: False)
        threading.Event().wait(0.3)  # a beat finds the new owner
        return ()

    with pytest.raises(LeaseLost, match="again"):
        garbage_collection.remove(bucket, leases, find_needed, garbage_collection.read_content(bucket).entries, AT_ONCE)
    assert whole(bucket, "fit", "a")


def test_a_removal_killed_at_any_request_leaves_whole_artifacts(on_s3: str, s3: S3) -> None:
    bucket, number = Bucket(on_s3, QUICK), 0
    deletes: Iterator[int] = iter(())

    def fail_one(request: str) -> int | None:
        return 403 if request.startswith("DELETE") and next(deletes, 0) == 0 else None

    while True:
        for key in ("a", "b"):
            upload(bucket, "fit", key, weights=key, config="shared")
        deletes = iter(range(number, -1, -1))
        s3.fault = fail_one
        try:
            remove(bucket, "a")
            ended = True
        except Forbidden:
            ended = False
        s3.fault = lambda request: None
        assert whole(bucket, "fit", "a")
        assert SharedStore(bucket).look_up("fit", "b") is None or whole(bucket, "fit", "b")
        if ended:
            break
        number += 1
    assert number >= 2


def test_the_bucket_tells_its_own_time(bucket: Bucket) -> None:
    bucket.write("some", b"")
    (entry,) = [one for one in bucket.entries() if isinstance(one, Entry) and one.name == "some"]
    assert timedelta() <= bucket.now() - entry.modified < timedelta(minutes=1)
    assert bucket.names("clock") == []
