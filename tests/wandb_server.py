"""A W&B server on loopback that answers the calls of a run and keeps its history."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROJECT = {"id": "p", "name": "recipe", "entity": {"id": "e", "name": "me"}}


class WandbServer(ThreadingHTTPServer):
    """The address is `url`; `history` has the rows of each run by its id, as an upload leaves them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.history: dict[str, list[dict[str, Any]]] = {}

    def answer(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL call."""
        call, name = re.search(r"(?:query|mutation) (\w+)", query), given.get("name")
        if call and call[1] == "Viewer":
            return {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        if call and call[1] == "RunResumeStatus":
            rows = self.history.get(str(name))
            bucket = {
                **{"id": name, "name": name, "displayName": name, "summaryMetrics": "{}", "config": "{}", "tags": []},
                **{"historyLineCount": len(rows or []), "logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]"},
                **{"historyTail": json.dumps([json.dumps(row) for row in (rows or [])[-1:]])},
                **{"wandbConfig": '{"t": 1}'},
            }
            return {"model": {**PROJECT, "bucket": None if rows is None else bucket}}
        if call and call[1] == "UpsertBucket":
            is_new = name not in self.history
            rows = self.history.setdefault(str(name), [])
            bucket = {"id": name, "name": name, "displayName": name, "config": "{}", "historyLineCount": len(rows)}
            return {"upsertBucket": {"bucket": {**bucket, "project": PROJECT}, "inserted": is_new}}
        if call and call[1] == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.url}/{file}"} for file in given["files"]]
            return {"createRunFiles": {"runID": name, "uploadHeaders": [], "files": files}}
        return {}


class _Handler(BaseHTTPRequestHandler):
    server: WandbServer

    def do_GET(self) -> None:
        self._reply({})

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        self._read()
        self._reply({})

    def do_POST(self) -> None:
        body = self._read()
        if self.path.endswith("/file_stream"):
            if chunk := json.loads(body).get("files", {}).get("wandb-history.jsonl"):
                rows = self.server.history[self.path.split("/")[-2]]
                rows[chunk["offset"] :] = map(json.loads, chunk["content"])
            self._reply({"exitcode": None, "limits": {}})
        elif self.path.endswith("/graphql"):
            call = json.loads(body)
            self._reply({"data": self.server.answer(call["query"], call.get("variables") or {})})
        else:
            self._reply({})

    def log_message(self, *_: object) -> None: ...

    def _read(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _reply(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        with suppress(ConnectionError):  # W&B waits for no answer at its end
            self._send(body)

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """A server that runs during the block."""
    server = WandbServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
