"""Builds the container image and tries it: make image BASE=…

    python -m tests.image [--base IMAGE] [--engine NAME] [--tag TAG] [--torch-index URL] [--build-only | --try-only]

It takes docker, podman or buildah, whichever is usable. `--base debootstrap` makes a base of Debian packages, for
machines without a registry. In containers of the image, as a user without rights, it runs the demo twice, stops a
training and resumes it, and stops a worker while it trains. Standard library only: any Python 3.11 will do.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.image import base
from tests.image.engines import Container, Engine, find_engine
from tests.image.pip_settings import read_pip_settings

ROOT = Path(__file__).resolve().parents[2]
DEMO = "deployments/demo.yaml"
LONG = "training.num_train_epochs"
"""Raised, so that a training can be stopped in the middle."""
STOP_S = 30.0
"""A stopped container ends within these seconds."""


class Table:
    """The rows of what was tried; each is printed when it is known."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, ...]] = []
        self.failed = 0

    def add(self, what: str, seconds: float | None, found: str, ok: bool = True) -> None:
        """Adds a row, and prints it."""
        self.failed += not ok
        self.rows.append((what, "" if seconds is None else f"{seconds:.1f}", found, "ok" if ok else "NOT OK"))
        print(" · ".join(filter(None, self.rows[-1])), flush=True)

    def lines(self) -> list[str]:
        """The aligned table."""
        rows = [("what", "seconds", "found", ""), *self.rows]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return [
            f"{what:<{widths[0]}}  {seconds:>{widths[1]}}  {found:<{widths[2]}}  {verdict}".rstrip()
            for what, seconds, found, verdict in rows
        ]


class Trial:
    """What is tried with an image.

    Args:
        engine: runs its containers.
        tag: the image.
        folder: for outputs and homes.
        table: gets a row for each promise.
    """

    def __init__(self, engine: Engine, tag: str, folder: Path, table: Table) -> None:
        self._engine, self._tag, self._folder, self._table = engine, tag, folder, table
        self._containers: list[Container] = []
        self._port, health_port = free_port(), free_port()
        self._password = f"team:{secrets.token_urlsafe(16)}"
        self._api = f"http://127.0.0.1:{self._port}/api"
        self._server_env = {"PREFECT_SERVER_API_AUTH_STRING": self._password, "HEALTH_URL": f"{self._api}/health"}
        self._worker_env = {
            "PREFECT_API_URL": self._api,
            "PREFECT_API_AUTH_STRING": self._password,
            "PREFECT_WORKER_WEBSERVER_PORT": str(health_port),
            "HEALTH_URL": f"http://127.0.0.1:{health_port}/health",
        }

    def play(self) -> None:
        """Tries everything, and removes the containers."""
        try:
            self._look()
            self._run_demo()
            self._stop_and_resume()
            self._stop_worker()
        finally:
            for container in self._containers:
                container.remove()

    def _look(self) -> None:
        container = self._container("look")
        _, printed = container.run(
            "sh", "-c", "id -u; stat -c %a ~; touch /opt/finetune/flows/x; ls /run/secrets; true"
        )
        found = f"user {printed.split()[0]}, home {printed.split()[1]}, code read-only"
        ok = printed.split()[:2] == ["1000", "700"] and "cannot touch" in printed and "pip.conf" not in printed
        self._table.add("who it runs as", None, found, ok)
        described = json.dumps(self._engine.inspect(self._tag))
        settings = read_pip_settings().values
        places = [
            place for name in ("index-url", "extra-index-url", "proxy") for place in settings.get(name, "").split()
        ]
        leaked = [place for place in places if place in described]
        self._table.add(
            "pip's settings", None, "in no layer and no history" if not leaked else "in its history", not leaked
        )

    def _run_demo(self) -> None:
        container = self._container("demo")
        for what in ("the demo", "the demo again"):
            began = time.monotonic()
            status, printed = container.run("finetune", "run", DEMO)
            stages = dict(re.findall(r"^  (\w+) +(ran|cached|resumed)\b", printed, re.MULTILINE))
            registered = re.search(r"^Registered: (.+)$", printed, re.MULTILINE)
            states = [f"{list(stages.values()).count(state)} {state}" for state in ("ran", "cached")]
            found = f"{registered.group(1) if registered else printed[-200:]}; stages: {', '.join(states)}"
            cached = stages.get("fit") == ("ran" if what == "the demo" else "cached")
            self._table.add(what, time.monotonic() - began, found, status == 0 and cached)

    def _stop_and_resume(self) -> None:
        container = self._container("stop")
        command = ("finetune", "run", DEMO, "--set", f"{LONG}=40")
        container.start(*command)
        wait_until(lambda: "fit: step" in container.output(), 180.0)
        seconds, left = container.stop()
        self._table.add("SIGTERM in fit", seconds, f"{left} processes are left", seconds < STOP_S and not left)
        before = len(container.output())
        container.start(*command)
        began = time.monotonic()
        wait_until(lambda: "resuming from checkpoint" in container.output()[before:], 120.0)
        (found,) = re.findall(r"resuming from \S+", container.output()[before:])
        self._table.add("the next container", time.monotonic() - began, found)
        container.stop()

    def _stop_worker(self) -> None:
        server = self._container("server", self._server_env)
        began = time.monotonic()
        server.start("prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self._port))
        wait_until(server.is_healthy, 120.0)
        self._table.add("Prefect's server", time.monotonic() - began, "healthy")
        worker = self._container("worker", self._worker_env)
        for command in (
            ("prefect", "--no-prompt", "work-pool", "create", "finetune", "--type", "process"),
            ("finetune", "deploy", DEMO),
        ):
            status, printed = worker.run(*command)
            if status:
                raise RuntimeError(f"{' '.join(command)} exits with {status}\n{printed}")
        self._table.add("without a worker", None, "not healthy", not worker.is_healthy())
        began = time.monotonic()
        worker.start()
        wait_until(worker.is_healthy, 120.0)
        self._table.add("a worker", time.monotonic() - began, "healthy")
        overrides = {"parameters": {"overrides": {LONG: 40}}, "state": {"type": "SCHEDULED"}}
        deployment = self._ask("deployments/name/finetune/demo")["id"]
        run = self._ask(f"deployments/{deployment}/create_flow_run", overrides)["id"]
        wait_until(lambda: "fit: step" in worker.output(), 180.0)
        seconds, left = worker.stop()
        state = self._ask(f"flow_runs/{run}")["state_name"]
        found = f"flow run {state}, {left} processes are left"
        self._table.add("SIGTERM to the worker", seconds, found, seconds < STOP_S and not left and state == "Crashed")
        seconds, left = server.stop()
        self._table.add("SIGTERM to the server", seconds, f"{left} processes are left", seconds < STOP_S and not left)

    def _ask(self, path: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
        login = base64.b64encode(self._password.encode()).decode()
        headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
        data = None if content is None else json.dumps(content).encode()
        with urllib.request.urlopen(
            urllib.request.Request(f"{self._api}/{path}", data, headers), timeout=30
        ) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def _container(self, name: str, env: dict[str, str] | None = None) -> Container:
        unique = f"finetune-{name}-{secrets.token_hex(3)}"
        self._containers.append(Container(self._engine, self._tag, unique, self._folder, env or {}))
        return self._containers[-1]


def wait_until(happened: Callable[[], bool], timeout_s: float) -> None:
    """Waits for a condition. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited in vain for {timeout_s:g} s")
        time.sleep(0.2)


def free_port() -> int:
    """A port of loopback on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def build(engine: Engine, options: argparse.Namespace, table: Table) -> None:
    """Builds the image, and its base if there is none."""
    arguments = {} if options.torch_index is None else {"TORCH_INDEX": options.torch_index}
    if options.base == "debootstrap":
        began = time.monotonic()
        made = base.make_base(engine)
        table.add("base by debootstrap", time.monotonic() - began, base.TAG if made else f"{base.TAG}, as it was")
        arguments["BASE"] = base.TAG
    elif options.base:
        arguments["BASE"] = options.base
    pip = read_pip_settings()
    if engine.name == "docker" and pip.folders:
        print(f"docker mounts no folder into a build: pip there is without {', '.join(pip.folders)}.", file=sys.stderr)
    began = time.monotonic()
    engine.build(options.tag, ROOT / "infra/Dockerfile", arguments, pip)
    size = f"{options.tag}, {engine.size(options.tag) / 1e9:.2f} GB, by {engine.name}"
    table.add("build", time.monotonic() - began, size)


def main() -> int:
    """Builds the image, tries it, and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.image", description=__doc__)
    parser.add_argument("--base", help="the base image; debootstrap makes one (default: that of the Dockerfile)")
    parser.add_argument("--engine", choices=("docker", "podman", "buildah"), help="default: the first that is usable")
    parser.add_argument("--tag", default="localhost/finetune:latest", help="name of the image (%(default)s)")
    parser.add_argument("--torch-index", metavar="URL", help="index with torch; empty: only pip's own, with CUDA")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--build-only", action="store_true", help="do not try the image")
    only.add_argument("--try-only", action="store_true", help="try the image that is there")
    options = parser.parse_args()
    try:
        engine = find_engine(options.engine)
    except LookupError as error:
        print(error, file=sys.stderr)
        return 2
    if options.base == "debootstrap" and (missing := base.find_missing()):
        print(missing, file=sys.stderr)
        return 2
    began, table = time.monotonic(), Table()
    with tempfile.TemporaryDirectory(prefix="finetune-image-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)  # the containers' user goes through it
        try:
            if not options.try_only:
                build(engine, options, table)
            if not options.build_only:
                Trial(engine, options.tag, Path(folder), table).play()
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            print(error, file=sys.stderr)
            table.add("stopped", None, f"{type(error).__name__}: {error}".splitlines()[0], False)
    print("", *table.lines(), sep="\n")
    print(f"\n{time.monotonic() - began:.0f} s, {table.failed} not ok")
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
