"""Checkpoints of a running training in a bucket: another machine resumes from the newest, to the same bytes."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tasks.cache import store
from tasks.cache.stage import Work
from tasks.home import home as create_home
from tasks.shared_store.bucket import Bucket
from tasks.shared_store.bucket_remote import BucketRemote
from tasks.shared_store.shared_checkpoints import Checkpoints, CheckpointUploader, remove_checkpoints, share_checkpoints
from tasks.shared_store.signed_manifests import FIELD
from tasks.signatures.keys import load_signing_key
from tasks.signatures.trust import FILE as TRUST
from tasks.signatures.trust import pin_own_key
from tests import fork_server
from tests.fork_server import COMMANDS, Fork
from tests.s3 import S3
from tests.tasks.shared import QUICK, bucket, kill_at_write, on_s3, s3, url
from tests.tasks.shared_store import training_elsewhere
from tests.tasks.shared_store.training_elsewhere import KEY
from tests.tasks.watching import Heard
from tests.training.conftest import made_world, world
from tests.waiting import wait_until
from training.engine import checkpoints
from training.jobs.protocol import CHECKPOINTS, EVENTS, Events, Job, read_events, sha256

__all__ = ["bucket", "made_world", "on_s3", "s3", "url", "world"]

UseHome = Callable[[str], Work]


@pytest.fixture
def use_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UseHome:
    """Makes a home, by its name, that of all that follows; gives the training's work in it."""

    def use(name: str) -> Work:
        monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / name))
        (create_home() / "signing.key").write_bytes(name.encode())
        return Work(KEY, tmp_path / "out", "run", (Heard(),), "fit")

    monkeypatch.setattr("tasks.shared_store.shared_checkpoints.LOOK_AGAIN_AFTER_S", 0.1)
    use("first")
    return use


def save(work: Work, step: int, needs: Sequence[int] = (), divisor: int = 1) -> Path:
    """A checkpoint as training writes one, and the older ones that go then."""
    Job(program="p", key=KEY, settings={"micro_batch_divisor": divisor}).write(work.job)
    final = work.job / CHECKPOINTS / checkpoints.name(step)
    with checkpoints.write(final, [checkpoints.name(n) for n in needs], {"device": "this one with AVX2"}) as folder:
        (folder / "model.safetensors").write_bytes(b"weights %d" % step * 1000)
        (folder / "config.json").write_text("{}")
        (folder / "state").mkdir()
        (folder / "state" / "optimizer.pt").write_bytes(b"momentum %d" % step * 1000)
    checkpoints.rotate(final.parent)
    events = Events(work.job / EVENTS)
    events.metrics(step, {"loss": 1 / step})
    events.write("checkpoint", step=step, seconds=0.1)
    return final


def uploads(bucket: Bucket, work: Work) -> CheckpointUploader:
    return CheckpointUploader(Checkpoints(bucket, KEY, work.job), work)


def resume(bucket: Bucket, work: Work, device: str | None = "this one") -> list[str]:
    """Looks for a checkpoint as the start of a training does. Returns the messages."""
    uploads(bucket, work).resume(create_home() / "signing.key", device)
    (heard,) = work.listeners
    assert isinstance(heard, Heard)
    return [event["message"] for event in heard.events if event["kind"] != "progress"]


def here(work: Work) -> list[str]:
    return sorted(path.name for path in (work.job / CHECKPOINTS).glob("*"))


def steps(bucket: Bucket) -> list[int]:
    names = bucket.names(f"checkpoints/{KEY}")
    return sorted(int(Path(name).stem) for name in names if name.endswith(".json"))


FROM = "from checkpoint {} of another machine"


def test_a_new_home_has_the_newest_checkpoint_with_all_that_it_needs_the_division_and_the_curve(
    bucket: Bucket, use_home: UseHome
) -> None:
    first = use_home("first")
    sender = uploads(bucket, first)
    for step, needs in ((10, []), (20, [10]), (30, [10])):
        save(first, step, needs, divisor=4)
        sender.upload()
    shutil.rmtree(create_home())
    second = use_home("second")
    assert resume(bucket, second) == [FROM.format(30)]
    assert here(second) == ["checkpoint-10", "checkpoint-30"]
    newest = second.job / CHECKPOINTS / "checkpoint-30"
    assert checkpoints.find_newest_intact(newest.parent, pytest.fail) == newest
    assert Job.read(second.job).settings["micro_batch_divisor"] == 4
    points = read_events(second.job / EVENTS, 0, ["metrics"])[0]
    assert [(point["step"], point["values"]["loss"]) for point in points] == [(10, 0.1), (20, 0.05), (30, 1 / 30)]
    assert not (second.job / "shared").exists()


def test_a_fetched_checkpoint_counts_as_one_of_this_home(bucket: Bucket, use_home: UseHome) -> None:
    first = use_home("first")
    save(first, 20)
    uploads(bucket, first).upload()
    second = use_home("second")
    resume(bucket, second)
    checkpoints.require_own(second.job / CHECKPOINTS / "checkpoint-20", create_home() / "signing.key")


def rename_step(bucket: Bucket, use_home: UseHome) -> None:
    """The signed checkpoint as one of more steps, which a training would prefer to its own."""
    bucket.write(f"checkpoints/{KEY}/0000000030.json", bucket.read(name := f"checkpoints/{KEY}/0000000020.json"))
    bucket.remove(name)


def replace_weights(bucket: Bucket, use_home: UseHome) -> None:
    """Another content, with its right digest, in the signed manifest."""
    name = f"checkpoints/{KEY}/0000000020.json"
    fields = json.loads(bucket.read(name))
    (file,) = (file for file in fields["files"] if file["path"].endswith("optimizer.pt"))
    file |= {"sha256": hashlib.sha256(b"evil").hexdigest(), "bytes": len(b"evil")}
    bucket.write(f"checkpoints/{KEY}/objects/{file['sha256'][:2]}/{file['sha256']}", b"evil")
    bucket.write(name, json.dumps(fields).encode())


def remove_signature(bucket: Bucket, use_home: UseHome) -> None:
    name = f"checkpoints/{KEY}/0000000020.json"
    bucket.write(name, json.dumps({**json.loads(bucket.read(name)), FIELD: None}).encode())


def train_elsewhere(bucket: Bucket, use_home: UseHome) -> None:
    """The attacker's own training of the same key, with a key of its own."""
    (work := use_home("attacker")).job.mkdir(parents=True, exist_ok=True)
    pin_own_key(load_signing_key().public_key(), "refuse")
    shutil.rmtree(work.job)
    save(work, 30)
    uploads(bucket, work).upload()


CHECKPOINT_ATTACKS = {
    "as one of another step": (rename_step, "30", "the signature of something else"),
    "with other weights": (replace_weights, "20", "the signature of something else"),
    "without a signature": (remove_signature, "20", "has no signature"),
    "by another key": (train_elsewhere, "30", "does not trust"),
}


@pytest.mark.parametrize("name", CHECKPOINT_ATTACKS)
def test_a_checkpoint_that_no_trusted_key_has_signed_is_named_and_not_resumed_from(
    bucket: Bucket, use_home: UseHome, name: str
) -> None:
    first = use_home("first")
    pin_own_key(load_signing_key().public_key(), "refuse")
    save(first, 20)
    uploads(bucket, first).upload()
    trust = (create_home() / TRUST).read_text()
    attack, step, reason = CHECKPOINT_ATTACKS[name]
    attack(bucket, use_home)
    second = use_home("second")
    (create_home() / TRUST).write_text(trust)
    messages = resume(bucket, second)
    assert f"checkpoint {step} in the shared store" in messages[0] and reason in messages[0]
    assert "is not used" in messages[0] and f"checkpoint-{step}" not in here(second)
    shutil.rmtree(second.job, ignore_errors=True)
    (create_home() / TRUST).write_text(trust.replace("unsigned: refuse", "unsigned: warn"))
    is_used = reason in ("has no signature", "does not trust")
    assert (f"checkpoint-{step}" in (resume(bucket, second) and here(second))) == is_used


def test_only_the_newest_stays_in_the_bucket_and_nothing_after_the_training(bucket: Bucket, use_home: UseHome) -> None:
    work = use_home("first")
    sender = uploads(bucket, work)
    for step in (10, 20):
        save(work, step)
        sender.upload()
    assert steps(bucket) == [20]
    objects = [name for name in bucket.names(f"checkpoints/{KEY}") if "/objects/" in name]
    assert len(objects) == len({"model", "config", "optimizer", "manifest", "events"})
    bucket.create(f"checkpoints/{KEY}k/0000000010.json", b"of another training")
    remove_checkpoints(bucket, KEY)
    assert bucket.names(f"checkpoints/{KEY}") == [] and len(bucket.names("checkpoints")) == 1


def test_when_the_artifact_of_the_training_is_in_the_bucket_its_checkpoints_are_removed(
    bucket: Bucket, use_home: UseHome
) -> None:
    work, remote = use_home("first"), BucketRemote(bucket)
    save(work, 10)
    uploads(bucket, work).upload()
    with store.filling("fit", KEY) as aside:
        (aside / "weights").write_text("trained")
        remote.upload(store.publish(aside, "fit", KEY, {}, {}), made=True)
    assert remote.end_run(wait=True) == []
    assert bucket.names("artifacts/fit") == [f"artifacts/fit/{KEY}.json"] and bucket.names("checkpoints") == []


def test_a_home_with_a_newer_checkpoint_of_its_own_keeps_it(bucket: Bucket, use_home: UseHome) -> None:
    first = use_home("first")
    save(first, 20)
    uploads(bucket, first).upload()
    second = use_home("second")
    save(second, 30)
    assert resume(bucket, second) == [] and here(second) == ["checkpoint-30"]
    third = use_home("third")
    save(third, 10, divisor=2)
    assert resume(bucket, third) == [FROM.format(20)] and here(third) == ["checkpoint-10", "checkpoint-20"]
    assert Job.read(third.job).settings["micro_batch_divisor"] == 1
    assert [event["step"] for event in read_events(third.job / EVENTS, 0, ["metrics"])[0]] == [20]


def test_a_checkpoint_of_other_hardware_is_used_only_if_other_weights_are_accepted(
    bucket: Bucket, use_home: UseHome
) -> None:
    first = use_home("first")
    save(first, 20)
    uploads(bucket, first).upload()
    second = use_home("second")
    (message,) = resume(bucket, second, device="another")
    assert "computed on this one with AVX2 (here another)" in message and here(second) == []
    assert resume(bucket, second, device=None)[1:] == [FROM.format(20)]


@pytest.mark.parametrize("damage", ["cut", "changed", "lost", "manifest"])
def test_a_damaged_checkpoint_is_reported_once_and_an_older_one_is_used(
    bucket: Bucket, use_home: UseHome, damage: str
) -> None:
    first = use_home("first")
    save(first, 10)
    uploads(bucket, first).upload()
    older = {name: bucket.read(name) for name in bucket.names(f"checkpoints/{KEY}")}
    save(first, 20)
    uploads(bucket, first).upload()
    for name in older.keys() - set(bucket.names(f"checkpoints/{KEY}")):
        bucket.create(name, older[name])  # as if the removal had failed
    digest = sha256(first.job / CHECKPOINTS / "checkpoint-20" / "model.safetensors")
    name = f"checkpoints/{KEY}/objects/{digest[:2]}/{digest}"
    if damage == "manifest":
        name = f"checkpoints/{KEY}/{20:010}.json"
    content = bucket.read(name)
    if damage == "lost":
        bucket.remove(name)
    else:
        bucket.write(name, content[::-1] if damage == "changed" else content[:-1])
    second = use_home("second")
    warning, note = resume(bucket, second)
    assert warning.startswith("checkpoint 20 in the shared store is damaged (") and note == FROM.format(10)
    assert here(second) == ["checkpoint-10"]
    assert resume(bucket, use_home("third")) == [FROM.format(10)]
    save(second, 20)
    uploads(bucket, second).upload()
    assert resume(bucket, use_home("fourth")) == [FROM.format(20)]


def test_an_upload_of_u_seconds_is_followed_by_a_pause_of_19_u(on_s3: str, s3: S3, use_home: UseHome) -> None:
    work, now = use_home("first"), [0.0]
    sender = CheckpointUploader(Checkpoints(Bucket(on_s3, QUICK), KEY, work.job), work, clock=lambda: now[0])

    def slow(request: str) -> None:
        now[0] += 3.0 * request.startswith("PUT")

    save(work, 10)
    s3.fault = slow
    pause_s = sender.upload()
    assert now[0] > 10 and now[0] / (now[0] + pause_s) == pytest.approx(0.05)
    assert sender.upload() == 0  # nothing is new
    assert steps(Bucket(on_s3, QUICK)) == [10]


@pytest.mark.slow
def test_after_a_long_outage_checkpoints_are_soon_uploaded_again(on_s3: str, s3: S3, use_home: UseHome) -> None:
    work, now = use_home("first"), [0.0]
    sender = CheckpointUploader(Checkpoints(Bucket(on_s3, QUICK), KEY, work.job), work, clock=lambda: now[0])

    def away(request: str) -> int:
        now[0] += 300.0
        return 503

    save(work, 10)
    s3.fault = away
    assert sender.upload() == 60.0


def test_training_goes_on_during_a_slow_upload_and_its_end_ends_the_upload(
    on_s3: str, s3: S3, use_home: UseHome
) -> None:
    work, reached, free = use_home("first"), threading.Event(), threading.Event()

    def slow(request: str) -> None:
        if request.startswith("PUT"):
            reached.set()
            free.wait(60)

    s3.fault = slow
    with share_checkpoints(Bucket(on_s3), work, create_home() / "signing.key", None):
        save(work, 10)
        work.on_events([{"kind": "checkpoint", "step": 10}])
        assert reached.wait(60)
        for step in (20, 30, 40):  # and training removes what is being sent
            save(work, step)
        threading.Timer(0.2, free.set).start()
    assert steps(Bucket(on_s3)) == [] and not (work.job / "shared").exists()


def test_a_checkpoint_that_training_removed_during_its_upload_arrives_whole(
    on_s3: str, s3: S3, use_home: UseHome
) -> None:
    work, bucket = use_home("first"), Bucket(on_s3, QUICK)
    save(work, 10)

    def meanwhile(request: str) -> None:
        s3.fault = lambda request: None
        for step in (20, 30):
            save(work, step)

    s3.fault = meanwhile
    uploads(bucket, work).upload()
    assert here(work) == ["checkpoint-20", "checkpoint-30"]
    assert resume(bucket, use_home("second")) == [FROM.format(10)]


@pytest.mark.parametrize("part", ["list", "object"])
@pytest.mark.parametrize("for_ever", [False, True])
def test_a_look_up_or_a_download_that_fails_once_is_repeated_before_training_starts_anew(
    on_s3: str, s3: S3, use_home: UseHome, part: str, for_ever: bool
) -> None:
    work, bucket, failed = use_home("first"), Bucket(on_s3, QUICK), list[str]()
    save(work, 10)
    uploads(bucket, work).upload()

    def fail_at_first(request: str) -> int | None:
        if (failed and not for_ever) or ("/objects/" in request) != (part == "object"):
            return None
        failed.append(request)
        return 400  # which the client does not repeat

    s3.fault = fail_at_first
    (message,) = resume(bucket, use_home("second"))
    assert ("none of another machine could be fetched" if for_ever else FROM.format(10)) in message


@pytest.mark.slow
@pytest.mark.parametrize("status", [500, 403])
def test_a_bucket_that_is_away_or_read_only_gives_one_message_and_training_goes_on(
    on_s3: str, s3: S3, use_home: UseHome, status: int
) -> None:
    work = use_home("first")
    s3.fault = lambda request: None if status == 403 and not request.startswith("PUT") else status
    with share_checkpoints(Bucket(on_s3, QUICK), work, create_home() / "signing.key", None):
        save(work, 10)
        work.on_events([{"kind": "checkpoint", "step": 10}])
        time.sleep(0.2)
    (heard,) = work.listeners
    assert isinstance(heard, Heard)
    assert [event["kind"] for event in heard.events if event["kind"] != "checkpoint"] == [
        "note" if status == 403 else "warning"
    ]


def test_an_upload_that_is_killed_leaves_the_checkpoint_before_it(on_s3: str, s3: S3, use_home: UseHome) -> None:
    work, bucket = use_home("first"), Bucket(on_s3, QUICK)
    save(work, 10)
    uploads(bucket, work).upload()
    save(work, 20)
    for last in (1, 3, 5):
        process = Fork(upload, (on_s3, create_home()), level=COMMANDS).start()
        kill_at_write(s3, process, last)
        if process.exitcode == 0:
            break
        shutil.rmtree(create_home().with_name("second"), ignore_errors=True)
        assert resume(bucket, use_home("second")) in ([FROM.format(10)], [FROM.format(20)])
        use_home("first")
    uploads(bucket, work).upload()
    assert steps(bucket) == [20]
    assert resume(bucket, use_home("third")) == [FROM.format(20)]


def upload(url: str, home: Path) -> None:
    os.environ["FINETUNE_HOME"] = str(home)
    uploads(Bucket(url), Work(KEY, home / "out", "run", (), "fit")).upload()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.drill)])
def test_a_training_whose_home_is_deleted_ends_in_another_home_with_the_same_bytes(
    on_s3: str, s3: S3, world: Path, tmp_path: Path, processes: int
) -> None:
    arguments = (world, tmp_path / "whole", processes, 0.0)
    fork_server.call(training_elsewhere.train, tmp_path / "undisturbed", None, *arguments)
    doomed = (tmp_path / "first", on_s3, world, tmp_path / "cut", processes, 0.05)
    process = Fork(training_elsewhere.train, doomed).start()
    manifest = re.compile(rf"DELETE .*/checkpoints/{KEY}/(\d+)\.json")  # which follows the upload of a newer one
    wait_until(lambda: not process.is_alive() or any(int(m[1]) >= 10 for m in map(manifest.match, s3.requests) if m))
    assert process.is_alive()
    process.kill()
    process.join()
    (found,) = steps(Bucket(on_s3))[-1:]
    (tmp_path / "first").rename(tmp_path / "burned")  # at once, while its processes end
    state, messages = fork_server.call(
        training_elsewhere.train, tmp_path / "second", on_s3, world, tmp_path / "again", processes, 0.0
    )
    assert state == "resumed" and FROM.format(found) in messages and f"resuming from checkpoint-{found}" in messages
    assert content(tmp_path / "again") == content(tmp_path / "whole")
    assert curve(tmp_path / "again") == curve(tmp_path / "whole")


def content(out: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in (out / "model").iterdir()}


def curve(out: Path) -> dict[int, dict[str, float]]:
    points: dict[int, dict[str, float]] = {}
    for event in read_events(out / "log" / "events.jsonl", 0, ["metrics"])[0]:
        points.setdefault(event["step"], {}).update(event["values"])
    return json.loads(json.dumps(points))
