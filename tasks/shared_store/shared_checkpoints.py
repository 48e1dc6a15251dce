"""Checkpoints of a running training in a bucket, from which another machine resumes it.

    checkpoints/<key of fit>/<step>.json                a checkpoint, signed and written last
    checkpoints/<key of fit>/objects/<2 hex>/<sha256>   the content of a file

The newest replaces those before it. An upload runs while training goes on. Objects are below the key, because no
artifact may need what is removed with them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.cache.remote import Progress, no_progress
from tasks.cache.stage import Listener, Work
from tasks.cache.store import link_or_copy
from tasks.shared_store.bucket import Bucket, BucketError, Forbidden, NotFound, Unavailable
from tasks.shared_store.signed_manifests import FIELD, Doubt, find_doubt, sign_manifest
from tasks.shared_store.transfers import SharedFile, Stopped, check, count_bytes, download, in_parallel, send
from training.engine import checkpoints
from training.jobs.protocol import CHECKPOINTS, EVENTS, Event, Job, Message, fsync, sha256
from training.problems import UserError

PROGRAM = "training.programs.fit"
ASIDE = "shared"
"""In a job's folder: links to the files that are being uploaded, and files that are being fetched."""
PAUSE = 19.0
"""An upload is followed by a pause of so many times its own time: uploads take at most 5 % of a training."""
RETRY_AFTER_S = 60.0
"""Pause after an upload that failed."""
LOOK_AGAIN_AFTER_S = 5.0
"""Pause before the second and last look for a checkpoint: without one, hours of training may be repeated."""
END_S = 2.0
"""Time that a finished training waits for the part of an upload that is on its way."""
_STEP = re.compile(r"/0*(\d+)\.json$")


@contextlib.contextmanager
def share_checkpoints(
    bucket: Bucket, work: Work, signing_key: Path, device: str | None, *, is_away: bool = False
) -> Iterator[None]:
    """Fetches the newest checkpoint of the training, and uploads its checkpoints during the block.

    An error of the bucket is only a warning. Training does not wait for uploads.

    Args:
        bucket: where the checkpoints are.
        work: the training. Its listeners receive warnings and notes.
        signing_key: the key with which this home signs its checkpoints.
        device: the hardware that may resume only its own checkpoints; None if any may be used.
        is_away: whether the run has already warned that the bucket does not answer.
    """
    uploads = CheckpointUploader(Checkpoints(bucket, work.key, work.job), work, is_away=is_away)
    if not is_away:
        uploads.resume(signing_key, device)
    listeners, work.listeners = work.listeners, (*work.listeners, uploads)
    thread = threading.Thread(target=uploads.run, name="checkpoints", daemon=True)
    thread.start()
    try:
        yield
    finally:
        uploads.close()
        thread.join(END_S)
        work.listeners = listeners
        uploads.report()


class CheckpointUploader(Listener):
    """Uploads the newest checkpoint after each one that a training writes, in a thread of its own.

    Args:
        shared: the training's checkpoints in the bucket.
        work: the training.
        is_away: whether the run has already warned that the bucket does not answer.
        clock: seconds.
    """

    def __init__(
        self, shared: Checkpoints, work: Work, *, is_away: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._shared, self._work, self._clock = shared, work, clock
        self._sent = 0
        """The step of the newest checkpoint of this home in the bucket."""
        self._warned = is_away
        self._written, self._closing = threading.Event(), threading.Event()
        self._reports: deque[Message] = deque()
        """Listeners are called in the thread of the training's stage only."""

    def resume(self, signing_key: Path, device: str | None) -> None:
        """Fetches the newest checkpoint if it is newer than those here. Tries twice if the bucket does not answer."""

        def refuse(shared: SharedCheckpoint) -> bool:
            refused = device is not None and shared.device != device and not shared.device.startswith(f"{device} with ")
            if refused:
                message = f"checkpoint {shared.step} of another machine was computed on {shared.device} (here {device})"
                self._report("note", f"{message}: it is used only if training.inexact_resume is true")
            return refused

        def fetch() -> SharedCheckpoint | None:
            return self._shared.resume(
                signing_key, refuse, lambda message: self._report("warning", message), self._work.fetch_progress
            )

        try:
            try:
                found = fetch()
            except Unavailable:
                time.sleep(LOOK_AGAIN_AFTER_S)
                found = fetch()
            if found is not None:
                self._sent = found.step
                self._report("note", f"from checkpoint {found.step} of another machine")
        except (BucketError, UserError, OSError) as error:
            self._warn(f"the checkpoints of this home are used, as none of another machine could be fetched: {error}")
        self.report()

    def stage_events(self, stage: str, events: list[Event]) -> None:
        """Notices new checkpoints."""
        if any(event["kind"] == "checkpoint" for event in events):
            self._written.set()
        self.report()

    def run(self) -> None:
        """Uploads until `close`."""
        while not self._closing.is_set():
            self._written.wait()
            self._written.clear()
            self._closing.wait(self.upload())

    def upload(self) -> float:
        """Uploads the newest checkpoint, and returns the pause that must follow, in seconds."""
        began = self._clock()
        try:
            self._sent = self._shared.upload_newest(self._sent, self._closing) or self._sent
        except Stopped:
            return 0.0
        except Forbidden as error:
            self._report("note", f"checkpoints are not uploaded: {error}")
            return threading.TIMEOUT_MAX
        except (BucketError, UserError, OSError) as error:
            self._warn(f"no other machine could resume this training now, as its checkpoints are only here: {error}")
            return RETRY_AFTER_S
        return PAUSE * (self._clock() - began)

    def close(self) -> None:
        """Ends the thread, and the upload after its present part."""
        self._closing.set()
        self._written.set()

    def report(self) -> None:
        """Passes messages to the listeners of the stage."""
        while self._reports:
            self._work.on_events([self._reports.popleft()])

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            self._report("warning", message)

    def _report(self, kind: Literal["warning", "note"], message: str) -> None:
        self._reports.append({"kind": kind, "message": message})


class DamagedCheckpoint(Exception):
    """A checkpoint in the bucket cannot be used."""


class SharedCheckpoint(BaseModel):
    """A checkpoint that can be fetched."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    step: int = Field(ge=0)
    device: str
    """The hardware that computed it, as in the environment of a training."""
    micro_batch_divisor: int = Field(ge=1)
    """The micro-batch division. It is stored with the checkpoint, because another one would change the weights."""
    files: list[SharedFile]
    """Paths are relative to the job's folder: the checkpoint, those that it needs, and the events so far."""


class Checkpoints:
    """The checkpoints of one training.

    All methods raise `bucket.BucketError` if the bucket does not answer or refuses.

    Args:
        bucket: where they are.
        key: of the training.
        job: the job's folder.
    """

    def __init__(self, bucket: Bucket, key: str, job: Path) -> None:
        self._bucket, self._key, self._job = bucket, key, job
        self._above = f"checkpoints/{key}"
        self._folder, self._aside = job / CHECKPOINTS, job / ASIDE

    def newest_here(self) -> int:
        """The step of the job's newest checkpoint; 0 without one."""
        return max(map(checkpoints.step_of, self._folder.glob("checkpoint-*")), default=0)

    def resume(
        self,
        signing_key: Path,
        refuse: Callable[[SharedCheckpoint], bool],
        warn: Callable[[str], None],
        progress: Progress = no_progress,
    ) -> SharedCheckpoint | None:
        """Fetches the newest checkpoint into the job's folder, if it is newer than those of the job.

        Args:
            signing_key: the key of this home: a checkpoint of the bucket is trusted like one of its own.
            refuse: whether this machine cannot go on from a checkpoint.
            warn: receives the reason why a damaged one was passed over.
            progress: receives the bytes so far, and those of all files.
        """
        steps = {int(found[1]): name for name in self._bucket.names(self._above) if (found := _STEP.search(name))}
        for step in sorted((step for step in steps if step > self.newest_here()), reverse=True):
            try:
                shared, doubt = self._read(steps[step])
                if doubt is not None:
                    end = "is not used" if doubt.refused else "is used unverified"
                    warn(f"checkpoint {step} in the shared store {doubt.reason}: it {end}")
                if not (doubt and doubt.refused) and not refuse(shared):
                    self._fetch(shared, signing_key, progress)
                    return shared
            except NotFound:
                continue  # replaced by a newer one since
            except DamagedCheckpoint as damage:
                warn(f"checkpoint {step} in the shared store is damaged ({damage}) and is not used")
                with contextlib.suppress(BucketError):
                    self._bucket.remove(steps[step])
            finally:
                shutil.rmtree(self._aside, ignore_errors=True)
        return None

    def upload_newest(self, after: int, closing: threading.Event) -> int | None:
        """Uploads the job's newest checkpoint if it is newer than the step `after`, and removes those before it.

        Returns its step. Returns None if there was nothing to do, or if training removed it meanwhile. Raises
        `transfers.Stopped` soon after `closing` is set.
        """
        step = self.newest_here()
        if step <= after:
            return None
        try:
            shared = self._link_aside(step)
            by_content = {file.sha256: file for file in shared.files}
            in_parallel(
                lambda file, stop: send(self._bucket, self._object(file), file, self._aside / file.path, stop, closing),
                by_content.values(),
            )
        except (FileNotFoundError, shutil.Error):
            return None
        finally:
            shutil.rmtree(self._aside, ignore_errors=True)
        check(closing)
        name = f"{self._above}/{step:010}.json"
        self._bucket.write(name, json.dumps(sign_manifest(name, shared.model_dump(mode="json")), indent=1).encode())
        with contextlib.suppress(BucketError):  # some may write and not remove
            if not self._remove_older(name, {self._object(file) for file in shared.files}):
                return None
        return step

    def _object(self, file: SharedFile) -> str:
        return f"{self._above}/{file.object}"

    def _read(self, name: str) -> tuple[SharedCheckpoint, Doubt | None]:
        """The checkpoint, and why it is not trusted."""
        content = self._bucket.read(name)
        try:
            fields = json.loads(content)
            signature = fields.pop(FIELD, None)
            return SharedCheckpoint.model_validate_json(json.dumps(fields)), find_doubt(name, fields, signature)
        except ValidationError as error:
            raise DamagedCheckpoint(f"{name}: {error.errors()[0]['msg']}") from error
        except (ValueError, AttributeError, TypeError) as error:
            raise DamagedCheckpoint(f"{name}: {error}") from error

    def _remove_older(self, newest: str, needed: set[str]) -> bool:
        """Returns False, and removes the newest instead, if another machine that trains the same has removed objects of
        it before its manifest was there."""
        names = set(self._bucket.names(self._above))
        if not needed <= names:
            self._bucket.remove(newest)
            return False
        manifests = {name for name in names if _STEP.search(name)}
        for name in manifests:
            if name < newest:
                self._bucket.remove(name)
        if max(manifests, default="") == newest:
            for name in names - manifests - needed:
                self._bucket.remove(name)
        return True

    def _link_aside(self, step: int) -> SharedCheckpoint:
        """Links a checkpoint and those that it needs, because training may remove them, and copies the events.

        The digests are those of the checkpoints' manifests. Raises OSError or shutil.Error if a file is gone.
        """
        shutil.rmtree(self._aside, ignore_errors=True)
        newest = self._folder / checkpoints.name(step)
        sources = [*checkpoints.list_needed(newest), newest]
        for source in sources:
            shutil.copytree(source, self._aside / CHECKPOINTS / source.name, copy_function=link_or_copy)
        content = (self._job / EVENTS).read_bytes()
        (self._aside / EVENTS).write_bytes(content[: content.rfind(b"\n") + 1])
        files = [_describe(self._aside, EVENTS)]
        for source in sources:
            place = f"{CHECKPOINTS}/{source.name}"
            written = json.loads((self._aside / place / checkpoints.MANIFEST).read_bytes())["files"]
            files += [SharedFile(**file | {"path": f"{place}/{file['path']}"}) for file in written]
            files.append(_describe(self._aside, f"{place}/{checkpoints.MANIFEST}"))
        return SharedCheckpoint(
            step=step,
            device=str(checkpoints.read_environment(self._aside / CHECKPOINTS / newest.name).get("device", "")),
            micro_batch_divisor=Job.read(self._job).settings["micro_batch_divisor"],
            files=files,
        )

    def _fetch(self, shared: SharedCheckpoint, signing_key: Path, progress: Progress) -> None:
        """Publishes the checkpoint in the job's folder. Raises DamagedCheckpoint, and publishes nothing, if its objects
        are absent or have other bytes."""
        shutil.rmtree(self._aside, ignore_errors=True)
        by_content = {file.sha256: file for file in shared.files}
        targets = {sha256: self._aside / file.path for sha256, file in by_content.items()}
        for file in shared.files:
            (self._aside / file.path).parent.mkdir(parents=True, exist_ok=True)
        on_bytes = count_bytes(sum(file.bytes for file in by_content.values()), progress)
        reasons = in_parallel(
            lambda file, stop: download(self._bucket, self._object(file), file, targets[file.sha256], stop, on_bytes),
            by_content.values(),
        )
        if damaged := {file: reason for file, reason in zip(by_content.values(), reasons, strict=True) if reason}:
            for file in damaged:  # an object of the right size would not be uploaded again
                with contextlib.suppress(BucketError):
                    self._bucket.remove(self._object(file))
            raise DamagedCheckpoint("; ".join(damaged.values()))
        for file in shared.files:
            if targets[file.sha256] != self._aside / file.path:
                shutil.copyfile(targets[file.sha256], self._aside / file.path)
        self._publish(shared, signing_key)

    def _publish(self, shared: SharedCheckpoint, signing_key: Path) -> None:
        # The checkpoint last: with it, the job resumes, by this division and these events.
        settings = {"micro_batch_divisor": shared.micro_batch_divisor}
        Job(program=PROGRAM, key=self._key, settings=settings).write(self._job)
        os.replace(self._aside / EVENTS, self._job / EVENTS)
        self._folder.mkdir(exist_ok=True)
        for fetched in sorted((self._aside / CHECKPOINTS).iterdir(), key=checkpoints.step_of):
            checkpoints.sign(fetched, signing_key)
            for path in (*fetched.rglob("*"), fetched):
                fsync(path)
            if not (self._folder / fetched.name).exists():
                fetched.rename(self._folder / fetched.name)
        fsync(self._folder)


def remove_checkpoints(bucket: Bucket, key: str) -> None:
    """Removes all checkpoints of a training, whose artifact makes them useless."""
    with contextlib.suppress(Forbidden):  # some may write and not remove
        # Manifests first: they have no folder between them and the key.
        for name in sorted(bucket.names(f"checkpoints/{key}"), key=lambda name: name.count("/")):
            bucket.remove(name)


def _describe(folder: Path, path: str) -> SharedFile:
    file = folder / path
    return SharedFile(path=path, bytes=file.stat().st_size, sha256=sha256(file))
