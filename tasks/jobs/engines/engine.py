"""What an engine is: where the programs of jobs run. All that differs between this machine and a cluster is a method
here. `tasks.jobs.engines.engine_of` returns the engine of a recipe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel

from training.jobs.protocol import Event, Imports
from training.jobs.resources import Kills
from training.problems import Problem
from training.recipe import ResolvedCompute

Handle = TypeVar("Handle", bound=BaseModel)
"""A started job, as plain JSON: another process can poll or stop it, such as a flow that was restarted."""

OnEvents = Callable[[list[Event]], None]


class Program(NamedTuple):
    """A program, as an engine starts it before its job is known."""

    module: str
    argv: Sequence[str]
    """The command on this machine, without its last argument, the job's folder."""
    env: Mapping[str, str]
    """Its variables on this machine, besides those of all jobs."""
    compute: ResolvedCompute
    """Its processes and their number format."""
    imports: Imports
    """What the processes import before they have a job."""
    logins: tuple[str, ...] = ()
    """Patterns of variables with credentials, which processes on another machine get from that machine."""


class Runner(Protocol[Handle]):
    """Starts, watches and stops one job, for `tasks.jobs.launch`."""

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

    def killed_for_memory(self) -> Kills:
        """The processes that Linux has killed for want of memory where this process can count them."""


class Engine(ABC):
    """Where the programs of a recipe, or of a batch prediction, run."""

    runs_here: bool
    """Whether programs run on this machine. Then they use its GPUs, and their checkpoints are in its home."""

    @abstractmethod
    def find_package_problems(self) -> list[Problem]:
        """The problem if a package that the engine needs is not installed here."""

    @abstractmethod
    def find_address_problems(self) -> list[Problem]:
        """The problem if the engine has an address, and nothing listens there."""

    @abstractmethod
    def describe(self, compute: ResolvedCompute) -> str | None:
        """The machines on which such a program would run, and their free resources; None for this machine."""

    @abstractmethod
    def keep_open(self, several: bool) -> AbstractContextManager[None]:
        """In the block, programs share what the engine would start for each of them. `several`: they run at once."""

    @abstractmethod
    def start_early(self, program: Program) -> None:
        """Starts processes that import, and wait for the job. Does not wait for them. One program may start early,
        inside `local.early_launches`, whose end also ends it if it has no job."""

    @abstractmethod
    def runner(self, program: Program, inputs: Mapping[str, Path], on_events: OnEvents) -> Runner[Any]:
        """Returns the runner of a job with this program, which takes over processes that have started early.

        Args:
            program: the job's.
            inputs: the folders of artifacts that it reads, by name.
            on_events: receives notes and warnings of the engine.

        Raises:
            UserError: if the engine cannot pass one of these folders on.
        """
