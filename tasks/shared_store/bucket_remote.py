"""The shared store of the environment, as runs and plans see it: a bucket that fails stops no run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path

from tasks.cache import store
from tasks.cache.remote import Progress, Remote, no_progress
from tasks.cache.results import Artifact
from tasks.cache.stage import Work, without_number
from tasks.home import home, named_lock
from tasks.shared_store.bucket import VARIABLE, Bucket, BucketError
from tasks.shared_store.leases import Leases
from tasks.shared_store.shared_artifacts import ArtifactUploads, DamagedObject, SharedArtifact, SharedStore
from tasks.shared_store.shared_checkpoints import remove_checkpoints, share_checkpoints
from tasks.shared_store.signed_manifests import Doubt
from tasks.shared_store.transfers import count_bytes

_SHOWN = 3
"""Artifacts that a warning names."""


def open_remote() -> Remote:
    """The store of FINETUNE_STORE: one object for each home, so that a run reports what its plan fetched.

    Raises UserError if the variable is no URL of a store.
    """
    url = os.environ.get(VARIABLE)
    return _open(url, home()) if url else Remote()


def find_artifact(stage: str, key: str) -> Artifact | None:
    """The artifact, from this home or the shared store; None if it is absent, or damaged here: the next run that needs
    it makes it again."""
    try:
        return store.find(stage, key) or open_remote().find(stage, key)
    except store.Damaged:
        return None


@lru_cache
def _open(url: str, of_home: Path) -> Remote:
    return BucketRemote(Bucket(url))


class BucketRemote(Remote):
    """The artifacts of a bucket.

    Args:
        bucket: the bucket.
        leases: those of this process; by default with the usual times.
    """

    def __init__(self, bucket: Bucket, leases: Leases | None = None) -> None:
        self._bucket, self._leases = bucket, leases or Leases(bucket)
        self._shared = SharedStore(bucket, self._leases)
        self._uploads = ArtifactUploads(self._shared, bucket.url, self._upload_ended)
        self._fetched: dict[tuple[str, str], int] = {}
        self._is_away = False
        """Whether a look-up failed: each further one would wait for the same answer."""
        self._takes_leases = True
        self._warnings: list[str] = []
        self._doubts: dict[tuple[str, str], Doubt] = {}

    def find(self, stage: str, key: str, progress: Progress = no_progress) -> Artifact | None:
        """The artifact, fetched into the local store; None if it is absent, damaged, or the bucket does not answer."""
        if self._is_away:
            return None
        try:
            artifact = self._look_up(stage, key)
            if artifact is None:
                return None
            with named_lock(f"fetch-{stage}-{key}"):  # plans fetch too, and hold no lock of the stage
                if (ref := store.find(stage, key)) is not None:  # fetched or made by another process of this home
                    return ref
                fetched_bytes = self._shared.fetch(artifact, count_bytes(artifact.missing_bytes, progress))
            if fetched_bytes is None:
                return store.find(stage, key)
            self._fetched[stage, key] = fetched_bytes
            return artifact.ref
        except DamagedObject as damage:
            self._warnings.append(f"{damage}. It is made again.")
            try:
                self._shared.remove(damage)
            except BucketError:  # while it stands, a waiter for a lease would take it for the artifact
                self._takes_leases = False
        except BucketError as error:
            self._is_away = True
            self._takes_leases = False
            self._warnings.append(f"Artifacts of the shared store are not used: {error}")
        return None

    def find_or_lease(
        self,
        stage: str,
        key: str,
        progress: Progress = no_progress,
        on_wait: Callable[[str], None] = lambda owner: None,
    ) -> Artifact | None:
        """Finds the artifact, after another machine that makes it has ended; None if this process is to make it."""
        ref = self.find(stage, key, progress)
        while ref is None and self._takes_leases:
            try:
                is_maker = self._leases.acquire(stage, key, lambda: self._is_made(stage, key), on_wait)
            except BucketError:  # the next look-up or upload reports it
                self._takes_leases = False
                break
            ref = self.find(stage, key, progress)  # another machine may have ended before the lease
            if is_maker:
                if ref is not None:
                    self._leases.release(stage, key)
                break
        return ref

    def release(self, stage: str, key: str) -> None:
        """Lets other machines make an artifact that this process could not make."""
        self._leases.release(stage, key)

    @contextlib.contextmanager
    def one_at_a_time(
        self, stage: str, key: str, on_wait: Callable[[str], None] = lambda owner: None
    ) -> Iterator[None]:
        """Lets one machine at a time into the block, as far as the bucket answers and takes leases."""
        if self._takes_leases:
            try:
                self._leases.acquire(stage, key, lambda: False, on_wait)
            except BucketError:  # the next look-up or upload reports it
                self._takes_leases = False
        try:
            yield
        finally:
            self._leases.release(stage, key)

    def fetched_bytes(self, stage: str, key: str) -> int | None:
        """The bytes that this run or its plan downloaded for an artifact; None if it was here before."""
        return self._fetched.get((stage, key))

    def share_checkpoints(self, work: Work, signing_key: Path, device: str | None) -> AbstractContextManager[None]:
        """Resumes a training from the newest checkpoint of another machine, and shares its own during the block."""
        return share_checkpoints(self._bucket, work, signing_key, device, is_away=self._is_away)

    def upload(self, artifact: Artifact, *, made: bool) -> None:
        """Uploads an artifact of the run, unless the bucket has it, while the run goes on."""
        if (artifact.stage, artifact.key) not in self._fetched:
            self._uploads.add(artifact.stage, artifact.key, artifact.digest if made else "")

    def deliver_earlier(self) -> None:
        """Uploads what earlier runs of this home left, while the run goes on."""
        self._uploads.add_earlier()

    def end_run(self, wait: bool, note: Callable[[str], None] = lambda text: None) -> list[str]:
        """Waits for the end of uploads, or leaves them to a later run. Returns the warnings of the run."""
        warnings = self._warnings + self._warn_of_doubts() + self._uploads.end(wait, note)
        self._warnings = []
        self._leases.release_all()  # of failed uploads: another machine must not wait for this one's next run
        self._fetched, self._is_away, self._takes_leases = {}, False, True
        return warnings

    def _is_made(self, stage: str, key: str) -> bool:
        try:
            return self._look_up(stage, key) is not None
        except DamagedObject:
            return True  # `find` removes it

    def _look_up(self, stage: str, key: str) -> SharedArtifact | None:
        """The artifact; None if it is absent or refused."""
        artifact = self._shared.look_up(stage, key)
        if artifact is None or artifact.doubt is None:
            return artifact
        self._doubts[stage, key] = artifact.doubt
        return None if artifact.doubt.refused else artifact

    def _warn_of_doubts(self) -> list[str]:
        """A warning of all artifacts that are used unverified, and one of all that are refused."""
        warnings, (doubts, self._doubts) = list[str](), (self._doubts, {})
        for refused, end in ((False, "are used unverified"), (True, "are not used, and made here")):
            found = [(place, doubt.reason) for place, doubt in doubts.items() if doubt.refused == refused]
            if found:
                shown = "; ".join(f"{stage} {key[:16]} {reason}" for (stage, key), reason in found[:_SHOWN])
                shown += f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
                warnings.append(f"Artifacts of {self._bucket.url} {end}: {shown}.")
        return warnings

    def _upload_ended(self, stage: str, key: str) -> None:
        self._leases.end(stage, key)
        if without_number(stage) in ("fit", "fit_fold"):
            remove_checkpoints(self._bucket, key)
