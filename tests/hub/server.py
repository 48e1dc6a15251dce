"""A stand-in for the Hugging Face Hub: repositories in memory, served over HTTP on loopback.

    with Hub() as hub:
        hub.repo("model", "me/tiny", {"config.json": b"{}", "model.safetensors": weights})
        subprocess.run([...], env={**os.environ, **hub.environment(tmp_path)})
        hub.commit("model", "me/tiny", {"config.json": b'{"a": 1}'})    # the branch main moves

The clients read HF_ENDPOINT when they are imported: start them in a process of their own, or give HfApi the endpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub.endpoints import ENDPOINTS, USER, Answer, Request
from tests.hub.repos import LFS_SUFFIXES, File, Refused, Repo
from tests.servers import closed_port

CUT = 0
"""For `Hub.fault`: the connection breaks. Half of the response to a GET arrives; the body of a PUT is
dropped; a POST is carried out, and its response is lost."""


class Hub:
    """The server with all its repositories; stopped at the end of a `with` block."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        """Every request in order, as `METHOD path`."""
        self.fault: Callable[[str, str], int | None] = lambda method, path: None
        """The faults: for a method and a path, the status of the response, CUT, or None for no fault."""
        self.lock = threading.Lock()
        self._tokens: dict[str, frozenset[str]] = {}
        self._readers: set[str] = set()
        self._port = closed_port()
        self._server: ThreadingHTTPServer | None = None

    def __enter__(self) -> Hub:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The value for HF_ENDPOINT."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Answers again, on the same port."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), _Handler)
        self._server.daemon_threads = True
        self._server.hub = self  # type: ignore[attr-defined]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """Refuses connections."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    @property
    def stopped(self) -> bool:
        """Whether no request is answered."""
        return self._server is None

    def environment(self, home: Path, token: str = "") -> dict[str, str]:
        """The environment in which a child process takes this for the Hub; its caches lie under `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": token,
        }

    def token(self, *names: str, write: bool = True) -> str:
        """An access token that opens these private and gated repositories."""
        token = f"hf_{hashlib.sha1(str(len(self._tokens)).encode()).hexdigest()}"
        self._tokens[token] = frozenset(names)
        if not write:
            self._readers.add(token)
        return token

    def repo(
        self, kind: str, name: str, files: Mapping[str, bytes], *, private: bool = False, gated: bool = False
    ) -> str:
        """A new model, dataset or space; gives the commit."""
        self.repos[f"{kind}s", name] = Repo(f"{kind}s", name, private, gated)
        return self.commit(kind, name, files)

    def commit(self, kind: str, name: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Adds or replaces files, which moves the branch; gives the commit."""
        repo = self.repos[f"{kind}s", name]
        before = repo.commits[repo.branches[branch]].files if branch in repo.branches else {}
        added = {path: File(content, path.endswith(LFS_SUFFIXES)) for path, content in files.items()}
        return repo.add(before | added, "Upload files", branch).id

    def readable(self, request: Request, kind: str, name: str, *, content: bool = False) -> Repo:
        """The repository. Raises Refused, with the Hub's status, for a user who may not see it or its files."""
        if request.token is not None and request.token not in self._tokens:
            raise Refused(401, None, "Invalid credentials in Authorization header")
        mine = self._tokens.get(request.token or "", frozenset())
        repo = self.repos.get((kind, name))
        if repo is None or (repo.private and name not in mine and not name.startswith(f"{USER}/")):
            raise Refused(401 if request.token is None else 404, "RepoNotFound", "Repository not found")
        if content and repo.gated and name not in mine:
            message = f"Access to {name} is restricted and you are not in the authorized list."
            raise Refused(401 if request.token is None else 403, "GatedRepo", message)
        return repo

    def writable(self, request: Request, kind: str, name: str) -> Repo:
        """The repository, to those who may write."""
        self.need_writer(request)
        return self.readable(request, kind, name)

    def need_writer(self, request: Request) -> None:
        """Refuses those without a token, and those whose token is for reading."""
        if request.token is None or request.token not in self._tokens:
            raise Refused(401, None, "Invalid username or password.")
        if request.token in self._readers:
            raise Refused(403, None, "Forbidden: you must use a write token to write to this repository.")

    def answer(self, method: str, path: str, request: Request) -> Answer:
        """The response of the endpoint for this method and path."""
        for wanted, pattern, give in ENDPOINTS:
            if wanted == method and (match := pattern.fullmatch(path)):
                parts = {name: unquote(part or "models") for name, part in match.groupdict().items()}
                with self.lock:
                    return give(self, request, **parts)
        return Answer(status=404)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open, as at the Hub

    def do_GET(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        length = int(self.headers.get("Content-Length") or 0)
        url = urlsplit(self.path)
        request = Request(parse_qs(url.query), self.headers, self.rfile.read(length))
        if hub.stopped:
            self.close_connection = True
            return
        hub.requests.append(f"{self.command} {url.path}")
        fault = hub.fault(self.command, url.path)
        if fault == CUT and self.command == "PUT":
            self.close_connection = True
            return
        try:
            method = "GET" if self.command == "HEAD" else self.command
            answer = Answer(status=fault) if fault else hub.answer(method, url.path, request)
        except Refused as refused:
            answer = Answer(json.dumps({"error": str(refused)}).encode(), refused.status, refused.headers)
        self._send(answer, cut=fault == CUT and self.command in ("GET", "POST"))

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _send(self, answer: Answer, cut: bool) -> None:
        content, status = answer.content, answer.status
        headers = {"Content-Length": str(len(content)), **answer.headers}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and status == 200:
            first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
            status, headers["Content-Range"] = 206, f"bytes {first}-{last}/{len(content)}"
            content = content[first : last + 1]
            headers["Content-Length"] = str(len(content))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if cut:
            content = b"" if wanted else content[: len(content) // 2]
            self.close_connection = True
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""
