"""Checks of `finetune doctor`: versions, ports, disks, memory, GPUs, the home, databases, servers, the shared store,
the Ray cluster and the Hub.

The checks leave nothing behind, and do not create the home.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import sqlite3
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tasks import servers
from tasks.environment_variables import ACCESS_TOKENS
from tasks.home import home, home_path, require_usable_path, without_credentials
from tasks.jobs.engines.ray_engine import free
from tasks.jobs.hardware import describe_gpus
from tasks.locks import is_held
from tasks.servers import MLFLOW, MLFLOW_PORT, PREFECT, PREFECT_PORT, VARIABLES, ServicesState
from tasks.services.prefect_server import database_url
from tasks.tracking import connection
from training.problems import UserError

PACKAGE = "finetune-flows"
SHOWN = ("prefect", "mlflow", "torch", "transformers", "accelerate", "datasets")
CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
"""The versions that are tested together; only a checkout has this file."""
NETWORK_TIMEOUT_S = 3.0
MLFLOW_TIMEOUT_S = 10.0
"""MLflow answers only after a query of its database."""
DATABASE_TIMEOUT_S = 1.0
TOO_LITTLE_DISK_GB, LITTLE_DISK_GB = 1.0, 10.0
LITTLE_MEMORY_GB = 2.0

REFUSED = {
    "HTTP 401": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD to a login of the server or its proxy",
    "HTTP 403": "name its host in MLFLOW_SERVER_ALLOWED_HOSTS, where the server runs, or let this user in",
}
"""The next step for an HTTP error of MLflow, or of the proxy in front of it."""

Level = Literal["ok", "warning", "problem"]


class Finding(NamedTuple):
    """The result of one check."""

    level: Level
    subject: str
    found: str
    next_step: str = ""
    """Empty if all is well."""


def run_checks() -> list[Finding]:
    """Runs all checks, within seconds: the network's time-outs are short."""
    state = servers.read_last_state()
    finish_hub_check = _check_hub()  # its request runs during the other checks
    findings = [
        _check_python(),
        *_check_packages(),
        *_check_ports(state),
        *_check_disks(),
        _check_memory(),
        *_check_gpus(),
    ]
    findings += [_check_home(), *_check_servers(), *_check_store(), *_check_cluster()]
    findings += [*_check_leftovers(state), *_check_undelivered()]
    return [*findings, finish_hub_check(), _check_token()]


def _check_python() -> Finding:
    version = platform.python_version()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        needed = importlib.metadata.metadata(PACKAGE)["Requires-Python"]
        if version not in SpecifierSet(needed):
            return Finding("problem", "Python", version, f"make an environment with Python {needed}")
    return Finding("ok", "Python", version)


def _check_packages() -> Iterator[Finding]:
    """One finding for all packages that fit their requirements, and one for each that does not."""
    try:
        requirements = [Requirement(line) for line in importlib.metadata.requires(PACKAGE) or ()]
    except importlib.metadata.PackageNotFoundError:
        yield Finding("problem", "packages", f"{PACKAGE} is not installed", "pip install -e . -c constraints.txt")
        return
    tested, versions, untested = _read_tested_versions(), {}, []
    for requirement in requirements:
        name, do = requirement.name, f"pip install '{requirement}' -c constraints.txt"
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            versions[name] = version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("problem", name, "not installed", do)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield Finding("problem", name, version, do)
        elif Version(version).public != (locked := tested.get(canonicalize_name(name), Version(version).public)):
            untested.append(f"{name} {version} (tested: {locked})")
    if untested:
        yield Finding("warning", "packages", ", ".join(untested), "pip install -e . -c constraints.txt, if runs fail")
    yield Finding("ok", "packages", ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions))


def _read_tested_versions() -> dict[str, str]:
    with contextlib.suppress(OSError):
        return dict(re.findall(r"^([^\s#=]+)==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE))
    return {}


def _check_ports(state: ServicesState | None) -> Iterator[Finding]:
    home_urls = {state.prefect, state.mlflow} if state and servers.read_running() else set()
    for name, port in ((PREFECT, PREFECT_PORT), (MLFLOW, MLFLOW_PORT)):
        if f"http://127.0.0.1:{port}" in home_urls:
            yield Finding("ok", f"port {port}", f"{name} of `finetune up`")
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                yield Finding("ok", f"port {port}", "free")
            except OSError as error:
                do = f"finetune up --{name}-port N, should you need it"
                yield Finding("warning", f"port {port}", str(error.strerror), do)


def _check_disks() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_CACHE

    places = {"home": home_path(), "Hub cache": Path(HF_HUB_CACHE), "temporary": Path(tempfile.gettempdir())}
    for name, place in places.items():
        existing = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
        free_gb = shutil.disk_usage(existing).free / 1e9
        level: Level = "problem" if free_gb < TOO_LITTLE_DISK_GB else "warning" if free_gb < LITTLE_DISK_GB else "ok"
        do = "" if level == "ok" else "free some: checkpoints and models take gigabytes"
        yield Finding(level, "disk", f"{name}: {free_gb:,.1f} GB free ({place})", do)


def _check_memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    amount = f"{total / 1e9:,.1f} GB"
    with contextlib.suppress(OSError):  # without Linux's /proc the free memory is unknown
        available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        if available:
            free_gb = int(available[1]) * 1024 / 1e9
            amount = f"{free_gb:,.1f} GB of {amount} free"
            if free_gb < LITTLE_MEMORY_GB:
                do = "end programs that you do not need: libraries alone take a gigabyte"
                return Finding("warning", "memory", amount, do)
    return Finding("ok", "memory", amount)


def _check_gpus() -> Iterator[Finding]:
    gpus = describe_gpus()
    if not gpus:
        yield Finding("ok", "GPU", "no NVIDIA GPU: training runs on the CPU")
    for gpu in gpus:
        memory = f"{gpu.free_bytes / 1e9:,.1f} of {gpu.total_bytes / 1e9:,.1f} GB free"
        yield Finding("ok", "GPU", f"{gpu.name}, {memory}, driver {gpu.driver_version}")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        torch = importlib.metadata.version("torch")
        if gpus and torch.endswith("+cpu"):
            yield Finding(
                "problem", "GPU", f"torch {torch} does not use GPUs", "install torch for CUDA: see pytorch.org"
            )


def _check_home() -> Finding:
    place = home_path()
    try:
        require_usable_path(place)
    except UserError as error:
        return Finding("problem", "home", *error.problems[0].message.rsplit(": ", 1))
    if not place.exists():
        existing = next(folder for folder in place.parents if folder.exists())
        if not os.access(existing, os.W_OK | os.X_OK):
            return Finding("problem", "home", f"{place} cannot be created", "name another folder in FINETUNE_HOME")
        return Finding("ok", "home", f"{place} does not exist yet: the first run creates it")
    try:
        home()
    except UserError as error:
        return Finding("problem", "home", *error.problems[0].message.rsplit(": ", 1))
    taken = [lock.stem for folder in ("locks", "services") for lock in (place / folder).glob("*.lock") if is_held(lock)]
    use = f"; in use: {', '.join(sorted(taken))}" if taken else "; no lock is held"
    return Finding("ok", "home", f"{place}, mode {place.stat().st_mode & 0o777:o}{use}")


def _check_servers() -> list[Finding]:
    """Checks of the servers of Prefect and MLflow that the settings name, otherwise of their databases. Both requests
    run at the same time."""
    from prefect.settings import PREFECT_API_URL

    prefect = PREFECT_API_URL.value() or database_url()
    mlflow = os.environ.get(VARIABLES[MLFLOW]) or f"sqlite:///{home_path() / 'mlflow.db'}"
    checks = [
        (_check_server if url.startswith(("http:", "https:")) else partial(partial, _check_database))(name, url)
        for name, url in (("Prefect", str(prefect)), ("MLflow", mlflow))
    ]
    return [check() for check in checks]


def _check_server(name: str, url: str) -> Callable[[], Finding]:
    shown = without_credentials(url)
    wait = _start_request(f"{shown.rstrip('/')}/health")

    def finding() -> Finding:
        # /health answers whatever the login and the host name are, so MLflow's client makes a request too.
        if not (trouble := wait() or (_find_mlflow_error() if name == "MLflow" else None)) and name == "MLflow":
            for problem in connection.find_server_problems("Default"):
                return Finding("problem", name, *problem.message.removesuffix(".").rsplit(": ", 1))
        if trouble:
            do = f"start it, or change {VARIABLES[name.lower()]}"
            return Finding("problem", name, f"{shown}: {trouble}", REFUSED.get(trouble, do) if name == "MLflow" else do)
        return Finding("ok", name, f"{shown} answers")

    return finding


def _find_mlflow_error() -> str | None:
    """The error of MLflow's client, with its login; None if it gets an answer."""
    from mlflow.exceptions import MlflowException  # the import takes seconds, and must not count as the server's time
    from requests import RequestException

    def connect() -> str:
        try:
            connection.connect()
        except MlflowException as error:
            status = f"HTTP {error.get_http_status_code()}"
            return status if status in REFUSED else connection.one_line(error)
        except RequestException as error:
            return connection.one_line(error)
        return ""

    return _start_call(connect, MLFLOW_TIMEOUT_S)()


def _check_store() -> Iterator[Finding]:
    """Whether the shared store answers, and what the credentials may do. Writes an object and removes it."""
    if not (url := os.environ.get("FINETUNE_STORE")):
        return
    from tasks.shared_store.bucket import AlreadyExists, Bucket, BucketError, Forbidden, Limits, NotFound

    wait = NETWORK_TIMEOUT_S
    subject, name, keys = "shared store", f"doctor/{uuid.uuid4().hex}", "check AWS_ACCESS_KEY_ID, …, AWS_ENDPOINT_URL"
    try:
        bucket = Bucket(url, Limits(connect_s=wait, idle_s=wait, part_s=wait, retry_s=wait))
        with contextlib.suppress(NotFound):
            bucket.read(name)
        try:
            bucket.create(name, b"")
            bucket.create(name, b"")
        except Forbidden:
            yield Finding("ok", subject, f"{url}: may only be read")
            return
        except AlreadyExists:
            yield Finding("ok", subject, f"{url}: may be read and written")
        else:
            do = "update the server, or take one that has conditional writes: machines overwrite each other's artifacts"
            yield Finding("problem", subject, f"{url} ignores `If-None-Match: *`", do)
        bucket.remove(name)
    except UserError as error:
        yield Finding("problem", subject, error.problems[0].message, "change FINETUNE_STORE")
    except BucketError as error:
        yield Finding("problem", subject, str(error), keys)


def _check_cluster() -> Iterator[Finding]:
    """Whether the Ray cluster of RAY_ADDRESS answers, and what it has free."""
    if not (address := os.environ.get("RAY_ADDRESS")):
        return
    if importlib.util.find_spec("ray") is None:
        yield Finding("problem", "Ray cluster", "Ray is not installed", "pip install 'finetune-flows[ray]'")
        return
    try:
        yield Finding("ok", "Ray cluster", f"{address}: {free(address)}")
    except UserError as error:
        yield Finding("problem", "Ray cluster", error.problems[0].message, "start Ray here, or change RAY_ADDRESS")


def _check_database(name: str, url: str) -> Finding:
    scheme, _, path = url.partition(":///")
    if not scheme.startswith("sqlite"):
        return Finding("ok", name, f"{without_credentials(url)}: not checked: it is your own database")
    file = Path(path).absolute()
    if not file.exists():
        return Finding("ok", name, f"{file} does not exist yet: the first run creates it")
    deadline = time.monotonic() + DATABASE_TIMEOUT_S
    try:
        with contextlib.closing(
            sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=DATABASE_TIMEOUT_S)
        ) as database:
            (revision,) = database.execute("SELECT version_num FROM alembic_version").fetchone()
            database.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
            integrity = database.execute("PRAGMA integrity_check(1)").fetchone()[0]
    except sqlite3.OperationalError as error:
        if str(error) == "interrupted":
            return Finding("ok", name, f"{file}, schema {revision}; too large for a full check within a second")
        busy = "locked" in str(error)
        do = "try again when the runs have ended" if busy else _advise_repair(file)
        return Finding("warning" if busy else "problem", name, f"{file}: {error}", do)
    except (sqlite3.DatabaseError, TypeError) as error:
        reason = "it has no schema revision" if isinstance(error, TypeError) else error
        return Finding("problem", name, f"{file}: {reason}", _advise_repair(file))
    if integrity != "ok":
        return Finding("problem", name, f"{file}: {integrity}", _advise_repair(file))
    return Finding("ok", name, f"{file} is intact, schema {revision}")


def _advise_repair(file: Path) -> str:
    return f"put a backup in its place, or move {file.name} away: a new one is created"


def _check_leftovers(state: ServicesState | None) -> Iterator[Finding]:
    """Servers that still run although their process manager was killed."""
    if state is None or servers.read_running():
        return
    for name, url in ((PREFECT, state.prefect), (MLFLOW, state.mlflow)):
        health = f"{url}/api/health" if name == PREFECT else f"{url}/health"
        if url and _start_request(health)() is None:
            do = f"find it with `ss -ltnp 'sport = :{url.rpartition(':')[2]}'` and end it"
            yield Finding("warning", "leftover", f"{name} answers at {url}, and no `finetune up` of this home runs", do)


def _check_undelivered() -> Iterator[Finding]:
    """Ended runs of this home with entries for MLflow, or a final state for Prefect, that are not delivered yet."""
    from tasks.prefect import flow_runs
    from tasks.tracking.outbox import find_undelivered

    if not (home_path() / "runs").is_dir():
        return
    try:
        waiting = [box.run for box in find_undelivered() if not is_held(box.folder / "lock")]
        ends = flow_runs.list_pending()
    except UserError:
        return  # `_check_home` reports the problem
    to_mlflow = "the next run delivers it, once MLflow answers"
    to_prefect = "`finetune up`, or the next run that runs a stage, delivers it, once the server answers"
    for runs, missing, do in (
        (waiting, "MLflow has not all of", to_mlflow),
        (ends, "Prefect has no final state of", to_prefect),
    ):
        if runs:
            names = ", ".join(runs[:3]) + (" …" if len(runs) > 3 else "")
            yield Finding("warning", "undelivered", f"{missing} {len(runs):,} run{'s' * (len(runs) > 1)}: {names}", do)


def _check_hub() -> Callable[[], Finding]:
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    shown = without_credentials(ENDPOINT)
    if HF_HUB_OFFLINE:
        return lambda: Finding("ok", "Hub", f"{shown}: not checked, as HF_HUB_OFFLINE is set")
    wait = _start_request(shown, "HEAD", (401, 404, 405))

    def finding() -> Finding:
        if trouble := wait():
            do = "check the network, or HF_ENDPOINT; runs from files that are stored here still work"
            return Finding("warning", "Hub", f"{shown}: {trouble}", do)
        return Finding("ok", "Hub", f"{shown} answers")

    return finding


def _check_token() -> Finding:
    """Whether there is a token. Unlike the Hub's client, this neither reads the token's file nor renews the token."""
    from huggingface_hub.constants import HF_TOKEN_PATH

    named = [name for name in ACCESS_TOKENS if os.environ.get(name)]
    origins = named or ([HF_TOKEN_PATH] if Path(HF_TOKEN_PATH).is_file() else [])
    origin = f"from {origins[0]}" if origins else "none: public repositories only (`hf auth login`, or set HF_TOKEN)"
    return Finding("ok", "Hub token", origin)


def _start_request(url: str, method: str = "GET", accepted: tuple[int, ...] = (401,)) -> Callable[[], str | None]:
    """Sends the request. Returns a function that waits for the response and returns the error; None for a success or an
    `accepted` status."""

    def send() -> str:
        request = urllib.request.Request(url, method=method)
        try:
            with urllib.request.urlopen(request, timeout=NETWORK_TIMEOUT_S):
                return ""
        except urllib.error.HTTPError as error:
            return "" if error.code in accepted else f"HTTP {error.code}"
        except (OSError, ValueError, http.client.HTTPException) as error:
            return without_credentials(str(getattr(error, "reason", error)))

    return _start_call(send, NETWORK_TIMEOUT_S)


def _start_call(call: Callable[[], str], timeout_s: float) -> Callable[[], str | None]:
    """Starts the call in a thread, as the look-up of a host name has no time-out. Returns a function that waits for the
    result; None if it is empty."""
    deadline, result = time.monotonic() + timeout_s, [f"no answer within {timeout_s:g} s"]

    def run() -> None:
        result[0] = call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> str | None:
        thread.join(max(0.0, deadline - time.monotonic()))
        return result[0] or None

    return wait
