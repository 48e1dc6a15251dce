"""`python -m tasks.jobs.engines.ray_driver FD`: the process that uses Ray for one try of a job.

A job has one actor a machine in a placement group, each with a supervisor. The driver beats to every machine, and
copies events, logs, outcomes and output into the job's folder of the flow's home, so a job looks as on this machine. If
a machine does not answer, or one's supervisor ends, the try ends on all of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tasks.cache import store
from tasks.cache.stage import fetch_event
from tasks.jobs.commands import Machines
from tasks.jobs.engines.engine import Program
from tasks.jobs.engines.ray_machine import CHUNK_BYTES, SILENCE_S, Machine, describe
from tasks.jobs.engines.ray_messages import (
    Cluster,
    Facts,
    Input,
    MachineLost,
    MachineState,
    no_cluster,
    own_login,
    probe,
    refused,
)
from training.jobs.protocol import EVENTS, LOGS, OUTPUT, Event, Job, read_outcome
from training.problems import Problem, UserError
from training.programs.predict_shards import SHARDS

NAMESPACE = "finetune"
BEAT_S = 2.0
ANSWER_S = 60.0
"""For a machine to answer what takes it more than a moment."""
TRANSFER_S = 3600.0
"""For a machine to fetch the inputs of a job from the shared store."""
AGAIN_S = 1.0
NOTE_AFTER_S = 5.0
PROGRESS_S = 0.5
"""Between two reports of a copy."""
ENDED_GRACE_S = 1.0
"""For the processes of other machines after one machine's have ended: without those no checkpoint can be saved."""


class ClusterJob:
    """One try of a job.

    Args:
        on_events: receives warnings, reasons of waits, and the progress of copies.
    """

    def __init__(self, on_events: Callable[[list[Event]], None]) -> None:
        self._on_events = on_events
        self._group: WorkerGroup | None = None
        self._job = Path()
        self._number = 0
        self._offsets: list[dict[str, int]] = []
        self._reported_at = 0.0
        self._trains = True
        """Whether a stopped job resumes, from its checkpoints."""

    def free(self, address: str) -> str:
        """What a cluster has free, in words. Raises UserError if it does not answer."""
        connect(address, 0.0, self._report_wait)
        return _free()

    def start_here(self) -> str:
        """Starts a cluster of this machine alone, which ends with the driver. Returns its address."""
        connect(None, 0.0, self._report_wait)
        return str(ray.get_runtime_context().gcs_address)

    def prepare(self, cluster: Cluster, program: Program, connected_before: bool) -> None:
        """Waits for machines, and starts the processes that wait for the job. Waits for the cluster too if
        this run has `connected_before`. Raises UserError and MachineLost."""
        connect(cluster.address, cluster.wait_s if connected_before else 0.0, self._report_wait)
        here = cluster.processes // cluster.machines
        self._group = group = WorkerGroup(cluster.machines, here, here if cluster.uses_gpus else 0)
        group.start(cluster.wait_s, self._report_wait)
        facts = group.all("describe", program.module)
        group.hosts = [one.host for one in facts]
        require_alike([describe(program.module), *facts])
        host, port = group.one(0, "address")
        machines = [Machines(cluster.machines, rank, f"{host}:{port}") for rank in range(cluster.machines)]
        group.each("prepare", [(program, one) for one in machines])

    def start(self, job: Path, inputs: Mapping[str, Input]) -> None:
        """Starts the job on all machines. Raises MachineLost."""
        assert self._group is not None
        group, self._job, events = self._group, job, b""
        self._number = 1 + max((int(log.stem) for log in (job / LOGS).glob("*.log") if log.stem.isdigit()), default=0)
        (job / LOGS / f"{self._number}.log").touch()
        self._send_inputs(group, list(inputs.values()))
        description = Job.read(job)
        with contextlib.suppress(FileNotFoundError):
            events = (job / EVENTS).read_bytes()
        self._offsets = [{EVENTS: len(events)} if rank == 0 else {} for rank in range(group.size)]
        if events:
            found = [one for one in group.all("events", description.key) if one.startswith(events)]
            events = max([events, *found], key=len)
        values = dict(description.settings)
        self._trains = "training" in values
        group.one(0, "take", description.key, events)
        if self._trains:
            divisor = group.one(0, "share_checkpoints", values["training"]["inexact_resume"], timeout_s=TRANSFER_S)
            if not events and divisor is not None:  # this home knows nothing of earlier tries
                values["micro_batch_divisor"] = divisor
        group.all("start", description.model_copy(update={"settings": values}), dict(inputs))

    def poll(self) -> bool:
        """Copies what is new into the job's folder. Returns whether the job still runs. Raises MachineLost; UserError
        if a machine's disk is full."""
        assert self._group is not None
        states: list[MachineState] = self._group.each("read", [(offsets,) for offsets in self._offsets])
        for rank, state in enumerate(states):
            self._copy(rank, state)
        if all(state.is_running for state in states):
            return True
        problems = self._finish(self._group, ENDED_GRACE_S)
        outcome = read_outcome(self._job)
        if problems and (outcome is None or outcome.state != "finished"):
            raise UserError(problems)
        self._copy_output(self._group)
        if not self._trains or (outcome is not None and outcome.state == "finished"):
            self._group.all("discard")
        return False

    def stop(self, grace_s: float) -> None:
        """Stops the job on all machines, which may save a checkpoint first. Raises MachineLost."""
        if self._group is not None:
            self._finish(self._group, grace_s)
            if not self._trains:
                self._group.all("discard")

    def close(self) -> None:
        """Ends the machines' actors, and with them what they run."""
        if self._group is not None:
            self._group.close()

    def _finish(self, group: WorkerGroup, grace_s: float) -> list[Problem]:
        """Ends the job on all machines, and copies the rest of its files. Returns the machines' problems."""
        group.all("stop", grace_s, timeout_s=grace_s + ANSWER_S)
        problems: list[Problem] = []
        for rank in range(group.size):
            while True:
                state: MachineState = group.one(rank, "read", self._offsets[rank])
                self._copy(rank, state)
                if state.is_complete:
                    break
            problems += state.problems
        return problems

    def _copy(self, rank: int, state: MachineState) -> None:
        job = self._job
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
            begins = folder == SHARDS and name not in self._offsets[rank]  # a lost machine may have left a part
            with target.open("wb" if begins else "ab") as out:
                out.write(part)
            self._offsets[rank][name] = self._offsets[rank].get(name, 0) + len(part)

    def _send_inputs(self, group: WorkerGroup, inputs: list[Input]) -> None:
        files = [
            (rank, artifact, path)
            for rank, missing in enumerate(self._find_missing(group, inputs))
            for artifact in missing
            for path in _files(store.folder(*artifact))
        ]
        done, total = 0, sum(path.stat().st_size for _, _, path in files)
        for rank, (stage, key), path in files:
            offset, name = 0, path.relative_to(store.folder(stage, key)).as_posix()
            for part in _parts(path):
                group.one(rank, "receive", stage, key, name, offset, part)
                offset += len(part)
                done += len(part)
                self._report_copied(done, total)

    def _find_missing(self, group: WorkerGroup, inputs: list[Input]) -> list[list[tuple[str, str]]]:
        wait = threading.Timer(NOTE_AFTER_S, self._report_wait, ["the machines fetch what training reads"])
        wait.start()
        try:
            return group.all("find_missing", inputs, timeout_s=TRANSFER_S)
        finally:
            wait.cancel()
            wait.join()

    def _copy_output(self, group: WorkerGroup) -> None:
        job = self._job
        outcome = read_outcome(job)
        if outcome is None or outcome.state != "finished":
            return
        done, total = 0, sum(group.one(0, "output_sizes", list(outcome.files)))
        for name in outcome.files:
            target = job / OUTPUT / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as out:
                while True:
                    part = group.one(0, "read_output", name, out.tell())
                    out.write(part)
                    done += len(part)
                    self._report_copied(done, total)
                    if len(part) < CHUNK_BYTES:
                        break

    def _report_wait(self, reason: str) -> None:
        self._on_events([{"kind": "waiting", "message": reason}])

    def _report_copied(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._reported_at >= PROGRESS_S:
            self._reported_at = now
            self._on_events([fetch_event(done, total)])


class WorkerGroup:
    """The machines of one try of a job.

    Args:
        size: how many.
        cores, gpus: of each, to reserve.
    """

    def __init__(self, size: int, cores: int, gpus: int) -> None:
        bundle = {"CPU": cores, **({"GPU": gpus} if gpus else {})}
        self._group: PlacementGroup = placement_group([bundle] * size, "STRICT_SPREAD")
        self.size, self._cores, self._gpus = size, cores, gpus
        self.hosts: list[str] = []
        """The names of the machines by rank, when they are known."""
        self._actors: list[Any] = []
        self._silent: list[str] = []
        self._lost, self._closed = threading.Event(), threading.Event()

    def start(self, wait_s: float, note: Callable[[str], None]) -> None:
        """Waits for the machines. Raises UserError if they are not there in time."""
        began, is_noted = time.monotonic(), False
        while not self._group.wait(timeout_seconds=1):
            waited = time.monotonic() - began
            if waited > wait_s:
                message = f"{self._needed()} were not free within {wait_s:g} s: {_free()}."
                raise UserError.of("compute", "compute.num_machines", message)
            if waited > NOTE_AFTER_S and not is_noted:
                is_noted = True
                note(f"waiting for {self._needed()}: {_free()}")
        machine = ray.remote(Machine)
        for index in range(self.size):
            options = machine.options(
                num_cpus=self._cores,
                num_gpus=self._gpus,
                max_concurrency=2,  # `beat`, while another method runs
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            )
            self._actors.append(options.remote())
        threading.Thread(target=self._beat, name="machines", daemon=True).start()

    def all(self, method: str, *arguments: Any, timeout_s: float = ANSWER_S) -> list[Any]:
        """Calls a method of all machines at once. Raises MachineLost."""
        return self.each(method, [arguments] * len(self._actors), timeout_s)

    def one(self, rank: int, method: str, *arguments: Any, timeout_s: float = ANSWER_S) -> Any:
        """Calls a method of one machine. Raises MachineLost."""
        return self._wait({rank: getattr(self._actors[rank], method).remote(*arguments)}, timeout_s)[0]

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float = ANSWER_S) -> list[Any]:
        """Calls a method of all machines at once, with arguments of their own. Raises MachineLost."""
        calls = enumerate(zip(self._actors, arguments, strict=True))
        return self._wait({rank: getattr(actor, method).remote(*own) for rank, (actor, own) in calls}, timeout_s)

    def close(self) -> None:
        """Ends the machines' actors, and with them what they run."""
        self._closed.set()
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        with contextlib.suppress(RayError):
            remove_placement_group(self._group)

    def _wait(self, calls: Mapping[int, Any], timeout_s: float) -> list[Any]:
        """The answers to calls, by rank."""
        deadline = time.monotonic() + timeout_s
        while not self._lost.is_set() and time.monotonic() < deadline:
            _, waiting = ray.wait(list(calls.values()), num_returns=len(calls), timeout=0.2)
            if not waiting:
                return [self._answer(call, rank) for rank, call in calls.items()]
        silent = self._silent or [self._name(next(iter(calls)))]
        verb = "does" if len(silent) == 1 else "do"
        raise MachineLost(f"{' and '.join(silent)} of the cluster {verb} not answer.")

    def _answer(self, call: Any, rank: int) -> Any:
        try:
            return ray.get(call, timeout=ANSWER_S)
        except RayTaskError as error:
            raise error.cause from None
        except (RayError, GetTimeoutError) as error:
            _require_project(str(error))
            print(error, file=sys.stderr)
            raise MachineLost(f"{self._name(rank)} of the cluster was lost.") from error

    def _name(self, rank: int) -> str:
        return self.hosts[rank] if self.hosts else f"machine {rank}"

    def _beat(self) -> None:
        answered = time.monotonic()
        calls, waiting = [actor.beat.remote() for actor in self._actors], []
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
        self._silent = [self._name(calls.index(call)) for call in waiting]
        self._lost.set()

    def _needed(self) -> str:
        gpus = f" and {self._gpus} GPUs" if self._gpus else ""
        return f"{self.size} machines with {self._cores} cores{gpus} each"


def _require_project(error: str) -> None:
    """Raises UserError if this error is one of importing the project."""
    if "error raised in its creation task" in error:
        host = re.search(r"ip=([^,)]+)", error)
        reason = error.strip().splitlines()[-1]
        message = f"{host[1] if host else 'a machine'} cannot run this project ({reason}): install the same there."
        raise UserError.of("compute", "compute.cluster", message)


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


def connect(address: str | None, wait_s: float, note: Callable[[str], None]) -> None:
    """Connects to a cluster, or starts one on this machine if there is no address. Raises UserError if it does not
    answer within `wait_s`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    place, began, is_noted = address or os.environ.get("RAY_ADDRESS") or None, time.monotonic(), False
    while True:
        try:
            _connect(place)
            return
        except (OSError, ValueError, RuntimeError) as error:
            ray.shutdown()
            if time.monotonic() - began >= wait_s:
                raise UserError([no_cluster(place, error)]) from error
            if not is_noted:
                is_noted = True
                note(f"waiting for the Ray cluster at {place}")
            time.sleep(AGAIN_S)


def _connect(place: str | None) -> None:
    if place is None:
        os.environ |= own_login()
    else:
        probe(place)
    try:
        ray.init(
            place,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=None if place else False,
        )
    except (OSError, RuntimeError) as error:
        raise error if place is None else refused(error) from error


def _files(artifact: Path) -> list[Path]:
    """The files of an artifact, its manifest last: it makes the artifact complete."""
    files = [path for path in artifact.rglob("*") if path.is_file() and path.name != store.RECORD]
    return sorted(files, key=lambda path: path.name == store.MANIFEST)


def _parts(file: Path) -> Iterator[bytes]:
    with file.open("rb") as source:
        part = source.read(CHUNK_BYTES)
        yield part
        while part := source.read(CHUNK_BYTES):
            yield part


def _free() -> str:
    free, nodes = ray.available_resources(), sum(node["Alive"] for node in ray.nodes())
    gpus = f" and {free['GPU']:g} GPUs" if free.get("GPU") else ""
    return f"the cluster has {nodes} machine{'s' * (nodes != 1)}, with {free.get('CPU', 0):g} cores{gpus} free"


def main() -> None:
    """Answers the calls that come through the pipe with this file descriptor, until it is closed."""
    connection = Connection(int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    number = 0
    job = ClusterJob(lambda events: connection.send((number, "events", events)))
    while True:
        try:
            number, method, arguments = connection.recv()
        except EOFError:
            break
        try:
            connection.send((number, "result", getattr(job, method)(*arguments)))
        except (UserError, MachineLost) as error:
            connection.send((number, "error", error))
        except Exception as error:
            traceback.print_exc()
            connection.send((number, "error", RuntimeError(f"{type(error).__name__}: {error}")))
    job.close()


def _end_with(flow: int) -> None:
    while os.getppid() == flow:
        time.sleep(AGAIN_S)
    os._exit(1)


if __name__ == "__main__":
    main()
