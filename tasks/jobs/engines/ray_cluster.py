"""Jobs on the machines of a Ray cluster: one actor a machine in a placement group, each with a supervisor.

The flow is the driver. It beats to every machine, and copies events, logs, outcomes and output into the job's folder of
its own home, so a job looks as on this machine. If a machine does not answer, or one's supervisor ends, the try ends on
all of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from pydantic import BaseModel, ConfigDict
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tasks.cache import settings, store
from tasks.jobs.commands import Machines
from tasks.jobs.engines import local
from tasks.jobs.engines.ray_machine import CHUNK_BYTES, SILENCE_S, Facts, Input, Machine, State, describe
from tasks.jobs.supervisors import Handle
from training.jobs.protocol import (
    EVENTS,
    LOGS,
    OUTCOMES,
    OUTPUT,
    Failure,
    Job,
    Outcome,
    crash_files,
    read_outcome,
    write_atomically,
)
from training.problems import Problem, UserError

NAMESPACE = "finetune"
BEAT_S = 2.0
ANSWER_S = 60.0
"""For a machine to answer what takes it more than a moment."""
TRANSFER_S = 3600.0
"""For a machine to fetch the inputs of a job from the shared store."""
CONNECT_S = 5.0
NOTE_AFTER_S = 5.0
ENDED_GRACE_S = 1.0
"""For the processes of other machines after one machine's have ended: without those no checkpoint can be saved."""


class MachineLost(Exception):
    """A machine of a cluster does not answer."""


class RayHandle(BaseModel):
    """A job on a cluster."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: str
    """The job's folder on this machine, absolute."""
    actors: tuple[str, ...]
    """The names of the machines' actors."""


class RayEngine:
    """The engine for one job on a cluster.

    Args:
        address: of the cluster; None for RAY_ADDRESS, or else for a cluster of this machine alone.
        machines: how many train.
        processes: on all machines together.
        gpus: whether each process has a GPU.
        inputs: the folders of artifacts that the job reads, by name.
        wait_s: the longest wait for machines, in seconds.
        on_events: receives notes and warnings.
    """

    def __init__(
        self,
        address: str | None,
        *,
        machines: int,
        processes: int,
        gpus: bool,
        inputs: Mapping[str, Path],
        wait_s: float,
        on_events: Callable[[list[dict[str, Any]]], None],
    ) -> None:
        self._address, self._count, self._processes, self._gpus = address, machines, processes, gpus
        self._inputs = {name: _input(path) for name, path in inputs.items()}
        self._wait_s, self._on_events = wait_s, on_events
        self._gang: Gang | None = None
        self._offsets: list[dict[str, int]] = []
        self._number = 0

    def start(self, job: Path, argv: Sequence[str], env: Mapping[str, str]) -> RayHandle:
        """Starts the job on all machines, which make `argv` their own. Raises UserError."""
        job = job.resolve()
        (job / LOGS).mkdir(parents=True, exist_ok=True)
        for old in [*job.glob(OUTCOMES), *crash_files(job)]:
            old.unlink()
        self._number = 1 + max((int(log.stem) for log in (job / LOGS).glob("*.log") if log.stem.isdigit()), default=0)
        (job / LOGS / f"{self._number}.log").touch()
        connect(self._address)
        here = self._processes // self._count
        names = tuple(f"{job.name}-{rank}" for rank in range(self._count))
        self._gang = gang = Gang(names, here, here if self._gpus else 0)
        handle = RayHandle(job=str(job), actors=names)
        try:
            gang.gather(job.name, self._wait_s, self._note)
            description = Job.read(job)
            require_alike([describe(description.program), *gang.all("describe", description.program)])
            self._send_inputs(gang)
            (host, port), events = gang.one(0, "address"), b""
            with contextlib.suppress(FileNotFoundError):
                events = (job / EVENTS).read_bytes()
            self._offsets = [{EVENTS: len(events)} if rank == 0 else {} for rank in range(self._count)]
            values = dict(description.settings)
            divisor = gang.one(
                0, "share_checkpoints", events, values["training"]["inexact_resume"], timeout_s=TRANSFER_S
            )
            if not events and divisor is not None:  # this home knows nothing of earlier tries
                values["micro_batch_divisor"] = divisor
            description = description.model_copy(update={"settings": values})
            machines = [Machines(self._count, rank, f"{host}:{port}") for rank in range(self._count)]
            variables = {name: value for name, value in env.items() if name == "OMP_NUM_THREADS"}
            gang.each("start", [(description, self._inputs, one, variables) for one in machines])
        except MachineLost as lost:
            self._end(job, lost)
        except BaseException:
            gang.close()
            raise
        return handle

    def poll(self, handle: RayHandle) -> bool:
        """Copies what is new into the job's folder. Returns whether the job still runs."""
        job, gang = Path(handle.job), self._gang
        if gang is None:
            return False
        try:
            states: list[State] = gang.each("read", [(offsets,) for offsets in self._offsets])
            for rank, state in enumerate(states):
                self._copy(job, rank, state)
            if all(state.is_running for state in states):
                return True
            self._finish(job, gang, ENDED_GRACE_S)
            self._copy_output(job, gang)
        except MachineLost as lost:
            self._end(job, lost)
            return False
        gang.close()
        self._gang = None
        return False

    def wait(self, handle: RayHandle, timeout_s: float) -> None:
        """Waits: a machine does not report by itself that its job has ended."""
        time.sleep(timeout_s)

    def stop(self, handle: RayHandle, grace_s: float) -> None:
        """Stops the job on all machines, which may save a checkpoint first."""
        gang, self._gang = self._gang, None
        if gang is not None:
            with contextlib.suppress(MachineLost):
                self._finish(Path(handle.job), gang, grace_s)
            gang.close()

    def logs(self, handle: RayHandle) -> Path:
        """The output of the job's last try."""
        return local.logs(Handle(job=handle.job, pid=0, started=0))

    def _finish(self, job: Path, gang: Gang, grace_s: float) -> None:
        """Ends the job on all machines, and copies the rest of its files."""
        gang.all("stop", grace_s, timeout_s=grace_s + ANSWER_S)
        for rank in range(self._count):
            while True:
                state: State = gang.one(rank, "read", self._offsets[rank])
                self._copy(job, rank, state)
                if state.is_complete:
                    break

    def _end(self, job: Path, lost: MachineLost) -> None:
        """Ends the try on the other machines, and reports why."""
        if self._gang is not None:
            self._gang.close()
        self._gang = None
        outcome = Outcome(state="failed", failure=Failure(kind="interrupted", message=str(lost)))
        write_atomically(job / "outcome.cluster.json", outcome.model_dump_json(indent=1).encode())

    def _copy(self, job: Path, rank: int, state: State) -> None:
        if state.reports:
            self._on_events(state.reports)
        for name, part in state.content.items():
            folder, _, base = name.rpartition("/")
            if name == EVENTS and rank:
                continue
            target = job / name
            if folder == LOGS and base[0].isdigit():  # a machine numbers its own tries
                target = job / LOGS / (f"machine{rank}" if rank else "") / f"{self._number}.log"
            elif base == "supervisor.log":
                target = job / LOGS / (f"machine{rank}" if rank else "") / base
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("ab") as out:
                out.write(part)
            self._offsets[rank][name] = self._offsets[rank].get(name, 0) + len(part)

    def _send_inputs(self, gang: Gang) -> None:
        inputs = list(self._inputs.values())
        for rank, missing in enumerate(gang.all("find_missing", inputs, timeout_s=TRANSFER_S)):
            for stage, key in missing:
                folder = store.folder(stage, key)
                files = [path for path in folder.rglob("*") if path.is_file() and path.name != store.RECORD]
                for path in sorted(files, key=lambda path: path.name == store.MANIFEST):
                    offset, name = 0, path.relative_to(folder).as_posix()
                    for part in _parts(path):
                        gang.one(rank, "receive", stage, key, name, offset, part)
                        offset += len(part)

    def _copy_output(self, job: Path, gang: Gang) -> None:
        outcome = read_outcome(job)
        if outcome is None or outcome.state != "finished":
            return
        for name in outcome.files:
            target = job / OUTPUT / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as out:
                while True:
                    part = gang.one(0, "read_output", name, out.tell())
                    out.write(part)
                    if len(part) < CHUNK_BYTES:
                        break
        gang.all("discard")

    def _note(self, message: str) -> None:
        self._on_events([{"kind": "note", "message": message}])


class Gang:
    """The machines of one try of a job.

    Args:
        names: of their actors, one a machine. An actor of that name that is left of an earlier try is ended.
        cores, gpus: of each, to reserve.
    """

    def __init__(self, names: Sequence[str], cores: int, gpus: int) -> None:
        for name in names:
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(name))
        bundle = {"CPU": cores, **({"GPU": gpus} if gpus else {})}
        self._group: PlacementGroup = placement_group([bundle] * len(names), "STRICT_SPREAD")
        self._names, self._cores, self._gpus = names, cores, gpus
        self._actors: list[Any] = []
        self._lost, self._closed = threading.Event(), threading.Event()

    def gather(self, key: str, wait_s: float, note: Callable[[str], None]) -> None:
        """Waits for the machines. Raises UserError if they are not there in time."""
        began, is_noted = time.monotonic(), False
        while not self._group.wait(timeout_seconds=1):
            waited = time.monotonic() - began
            if waited > wait_s:
                message = f"{self._needed()} were not free within {wait_s:g} s (compute.stall_timeout_s): {_free()}."
                raise UserError([Problem(kind="compute", where="compute.num_machines", message=message)])
            if waited > NOTE_AFTER_S and not is_noted:
                is_noted = True
                note(f"waiting for {self._needed()}: {_free()}")
        machine = ray.remote(Machine)
        for index, name in enumerate(self._names):
            options = machine.options(
                name=name,
                num_cpus=self._cores,
                num_gpus=self._gpus,
                max_concurrency=2,  # `beat`, while another method runs
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            )
            self._actors.append(options.remote(key))
        threading.Thread(target=self._beat, name="machines", daemon=True).start()

    def all(self, method: str, *arguments: Any, timeout_s: float = ANSWER_S) -> list[Any]:
        """Calls a method of all machines at once. Raises MachineLost."""
        return self.each(method, [arguments] * len(self._actors), timeout_s)

    def one(self, rank: int, method: str, *arguments: Any, timeout_s: float = ANSWER_S) -> Any:
        """Calls a method of one machine. Raises MachineLost."""
        return self._wait([getattr(self._actors[rank], method).remote(*arguments)], timeout_s)[0]

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float = ANSWER_S) -> list[Any]:
        """Calls a method of all machines at once, with arguments of their own. Raises MachineLost."""
        calls = zip(self._actors, arguments, strict=True)
        return self._wait([getattr(actor, method).remote(*own) for actor, own in calls], timeout_s)

    def close(self) -> None:
        """Ends the machines' actors, and with them what they run."""
        self._closed.set()
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        with contextlib.suppress(RayError):
            remove_placement_group(self._group)

    def _wait(self, calls: list[Any], timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        while not self._lost.is_set() and time.monotonic() < deadline:
            _, waiting = ray.wait(calls, num_returns=len(calls), timeout=0.2)
            if not waiting:
                return [self._answer(call, name) for call, name in zip(calls, self._names, strict=False)]
        raise MachineLost("A machine of the cluster does not answer.")

    def _answer(self, call: Any, name: str) -> Any:
        try:
            return ray.get(call, timeout=ANSWER_S)
        except RayTaskError as error:
            raise error.cause from None
        except (RayError, GetTimeoutError) as error:
            raise MachineLost(f"A machine of the cluster was lost: {str(error).strip().splitlines()[0]}") from error

    def _beat(self) -> None:
        answered = time.monotonic()
        calls = [actor.beat.remote() for actor in self._actors]
        while not self._closed.is_set() and time.monotonic() - answered < SILENCE_S:
            try:
                _, waiting = ray.wait(calls, num_returns=len(calls), timeout=BEAT_S)
                if not waiting:
                    ray.get(calls)
                    answered = time.monotonic()
                    self._closed.wait(BEAT_S)
                    calls = [actor.beat.remote() for actor in self._actors]
            except RayError:
                break
        self._lost.set()

    def _needed(self) -> str:
        gpus = f" and {self._gpus} GPUs" if self._gpus else ""
        return f"{len(self._names)} machines with {self._cores} cores{gpus} each"


def require_alike(facts: Sequence[Facts]) -> None:
    """Raises UserError with each difference between machines that could change the result."""
    first = facts[0]
    differences = dict.fromkeys(
        f"{name} differs: {value} on {first.host}, {other.alike.get(name)} on {other.host}: install the same."
        for other in facts[1:]
        for name, value in first.alike.items()
        if other.alike.get(name) != value
    )
    if differences:
        raise UserError([Problem(kind="compute", where="compute.cluster", message=message) for message in differences])


def connect(address: str | None) -> None:
    """Connects to a cluster, or starts one on this machine if there is no address. Raises UserError."""
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    place = address or os.environ.get("RAY_ADDRESS") or None
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        if place is not None:  # Ray itself tries for minutes
            host, _, port = place.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(
            place,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=None if place else False,
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        message = f"no Ray cluster answers at {place!r} ({reason}): start it, or name host:port of its head."
        raise UserError([Problem(kind="compute", where="compute.cluster_address", message=message)]) from error
    finally:
        with contextlib.suppress(ValueError):  # outside of the main thread Ray sets none
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _input(folder: Path) -> Input:
    """The artifact's part that a folder of this home is."""
    stage, key, *inside = folder.resolve().relative_to((settings.home() / "artifacts").resolve()).parts
    return Input(stage, key, "/".join(inside))


def _parts(file: Path) -> Iterator[bytes]:
    with file.open("rb") as source:
        part = source.read(CHUNK_BYTES)
        yield part
        while part := source.read(CHUNK_BYTES):
            yield part


def _free() -> str:
    free, nodes = ray.available_resources(), sum(node["Alive"] for node in ray.nodes())
    gpus = f" and {free['GPU']:g} GPUs" if free.get("GPU") else ""
    return f"the cluster has {nodes} machines, with {free.get('CPU', 0):g} cores{gpus} free"
