"""A bucket of an S3-compatible object store, or a folder in its place.

By obstore: it creates an object only if absent, atomically, in both (If-None-Match, a hard link), brings time-outs,
retries and multipart uploads in one wheel without dependencies, and is imported in 10 ms; s3fs takes 400 ms, three
times the memory, and longer for each transfer.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore, S3Store

from tasks.home import without_credentials
from training.problems import UserError

if TYPE_CHECKING:
    from obstore import Bytes
    from obstore.store import ClientConfig, ObjectStore, S3Credential

VARIABLE = "FINETUNE_STORE"
CHUNK_BYTES = 2**20
"""Bytes that a download gives at a time. Larger ones cost more: they are new memory each time."""
CHUNKS_AHEAD = 2
"""Chunks that are received while one is used, for objects of more than one part."""
PART_BYTES = 8 * 2**20
"""Bytes of a part of an upload, and of a large download, that has a request of its own."""
MAX_PARTS = 10_000
"""Parts of a multipart upload, by the rules of S3."""
PARTS_AT_ONCE = 4
"""Parts of an object that are in transfer, and in memory, at the same time."""
LARGE_BYTES = 256 * 2**20
"""Size from which an object is read by several requests at once: S3 sends some 100 MB a second to one request."""
CREDENTIALS_TTL = timedelta(minutes=10)
"""botocore renews credentials that expire sooner."""


class BucketError(Exception):
    """A request that the bucket did not fulfil."""


class NotFound(BucketError):
    """The object is absent."""


class AlreadyExists(BucketError):
    """An object of this name exists."""


class WrongSize(BucketError):
    """The object has another size."""


class Forbidden(BucketError):
    """The credentials do not allow the request, or there are none."""


class Unavailable(BucketError):
    """No answer, or only errors of the server, until the last retry."""


class Entry(NamedTuple):
    """An object, as a listing has it."""

    name: str
    bytes: int
    modified: datetime
    """By the clock of the bucket."""


@dataclass(frozen=True)
class Limits:
    """The longest waits, in seconds."""

    connect_s: float = 5.0
    idle_s: float = 15.0
    """For an answer, or its next bytes."""
    part_s: float = 120.0
    """For the upload of one part: a part of 8 MiB needs 0.6 Mbit/s."""
    retry_s: float = 20.0
    """From the first request to the start of the last retry."""


LIMITS = Limits()


class Bucket:
    """The objects below a URL, by name.

    Any method but `stream`'s chunks may be called in several threads. A process that was forked after the first request
    must not make another.

    Args:
        url: `s3://bucket/prefix` or `file:///folder`. Raises UserError for another.
        limits: the longest waits.
    """

    def __init__(self, url: str, limits: Limits = LIMITS) -> None:
        self.url = url.rstrip("/")
        scheme, place, path = _parts(url)
        if scheme == "file":
            self._store: ObjectStore = LocalStore(_folder(url, path))
            self._uploads: ObjectStore = self._store
        else:
            idle, part = timedelta(seconds=limits.idle_s), timedelta(seconds=limits.part_s)
            self._store = _s3(place, path, limits, {"read_timeout": idle, "timeout": timedelta(days=1)})
            # The idle time would begin before the first byte is sent.
            self._uploads = _s3(place, path, limits, {"timeout": part})

    def size(self, name: str) -> int | None:
        """Bytes of an object; None if it is absent."""
        try:
            with self._typed_errors(name):
                return obstore.head(self._store, name)["size"]
        except NotFound:
            return None

    def read(self, name: str) -> bytes:
        """A small object."""
        with self._typed_errors(name):
            return bytes(obstore.get(self._store, name).bytes())

    def names(self, above: str) -> list[str]:
        """The names of all objects below `above/`."""
        return [entry.name for entry in self.entries(above)]

    def entries(self, above: str | None = None) -> list[Entry]:
        """All objects below `above/`, or below the URL."""
        with self._typed_errors(above or ""):
            listing = obstore.list(self._store, prefix=f"{above}/" if above else None)
            return [Entry(one["path"], one["size"], one["last_modified"]) for chunk in listing for one in chunk]

    def now(self) -> datetime:
        """The time of the bucket's clock, which the age of an object is measured by. Writes an object and removes
        it."""
        name = f"clock/{uuid.uuid4().hex}"
        self.write(name, b"")
        try:
            with self._typed_errors(name):
                return obstore.head(self._store, name)["last_modified"]
        finally:
            self.remove(name)

    def stream(self, name: str, size_bytes: int) -> Iterator[bytes | Bytes]:
        """The chunks of an object, in order. Raises WrongSize before the first if the object has another size."""
        with self._typed_errors(name):
            if size_bytes < LARGE_BYTES:
                result = obstore.get(self._store, name)
                self._check_size(name, result.meta["size"], size_bytes)
                chunks = iter(result.stream(CHUNK_BYTES))
                if size_bytes <= PART_BYTES:
                    yield from chunks
                else:
                    yield from _ahead(repeat(partial(next, chunks, None)), CHUNKS_AHEAD, threads=1)
            else:
                self._check_size(name, obstore.head(self._store, name)["size"], size_bytes)
                yield from _ahead(self._ranges(name, size_bytes), PARTS_AT_ONCE, threads=PARTS_AT_ONCE)

    def create(self, name: str, content: bytes) -> None:
        """Writes a small object. Raises AlreadyExists, and changes nothing, if there is one of this name."""
        with self._typed_errors(name):
            obstore.put(self._store, name, content, mode="create")

    def write(self, name: str, content: bytes) -> None:
        """Writes a small object; replaces one of this name."""
        with self._typed_errors(name):
            obstore.put(self._store, name, content)

    def upload(self, name: str, file: Path, before_part: Callable[[], None] = lambda: None) -> None:
        """Writes a file as an object, which appears as a whole; replaces an object of this name.

        `before_part` is called before each part is read. An error that it raises ends the upload.
        """
        part_bytes = max(PART_BYTES, -(-file.stat().st_size // MAX_PARTS))
        with file.open("rb") as source:
            first = source.read(part_bytes)
            more = len(first) == part_bytes
            content = chain([first], _chunks(source, part_bytes, before_part)) if more else first
            with self._typed_errors(name):
                obstore.put(self._uploads, name, content, chunk_size=part_bytes, max_concurrency=PARTS_AT_ONCE)

    def remove(self, name: str) -> None:
        """Removes an object, which may be absent."""
        with contextlib.suppress(NotFound), self._typed_errors(name):
            obstore.delete(self._store, name)

    def _ranges(self, name: str, size_bytes: int) -> Iterator[Callable[[], Bytes]]:
        for start in range(0, size_bytes, PART_BYTES):
            end = min(start + PART_BYTES, size_bytes)
            yield partial(obstore.get_range, self._store, name, start=start, end=end)

    def _check_size(self, name: str, found_bytes: int, size_bytes: int) -> None:
        if found_bytes != size_bytes:
            raise WrongSize(f"{self.url}/{name} has {found_bytes} bytes, not {size_bytes}")

    @contextlib.contextmanager
    def _typed_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise _problem(self.url, "names a bucket that does not exist: create it, or name another.") from error
            raise NotFound(f"{self.url}/{name} does not exist") from error
        except BaseError as error:
            raise _kind(error)(f"{self.url}/{name}: {_reason(error)}") from error


def _chunks(source: BinaryIO, chunk_bytes: int, before_each: Callable[[], None]) -> Iterator[bytes]:
    while chunk := source.read(chunk_bytes):
        before_each()
        yield chunk


def _ahead(calls: Iterator[Callable[[], Bytes | None]], ahead: int, threads: int) -> Iterator[Bytes]:
    """The results in order, until the first None, of which the next ones are made while one is used."""
    pool = ThreadPoolExecutor(threads, "download")
    try:
        pending = deque(pool.submit(call) for call in islice(calls, ahead))
        while pending and (result := pending.popleft().result()) is not None:
            pending.extend(pool.submit(call) for call in islice(calls, 1))
            yield result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _kind(error: BaseError) -> type[BucketError]:
    """The class of our own for an error of obstore's."""
    if isinstance(error, AlreadyExistsError):
        return AlreadyExists
    refused = isinstance(error, PermissionDeniedError | UnauthenticatedError) or "kind: PermissionDenied" in str(error)
    return Forbidden if refused or _lacks_credentials(error) else Unavailable


def _lacks_credentials(error: BaseError) -> bool:
    """Whether the last place of credentials, the machine's metadata, did not answer."""
    return "/latest/api/token" in str(error) or "/latest/meta-data" in str(error)


def _reason(error: BaseError) -> str:
    """One line of an error's text, which has the answer and the library's structures too."""
    text = str(error)
    if _lacks_credentials(error):
        return "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    endpoint = re.search(r"uri: Some\(\s*(https?://[^/\s,?]+)", text)
    place = f" from {without_credentials(endpoint[1])}" if endpoint else ""
    if "kind: Timeout" in text:
        return f"no answer in time{place}"
    if "kind: Connect," in text:
        system = re.search(r'(?:message|error): "(.*?)"', text)
        return f"no answer{place}" + (f" ({system[1]})" if system else "")
    answer = re.search(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", text, re.DOTALL)
    if answer:
        return f"{answer[1]}: {answer[2]}"
    system = re.search(r'message: "(.*?)"', text)
    return system[1] if system else text.partition("\n")[0].rpartition(" - ")[2].strip(": ")


def _parts(url: str) -> tuple[str, str, str]:
    """Scheme, bucket and path of a URL."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        message = "holds credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, instead."
        raise _problem(url, message)
    path = parts.path.strip("/")
    plain = not (parts.query or parts.fragment)
    if parts.scheme == "file" and plain and not parts.netloc and parts.path.startswith("/") and path:
        return "file", "", unquote(parts.path)
    bucket = re.fullmatch(r"[a-z0-9][a-z0-9.-]+[a-z0-9]", parts.netloc)
    prefix = re.fullmatch(r"([\w=+-][\w.=+-]*(/|$))*", path, re.ASCII)
    if parts.scheme == "s3" and plain and bucket and prefix:
        return "s3", parts.netloc, path
    message = (
        "is no URL of a store: write s3://bucket/prefix, or file:///folder for a folder. A bucket has lower-case "
        "letters, digits, '.' and '-'. A prefix has letters, digits and '_.=+-' between single slashes; no part of it "
        "starts with '.'. Neither form has '?' or '#'."
    )
    raise _problem(url, message)


def _folder(url: str, path: str) -> Path:
    folder = Path(path)
    if not folder.is_dir():  # not made here: a share that is not mounted must not become a folder of this machine
        raise _problem(url, "names a folder that does not exist: create it, or mount its file system.")
    return folder


def _s3(bucket: str, prefix: str, limits: Limits, timeouts: ClientConfig) -> S3Store:
    credentials, region, endpoint = _shared_files()
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or endpoint
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or region
    return S3Store(
        bucket,
        prefix=prefix or None,
        config={
            "region": region or "us-east-1",
            "disable_bulk_delete": True,  # which not every S3-compatible store has
            **({"endpoint": endpoint} if endpoint else {}),
        },
        client_options={
            "allow_http": (endpoint or "").startswith("http://"),
            "connect_timeout": timedelta(seconds=limits.connect_s),
            **timeouts,
        },
        retry_config={
            "max_retries": 6,
            "retry_timeout": timedelta(seconds=limits.retry_s),
            "backoff": {
                "init_backoff": timedelta(seconds=0.2),
                "max_backoff": timedelta(seconds=limits.retry_s / 4),
                "base": 2,
            },
        },
        credential_provider=credentials,
    )


def _shared_files() -> tuple[Callable[[], S3Credential] | None, str | None, str | None]:
    """Credentials, region and endpoint of the profile in ~/.aws; None for those that it does not have.

    obstore itself finds credentials of the environment, of a container and of the machine's metadata.
    """
    files = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
    used = any(Path(os.environ.get(name, file)).expanduser().is_file() for name, file in files.items())
    if "AWS_ACCESS_KEY_ID" in os.environ or not (used or "AWS_PROFILE" in os.environ):
        return None, None, None
    try:
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session
    except ImportError as error:
        message = "credentials in ~/.aws are read by botocore: install finetune-flows[s3]."
        raise UserError.of("store", "AWS_PROFILE", message) from error
    try:
        session = Session()
        found, profile = session.get_credentials(), session.get_scoped_config()
    except BotoCoreError as error:
        raise UserError.of("store", "AWS_PROFILE", str(error)) from error

    def renewed() -> S3Credential:
        frozen = found.get_frozen_credentials()
        expires = datetime.now(UTC) + CREDENTIALS_TTL
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": expires,
        }

    return renewed if found else None, profile.get("region"), profile.get("endpoint_url")


def _problem(url: str, message: str) -> UserError:
    return UserError.of("store", VARIABLE, f"{without_credentials(url)!r} {message}")
