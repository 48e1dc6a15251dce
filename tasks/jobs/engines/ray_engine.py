"""The engine for jobs on a Ray cluster.

If Ray ends on a machine, it ends the processes there that use it. So the flow leaves Ray to a process of its own, the
driver (ray_driver.py), calls it by a pipe, and starts another one for the next try.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from tasks.environment import RAY_CLUSTER, base_environment
from tasks.home import home
from tasks.jobs import early_launch
from tasks.jobs.engines import local
from tasks.jobs.engines.ray_messages import Cluster, Input, MachineLost, Program, no_cluster, own_login, probe
from tasks.jobs.supervisors import Handle
from tasks.locks import raise_if_cancelled
from training.jobs.protocol import LOGS, OUTCOMES, Failure, Outcome, crash_files, write_atomically
from training.jobs.search_path import start_variables
from training.problems import Problem, UserError

ADDRESS = "RAY_ADDRESS"
LOG = "ray.log"
"""What Ray prints, in the job's logs."""

OnEvents = Callable[[list[dict[str, Any]]], None]
EARLY_S = 60.0
"""The longest that machines stay reserved for a job that does not start."""
LOOK_S = 1.0
POLL_S = 1.0
"""Each look at a machine costs it some milliseconds."""
END_S = 5.0
"""For a driver to end the machines' actors by itself."""


class RayHandle(BaseModel):
    """A job on a cluster."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: str
    """The job's folder on this machine, absolute."""


class RayEngine:
    """The engine for one job.

    Args:
        cluster: where it runs.
        program: what it runs.
    """

    def __init__(self, cluster: Cluster, program: Program) -> None:
        self._what = (cluster, program)
        self._inputs: dict[str, Input] = {}
        self._on_events: OnEvents = lambda events: None
        self._driver: Driver | None = None
        self._prepared = 0
        self._connected_before = False
        self._polled_at = 0.0
        self._turn = threading.Lock()
        self._has_job = False
        self._too_early = threading.Timer(EARLY_S, self._give_back)
        self._too_early.daemon = True

    def is_for(self, cluster: Cluster, program: Program) -> bool:
        """Whether it is for this."""
        return self._what == (cluster, program)

    def start_early(self) -> None:
        """Has machines reserved, and processes started there that wait for the job. Does not wait for them. Gives them
        back if the job does not start within `EARLY_S`."""
        self._prepare()
        self._too_early.start()

    def bind(self, inputs: Mapping[str, Path], on_events: OnEvents) -> RayEngine:
        """This engine, for a job that reads these folders of artifacts, by name. `on_events` receives notes and
        warnings."""
        self._inputs, self._on_events = {name: _input(path) for name, path in inputs.items()}, on_events
        return self

    def start(self, job: Path, argv: Sequence[str], env: Mapping[str, str]) -> RayHandle:
        """Starts the job on all machines, which make `argv` and `env` their own. Raises UserError."""
        job = job.resolve()
        (job / LOGS).mkdir(parents=True, exist_ok=True)
        for old in [*job.glob(OUTCOMES), *crash_files(job)]:
            old.unlink()
        self._too_early.cancel()
        with self._turn:
            self._has_job = True
            driver = self._driver or self._prepare()
        try:
            driver.result(self._prepared, self._on_events, look=raise_if_cancelled)
            self._connected_before = True
            driver.call("start", job, self._inputs, on_events=self._on_events, look=raise_if_cancelled)
        except MachineLost as lost:
            self._end(job, lost)
        except BaseException:
            self.close()
            raise
        return RayHandle(job=str(job))

    def poll(self, handle: RayHandle) -> bool:
        """Copies what is new into the job's folder, at most every `POLL_S`. Returns whether the job still runs."""
        if self._driver is None:
            return False
        if time.monotonic() - self._polled_at < POLL_S:
            return True
        self._polled_at = time.monotonic()
        try:
            if self._driver.call("poll", on_events=self._on_events):
                return True
        except MachineLost as lost:
            self._end(Path(handle.job), lost)
            return False
        self._driver.close(END_S)
        self.close()
        return False

    def wait(self, handle: RayHandle, timeout_s: float) -> None:
        """Waits for news of the machines, at most so long."""
        if self._driver is not None:
            self._driver.wait(timeout_s)

    def stop(self, handle: RayHandle, grace_s: float) -> None:
        """Stops the job on all machines, which may save a checkpoint first."""
        if self._driver is not None:
            try:
                self._driver.call("stop", grace_s, on_events=self._on_events)
            except MachineLost:
                pass
            else:
                self._driver.close(END_S)
            finally:
                self.close()

    def logs(self, handle: RayHandle) -> Path:
        """The output of the job's last try."""
        return local.logs(Handle(job=handle.job, pid=0, started=0))

    def close(self) -> None:
        """Gives the machines back, and ends what runs there."""
        self._too_early.cancel()
        if self._driver is not None:
            self._driver.close()
        self._driver = None

    def _give_back(self) -> None:
        with self._turn:
            if not self._has_job:
                self.close()

    def _prepare(self) -> Driver:
        self._driver = Driver()
        self._prepared = self._driver.post("prepare", *self._what, self._connected_before)
        return self._driver

    def _end(self, job: Path, lost: MachineLost) -> None:
        """Ends the try on the other machines, and reports why."""
        if self._driver is not None:
            self._driver.save_log(job / LOGS / LOG)
        self.close()
        outcome = Outcome(state="failed", failure=Failure(kind="interrupted", message=str(lost)))
        write_atomically(job / "outcome.cluster.json", outcome.model_dump_json(indent=1).encode())


class Driver:
    """The process that uses Ray, for one try of a job."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        self._number = 0
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tasks.jobs.engines.ray_driver", str(theirs.fileno())],
                env=base_environment(*RAY_CLUSTER) | start_variables(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
            )

    def call(self, method: str, *arguments: Any, on_events: OnEvents, look: Callable[[], None] = lambda: None) -> Any:
        """Calls a method of ray_driver.ClusterJob. Raises what it raises, and MachineLost if the driver has ended."""
        return self.result(self.post(method, *arguments), on_events, look)

    def post(self, method: str, *arguments: Any) -> int:
        """Begins such a call. Returns its number."""
        self._number += 1
        with contextlib.suppress(BrokenPipeError):  # `result` tells
            self._connection.send((self._number, method, arguments))
        return self._number

    def result(self, number: int, on_events: OnEvents, look: Callable[[], None] = lambda: None) -> Any:
        """Waits for the result of the call with this number, and calls `look`, which may raise, every LOOK_S. Earlier
        answers are left over from calls that were interrupted."""
        try:
            while True:
                while not self._connection.poll(LOOK_S):
                    look()
                answered, kind, value = self._connection.recv()
                if kind == "events":
                    on_events(value)
                elif answered == number and kind == "error":
                    raise value
                elif answered == number:
                    return value
        except (EOFError, ConnectionResetError) as error:
            raise MachineLost("Ray on this machine has ended.") from error

    def wait(self, timeout_s: float) -> None:
        """Returns when the driver ends, at the latest after `timeout_s`."""
        self._connection.poll(timeout_s)

    def save_log(self, file: Path) -> None:
        """Adds what Ray has printed to the file."""
        self._log.seek(0)
        with file.open("ab") as out:
            shutil.copyfileobj(self._log, out)

    def close(self, wait_s: float = 0.0) -> None:
        """Ends it, and with it what runs on the machines. It has `wait_s` to do that by itself."""
        self._connection.close()
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def find_cluster_problems(cluster: str | None, address: str | None) -> list[Problem]:
    """The problem if there is to be a cluster at an address, this one or that of RAY_ADDRESS, and nothing listens
    there."""
    address = address or os.environ.get(ADDRESS)
    if cluster is None or not address:
        return []
    try:
        probe(address)
    except (OSError, ValueError) as error:
        return [no_cluster(address, error)]
    return []


def find_package_problems(cluster: str | None) -> list[Problem]:
    """The problem if there is to be a cluster, and Ray is not installed here."""
    if cluster is None or importlib.util.find_spec("ray") is not None:
        return []
    message = "'ray' needs the package ray, which is not installed here: `pip install 'finetune-flows[ray]'`."
    return [Problem(kind="compute", where="compute.cluster", message=message)]


def free(address: str) -> str:
    """What the cluster at `host:port` has free, in words. Raises UserError if it does not answer."""
    driver = Driver()
    try:
        return str(driver.call("free", address, on_events=lambda events: None))
    except MachineLost as lost:
        message = f"the Ray cluster at {address} ended its client: is Ray started on this machine too?"
        raise UserError.of("compute", "compute.cluster_address", message) from lost
    finally:
        driver.close()


@contextlib.contextmanager
def shared_cluster(cluster: str | None, address: str | None, needed: bool) -> Iterator[None]:
    """In the block, jobs at once share one cluster of this machine if they want a cluster and no address is known."""
    if not needed or cluster is None or address or os.environ.get(ADDRESS):
        yield
        return
    login = own_login()
    os.environ |= login
    driver = Driver()
    try:
        os.environ[ADDRESS] = str(driver.call("start_here", on_events=lambda events: None))
        yield
    finally:
        for name in (ADDRESS, *login):
            os.environ.pop(name, None)
        driver.close(END_S)


_early: RayEngine | None = None


def start_early(cluster: Cluster, program: Program) -> None:
    """Starts an engine before its job is known, inside `early_launches`, unless one waits already."""
    global _early
    if _early is None:
        _early = RayEngine(cluster, program)
        _early.start_early()
        early_launch.at_end(_close_early)


def take_early(cluster: Cluster, program: Program) -> RayEngine:
    """The engine that was started early for the same, or else a new one."""
    global _early
    early, _early = _early, None
    if early is not None and early.is_for(cluster, program):
        return early
    if early is not None:
        early.close()
    return RayEngine(cluster, program)


def _close_early() -> None:
    global _early
    if _early is not None:
        _early.close()
        _early = None


def _input(folder: Path) -> Input:
    """The artifact's part that a folder of this home is."""
    stage, key, *inside = folder.resolve().relative_to((home() / "artifacts").resolve()).parts
    return Input(stage, key, "/".join(inside))
