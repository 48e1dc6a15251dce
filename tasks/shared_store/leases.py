"""Leases, by which machines with a shared bucket take turns, and announcements of uploads, which a removal reads.

    leases/<stage>/<key>.json              {"owner": …, "beat": 7}
    leases/removal/all.json                the lease of a removal
    uploads/<stage>/<key>.<random>.json    the manifest that an upload is about to write

Of several machines that want the same artifact, one makes it and the others wait. The owner of a lease counts `beat` up
while it works. A waiter takes a lease over if its content has not changed for a time on the waiter's own monotonic
clock, so clocks of machines are never compared. It reads the lease once more before it removes it, because another
waiter may have been first. Between these two requests it can still remove the other's new lease, or one whose owner
wakes up: a bucket removes without a condition. A lease only saves work: if two machines hold it at once, each makes the
artifact, and the first manifest stands.

An upload does not send an object that exists, and a removal removes objects that no manifest names: together they could
lose one. So an upload first writes its announcement, and then waits while there is a removal; a removal first takes its
lease, and then reads the announcements, whose objects it keeps. Whichever comes second sees the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from threading import Event

from tasks.home import home
from tasks.locks import raise_if_cancelled
from tasks.shared_store.bucket import AlreadyExists, Bucket, BucketError, NotFound
from tasks.shared_store.transfers import check
from training.problems import UserError

BEAT_S = 10.0
STALE_S = 45.0
"""Without a beat, a lease is taken over: a machine that dies loses it in less than a minute."""
POLL_S = 2.0
_FAILURES = (BucketError, UserError)
"""A bucket that was deleted is a UserError."""
ANNOUNCEMENTS = "uploads"
REMOVAL = ("removal", "all")
"""The lease of a removal."""


class Leases:
    """The leases of this process.

    Args:
        bucket: where they are.
        beat_s: seconds between two beats.
        stale_s: seconds without a beat after which a lease is taken over.
        poll_s: seconds between two looks of a waiter.
    """

    def __init__(
        self, bucket: Bucket, *, beat_s: float = BEAT_S, stale_s: float = STALE_S, poll_s: float = POLL_S
    ) -> None:
        self._bucket, self._beat_s, self._stale_s, self._poll_s = bucket, beat_s, stale_s, poll_s
        self._home = f"{socket.gethostname()}:{home()}"
        self.owner = f"{self._home}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._held: dict[str, int] = {}
        """The number of beats by the name of the lease."""
        self._beaten: dict[str, float] = {}
        """The time of the last beat by the name of the lease, on the monotonic clock."""
        self._turn = threading.Lock()
        self._heart: threading.Thread | None = None

    def acquire(
        self,
        stage: str,
        key: str,
        is_made: Callable[[], bool],
        on_wait: Callable[[str], None] = lambda owner: None,
    ) -> bool:
        """Waits until this process holds the lease. Returns False if `is_made` is true before.

        A process that acquires a lease holds the stage's lock in its home, so the owner of an earlier lease of the same
        home has ended: the lease is taken over at once.

        Args:
            stage: the stage that makes the artifact.
            key: the artifact's key.
            is_made: whether the artifact is in the bucket.
            on_wait: called with the other owner when the wait begins.

        Raises:
            BucketError: if the bucket refuses or does not answer.
        """
        name, waits = _name(stage, key), False
        seen, since = b"", time.monotonic()
        while True:
            with contextlib.suppress(AlreadyExists):
                began = time.monotonic()
                self._bucket.create(name, self._content(0))
                self._hold(name, began)
                return True
            content = self._read(name)
            if content != seen:
                seen, since = content, time.monotonic()
            owner = _owner(content)
            if owner.startswith(f"{self._home}:") or time.monotonic() - since >= self._stale_s:
                if self._read(name) == content:
                    self._bucket.remove(name)
                continue
            if content and not waits:
                waits = True
                on_wait(owner)
            if is_made():
                return False
            raise_if_cancelled()
            time.sleep(self._poll_s)

    def is_held(self, stage: str, key: str) -> bool:
        """Whether this process has written the lease too recently for others to find it stale by now. One that found it
        stale before may remove it still: see above."""
        name = _name(stage, key)
        return name in self._held and time.monotonic() - self._beaten[name] < self._stale_s / 2

    def wait_for_end(self, stage: str, key: str, is_stopped: Callable[[], bool]) -> None:
        """Waits until no living process holds the lease, or `is_stopped` is true. Raises BucketError."""
        name, seen, since = _name(stage, key), b"", time.monotonic()
        while (content := self._read(name)) and not is_stopped():
            if content != seen:
                seen, since = content, time.monotonic()
            elif time.monotonic() - since >= self._stale_s:
                return
            raise_if_cancelled()
            time.sleep(self._poll_s)

    def release(self, stage: str, key: str) -> None:
        """Ends the lease, if this process holds it. If the bucket does not answer, the lease becomes stale."""
        with contextlib.suppress(*_FAILURES):
            self._release(_name(stage, key))

    def end(self, stage: str, key: str) -> None:
        """Ends the lease of an artifact that is in the bucket now, also if a killed process of this home left it."""
        name = _name(stage, key)
        with contextlib.suppress(*_FAILURES):
            self._release(name)
            if _owner(self._read(name)).startswith(f"{self._home}:"):
                self._bucket.remove(name)

    def release_all(self) -> None:
        """Ends all leases of this process. If one fails, those after it become stale without a request: each would wait
        for the same answer."""
        with contextlib.suppress(*_FAILURES):
            for name in [*self._held]:
                self._release(name)
        with self._turn:
            self._held.clear()

    def _release(self, name: str) -> None:
        with self._turn:
            held = self._held.pop(name, None) is not None
        if held and _owner(self._read(name)) == self.owner:
            self._bucket.remove(name)

    def _hold(self, name: str, began: float) -> None:
        with self._turn:
            self._held[name] = 0
            self._beaten[name] = began
            if self._heart is None:
                self._heart = threading.Thread(target=self._beat, name="leases", daemon=True)
                self._heart.start()

    def _beat(self) -> None:
        while True:
            time.sleep(self._beat_s)
            with self._turn:
                names = [*self._held]
                if not names:
                    self._heart = None
                    return
            for name in names:
                with contextlib.suppress(*_FAILURES):
                    self._renew(name)

    def _renew(self, name: str) -> None:
        with self._turn:  # a lease that was released meanwhile is not written again
            if name not in self._held:
                return
            if _owner(self._read(name)) != self.owner:  # another machine saw no beat for too long
                del self._held[name]
                return
            self._held[name] += 1
            began = time.monotonic()
            self._bucket.write(name, self._content(self._held[name]))
            self._beaten[name] = began

    def _read(self, name: str) -> bytes:
        try:
            return self._bucket.read(name)
        except NotFound:
            return b""

    def _content(self, beat: int) -> bytes:
        return json.dumps({"owner": self.owner, "beat": beat}).encode()


@contextlib.contextmanager
def announce(bucket: Bucket, leases: Leases, stage: str, key: str, manifest: bytes, *stops: Event) -> Iterator[None]:
    """Keeps the objects of the manifest from removal during the block.

    Raises Stopped if one of the events is set while a removal goes on, and BucketError.
    """
    name = f"{ANNOUNCEMENTS}/{stage}/{key}.{uuid.uuid4().hex[:8]}.json"
    bucket.create(name, manifest)
    try:
        leases.wait_for_end(*REMOVAL, lambda: any(stop.is_set() for stop in stops))
        check(*stops)
        yield
    finally:
        with contextlib.suppress(BucketError):  # it is removed later, when it is old
            bucket.remove(name)


def _name(stage: str, key: str) -> str:
    return f"leases/{stage}/{key}.json"


def _owner(content: bytes) -> str:
    """The owner of a lease; empty if it is absent or damaged."""
    try:
        return str(json.loads(content)["owner"])
    except (ValueError, KeyError, TypeError):
        return ""
