"""Artifacts that homes share through a bucket: whole and verified, or absent."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from threading import Event, Lock

import pytest

from tasks.cache import digests, store
from tasks.cache.digests import digest_of
from tasks.cache.results import Artifact
from tasks.shared_store.bucket import PART_BYTES, Bucket, Forbidden, Unavailable
from tasks.shared_store.bucket_remote import find_artifact
from tasks.shared_store.shared_artifacts import DamagedObject, SharedStore
from tests.fork_server import COMMANDS, Fork
from tests.made import artifact
from tests.s3 import S3
from tests.tasks.shared import QUICK, bucket, kill_at_write, on_s3, s3, url
from tests.tasks.shared_store import uploading
from tests.waiting import wait_until

__all__ = ["bucket", "on_s3", "s3", "url"]

KEY = "k" * 40
WEIGHTS = os.urandom(100_000)
UseHome = Callable[[str], Path]


@pytest.fixture
def use_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UseHome:
    """Makes a home, by its name, that of all that follows."""

    def use(name: str) -> Path:
        monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / name))
        return tmp_path / name

    use("first")
    return use


@pytest.fixture
def shared(bucket: Bucket, use_home: UseHome) -> SharedStore:
    return SharedStore(bucket)


@pytest.fixture
def shared_on_s3(on_s3: str, use_home: UseHome) -> SharedStore:
    return SharedStore(Bucket(on_s3, QUICK))


def make(key: str = KEY, weights: bytes = WEIGHTS, log: str = "1") -> Artifact:
    """A small artifact in the home of the moment."""
    with store.filling("fit", key) as aside:
        (aside / "model").mkdir()
        (aside / "model" / "weights").write_bytes(weights)
        (aside / "model" / "config.json").write_text("{}")
        (aside / "model" / "copy.json").write_text("{}")
        (aside / "empty").write_text("")
        (aside / "log").mkdir()
        (aside / "log" / "events.jsonl").write_text(log)
        return store.publish(aside, "fit", key, {"training.seed": 1}, {"loss": 0.5})


def fetch(shared: SharedStore, key: str = KEY) -> int:
    found = shared.look_up("fit", key)
    assert found is not None
    fetched_bytes = shared.fetch(found)
    assert fetched_bytes is not None
    return fetched_bytes


def object_of(content: bytes) -> str:
    name = sha256(content).hexdigest()
    return f"objects/{name[:2]}/{name}"


def leftovers(home: Path) -> list[Path]:
    return list((home / "artifacts" / "fit").iterdir())


def test_an_artifact_of_one_home_is_found_whole_in_another(shared: SharedStore, use_home: UseHome) -> None:
    ref = make()
    manifest = (ref.path / "manifest.json").read_bytes()
    size = sum(entry["bytes"] for entry in {e["sha256"]: e for e in json.loads(manifest)["files"]}.values())
    assert shared.upload("fit", KEY).sent_bytes == size
    use_home("second")
    found = shared.look_up("fit", KEY)
    assert found is not None and (found.ref, found.missing_bytes) == (ref, size)
    assert store.find("fit", KEY) is None
    assert shared.fetch(found) == size
    assert store.find("fit", KEY) == ref
    assert (ref.path / "manifest.json").read_bytes() == manifest
    assert (ref.path / "model" / "weights").read_bytes() == WEIGHTS


def test_a_fetched_file_is_not_read_again(
    shared: SharedStore, use_home: UseHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    shared.upload("fit", KEY)
    use_home("second")
    monkeypatch.setattr(digests, "SETTLED_S", -1.0)
    fetch(shared)
    read: list[str] = []
    sha256_of = digests._sha256
    monkeypatch.setattr(digests, "_sha256", lambda path: read.append(path.name) or sha256_of(path))
    assert store.find("fit", KEY) is not None
    assert "weights" not in read


def test_an_artifact_that_was_never_uploaded_is_absent(shared: SharedStore) -> None:
    make()
    assert shared.look_up("fit", KEY) is None


def test_an_artifact_that_this_home_makes_during_a_fetch_stays(shared: SharedStore, use_home: UseHome) -> None:
    make()
    shared.upload("fit", KEY)
    home, own, turn = use_home("second"), list[Artifact](), Lock()

    def make_own(count: int) -> None:
        with turn:
            if not own:
                own.append(make(weights=b"own"))

    found = shared.look_up("fit", KEY)
    assert found is not None and shared.fetch(found, make_own) is None
    assert [store.find("fit", KEY)] == own
    assert leftovers(home) == [own[0].path] and not (home / "quarantine").exists()


def test_content_that_is_there_is_not_sent_again(shared: SharedStore) -> None:
    make()
    shared.upload("fit", KEY)
    assert shared.upload("fit", KEY).sent_bytes == 0
    make("other", log="another log")
    assert shared.upload("fit", "other").sent_bytes == len("another log")


def test_content_that_is_here_is_linked_and_not_downloaded(shared: SharedStore, use_home: UseHome) -> None:
    make()
    shared.upload("fit", KEY)
    make("other", log="another log")
    shared.upload("fit", "other")
    use_home("second")
    here = make()
    found = shared.look_up("fit", "other")
    assert found is not None and found.missing_bytes == len("another log")
    assert shared.fetch(found) == len("another log")
    ref = store.find("fit", "other")
    assert ref is not None and (ref.path / "model" / "weights").samefile(here.path / "model" / "weights")
    assert store.find("fit", KEY) == here


def test_an_object_that_is_cut_off_is_sent_again(shared: SharedStore, bucket: Bucket, use_home: UseHome) -> None:
    bucket.create(object_of(WEIGHTS), WEIGHTS[:10])
    make()
    shared.upload("fit", KEY)
    use_home("second")
    assert fetch(shared) > 0


def test_content_that_changed_here_is_downloaded(shared: SharedStore, use_home: UseHome) -> None:
    make()
    shared.upload("fit", KEY)
    use_home("second")
    here = make("other")
    (here.path / "model" / "weights").write_bytes(WEIGHTS[::-1])
    assert fetch(shared) == len(WEIGHTS)
    assert store.find("fit", KEY) is not None


def test_the_first_content_of_a_key_stands_and_the_second_upload_has_both_digests(
    shared: SharedStore, use_home: UseHome
) -> None:
    first = make()
    assert shared.upload("fit", KEY).standing_digest == first.digest
    use_home("second")
    second = make(weights=WEIGHTS[::-1])
    upload = shared.upload("fit", KEY)
    assert (upload.digest, upload.standing_digest) == (second.digest, first.digest)
    use_home("third")
    fetch(shared)
    assert store.find("fit", KEY) == first


def test_of_two_homes_that_upload_at_once_one_stands_whole(
    shared_on_s3: SharedStore, s3: S3, use_home: UseHome
) -> None:
    slow = make()

    def meanwhile(request: str) -> None:
        if request.startswith("PUT") and "/artifacts/" in request:
            s3.fault = lambda request: None
            use_home("second")
            make(weights=WEIGHTS[::-1])
            shared_on_s3.upload("fit", KEY)

    s3.fault = meanwhile
    upload = shared_on_s3.upload("fit", KEY)
    fast = store.find("fit", KEY)
    assert fast is not None
    assert (upload.digest, upload.standing_digest) == (slow.digest, fast.digest)
    use_home("third")
    fetch(shared_on_s3)
    assert store.find("fit", KEY) == fast


def test_threads_that_upload_the_same_artifact_all_end_well(shared: SharedStore) -> None:
    ref = make()
    with ThreadPoolExecutor(4) as pool:
        uploads = list(pool.map(lambda _: shared.upload("fit", KEY), range(4)))
    assert {upload.standing_digest for upload in uploads} == {ref.digest}


def test_a_killed_upload_shows_nothing_and_the_next_one_completes_it(
    shared_on_s3: SharedStore, on_s3: str, s3: S3, use_home: UseHome
) -> None:
    home = use_home("first")
    ref = make(weights=os.urandom(PART_BYTES + 1))  # in parts
    for write in itertools.count(1):
        process = Fork(uploading.upload, (home, on_s3, "fit", KEY), level=COMMANDS).start()
        writes = kill_at_write(s3, process, write)
        if process.exitcode == 0:
            break
        assert shared_on_s3.look_up("fit", KEY) is None or "/artifacts/" in writes[-1]
    assert write > 3
    use_home("second")
    fetch(shared_on_s3)
    assert store.find("fit", KEY) == ref


def test_an_upload_to_a_folder_killed_in_the_middle_of_a_file_shows_nothing(use_home: UseHome, tmp_path: Path) -> None:
    home, url = use_home("first"), f"file://{tmp_path}/folder"
    ref = make(weights=os.urandom(PART_BYTES + 1))
    weights = tmp_path / "folder" / object_of((ref.path / "model" / "weights").read_bytes())
    weights.parent.mkdir(parents=True)
    process = Fork(uploading.upload, (home, url, "fit", KEY, 60.0), level=COMMANDS).start()
    wait_until(lambda: any(weights.parent.iterdir()))
    process.kill()
    assert process.join() == -signal.SIGKILL and not weights.exists()
    shared = SharedStore(Bucket(url))
    assert shared.look_up("fit", KEY) is None
    shared.upload("fit", KEY)
    use_home("second")
    fetch(shared)
    assert store.find("fit", KEY) == ref


@pytest.mark.parametrize("content", [b"", WEIGHTS[:-1], WEIGHTS[::-1], WEIGHTS + b"1"])
def test_a_damaged_object_is_named_and_replaced_by_a_new_upload(
    shared: SharedStore, bucket: Bucket, use_home: UseHome, tmp_path: Path, content: bytes
) -> None:
    ref = make()
    shared.upload("fit", KEY)
    (tmp_path / "damage").write_bytes(content)
    bucket.upload(object_of(WEIGHTS), tmp_path / "damage")
    home = use_home("second")
    with pytest.raises(DamagedObject, match=object_of(WEIGHTS)) as raised:
        fetch(shared)
    assert raised.value.objects == (object_of(WEIGHTS),)
    assert leftovers(home) == []
    shared.remove(raised.value)
    assert shared.look_up("fit", KEY) is None
    make()
    assert shared.upload("fit", KEY).sent_bytes >= len(WEIGHTS)
    use_home("third")
    fetch(shared)
    found = store.find("fit", KEY)
    assert found is not None and found.digest == ref.digest


def test_a_removal_of_damage_that_is_cut_short_leaves_damage_that_the_next_fetch_sees(
    shared: SharedStore, bucket: Bucket, use_home: UseHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    shared.upload("fit", KEY)
    (tmp_path / "damage").write_bytes(WEIGHTS[::-1])
    bucket.upload(object_of(WEIGHTS), tmp_path / "damage")
    use_home("second")
    with pytest.raises(DamagedObject) as raised:
        fetch(shared)
    with monkeypatch.context() as cut, pytest.raises(Unavailable):
        removed, remove = list[str](), bucket.remove

        def remove_one(name: str) -> None:
            if removed:
                raise Unavailable(name)
            removed.append(name)
            remove(name)

        cut.setattr(bucket, "remove", remove_one)
        shared.remove(raised.value)
    with pytest.raises(DamagedObject):
        fetch(shared)


def test_all_objects_that_are_lost_are_named_at_once(shared: SharedStore, bucket: Bucket, use_home: UseHome) -> None:
    make()
    shared.upload("fit", KEY)
    lost = {object_of(WEIGHTS), object_of(b"{}")}
    for name in lost:
        bucket.remove(name)
    use_home("second")
    with pytest.raises(DamagedObject) as raised:
        fetch(shared)
    assert set(raised.value.objects) == lost


def manifest(stage: str = "fit", key: str = KEY, **entry: object) -> bytes:
    """A manifest with the right digest, of one file."""
    ref = Artifact(stage=stage, key=key, digest="d").model_dump()
    content = {"ref": ref, "files": [{"path": "a", "bytes": 0, "sha256": "0" * 64, **entry}]}
    return json.dumps({**content, "digest": digest_of(content)}).encode()


@pytest.mark.parametrize(
    "path", ["../a", "a/../../b", "/etc/a", "a//b", "a/.", "", "record", "manifest.json", "a\0", 1, None]
)
def test_a_manifest_with_a_path_outside_of_its_artifact_is_refused(
    shared: SharedStore, bucket: Bucket, path: object
) -> None:
    bucket.create(f"artifacts/fit/{KEY}.json", manifest(path=path))
    with pytest.raises(DamagedObject, match="manifest"):
        shared.look_up("fit", KEY)


BROKEN = {
    "cut": manifest()[:-1],
    "empty": b"",
    "a list": b"[]",
    "changed": manifest().replace(b'"bytes": 0', b'"bytes": 1'),
    "of another key": manifest(key="other"),
    "of another stage": manifest(stage="other"),
    "no digest": manifest(sha256="../../secret"),
    "no size": manifest(bytes=-1),
}


@pytest.mark.parametrize("manifest", BROKEN.values(), ids=BROKEN)
def test_a_damaged_manifest_is_refused_and_replaced_by_a_new_upload(
    shared: SharedStore, bucket: Bucket, use_home: UseHome, manifest: bytes
) -> None:
    bucket.create(f"artifacts/fit/{KEY}.json", manifest)
    make()
    with pytest.raises(DamagedObject, match=f"fit {KEY[:16]} in the shared store is damaged") as raised:
        shared.upload("fit", KEY)
    shared.remove(raised.value)
    shared.upload("fit", KEY)
    use_home("second")
    assert fetch(shared) > 0


def test_an_artifact_that_is_damaged_here_is_not_uploaded(shared: SharedStore) -> None:
    ref = make()
    (ref.path / "model" / "weights").write_bytes(b"")
    with pytest.raises(store.Damaged, match="weights"):
        shared.upload("fit", KEY)
    assert shared.look_up("fit", KEY) is None


def test_credentials_that_may_only_read_fetch_and_cannot_upload(
    shared_on_s3: SharedStore, s3: S3, use_home: UseHome
) -> None:
    make()
    shared_on_s3.upload("fit", KEY)
    use_home("second")
    s3.fault = lambda request: None if request.startswith(("GET", "HEAD")) else 403
    assert fetch(shared_on_s3) > 0
    make("other", weights=b"other")
    with pytest.raises(Forbidden):
        shared_on_s3.upload("fit", "other")


def test_a_bucket_that_goes_away_in_a_download_leaves_nothing(
    shared_on_s3: SharedStore, s3: S3, use_home: UseHome
) -> None:
    make()
    shared_on_s3.upload("fit", KEY)
    home = use_home("second")
    answers = iter([None] * 3)
    s3.fault = lambda request: next(answers, 503)
    with pytest.raises(Unavailable):
        fetch(shared_on_s3)
    assert leftovers(home) == []


@pytest.mark.slow
def test_a_bucket_that_goes_away_in_an_upload_shows_no_artifact(shared_on_s3: SharedStore, s3: S3) -> None:
    make()
    answers = iter([None] * 5)
    s3.fault = lambda request: next(answers, 503)
    with pytest.raises(Unavailable):
        shared_on_s3.upload("fit", KEY)
    s3.fault = lambda request: None
    assert shared_on_s3.look_up("fit", KEY) is None


def test_after_a_failed_upload_the_same_caller_can_upload_again(shared_on_s3: SharedStore, s3: S3) -> None:
    make()
    stop = Event()
    s3.fault = lambda request: 503 if request.startswith("PUT") else None
    with pytest.raises(Unavailable):
        shared_on_s3.upload("fit", KEY, stop)
    s3.fault = lambda request: None
    assert not stop.is_set()
    assert shared_on_s3.upload("fit", KEY, stop).sent_bytes


def test_an_artifact_that_is_damaged_or_nowhere_is_not_found(home: Path) -> None:
    stored = artifact("load_data", {"train.arrow": b"rows"})
    assert find_artifact("load_data", stored.key) == stored and find_artifact("fit", stored.key) is None
    (stored.path / "train.arrow").write_bytes(b"raws")
    assert find_artifact("load_data", stored.key) is None
