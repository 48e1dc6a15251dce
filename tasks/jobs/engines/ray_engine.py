"""The engine of jobs on a Ray cluster.

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

from tasks.environment_variables import RAY_CLUSTER, base_environment
from tasks.home import home
from tasks.jobs.engines.engine import Engine, OnEvents, Program
from tasks.jobs.engines.local import at_end, newest_log
from tasks.jobs.engines.ray_messages import Cluster, Input, MachineLost, no_cluster, own_login, probe
from tasks.jobs.hardware import visible_gpus
from tasks.locks import raise_if_cancelled
from training.jobs.protocol import LOGS, OUTCOMES, Failure, Outcome, crash_files, write_atomically
from training.jobs.resources import Kills
from training.jobs.search_path import start_variables
from training.problems import Problem, UserError
from training.recipe import ResolvedCompute

ADDRESS = "RAY_ADDRESS"
LOG = "ray.log"
"""The output of Ray, in the job's logs."""

EVERYWHERE = ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM")
"""Variables of a program that have the same values on all machines: the number of threads changes how sums round."""
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


class RayEngine(Engine):
    """The engine of a Ray cluster.

    Args:
        address: `host:port` of its head; None for RAY_ADDRESS, or else for a cluster of this machine alone.
        wait_s: the longest wait for machines, in seconds.
    """

    runs_here = False

    def __init__(self, address: str | None, wait_s: float) -> None:
        self._address, self._wait_s = address, wait_s
        self._early: RayRunner | None = None

    @property
    def _known_address(self) -> str | None:
        return self._address or os.environ.get(ADDRESS)

    def find_package_problems(self) -> list[Problem]:
        """The problem if Ray is not installed here."""
        if importlib.util.find_spec("ray") is not None:
            return []
        message = "'ray' needs the package ray, which is not installed here: `pip install 'finetune-flows[ray]'`."
        return [Problem(kind="compute", where="compute.cluster", message=message)]

    def find_address_problems(self) -> list[Problem]:
        """The problem if nothing listens at the address."""
        if not (address := self._known_address):
            return []
        try:
            probe(address)
        except (OSError, ValueError) as error:
            return [no_cluster(address, error)]
        return []

    def describe(self, compute: ResolvedCompute) -> str | None:
        """The machines that a training needs, the cluster that has them, and its free resources."""
        machines, here = compute.num_machines, compute.num_processes // compute.num_machines
        needed = f"{machines} machine{'s' * (machines > 1)} with {here} process{'es' * (here > 1)} each"
        if not (address := self._known_address):
            return f"{needed}, on a Ray cluster of this machine alone, which starts with the run ({ADDRESS} is not set)"
        try:
            return f"{needed}, on the Ray cluster at {address}: {free(address)}"
        except UserError as error:
            return f"{needed}; {error.problems[0].message}"

    @contextlib.contextmanager
    def keep_open(self, several: bool) -> Iterator[None]:
        """In the block, several jobs share one cluster of this machine, unless an address is known."""
        if not several or self._known_address:
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

    def start_early(self, program: Program) -> None:
        """Reserves machines, and starts processes there that wait for the job. Does not wait for them."""
        if self._early is None:
            self._early = RayRunner(self._cluster(program), program)
            self._early.start_early()
            at_end(self._end_early)

    def runner(self, program: Program, inputs: Mapping[str, Path], on_events: OnEvents) -> RayRunner:
        """The runner that was started early for this program, or else a new one. Raises UserError if a folder is of no
        artifact, from which machines could fetch it."""
        runner, self._early = self._early, None
        cluster = self._cluster(program)
        if runner is not None and not runner.is_for(cluster, program):
            runner.close()
            runner = None
        return (runner or RayRunner(cluster, program)).bind(inputs, on_events)

    def _cluster(self, program: Program) -> Cluster:
        compute = program.compute
        uses_gpus = bool(visible_gpus())
        return Cluster(self._address, compute.num_machines, compute.num_processes, uses_gpus, self._wait_s)

    def _end_early(self) -> None:
        if self._early is not None:
            self._early.close()
            self._early = None


class RayRunner:
    """The runner of one job on a cluster, over all of its tries.

    Args:
        cluster: the machines that it needs.
        program: what they start.
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
        """Whether it is for this program on these machines."""
        return self._what == (cluster, program)

    def start_early(self) -> None:
        """Reserves machines, and starts processes there that wait for the job. Gives them back if the job does not
        start within `EARLY_S`."""
        self._prepare()
        self._too_early.start()

    def bind(self, inputs: Mapping[str, Path], on_events: OnEvents) -> RayRunner:
        """This runner, for a job that reads these folders of artifacts, by name. `on_events` receives notes and
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
        return newest_log(Path(handle.job))

    def killed_for_memory(self) -> Kills:
        """None: the counts of other machines are unknown here."""
        return Kills(0, own=True)

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
        cluster, program = self._what
        # The command and the other variables are of this machine.
        env = {name: program.env[name] for name in EVERYWHERE if name in program.env}
        self._prepared = self._driver.post(
            "prepare", cluster, program._replace(argv=(), env=env), self._connected_before
        )
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


def _input(folder: Path) -> Input:
    """The artifact's part that a folder of this home is. Raises UserError for another folder."""
    artifacts, found = (home() / "artifacts").resolve(), folder.resolve()
    if artifacts not in found.parents:
        message = (
            "'ray' is for models in the store, from which machines fetch them, and this one is in MLflow alone: run "
        )
        message += "its recipe again, or predict on this machine."
        raise UserError.of("compute", "compute.cluster", message)
    stage, key, *inside = found.relative_to(artifacts).parts
    return Input(stage, key, "/".join(inside))
