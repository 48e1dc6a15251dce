"""Runs and plans of homes that share a bucket."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from prefect import flow
from prefect.runtime import flow_run
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from tasks.cache.executor import Executor
from tasks.cache.planner import PlannedStage, Planner
from tasks.cache.remote import Remote
from tasks.cache.results import Artifact
from tasks.cache.stage import Inputs, Listener, Row, Work, action
from tasks.home import with_this_home
from tasks.shared_store.bucket import Bucket
from tasks.shared_store.bucket_remote import BucketRemote
from tasks.shared_store.shared_artifacts import SharedStore
from tests.s3 import BUCKET, S3
from tests.tasks.plain_stages import stage
from tests.tasks.shared import QUICK, on_s3, s3

__all__ = ["on_s3", "s3"]

made: list[str] = []
noise: list[str] = []
"""Appended to the output of `write`, which then is not determined by its inputs."""
TEXT = "word " * 1000


@stage(lambda text: Inputs({"text": text}))
def write(work: Work, text: str) -> Mapping[str, Any]:
    made.append(text)
    (work.out / "text.txt").write_text(text + "".join(noise))
    return {"characters": len(text)}


@stage(lambda written: Inputs({"upstream": {"write": written.digest}, "text": (written.path / "text.txt").read_text()}))
def count(work: Work, written: Artifact) -> Mapping[str, Any]:
    made.append("count")
    (work.out / "count.txt").write_text("1000")
    return {}


@action(lambda text: Inputs({"text": text}))
def announce(work: Work, text: str) -> None:
    with work.one_at_a_time():
        made.append("announce")


class Recorded(Remote):
    """Records the blocks that actions enter."""

    def __init__(self) -> None:
        self.blocks = list[tuple[str, str]]()

    def one_at_a_time(
        self, stage: str, key: str, on_wait: Callable[[str], None] = lambda owner: None
    ) -> AbstractContextManager[None]:
        self.blocks.append((stage, key))
        return nullcontext()


@pytest.fixture(autouse=True)
def quick_flows(prefect_server: None) -> Iterator[None]:
    made.clear()
    noise.clear()
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield


class Homes:
    """Homes, each on a machine of its own, and one bucket."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
        self.folder, self._monkeypatch, self._url = folder, monkeypatch, url

    def use(self, name: str) -> Remote:
        self._monkeypatch.setenv("FINETUNE_HOME", str(self.folder / name))
        return BucketRemote(Bucket(self._url, QUICK))

    def objects(self, s3: S3) -> dict[str, bytes]:
        """The content of each object of the store."""
        prefix = self._url.removeprefix(f"s3://{BUCKET}/")
        return {name: content for name, content in s3.objects().items() if name.startswith(prefix)}

    def share(self, name: str) -> None:
        """A run of this home, all in the bucket."""
        remote = self.use(name)
        run(remote)
        assert remote.end_run(wait=True) == []
        made.clear()


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_s3: str) -> Homes:
    return Homes(tmp_path, monkeypatch, on_s3)


class Waits(Listener):
    """Collects the reasons of waiting stages.

    Args:
        on_wait: called at each.
    """

    def __init__(self, on_wait: Callable[[], None]) -> None:
        self._on_wait, self.notes = on_wait, list[str]()

    def stage_events(self, stage: str, events: list[dict[str, Any]]) -> None:
        notes = [event["message"] for event in events if event["kind"] == "waiting"]
        self.notes += notes
        for _ in notes:
            self._on_wait()


def run(remote: Remote, text: str | None = TEXT, listeners: Sequence[Listener] = ()) -> list[Row]:
    """The rows of a run of both stages."""
    rows: list[Row] = []

    def body() -> None:
        executor = Executor("recipe", str(flow_run.get_id()), listeners, remote=remote)
        try:
            executor(count, executor(write, text))
        finally:
            rows.extend(executor.rows)

    flow(name="walk")(body)()
    return rows


def plan(remote: Remote, text: str = TEXT) -> list[PlannedStage]:
    planner = Planner("recipe", remote=remote)
    planner(count, planner(write, text))
    return planner.rows


def states(rows: list[Row] | list[PlannedStage]) -> list[str]:
    return [row.state for row in rows]


def test_a_stage_whose_artifact_another_machine_made_is_cached_and_its_row_has_the_bytes(homes: Homes) -> None:
    first = homes.use("first")
    run(first)
    assert first.end_run(wait=True) == []
    made.clear()
    remote = homes.use("second")
    rows = run(remote)
    assert states(rows) == ["cached", "cached"] and made == []
    assert (rows[0].fetched_bytes or 0) > len(TEXT)
    assert remote.end_run(wait=True) == []
    again = run(remote)
    assert states(again) == ["cached", "cached"] and [row.fetched_bytes for row in again] == [None, None]


@pytest.mark.slow
def test_while_another_machine_makes_an_artifact_this_one_waits_and_then_fetches_it(homes: Homes, s3: S3) -> None:
    first = homes.use("first")
    refs = [Artifact(stage=row.name, key=row.key or "", digest="") for row in run(Remote())]
    assert first.find_or_lease("write", refs[0].key) is None

    def deliver() -> None:
        for ref in refs:
            first.upload(ref, made=True)

    waits = Waits(with_this_home(deliver))
    made.clear()
    rows = run(homes.use("second"), listeners=[waits])
    assert states(rows) == ["cached", "cached"] and made == []
    assert len(waits.notes) == 1 and "another machine" in waits.notes[0]
    assert first.end_run(wait=True) == []
    assert not any("/leases/" in name for name in homes.objects(s3))


def test_a_stage_that_failed_keeps_no_other_machine_waiting(homes: Homes, s3: S3) -> None:
    remote = homes.use("first")
    with pytest.raises(TypeError):
        run(remote, text=None)
    assert not any("/leases/" in name for name in homes.objects(s3))


@pytest.mark.slow
def test_machines_enter_the_block_of_an_action_one_after_the_other(homes: Homes, s3: S3) -> None:
    first, second = homes.use("first"), homes.use("second")
    with first.one_at_a_time("register", "k1"):
        waits: list[str] = []
        waited = Thread(target=lambda: entered(second, waits))
        waited.start()
        while not waits:
            time.sleep(0.02)
        assert made == []
        with second.one_at_a_time("register", "another"):
            pass
    waited.join()
    assert made == ["entered"]
    assert not any("/leases/" in name for name in homes.objects(s3))


def entered(remote: Remote, waits: list[str]) -> None:
    with remote.one_at_a_time("register", "k1", waits.append):
        made.append("entered")


def test_a_bucket_that_takes_no_leases_stops_no_action(homes: Homes, s3: S3) -> None:
    remote = homes.use("reader")
    s3.fault = lambda request: 403 if request.startswith("PUT") else None
    with remote.one_at_a_time("register", "k1"), remote.one_at_a_time("register", "k2"):
        pass


def test_an_action_is_given_the_block_of_its_key(homes: Homes) -> None:
    remote = Recorded()

    def body() -> None:
        executor = Executor("recipe", str(flow_run.get_id()), remote=remote)
        executor(announce, TEXT)

    homes.use("first")
    flow(name="walk")(body)()
    assert remote.blocks == [("announce", announce.key(announce.flat_inputs(TEXT)[0]))]


def test_a_plan_fetches_so_that_it_can_read_the_inputs_of_later_stages(homes: Homes) -> None:
    homes.share("first")
    remote = homes.use("second")
    assert states(plan(remote)) == ["cached", "cached"]
    rows = run(remote)
    assert (rows[0].fetched_bytes or 0) > len(TEXT), "the run shows what its plan fetched"


@pytest.mark.parametrize("status", [500, 403])
def test_a_bucket_that_refuses_look_ups_is_named_once_and_tried_once(homes: Homes, s3: S3, status: int) -> None:
    remote = homes.use("first")
    s3.fault = lambda request: status
    rows = run(remote)
    assert states(rows) == ["ran", "ran"]
    assert sum("are not used" in warning for warning in remote.end_run(wait=False)) == 1
    assert len({request for request in s3.requests if "/artifacts/count" in request}) == 0


def test_a_damaged_object_is_removed_and_its_artifact_made_again(homes: Homes, s3: S3) -> None:
    homes.share("first")
    damaged = next(name for name, content in homes.objects(s3).items() if content == TEXT.encode())
    s3.put(damaged, b"other" * 1000)
    remote = homes.use("second")
    rows = run(remote)
    assert states(rows) == ["ran", "cached"]
    (warning,) = remote.end_run(wait=True)
    assert "write" in warning and "made again" in warning
    assert homes.objects(s3)[damaged] == TEXT.encode()


def test_a_damaged_artifact_that_may_not_be_removed_is_made_without_waiting_for_a_lease(homes: Homes, s3: S3) -> None:
    homes.share("first")
    objects = homes.objects(s3)
    s3.put(next(name for name, content in objects.items() if content == TEXT.encode()), b"other" * 1000)
    manifest = next(name for name in objects if "/artifacts/write/" in name)
    s3.put(manifest.replace("/artifacts/", "/leases/"), b'{"owner": "another machine", "beat": 1}')
    remote = homes.use("second")
    s3.fault = lambda request: 403 if request.startswith("DELETE") else None
    assert states(run(remote)) == ["ran", "cached"]
    assert sum("made again" in warning for warning in remote.end_run(wait=False)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("status", [500, 403])
def test_what_a_run_could_not_upload_is_named_and_uploaded_by_the_next_run(homes: Homes, s3: S3, status: int) -> None:
    first = homes.use("first")
    s3.fault = lambda request: status if request.startswith("PUT") else None
    keys = [row.key or "" for row in run(first)]
    (warning,) = first.end_run(wait=True)
    assert ("may only be read" if status == 403 else f"write {keys[0][:16]}, count {keys[1][:16]}") in warning
    s3.fault = lambda request: None
    later = homes.use("first")
    later.deliver_earlier()
    assert later.end_run(wait=True) == []
    assert sum(name.endswith(f"{key}.json") for key in keys for name in homes.objects(s3)) == 2
    assert list((homes.folder / "first" / "uploads").iterdir()) == []


@pytest.mark.slow
def test_a_failed_upload_is_tried_again_while_a_long_stage_runs(
    homes: Homes, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.shared_store.shared_artifacts.RETRY_AFTER_S", 0.5)
    remote, failed = homes.use("first"), Event()

    def fail_at_first(request: str) -> int | None:
        if failed.is_set() or not request.startswith("PUT"):
            return None
        failed.set()
        return 400

    s3.fault = fail_at_first
    (row, _) = run(Remote())
    remote.upload(Artifact(stage=row.name, key=row.key or "", digest=""), made=True)
    deadline = time.monotonic() + 60
    while not any(request.startswith("PUT") and "/artifacts/write/" in request for request in s3.requests):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert remote.end_run(wait=True) == [] and failed.is_set()
    assert any(name.endswith(f"/artifacts/write/{row.key}.json") for name in homes.objects(s3))


class Panic(BaseException):
    """As obstore raises one."""


def test_an_upload_that_panics_ends_the_run_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: object, **__: object) -> None:
        raise Panic("index out of bounds")

    homes = Homes(tmp_path, monkeypatch, f"file://{tmp_path}")
    monkeypatch.setattr(SharedStore, "upload", panic)
    remote = homes.use("first")
    (row, _) = run(Remote())
    remote.upload(Artifact(stage=row.name, key=row.key or "", digest=""), made=True)
    ended = list[str]()
    waits = Thread(target=with_this_home(lambda: ended.extend(remote.end_run(wait=True))), daemon=True)
    waits.start()
    waits.join(60)
    assert len(ended) == 1 and "(index out of bounds)" in ended[0]


def test_a_home_that_may_only_read_is_told_so_once(homes: Homes, s3: S3) -> None:
    s3.fault = lambda request: 403 if request.startswith("PUT") else None
    warnings = []
    for _ in range(2):
        remote = homes.use("first")
        run(remote)
        warnings += remote.end_run(wait=True)
    assert len(warnings) == 1


def test_uploads_of_an_interrupted_run_are_left_to_the_next(homes: Homes, s3: S3) -> None:
    remote, may_go_on = homes.use("first"), Event()
    s3.fault = lambda request: None if may_go_on.wait(60) else 500
    for row in run(Remote()):
        remote.upload(Artifact(stage=row.name, key=row.key or "", digest=""), made=True)
    (warning,) = remote.end_run(wait=False)
    may_go_on.set()
    assert "interrupted" in warning and "write" in warning and "count" in warning
    later = homes.use("first")
    later.deliver_earlier()
    assert later.end_run(wait=True) == []
    assert sum(name.endswith(".json") for name in homes.objects(s3)) == 2


@pytest.mark.slow
def test_two_contents_of_one_key_are_named_and_the_first_stands(homes: Homes, s3: S3) -> None:
    homes.share("first")
    (first,) = [content for name, content in homes.objects(s3).items() if "/artifacts/write/" in name]
    second = homes.use("second")
    noise.append("other")
    run(Remote())
    run(second)
    (warning,) = [text for text in second.end_run(wait=True) if "write" in text]
    assert json.loads(first)["ref"]["digest"] in warning and "different content" in warning
    assert first in homes.objects(s3).values()
