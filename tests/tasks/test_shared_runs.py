"""Runs and plans of homes that share a bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.runtime import flow_run
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from tasks.cache.executor import Executor
from tasks.cache.planner import PlannedStage, Planner
from tasks.cache.refs import Ref
from tasks.cache.remote import Remote
from tasks.cache.stage import Inputs, Row, Work, stage
from tasks.shared_store.artifacts import SharedStore
from tasks.shared_store.bucket import Bucket
from tasks.shared_store.bucket_remote import BucketRemote
from tests.s3 import S3
from tests.tasks.shared import QUICK, on_s3, s3

__all__ = ["on_s3", "s3"]

made: list[str] = []
TEXT = "word " * 1000


@stage(lambda text: Inputs({"text": text}))
def write(work: Work, text: str) -> Mapping[str, Any]:
    made.append(text)
    (work.out / "text.txt").write_text(text)
    return {"characters": len(text)}


@stage(lambda written: Inputs({"upstream": {"write": written.digest}, "text": (written.path / "text.txt").read_text()}))
def count(work: Work, written: Ref) -> Mapping[str, Any]:
    made.append("count")
    (work.out / "count.txt").write_text("1000")
    return {}


@pytest.fixture(autouse=True)
def quick_flows(prefect_server: None) -> Iterator[None]:
    made.clear()
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield


class Homes:
    """Homes, each on a machine of its own, and one bucket."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
        self._folder, self._monkeypatch, self._url = folder, monkeypatch, url

    def use(self, name: str) -> Remote:
        self._monkeypatch.setenv("FINETUNE_HOME", str(self._folder / name))
        return BucketRemote(Bucket(self._url, QUICK))


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_s3: str) -> Homes:
    return Homes(tmp_path, monkeypatch, on_s3)


def run(remote: Remote, text: str = TEXT) -> list[Row]:
    """The rows of a run of both stages."""
    rows: list[Row] = []

    def body() -> None:
        executor = Executor("recipe", str(flow_run.get_id()), remote=remote)
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


def upload(homes: Homes, rows: list[Row]) -> None:
    shared = SharedStore(Bucket(homes._url, QUICK))
    for row in rows:
        shared.upload(row.name, row.key or "")


def states(rows: list[Row] | list[PlannedStage]) -> list[str]:
    return [row.state for row in rows]


def test_a_stage_whose_artifact_another_machine_made_is_cached_and_its_row_has_the_bytes(homes: Homes) -> None:
    upload(homes, run(homes.use("first")))
    made.clear()
    remote = homes.use("second")
    rows = run(remote)
    assert states(rows) == ["cached", "cached"] and made == []
    assert (rows[0].fetched_bytes or 0) > len(TEXT)
    remote.end_run()
    again = run(remote)
    assert states(again) == ["cached", "cached"] and [row.fetched_bytes for row in again] == [None, None]


def test_a_plan_fetches_so_that_it_can_read_the_inputs_of_later_stages(homes: Homes) -> None:
    upload(homes, run(homes.use("first")))
    made.clear()
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
    (warning,) = remote.end_run()
    assert "goes on without" in warning
    assert len({request for request in s3.asked if request.startswith("GET")}) == 1


def test_a_damaged_object_is_removed_and_its_artifact_made_again(homes: Homes, s3: S3) -> None:
    upload(homes, run(homes.use("first")))
    damaged = next(name for name, content in s3.objects().items() if content == TEXT.encode())
    s3.put(damaged, b"other" * 1000)
    remote = homes.use("second")
    rows = run(remote)
    assert states(rows) == ["ran", "cached"]
    (warning,) = remote.end_run()
    assert "write" in warning and "made again" in warning
    assert damaged not in s3.objects()
