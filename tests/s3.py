"""An S3-compatible server in this process, that counts its requests."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import boto3
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

BUCKET = "rows"
OWN_KEY = "server"
"""The access key of the server's own requests, which are not counted and have no faults."""
KEYS = {"AWS_ACCESS_KEY_ID": "mine", "AWS_SECRET_ACCESS_KEY": "hush"}


class Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None: ...


class S3:
    """One bucket. Clients find it by the environment alone: see `reached`.

    Args:
        host: the address at which it listens.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(host, 0, self._counting, threaded=True, request_handler=Quiet)
        self.url = f"http://{host}:{self._server.server_port}"
        self.requests: list[str] = []
        """`HEAD /rows/train.csv` for each request."""
        self.logins: list[str] = []
        """The header `Authorization` of each request."""
        self.cut_after: int | None = None
        """Bytes of the next answer's body after which the connection ends."""
        self.fault: Callable[[str], int | None] = lambda request: None
        """The HTTP status of an error in place of the answer to a request; called before the request has an effect."""
        self.lost: Callable[[str], int | None] = lambda request: None
        """The same, called after the request had its effect."""
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=OWN_KEY,
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        )
        self._client.create_bucket(Bucket=BUCKET)

    def put(self, key: str, content: bytes) -> str:
        """Writes an object; gives its URL."""
        self._client.put_object(Bucket=BUCKET, Key=key, Body=content)
        return f"s3://{BUCKET}/{key}"

    def remove(self, key: str) -> None:
        """Removes an object."""
        self._client.delete_object(Bucket=BUCKET, Key=key)

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """The content of each object below the prefix."""
        return {key: self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in self.names(prefix)}

    def names(self, prefix: str = "") -> list[str]:
        """The names of these objects, also while others write and remove them."""
        return [
            entry["Key"] for entry in self._client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        ]

    def reached(self, monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
        """Lets s3fs find the server, with these variables more."""
        from s3fs import S3FileSystem

        S3FileSystem.clear_instance_cache()  # whose connections were made for another environment
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", *KEYS):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**self.environment(), **variables}.items():
            monkeypatch.setenv(name, value)

    def environment(self) -> dict[str, str]:
        """The variables by which a process finds the server, but its keys."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/none",
            "AWS_SHARED_CREDENTIALS_FILE": "/none",
        }

    def ask_for_keys(self, wanted: bool) -> None:
        """Whether every request must be signed by a registered user; the server has none."""
        allowed = b"0" if wanted else b"inf"
        address, headers = f"{self.url}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(address, allowed, headers)).close()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _counting(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        login = environ.get("HTTP_AUTHORIZATION", "")
        if f"Credential={OWN_KEY}/" in login:
            return self._app(environ, start)  # type: ignore[no-any-return]
        self.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
        self.logins.append(login)
        if status := self.fault(self.requests[-1]):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start(f"{status} Fault", [("Content-Length", "0")])
            return [b""]
        if status := self.lost(self.requests[-1]):
            b"".join(self._app(environ, lambda *ignored: None))
            start(f"{status} Lost", [("Content-Length", "0")])
            return [b""]
        answer = self._app(environ, start)
        if self.cut_after is not None:
            answer, self.cut_after = [b"".join(answer)[: self.cut_after]], None
        return answer  # type: ignore[no-any-return]


def server() -> Iterator[S3]:
    """For a fixture."""
    s3 = S3()
    yield s3
    s3.stop()
