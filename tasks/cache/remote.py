"""The seam between the local store and one that many machines share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from tasks.cache.results import Artifact
from tasks.cache.stage import Work

Progress = Callable[[int, int], None]
"""Called with the bytes that are transferred and those of all files."""


def no_progress(done: int, total: int) -> None:
    """Shows nothing."""


class Remote:
    """Artifacts that other machines made. This class is for a home that shares nothing; no method raises an error of
    the network."""

    def find(self, stage: str, key: str, progress: Progress = no_progress) -> Artifact | None:
        """The artifact, fetched into the local store; None if it cannot be had."""
        return None

    def find_or_lease(
        self,
        stage: str,
        key: str,
        progress: Progress = no_progress,
        on_wait: Callable[[str], None] = lambda owner: None,
    ) -> Artifact | None:
        """Finds the artifact, after another machine that makes it has ended; None if this process is to make it.

        Then `upload` or `release` must follow. `on_wait` is called with the other machine when the wait begins.
        """
        return self.find(stage, key, progress)

    def release(self, stage: str, key: str) -> None:
        """Lets other machines make an artifact that this process could not make."""

    def one_at_a_time(
        self, stage: str, key: str, on_wait: Callable[[str], None] = lambda owner: None
    ) -> AbstractContextManager[None]:
        """Lets one machine at a time into the block, as far as the bucket answers. `on_wait` is called with the other
        machine when the wait begins."""
        return nullcontext()

    def fetched_bytes(self, stage: str, key: str) -> int | None:
        """The bytes that this run or its plan downloaded for an artifact; None if it was here before."""
        return None

    def share_checkpoints(self, work: Work, signing_key: Path, device: str | None) -> AbstractContextManager[None]:
        """Resumes a training from the newest checkpoint of another machine, and shares its own during the block.

        `signing_key` signs the checkpoints of this home. `device` is the hardware that may resume only its own
        checkpoints; None if any may be used.
        """
        return nullcontext()

    def upload(self, artifact: Artifact, *, made: bool) -> None:
        """Uploads an artifact of the run, unless other machines have it, while the run goes on. It is signed if the run
        has `made` it."""

    def deliver_earlier(self) -> None:
        """Uploads what earlier runs of this home left, while the run goes on."""

    def end_run(self, wait: bool, note: Callable[[str], None] = lambda text: None) -> list[str]:
        """Ends the run, or a plan without a run, and returns its warnings.

        Args:
            wait: whether to wait for the end of uploads; else they are left to a later run.
            note: shows the reason of a long wait.
        """
        return []
