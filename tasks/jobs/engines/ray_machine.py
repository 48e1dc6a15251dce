"""One machine of a job on a Ray cluster: an actor that runs the machine's supervisor.

The job's folder on a machine is <home>/cluster/<key>, in that machine's own home. No disk is shared: inputs come from
this home, the shared store or the flow's home, and the driver reads events, logs and output through the actor.

The actor exits if the driver is silent for `SILENCE_S`, or if its raylet ends. Then, as always when a starter ends, the
supervisor ends all processes of the job.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import ray.util

from tasks.cache import store
from tasks.cache.code import code_behind
from tasks.cache.digests import digest_of
from tasks.cache.stage import Listener, Work
from tasks.environment_variables import passed
from tasks.home import home, signing_key
from tasks.jobs.commands import Machines, accelerate_argv, accelerate_environment
from tasks.jobs.engines.engine import Program
from tasks.jobs.engines.local import LOCAL, Handle, early_launches
from tasks.jobs.engines.ray_messages import Facts, Input, MachineState
from tasks.jobs.hardware import device, visible_gpus
from tasks.shared_store.bucket_remote import find_artifact, open_remote
from training.engine import checkpoints
from training.jobs.protocol import EVENTS, LOGS, OUTCOMES, OUTPUT, Event, Job, Outcome, read_events, write_atomically
from training.problems import DISK, Problem, full_disk
from training.programs.predict_shards import SHARDS

SILENCE_S = 10.0
"""Without a call of the driver for so long, a machine gives its job up; and the driver a machine without an answer."""
CHUNK_BYTES = 4 * 2**20
LIBRARIES = ("torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy")
_SIOCGIFADDR = 0x8915


@dataclass
class MachineWork(Work):
    """The context of a stage's program on a machine of a cluster."""

    @property
    def job(self) -> Path:
        """The job's folder on this machine."""
        return job_folder(self.key)


class _Reports(Listener):
    """Collects the events of this process; those of the job, which have a time, are in its file."""

    def __init__(self, reports: list[Event]) -> None:
        self._reports = reports

    def stage_events(self, stage: str, events: list[Event]) -> None:
        self._reports += [event for event in events if "time" not in event]


class Machine:
    """The actor. The driver calls one method at a time, and `beat` meanwhile."""

    def __init__(self) -> None:
        self._job = Path()
        self._work = MachineWork("", self._job, "", stage="fit")
        self._handle: Handle | None = None
        self._argv: list[str] = []
        self._env: dict[str, str] = {}
        self._reports: list[Event] = []
        self._closing = contextlib.ExitStack()
        # The one program here is a launcher, whose ranks are no forks.
        self._closing.enter_context(early_launches(forks=False))
        self._offset = 0
        self._receiving: dict[tuple[str, str], tuple[contextlib.ExitStack, Path]] = {}
        self._heard = time.monotonic()
        threading.Thread(target=self._watch, args=(os.getppid(),), name="driver", daemon=True).start()

    def beat(self) -> None:
        """Lets the machine know that the driver is there."""
        self._heard = time.monotonic()

    def describe(self, program: str) -> Facts:
        """What this machine is."""
        return describe(program)

    def address(self) -> tuple[str, int]:
        """This machine's address in the cluster, and a port on which rank 0 can listen."""
        host = str(ray.util.get_node_ip_address())
        with socket.create_server((host, 0)) as server:
            return host, int(server.getsockname()[1])

    def prepare(self, program: Program, machines: Machines) -> None:
        """Starts this machine's processes, which import what they need and wait for their job."""
        use_cpu, compute = not visible_gpus(), program.compute
        self._argv = accelerate_argv(
            program.module,
            num_processes=compute.num_processes,
            mixed_precision=compute.mixed_precision,
            use_cpu=use_cpu,
            machines=machines,
        )
        self._env = accelerate_environment(
            num_processes=compute.num_processes, use_cpu=use_cpu, strategy=compute.strategy, machines=machines
        )
        of_cluster = interface(ray.util.get_node_ip_address())
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            self._env[name] = os.environ.get(name, of_cluster)
        self._env |= passed(program.logins)
        self._env |= {checkpoints.SIGNING_KEY: str(signing_key()), **program.env}
        LOCAL.start_early(program._replace(argv=self._argv, env=self._env))

    def find_missing(self, inputs: Sequence[Input]) -> list[tuple[str, str]]:
        """Stage and key of the artifacts that are whole neither in this home nor in the shared store."""
        names = dict.fromkeys((one.stage, one.key) for one in inputs)
        return [name for name in names if find_artifact(*name) is None]

    def receive(self, stage: str, key: str, path: str, offset: int, content: bytes) -> None:
        """Takes a part of a file of an artifact. Its last file is its manifest, which makes it complete."""
        if (stage, key) not in self._receiving:
            filling = contextlib.ExitStack()
            self._receiving[stage, key] = filling, filling.enter_context(store.filling(stage, key))
        filling, aside = self._receiving[stage, key]
        if path == store.MANIFEST:
            with filling:
                store.complete(aside, stage, key, content)
            del self._receiving[stage, key]
            return
        (aside / path).parent.mkdir(parents=True, exist_ok=True)
        with (aside / path).open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(content)

    def events(self, key: str) -> bytes:
        """The events that this machine has of a job. Those of machine 0 may be more than the flow's: it may have been
        lost before they were read."""
        with contextlib.suppress(FileNotFoundError):
            return (job_folder(key) / EVENTS).read_bytes()
        return b""

    def take(self, key: str, events: bytes) -> None:
        """Takes a job with the events of its earlier tries."""
        self._take(key)
        if events:
            write_atomically(self._job / EVENTS, events)
        self._offset = len(events)

    def share_checkpoints(self, inexact_resume: bool) -> int | None:
        """Resumes the job from the newest checkpoint in the shared store, if it is newer than those here, and uploads
        those of this machine until `stop`. Returns the division of batches that the job's last checkpoint needs; None
        if it is unknown."""
        own_device = None if inexact_resume else device()
        self._closing.enter_context(open_remote().share_checkpoints(self._work, signing_key(), own_device))
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(Job.read(self._job).settings["micro_batch_divisor"])
        return None

    def start(self, job: Job, inputs: Mapping[str, Input]) -> None:
        """Gives the job to this machine's processes."""
        if self._job != job_folder(job.key):
            self._take(job.key)
        for folder in (LOGS, SHARDS):
            shutil.rmtree(self._job / folder, ignore_errors=True)
        places = {name: str(self._find(one)) for name, one in inputs.items()}
        job.model_copy(update={"inputs": places}).write(self._job)
        self._handle = LOCAL.start(self._job, self._argv, self._env)

    def read(self, offsets: Mapping[str, int]) -> MachineState:
        """The job's state, and what events, logs, outcomes and shards have beyond these offsets. Events wait for the
        whole shards that they tell of."""
        is_running = self._handle is not None and LOCAL.poll(self._handle)
        new_events, self._offset = read_events(self._job / EVENTS, self._offset)
        if new_events:
            self._work.on_events(new_events)
        events = self._read_beyond([self._job / EVENTS], offsets)
        shards = self._read_beyond((self._job / SHARDS).glob("*.parquet"), offsets)
        whole = all(len(part) < CHUNK_BYTES for part in shards.values())
        files = [*self._job.glob(OUTCOMES), *(self._job / LOGS).glob("*")]
        content = {**shards, **(events if whole else {}), **self._read_beyond(files, offsets)}
        reports, self._reports[:] = [*self._reports], []
        full = None if is_running else full_disk(self._job)
        problems = tuple(map(_of_this_machine, full.problems if full else ()))
        return MachineState(
            is_running, content, all(len(part) < CHUNK_BYTES for part in content.values()), reports, problems
        )

    def _read_beyond(self, files: Iterable[Path], offsets: Mapping[str, int]) -> dict[str, bytes]:
        content: dict[str, bytes] = {}
        for file in files:
            name = str(file.relative_to(self._job))
            with contextlib.suppress(FileNotFoundError), file.open("rb") as source:
                source.seek(offsets.get(name, 0))
                if (part := source.read(CHUNK_BYTES)) or name not in offsets:
                    content[name] = _name_disks(part) if file.match(OUTCOMES) else part
        return content

    def output_sizes(self, paths: Sequence[str]) -> list[int]:
        """The sizes in bytes of files of the job's output."""
        return [(self._job / OUTPUT / path).stat().st_size for path in paths]

    def read_output(self, path: str, offset: int) -> bytes:
        """A part of a file of the job's output."""
        with (self._job / OUTPUT / path).open("rb") as source:
            source.seek(offset)
            return source.read(CHUNK_BYTES)

    def stop(self, grace_s: float) -> None:
        """Stops the job; its processes have so long to save."""
        if self._handle is not None:
            LOCAL.stop(self._handle, grace_s)
        self._closing.close()

    def discard(self) -> None:
        """Removes the job's folder: the flow has its output."""
        shutil.rmtree(self._job, ignore_errors=True)

    def _take(self, key: str) -> None:
        self._job = job_folder(key)
        self._job.mkdir(parents=True, exist_ok=True)
        self._work = MachineWork(key, self._job / OUTPUT, "", stage="fit")
        self._work.listeners = (_Reports(self._reports),)

    def _find(self, one: Input) -> Path:
        artifact = store.find(one.stage, one.key)
        if artifact is None:
            raise LookupError(f"{one.stage} {one.key} is not on {socket.gethostname()}")
        return artifact.path / one.path

    def _watch(self, raylet: int) -> None:
        while os.getppid() == raylet and time.monotonic() - self._heard < SILENCE_S:
            time.sleep(1.0)
        os._exit(1)


def _of_this_machine(problem: Problem) -> Problem:
    """A problem of a disk names the machine; any other is the same."""
    if problem.kind != DISK:
        return problem
    return problem.model_copy(update={"where": f"{socket.gethostname()}:{problem.where}"})


def _name_disks(outcome: bytes) -> bytes:
    """An outcome, whose problems of a disk name this machine."""
    content = Outcome.model_validate_json(outcome)
    if (failure := content.failure) is None or not failure.problems:
        return outcome
    failure = failure.model_copy(update={"problems": tuple(map(_of_this_machine, failure.problems))})
    return content.model_copy(update={"failure": failure}).model_dump_json(indent=1).encode()


def job_folder(key: str) -> Path:
    """A job's folder on a machine of a cluster."""
    return home() / "cluster" / key


def describe(program: str) -> Facts:
    """What this machine is, for machines that run this program together."""
    versions = {name: version(name) for name in LIBRARIES}
    alike = {"Python": platform.python_version(), **versions, "device": device()}
    return Facts(socket.gethostname(), {**alike, "the code": digest_of(code_behind([program]).digests)[:16]})


def interface(address: str) -> str:
    """The network interface with this address. Raises LookupError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    raise LookupError(f"no network interface has the address {address}")
