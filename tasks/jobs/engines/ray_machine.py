"""One machine of a job on a Ray cluster: an actor that runs the machine's supervisor.

The job's folder on a machine is <home>/cluster/<key>, in that machine's own home. No disk is shared: inputs come from
this home, the shared store or the flow, and the flow reads events, logs and output through the actor.

The actor exits if the flow is silent for `SILENCE_S`, or if its raylet ends. Then, as always when a starter ends, the
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import ray.util

from tasks.cache import settings, store
from tasks.cache.code import code_behind
from tasks.cache.digests import digest_of
from tasks.cache.secret_files import seal_key
from tasks.cache.stage import Listener, Work
from tasks.jobs.child_environment import environment
from tasks.jobs.commands import Machines, accelerate_argv, accelerate_environment
from tasks.jobs.hardware import device, visible_gpus
from tasks.jobs.supervisors import Handle, poll, start_supervisor, stop
from tasks.shared_store.opening import open_remote
from training.engine import checkpoints
from training.jobs.protocol import EVENTS, LOGS, OUTCOMES, OUTPUT, Job, read_events
from training.recipe import ResolvedCompute

SILENCE_S = 10.0
"""Without a call of the flow for so long, a machine gives its job up; and the flow a machine without an answer."""
CHUNK_BYTES = 4 * 2**20
LIBRARIES = ("torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy")
_SIOCGIFADDR = 0x8915


class Facts(NamedTuple):
    """What machines that train together may not differ in, and the name of this one."""

    host: str
    alike: dict[str, str]


class Input(NamedTuple):
    """A folder that a job reads: a part of an artifact."""

    stage: str
    key: str
    path: str
    """Relative to the artifact's folder."""


class State(NamedTuple):
    """A machine's job, as the flow sees it."""

    is_running: bool
    content: dict[str, bytes]
    """What is new in files, by path relative to the job's folder; at most CHUNK_BYTES of each."""
    is_complete: bool
    """Whether nothing more of these files is left to read."""
    reports: list[dict[str, Any]]
    """Events of this machine about shared checkpoints."""


@dataclass
class MachineWork(Work):
    """The context of a stage's program on a machine of a cluster."""

    @property
    def job(self) -> Path:
        """The job's folder on this machine."""
        return job_folder(self.key)


class _Reports(Listener):
    """Collects the events of this process; those of the job, which have a time, are in its file."""

    def __init__(self, reports: list[dict[str, Any]]) -> None:
        self._reports = reports

    def stage_events(self, stage: str, events: list[dict[str, Any]]) -> None:
        self._reports += [event for event in events if "time" not in event]


class Machine:
    """The actor. The flow calls one method at a time, and `beat` meanwhile.

    Args:
        key: the job's.
    """

    def __init__(self, key: str) -> None:
        self._key, self._job = key, job_folder(key)
        self._handle: Handle | None = None
        self._reports: list[dict[str, Any]] = []
        self._work = MachineWork(key, self._job / OUTPUT, "", stage="fit")
        self._work.listeners = (_Reports(self._reports),)
        self._sharing = contextlib.ExitStack()
        self._offset = 0
        self._receiving: dict[tuple[str, str], tuple[contextlib.ExitStack, Path]] = {}
        self._heard = time.monotonic()
        threading.Thread(target=self._watch, args=(os.getppid(),), name="flow", daemon=True).start()

    def beat(self) -> None:
        """Lets the machine know that the flow is there."""
        self._heard = time.monotonic()

    def describe(self, program: str) -> Facts:
        """What this machine is."""
        return describe(program)

    def address(self) -> tuple[str, int]:
        """This machine's address in the cluster, and a port on which rank 0 can listen."""
        host = str(ray.util.get_node_ip_address())
        with socket.create_server((host, 0)) as server:
            return host, int(server.getsockname()[1])

    def find_missing(self, inputs: Sequence[Input]) -> list[tuple[str, str]]:
        """Stage and key of the artifacts that are neither in this home nor in the shared store."""
        names = dict.fromkeys((one.stage, one.key) for one in inputs)
        return [name for name in names if store.find(*name) is None and open_remote().find(*name) is None]

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

    def share_checkpoints(self, events: bytes, inexact_resume: bool) -> int | None:
        """Resumes the job from the newest checkpoint in the shared store, if it is newer than those here, and uploads
        those of this machine until `stop`. Returns the division of batches that the job's last checkpoint needs; None
        if it is unknown.

        `events`: those of earlier tries, as the flow has them.
        """
        self._job.mkdir(parents=True, exist_ok=True)
        own_device = None if inexact_resume else device()
        self._sharing.enter_context(open_remote().share_checkpoints(self._work, seal_key(), own_device))
        if events:
            (self._job / EVENTS).write_bytes(events)
        self._offset = len(events)
        with contextlib.suppress(OSError, ValueError, KeyError):
            return int(Job.read(self._job).settings["micro_batch_divisor"])
        return None

    def start(self, job: Job, inputs: Mapping[str, Input], machines: Machines, env: Mapping[str, str]) -> None:
        """Starts this machine's processes of the job. `env` has precedence over this machine's variables."""
        for outcome in self._job.glob(OUTCOMES):
            outcome.unlink()
        shutil.rmtree(self._job / LOGS, ignore_errors=True)
        (self._job / LOGS).mkdir(parents=True)
        places = {name: str(self._find(one)) for name, one in inputs.items()}
        job.model_copy(update={"inputs": places}).write(self._job)
        use_cpu, compute = not visible_gpus(), ResolvedCompute.model_validate(job.settings["compute"])
        processes = compute.num_processes
        argv = accelerate_argv(
            job.program,
            num_processes=processes,
            mixed_precision=compute.mixed_precision,
            use_cpu=use_cpu,
            machines=machines,
        )
        own = accelerate_environment(
            num_processes=processes, use_cpu=use_cpu, strategy=compute.strategy, machines=machines
        )
        own |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface(ray.util.get_node_ip_address()))
        own |= {checkpoints.SEAL_KEY: str(seal_key()), **env}
        self._handle = start_supervisor(self._job, [*argv, str(self._job)], environment(own))

    def read(self, offsets: Mapping[str, int]) -> State:
        """The job's state, and what events, logs and outcomes have beyond these offsets."""
        is_running = self._handle is not None and poll(self._handle)
        new_events, self._offset = read_events(self._job / EVENTS, self._offset)
        if new_events:
            self._work.on_events(new_events)
        content: dict[str, bytes] = {}
        for file in [*self._job.glob(OUTCOMES), self._job / EVENTS, *(self._job / LOGS).glob("*")]:
            name = str(file.relative_to(self._job))
            with contextlib.suppress(FileNotFoundError), file.open("rb") as source:
                source.seek(offsets.get(name, 0))
                if (part := source.read(CHUNK_BYTES)) or name not in offsets:
                    content[name] = part
        reports, self._reports[:] = [*self._reports], []
        return State(is_running, content, all(len(part) < CHUNK_BYTES for part in content.values()), reports)

    def read_output(self, path: str, offset: int) -> bytes:
        """A part of a file of the job's output."""
        with (self._job / OUTPUT / path).open("rb") as source:
            source.seek(offset)
            return source.read(CHUNK_BYTES)

    def stop(self, grace_s: float) -> None:
        """Stops the job; its processes have so long to save."""
        if self._handle is not None:
            stop(self._handle, grace_s)
        self._sharing.close()

    def discard(self) -> None:
        """Removes the job's folder: the flow has its output."""
        shutil.rmtree(self._job, ignore_errors=True)

    def _find(self, one: Input) -> Path:
        ref = store.find(one.stage, one.key)
        if ref is None:
            raise LookupError(f"{one.stage} {one.key} is not on {socket.gethostname()}")
        return ref.path / one.path

    def _watch(self, raylet: int) -> None:
        while os.getppid() == raylet and time.monotonic() - self._heard < SILENCE_S:
            time.sleep(1.0)
        os._exit(1)


def job_folder(key: str) -> Path:
    """A job's folder on a machine of a cluster."""
    return settings.home() / "cluster" / key


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
