"""Messages between the flow, the driver and the machines of a job on a Ray cluster."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

from tasks.home import ray_token
from tasks.reports.formatting import first_line
from training.jobs.protocol import Event
from training.problems import Problem

CONNECT_S = 5.0
AUTH_MODE, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"


class MachineLost(Exception):
    """A machine of a cluster does not answer."""


class Cluster(NamedTuple):
    """What a job needs of a cluster."""

    address: str | None
    """None for RAY_ADDRESS, or else for a cluster of this machine alone."""
    machines: int
    processes: int
    """On all machines together."""
    uses_gpus: bool
    """Whether each process has a GPU."""
    wait_s: float
    """The longest wait for machines, in seconds."""


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


class MachineState(NamedTuple):
    """A machine's job, as the flow sees it."""

    is_running: bool
    content: dict[str, bytes]
    """What is new in files, by path relative to the job's folder; at most CHUNK_BYTES of each."""
    is_complete: bool
    """Whether nothing more of these files is left to read."""
    reports: list[Event]
    """Events of this machine about shared checkpoints."""
    problems: tuple[Problem, ...]
    """Of a job that does not run: a full disk, on which it could not report anything."""


def own_login() -> dict[str, str]:
    """The variables with which a process starts a cluster of this machine, and joins it; none if the user's own say how
    Ray asks for a token."""
    if AUTH_MODE in os.environ:
        return {}
    return {AUTH_MODE: "token", TOKEN_PATH: os.environ.get(TOKEN_PATH) or str(ray_token())}


def no_cluster(address: str | None, error: Exception) -> Problem:
    """That no cluster answers at this address."""
    message = f"no Ray cluster answers at {address!r} ({first_line(error)}): start it, or name host:port of its head."
    return Problem(kind="compute", where="compute.cluster_address", message=message)


def refused(error: Exception) -> ConnectionError:
    """That a cluster listens, and yet does not let a client in."""
    return ConnectionError(
        f"{first_line(error)}; something listens there: a cluster with a token needs {AUTH_MODE}=token and {TOKEN_PATH}"
    )


def probe(address: str) -> None:
    """Raises OSError or ValueError if nothing listens at `host:port`; Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), CONNECT_S).close()
