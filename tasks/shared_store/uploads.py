"""ArtifactUploads in the background of a run.

    <home>/uploads/<stage>.<key>    an artifact that may be absent in the bucket: locked while it is uploaded
    <home>/uploads/.read-only       the URL of the bucket that refused the last upload

A killed run leaves its pending uploads to the next run of the home, and so does a run whose bucket is away.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tasks.cache import store
from tasks.home import home, with_this_home
from tasks.locks import exclusive_lock
from tasks.shared_store.artifacts import DamagedObject, SharedStore, Upload
from tasks.shared_store.bucket import Forbidden
from tasks.shared_store.transfers import Stopped

NOTE_AFTER_S = 2.0
"""Seconds after which the end of a run reports that it waits."""
RETRY_AFTER_S = 60.0
"""Seconds after which a bucket that did not answer is tried again."""
OTHER_PROCESS_S = 3600.0
"""The longest wait for another process of this home that uploads the same artifact."""

StageAndKey = tuple[str, str]
"""Stage and key."""


class ArtifactUploads:
    """The uploads of this process.

    Args:
        shared: where to.
        url: the bucket, for messages.
        on_end: called in the uploading thread when an artifact is in the bucket.
    """

    def __init__(self, shared: SharedStore, url: str, on_end: Callable[[str, str], None]) -> None:
        self._shared, self._url, self._on_end = shared, url, on_end
        self._folder = home() / "uploads"
        self._turn = threading.Condition()
        self._queue: dict[StageAndKey, bool] = {}
        """Whether the artifact is of this run, whose artifacts come first."""
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._failed_at = 0.0
        self._warnings: list[str] = []

    def add(self, stage: str, key: str) -> None:
        """Records an artifact of this run on disk and uploads it."""
        with contextlib.suppress(OSError):  # a full disk: the artifact is uploaded unless this process is killed
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._mark(stage, key).touch(mode=0o600)
        with self._turn:
            self._queue[stage, key] = True
            self._start()

    def add_earlier(self) -> None:
        """ArtifactUploads what earlier runs of this home left."""
        for mark in sorted(self._folder.glob("[!.]*.*")):
            stage, _, key = mark.name.partition(".")
            if store.folder(stage, key).is_dir():
                with self._turn:
                    self._queue.setdefault((stage, key), False)
                    self._start()
            else:
                mark.unlink(missing_ok=True)

    def end(self, wait: bool, note: Callable[[str], None]) -> list[str]:
        """Waits for the end of all uploads, or stops them. Returns the warnings of the run."""
        reason = "the run was interrupted"
        with contextlib.suppress(KeyboardInterrupt):  # ends the wait, not the run, whose stages have ended
            if wait:
                self._wait(note)
                reason = str(self._error)
        with self._turn:
            self._stop.set()
            self._stop = threading.Event()
            left, self._queue, error, self._error = self._queue, {}, self._error, None
            warnings, self._warnings = self._warnings, []
        if left and isinstance(error, Forbidden):
            return warnings + self._note_read_only(error)
        if left:
            names = ", ".join(f"{stage} {key[:16]}" for stage, key in left)
            warnings.append(f"Not in {self._url} yet: {names}. The next run of this home uploads them. ({reason})")
        return warnings

    def _wait(self, note: Callable[[str], None]) -> None:
        with self._turn:
            self._start()
            if not self._turn.wait_for(lambda: self._thread is None, NOTE_AFTER_S):
                count = len(self._queue)
                note(f"waiting for the upload of {count} artifact{'' if count == 1 else 's'} to {self._url}")
                self._turn.wait_for(lambda: self._thread is None)

    def _start(self) -> None:
        """Starts the thread if there is work, unless the bucket has just failed. The turn is held."""
        if self._thread is not None or not self._queue or isinstance(self._error, Forbidden):
            return
        if self._error is None or time.monotonic() - self._failed_at >= RETRY_AFTER_S:
            self._error, stop = None, self._stop
            target = with_this_home(lambda: self._run(stop))
            self._thread = threading.Thread(target=target, name="uploads", daemon=True)
            self._thread.start()

    def _run(self, stop: threading.Event) -> None:
        while (artifact := self._next(stop)) is not None:
            try:
                self._upload(*artifact, stop)
            except Stopped:
                continue
            except BaseException as error:  # also a panic in obstore; the run ends with it as a warning
                with self._turn:
                    self._error, self._failed_at, self._thread = error, time.monotonic(), None
                    self._turn.notify_all()
                self._retry_later(stop)
                return
            with self._turn:
                self._queue.pop(artifact, None)

    def _retry_later(self, stop: threading.Event) -> None:
        """Other machines may wait for the artifact, and the next stage of this run may take hours."""

        def retry() -> None:
            with self._turn:
                if not stop.is_set():
                    self._start()

        timer = threading.Timer(RETRY_AFTER_S, with_this_home(retry))
        timer.daemon = True
        timer.start()

    def _next(self, stop: threading.Event) -> StageAndKey | None:
        """The next artifact, which stays in the queue until it is uploaded. Without one, the thread has ended."""
        with self._turn:
            if self._queue and not stop.is_set():
                return max(self._queue, key=lambda artifact: self._queue[artifact])  # the first of the largest
            self._thread = None
            self._turn.notify_all()
            return None

    def _upload(self, stage: str, key: str, stop: threading.Event) -> None:
        mark = self._mark(stage, key)
        with exclusive_lock(mark, OTHER_PROCESS_S if self._queue.get((stage, key)) else 0.0) as locked:
            if not locked:
                return  # the run of the other process uploads it
            try:
                end = self._send(stage, key, stop)
                (self._folder / ".read-only").unlink(missing_ok=True)
                if end.standing_digest != end.digest:
                    self._warnings.append(
                        f"{stage} {key}: two machines made different content from the same inputs: {end.digest} here, "
                        f"{end.standing_digest} in {self._url}, which keeps the first."
                    )
                self._on_end(stage, key)
            except (LookupError, store.Damaged):
                pass  # removed or damaged since: the run that needs it makes it again
            mark.unlink(missing_ok=True)

    def _send(self, stage: str, key: str, stop: threading.Event) -> Upload:
        try:
            return self._shared.upload(stage, key, stop)
        except DamagedObject as damage:
            self._warnings.append(f"{damage}. It was replaced.")
            self._shared.remove(damage)
            return self._shared.upload(stage, key, stop)

    def _note_read_only(self, error: Forbidden) -> list[str]:
        """The note for a consumer, once for each home and bucket."""
        marker = self._folder / ".read-only"
        if marker.is_file() and marker.read_text() == self._url:
            return []
        with contextlib.suppress(OSError):
            marker.write_text(self._url)
        return [f"{self._url} may only be read, so this home uploads nothing to it: {error}"]

    def _mark(self, stage: str, key: str) -> Path:
        return self._folder / f"{stage}.{key}"
