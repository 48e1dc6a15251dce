"""Buckets of the tests: on an S3-compatible server on loopback, and in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.shared_store.bucket import Bucket, Limits
from tests.fork_server import Fork
from tests.s3 import BUCKET, KEYS, S3, server

QUICK = Limits(connect_s=2.0, idle_s=2.0, part_s=5.0, retry_s=1.0)
"""Limits for a server that is never slow, so that a test of one that does not answer is short."""


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    yield from server()


@pytest.fixture
def on_s3(s3: S3, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty store on the server."""
    s3.reached(monkeypatch, **KEYS)
    s3.requests.clear()
    yield f"s3://{BUCKET}/{request.node.name.partition('[')[0]}/{id(request)}"
    s3.fault = lambda request: None
    s3.ask_for_keys(False)


@pytest.fixture(params=["s3", "folder"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store."""
    if request.param == "s3":
        return str(request.getfixturevalue("on_s3"))
    (tmp_path / "shared store").mkdir()
    return f"file://{tmp_path}/shared%20store"


@pytest.fixture
def bucket(url: str) -> Bucket:
    return Bucket(url, QUICK)


def kill_at_write(s3: S3, process: Fork, number: int) -> list[str]:
    """Waits for the end of the process, and kills it as soon as the server gets its write of this number. Returns its
    writes. The server has the whole last request, and may still serve it."""
    writes: list[str] = []

    def kill(request: str) -> None:
        if request.startswith(("PUT", "POST")):
            writes.append(request)
            if len(writes) == number:
                process.kill()

    s3.fault = kill
    process.join()
    s3.fault = lambda request: None
    return writes
