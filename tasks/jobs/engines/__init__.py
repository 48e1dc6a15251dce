"""Engines: where jobs run. An engine has the functions of `Engine`; `local` is this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from pydantic import BaseModel

Handle = TypeVar("Handle", bound=BaseModel)
"""A started job, as plain JSON: another process can poll or stop it, such as a flow that was restarted."""


class Engine(Protocol[Handle]):
    """The seam between `launch` and the place where a job runs. A module with these functions is an engine."""

    def start(self, job: Path, argv: Sequence[str], env: Mapping[str, str]) -> Handle:
        """Starts a command with the job's folder as its last argument. `env`: variables besides those of all jobs."""

    def poll(self, handle: Handle) -> bool:
        """Whether the job still runs; False only after all of its processes have ended."""

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Returns as soon as the job ends, at the latest after `timeout_s`."""

    def stop(self, handle: Handle, grace_s: float) -> None:
        """Stops the job, kills what remains after `grace_s`, and returns when all its processes have ended."""

    def logs(self, handle: Handle) -> Path:
        """The output of the job's last try."""
