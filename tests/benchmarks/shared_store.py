"""Transfers of artifacts through a bucket, against the library's own transfers of the same files, and runs with a
bucket, against runs without one."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import obstore
from obstore.store import LocalStore, ObjectStore, S3Store

from tasks.cache import store
from tasks.shared_store.bucket import CHUNK_BYTES, PART_BYTES, PARTS_AT_ONCE, Bucket
from tasks.shared_store.shared_artifacts import SharedStore
from tasks.shared_store.transfers import FILES_AT_ONCE
from tests.benchmarks.orchestration import run_project
from tests.benchmarks.subject import Subject
from tests.benchmarks.table import Row
from tests.flows.small import write_project

FILES = {"model/weights": 100 * 2**20, "optimizer": 50 * 2**20, **{f"shards/{n}": 2**20 for n in range(30)}}
"""Bytes of each file of the artifact, as a small encoder has them."""
ROUNDS = 10
RUN_ROUNDS = 2
EPOCHS = 100
"""Of the run that is measured with and without a bucket."""
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
            rows += _compare_runs(folder, f"s3://{BUCKET}/runs", raw)
        local = LocalStore(folder / "raw")
        return rows + _compare(folder, f"file://{folder}/bucket", local, "a folder", least=None)


def _compare(folder: Path, url: str, raw: ObjectStore, place: str, least: float | None) -> list[Row]:
    """Ratios of seconds: of the library alone, written to the disk, to those of the shared store.

    Who is first changes from round to round, and what a transfer wrote is removed at once: otherwise the second would
    write to memory that is slower, because the machine has not used it before.
    """
    bucket = Bucket(url)
    shared = SharedStore(bucket)
    seconds: dict[str, list[float]] = {name: [] for name in ("raw upload", "upload", "raw download", "download")}
    for number in range(ROUNDS):
        here, there = (folder / type(raw).__name__ / home for home in ("from", "to"))
        os.environ["FINETUNE_HOME"] = str(here)
        key = f"{number:040}"
        artifact = _make(key)
        names = {file: str(file.relative_to(artifact)) for file in artifact.rglob("*") if file.is_file()}
        uploads = {
            "raw upload": partial(_raw_upload, raw, names),
            "upload": partial(shared.upload, STAGE, key),
        }
        downloads = {
            "raw download": partial(_raw_download, raw, there, names.values()),
            "download": partial(_fetch, shared, key),
        }
        for name, transfer in _in_turn(uploads, number):
            seconds[name].append(_time(transfer))
        os.environ["FINETUNE_HOME"] = str(there)
        for name, transfer in _in_turn(downloads, number):
            seconds[name].append(_time(transfer))
            assert name.startswith("raw") or store.find(STAGE, key) is not None
            shutil.rmtree(there)
        shutil.rmtree(here)
        obstore.delete(raw, list(names.values()))
        for name in bucket.names("objects"):
            bucket.remove(name)
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


def _compare_runs(folder: Path, url: str, raw: ObjectStore) -> list[Row]:
    """A whole run with a bucket and without, in turn; then that of a home that fetches, and of one that has copies."""
    file, epochs = write_project(folder / "project"), ("--set", f"training.num_train_epochs={EPOCHS}")
    seconds: dict[str, list[float]] = {name: [] for name in ("without", "with", "fetching", "copied", "transfer")}
    for number in range(RUN_ROUNDS):
        there, here, other, copy = (folder / f"{name}-{number}" for name in ("without", "with", "other", "copy"))
        prefix = f"{url}/{number}"
        seconds["without"].append(run_project(file, there, *epochs).wall_s)
        with patch.dict(os.environ, {"FINETUNE_STORE": prefix}):
            seconds["with"].append(run_project(file, here, *epochs).wall_s)
            seconds["fetching"].append(run_project(file, other, *epochs).wall_s)
        copy.mkdir(mode=0o700)
        shutil.copytree(here / "artifacts", copy / "artifacts", symlinks=True)
        seconds["copied"].append(run_project(file, copy, *epochs).wall_s)
        names = {
            path: f"runs/{number}/{path.relative_to(here)}"
            for path in (here / "artifacts").rglob("*")
            if path.is_file()
        }
        _raw_upload(raw, names)
        seconds["transfer"].append(_time(partial(_raw_download, raw, folder / f"transfer-{number}", names.values())))
    with_store, without, fetching, copied, transfer = (
        statistics.median(seconds[name]) for name in ("with", "without", "fetching", "copied", "transfer")
    )
    return [
        Row(
            "a run with a shared store / without",
            with_store / without,
            f"`finetune run` in a new home, {with_store:.1f} s and {without:.1f} s; medians of {RUN_ROUNDS} in turn",
            most=1.05,
        ),
        Row(
            "a second home's run beside the transfer",
            fetching - copied - transfer,
            f"{fetching:.2f} s, less {copied:.2f} s in a new home with copies of the artifacts and {transfer:.2f} s "
            f"for the same files by obstore alone; medians of {RUN_ROUNDS} in turn",
            unit="s",
            most=2.0,
        ),
    ]


def _in_turn(transfers: dict[str, Callable[[], object]], number: int) -> list[tuple[str, Callable[[], object]]]:
    """In the order given, or in the other one in rounds of odd numbers."""
    both = list(transfers.items())
    return both[::-1] if number % 2 else both


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


def _time(action: Callable[[], object]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


@contextmanager
def _server() -> Iterator[str]:
    """An S3 server in a process of its own."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdin is not None
    with process:
        yield process.stdout.readline().strip()
        process.stdin.close()
