"""Upload of a training's newest checkpoint while it goes on, and the start from one of another machine."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tasks.cache.stage import Listener, Work
from tasks.shared_store.bucket import Bucket, BucketError, Forbidden, Unavailable
from tasks.shared_store.checkpoints import Checkpoints, SharedCheckpoint
from tasks.shared_store.transfers import Stopped
from training.problems import UserError

PAUSE = 19.0
"""An upload is followed by a pause of so many times its own time: uploads take at most 5 % of a training."""
RETRY_AFTER_S = 60.0
"""Pause after an upload that failed."""
LOOK_AGAIN_AFTER_S = 5.0
"""Pause before the second and last look for a checkpoint: without one, hours of training may be repeated."""
END_S = 2.0
"""Time that a finished training waits for the part of an upload that is on its way."""


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
    uploads = CheckpointUploads(Checkpoints(bucket, work.key, work.job), work, is_away=is_away)
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


class CheckpointUploads(Listener):
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
        self._reports: deque[dict[str, Any]] = deque()
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

    def stage_events(self, stage: str, events: list[dict[str, Any]]) -> None:
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

    def _report(self, kind: str, message: str) -> None:
        self._reports.append({"kind": kind, "message": message})
