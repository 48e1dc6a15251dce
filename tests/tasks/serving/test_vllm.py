"""The requests that are passed on to vLLM, while its port may belong to another user."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi import Request

from tasks import loopback
from tasks.serving import vllm
from tasks.serving.model_process import ProcessLost
from tests.waiting import wait_until
from training.jobs.processes import descendants

NOBODY = 65534
STAND_IN = """\
#!{python}
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def installed(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for vLLM, and no export."""
    program = tmp_path / "vllm"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(vllm, "export_version", lambda model, kind, folder: None)
    monkeypatch.setattr(socket.socket, "connect", socket.socket.connect)
    monkeypatch.setattr(loopback, "_ports", set())
    monkeypatch.setenv(loopback.HOME_SERVERS, "")


@pytest.mark.skipif(os.getuid() != 0, reason="only root may listen in the name of another user")
def test_another_user_who_takes_the_port_of_vllm_after_its_end_receives_no_request(installed: None) -> None:
    model: Any = SimpleNamespace(name="small", version="1")
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}

    async def ask_after_the_end() -> bytes:
        process = vllm.VllmProcess(model, (), lambda ended: None)
        await process.start()
        try:
            (program,) = descendants(process._supervisor.pid)
            port = urlsplit(process._url).port
            os.kill(program, signal.SIGKILL)
            wait_until(lambda: not Path(f"/proc/{program}").exists())
            os.seteuid(NOBODY)
            try:
                thief = socket.create_server(("127.0.0.1", port))
            finally:
                os.seteuid(0)
            with thief:
                thief.settimeout(5)
                with pytest.raises(ProcessLost):
                    async with asyncio.timeout(10), process.send(Request(scope), b"a private question"):
                        pass
                connection, _ = thief.accept()
                return connection.recv(1000)
        finally:
            await process.stop()

    assert asyncio.run(ask_after_the_end()) == b""
