"""Transfers of artifacts through a bucket, against the library's own transfers of the same files."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import obstore
from obstore.store import LocalStore, ObjectStore, S3Store

from tasks.cache import store
from tasks.shared_store.artifacts import SharedStore
from tasks.shared_store.bucket import CHUNK_BYTES, PART_BYTES, PARTS_AT_ONCE, Bucket
from tasks.shared_store.transfers import FILES_AT_ONCE
from tests.benchmarks.subject import Subject
from tests.benchmarks.table import Row

FILES = {"model/weights": 100 * 2**20, "optimizer": 50 * 2**20, **{f"shards/{n}": 2**20 for n in range(30)}}
"""Bytes of each file of the artifact, as a small encoder has them."""
ROUNDS = 7
STAGE, BUCKET = "fit", "rows"
LOGIN = {"AWS_ACCESS_KEY_ID": "mine", "AWS_SECRET_ACCESS_KEY": "hush", "AWS_DEFAULT_REGION": "us-east-1"}
SERVER = "import sys; from tests.s3 import S3; print(S3().url, flush=True); sys.stdin.read()"


def measure(subject: Subject) -> list[Row]:
    """Upload and download, through a server and a folder, each in turn with the library's."""
    folder = subject.folder / "shared-store"
    for room in ("bucket", "raw"):
        (folder / room).mkdir(parents=True)
    with patch.dict(os.environ, LOGIN):  # and the homes of below
        with _server() as url:
            os.environ["AWS_ENDPOINT_URL"] = url
            raw = S3Store(BUCKET, prefix="raw", client_options={"allow_http": True})
            rows = _compare(folder, f"s3://{BUCKET}/own", raw, "an S3 server on loopback", least=0.8)
        local = LocalStore(folder / "raw")
        return rows + _compare(folder, f"file://{folder}/bucket", local, "a folder", least=None)


def _compare(folder: Path, url: str, raw: ObjectStore, place: str, least: float | None) -> list[Row]:
    """Ratios of seconds: of the library alone, written to the disk, to those of the shared store."""
    shared = SharedStore(Bucket(url))
    seconds: dict[str, list[float]] = {name: [] for name in ("raw upload", "upload", "raw download", "download")}
    for number in range(ROUNDS):
        here, there = (folder / type(raw).__name__ / f"{number} {home}" for home in ("from", "to"))
        os.environ["FINETUNE_HOME"] = str(here)
        key = f"{number:040}"
        artifact = _make(key)
        files = [file for file in artifact.rglob("*") if file.is_file()]
        names = {file: f"{number}/{file.relative_to(artifact)}" for file in files}
        seconds["raw upload"].append(_time(_raw_upload, raw, names))
        seconds["upload"].append(_time(shared.upload, STAGE, key))
        seconds["raw download"].append(_time(_raw_download, raw, there / "raw", names.values()))
        os.environ["FINETUNE_HOME"] = str(there)
        seconds["download"].append(_time(_fetch, shared, key))
    mib = sum(FILES.values()) / 2**20
    return [
        Row(
            f"{name} of an artifact / by obstore alone, {place}",
            statistics.median(a / b for a, b in zip(seconds[f"raw {name}"], seconds[name], strict=True)),
            f"{mib:.0f} MiB in {len(FILES)} files, {ROUNDS} times in turn; median; "
            f"{mib / statistics.median(seconds[name]):.0f} and "
            f"{mib / statistics.median(seconds[f'raw {name}']):.0f} MiB/s",
            least=least,
        )
        for name in ("upload", "download")
    ]


def _make(key: str) -> Path:
    with store.filling(STAGE, key) as aside:
        for name, size in FILES.items():
            (aside / name).parent.mkdir(exist_ok=True)
            (aside / name).write_bytes(os.urandom(size))
        return store.publish(aside, STAGE, key, {}, {}).path


def _fetch(shared: SharedStore, key: str) -> None:
    found = shared.look_up(STAGE, key)
    assert found is not None
    shared.fetch(found)
    assert store.find(STAGE, key) == found.ref


def _raw_upload(raw: ObjectStore, names: dict[Path, str]) -> None:
    def put(file: Path) -> None:
        obstore.put(raw, names[file], file, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        list(pool.map(put, names))


def _raw_download(raw: ObjectStore, folder: Path, names: Iterable[str]) -> None:
    def get(name: str) -> None:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as out:
            for chunk in obstore.get(raw, name).stream(CHUNK_BYTES):
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())

    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        list(pool.map(get, names))


def _time(action: Callable[..., object], *arguments: object) -> float:
    began = time.monotonic()
    action(*arguments)
    return time.monotonic() - began


@contextmanager
def _server() -> Iterator[str]:
    """An S3 server in a process of its own."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    with process:
        yield process.stdout.readline().strip()
        process.stdin.close()
