"""A bucket: objects appear as a whole and once, and its errors have a type."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasks.shared_store import bucket as module
from tasks.shared_store.bucket import AlreadyExists, Bucket, Forbidden, NotFound, Unavailable, WrongSize
from tests.fork_server import NEW_PYTHON
from tests.raised import raised_problems
from tests.s3 import BUCKET, KEYS, S3
from tests.tasks.shared import QUICK, bucket, on_s3, s3, url
from training.problems import UserError

__all__ = ["bucket", "on_s3", "s3", "url"]

LARGE = os.urandom(2 * module.PART_BYTES + 1)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    (tmp_path / "large").write_bytes(LARGE)
    return tmp_path / "large"


def test_an_object_is_created_once_and_then_never_changed(bucket: Bucket) -> None:
    bucket.create("a/b.json", b"first")
    with pytest.raises(AlreadyExists, match=r"a/b\.json"):
        bucket.create("a/b.json", b"second")
    assert bucket.read("a/b.json") == b"first"


def test_of_many_creators_at_once_one_wins(bucket: Bucket) -> None:
    def create(number: int) -> bool:
        try:
            bucket.create("one", b"%d" % number)
        except AlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(16)))
    assert won.count(True) == 1
    assert bucket.read("one") == b"%d" % won.index(True)


@pytest.mark.parametrize("size", [0, 1, module.PART_BYTES, len(LARGE)])
def test_a_file_arrives_as_it_was_sent(bucket: Bucket, tmp_path: Path, size: int) -> None:
    (tmp_path / "file").write_bytes(LARGE[:size])
    bucket.upload("file", tmp_path / "file")
    assert bucket.size("file") == size
    assert b"".join(bucket.stream("file", size)) == LARGE[:size]


def test_a_large_object_is_read_by_several_requests_in_order(
    on_s3: str, s3: S3, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGE_BYTES", len(LARGE))
    bucket = Bucket(on_s3, QUICK)
    bucket.upload("large", large)
    s3.requests.clear()
    assert b"".join(bucket.stream("large", len(LARGE))) == LARGE
    assert sum(request.startswith("GET") for request in s3.requests) == 3


@pytest.mark.parametrize("large_bytes", [1, 100])
def test_an_object_of_another_size_is_refused_before_its_first_byte(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, large_bytes: int
) -> None:
    monkeypatch.setattr(module, "LARGE_BYTES", large_bytes)
    bucket.create("cut", b"")
    with pytest.raises(WrongSize, match="cut has 0 bytes, not 9"):
        next(bucket.stream("cut", 9))


def test_an_upload_that_is_stopped_leaves_no_object(bucket: Bucket, large: Path) -> None:
    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        bucket.upload("large", large, stop)
    assert bucket.size("large") is None


def test_an_absent_object_has_no_size_and_cannot_be_read(bucket: Bucket) -> None:
    assert bucket.size("none") is None
    bucket.remove("none")
    for read in (bucket.read, lambda name: next(bucket.stream(name, 1))):
        with pytest.raises(NotFound, match="none"):
            read("none")


def test_a_removed_object_is_absent(bucket: Bucket) -> None:
    bucket.create("a", b"")
    bucket.remove("a")
    assert bucket.size("a") is None


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "bucket",
            "http://host/bucket",
            "s3:///prefix",
            "s3://Upper/case",
            "s3://bucket/a//b",
            "s3://bucket/../b",
        ),
        *("s3://bucket/a?b", "s3://bucket/a#b", "file://host/folder", "file:///", "file:x"),
    ],
)
def test_a_url_of_no_store_is_an_error_that_names_the_variable_both_forms_and_what_they_allow(url: str) -> None:
    [problem] = raised_problems(Bucket, url)
    assert problem.where == "FINETUNE_STORE"
    assert problem.message.startswith(repr(url))
    assert "s3://bucket/prefix" in problem.message and "file:///folder" in problem.message
    assert "lower-case letters" in problem.message and "between single slashes" in problem.message


def test_credentials_in_a_url_are_refused_and_not_shown() -> None:
    with pytest.raises(UserError, match="'s3://bucket/a' holds credentials: set AWS_ACCESS_KEY_ID"):
        Bucket("s3://key:secret@bucket/a")


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"FINETUNE_STORE.*/none' names a folder that does not exist"):
        Bucket(f"file://{tmp_path}/none")
    assert not (tmp_path / "none").exists()


def test_a_bucket_that_does_not_exist_is_the_users_error(on_s3: str) -> None:
    with pytest.raises(UserError, match=r"FINETUNE_STORE.*'s3://nothing/here' names a bucket that does not exist"):
        Bucket("s3://nothing/here").read("a")


def test_refused_credentials_are_an_error_with_the_servers_reason(on_s3: str, s3: S3) -> None:
    s3.ask_for_keys(True)
    with pytest.raises(Forbidden, match="InvalidAccessKeyId: The AWS Access Key Id you provided does not exist"):
        Bucket(on_s3, QUICK).create("a", b"")


def test_without_any_credentials_the_error_names_the_variables(on_s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Forbidden, match="no credentials were found: set AWS_ACCESS_KEY_ID"):
        Bucket(on_s3, QUICK).read("a")


def test_credentials_region_and_endpoint_may_be_a_profiles(
    on_s3: str, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*KEYS, "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    keys = "\n".join(f"{name.lower()} = {value}" for name, value in KEYS.items())
    (tmp_path / "config").write_text(f"[profile team]\nregion = eu-north-1\nendpoint_url = {s3.url}\n{keys}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "team")
    Bucket(on_s3, QUICK).create("a", b"")
    assert s3.logins[-1].startswith(f"AWS4-HMAC-SHA256 Credential={KEYS['AWS_ACCESS_KEY_ID']}/")
    assert "/eu-north-1/s3/" in s3.logins[-1]


def test_a_profile_that_is_not_there_is_the_users_error(on_s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_PROFILE", "team")
    with pytest.raises(UserError, match=r"AWS_PROFILE.*team"):
        Bucket(on_s3)


def test_a_server_that_fails_once_is_tried_again(on_s3: str, s3: S3) -> None:
    statuses = iter([500, 503])
    s3.fault = lambda request: next(statuses, None)
    Bucket(on_s3, QUICK).create("a", b"1")
    assert len(s3.requests) == 3


@pytest.mark.slow
def test_a_server_that_only_fails_is_unavailable_in_bounded_time(on_s3: str, s3: S3, large: Path) -> None:
    s3.fault = lambda request: 500
    bucket = Bucket(on_s3, QUICK)
    for request in (lambda: bucket.read("a"), lambda: bucket.size("a"), lambda: bucket.upload("a", large)):
        started = time.monotonic()
        with pytest.raises(Unavailable, match="500"):
            request()
        assert time.monotonic() - started < 10 * QUICK.retry_s


@pytest.mark.slow
@pytest.mark.parametrize("listening", [True, False])
def test_a_server_that_does_not_answer_is_unavailable_in_bounded_time(
    on_s3: str, monkeypatch: pytest.MonkeyPatch, listening: bool
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listening:
            silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        bucket = Bucket(on_s3, QUICK)
        for request in (lambda: bucket.read("a"), lambda: bucket.create("a", b"")):
            started = time.monotonic()
            answer = rf"{'no answer in time' if listening else 'no answer'} from {endpoint}"
            with pytest.raises(Unavailable, match=answer if listening else rf"{answer} \(Connection refused\)$"):
                request()
            assert time.monotonic() - started < 10 * QUICK.retry_s


def test_a_download_that_is_cut_off_goes_on_where_it_was(on_s3: str, s3: S3, large: Path) -> None:
    bucket = Bucket(on_s3, QUICK)
    bucket.upload("large", large)
    s3.requests.clear()
    s3.cut_after = 3_000_000
    assert b"".join(bucket.stream("large", len(LARGE))) == LARGE
    assert len(s3.requests) == 2


def test_importing_the_bucket_imports_no_client_of_aws() -> None:
    program = (
        "import sys, tasks.shared_store.bucket; print({'boto3', 'botocore', 's3fs', 'aiohttp'} & set(sys.modules))"
    )
    child = subprocess.run([NEW_PYTHON, "-c", program], capture_output=True, text=True, check=True)
    assert child.stdout == "set()\n"


def test_the_url_of_a_bucket_alone_is_a_store(on_s3: str, s3: S3) -> None:
    Bucket(f"s3://{BUCKET}").create("at the top", b"")
    assert "at the top" in s3.objects()
