"""Leases: of several machines that want the same artifact, one makes it and the others wait.

    leases/<stage>/<key>.json    {"owner": …, "beat": 7}

The owner counts `beat` up while it works. A waiter takes a lease over if its content has not changed for a time on the
waiter's own monotonic clock, so clocks of machines are never compared. A lease only saves work: two machines that both
believe to hold it make the artifact twice, and the first manifest stands.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable

from tasks.shared_store.bucket import AlreadyExists, Bucket, BucketError, NotFound

BEAT_S = 10.0
STALE_S = 45.0
"""Without a beat, a lease is taken over: a machine that dies loses it in less than a minute."""
POLL_S = 2.0


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
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._held: dict[str, int] = {}
        """The beats of each lease by name."""
        self._turn = threading.Lock()
        self._closed = threading.Event()
        self._heart: threading.Thread | None = None

    def acquire(
        self,
        stage: str,
        key: str,
        is_made: Callable[[], bool],
        on_wait: Callable[[str], None] = lambda owner: None,
    ) -> bool:
        """Waits until this process holds the lease. Returns False if `is_made` is true before.

        `on_wait` is called once with the owner, if there is one. Raises BucketError if the bucket does not answer.
        """
        name, waits = _name(stage, key), False
        seen, since = b"", time.monotonic()
        while True:
            with contextlib.suppress(AlreadyExists):
                self._bucket.create(name, self._content(0))
                self._hold(name)
                return True
            content = self._read(name)
            if not waits:
                waits = True
                on_wait(_owner(content))
            if content != seen:
                seen, since = content, time.monotonic()
            elif time.monotonic() - since >= self._stale_s:
                self._bucket.remove(name)
                continue
            if is_made():
                return False
            time.sleep(self._poll_s)

    def release(self, stage: str, key: str) -> None:
        """Gives the lease back. A lease that was lost, or that the bucket does not let go, ends by itself."""
        name = _name(stage, key)
        with self._turn:
            held = self._held.pop(name, None) is not None
        with contextlib.suppress(BucketError):
            if held and _owner(self._read(name)) == self._owner:
                self._bucket.remove(name)

    def close(self) -> None:
        """Ends the beats. Leases that are still held become stale."""
        self._closed.set()

    def _hold(self, name: str) -> None:
        with self._turn:
            self._held[name] = 0
            if self._heart is None:
                self._heart = threading.Thread(target=self._beat, name="leases", daemon=True)
                self._heart.start()

    def _beat(self) -> None:
        while not self._closed.wait(self._beat_s):
            for name in [*self._held]:
                with contextlib.suppress(BucketError):
                    self._renew(name)

    def _renew(self, name: str) -> None:
        with self._turn:  # a lease that is given back meanwhile is not written again
            if name not in self._held:
                return
            if _owner(self._read(name)) != self._owner:  # another machine believes that this one is dead
                del self._held[name]
                return
            self._held[name] += 1
            self._bucket.write(name, self._content(self._held[name]))

    def _read(self, name: str) -> bytes:
        try:
            return self._bucket.read(name)
        except NotFound:
            return b""

    def _content(self, beat: int) -> bytes:
        return json.dumps({"owner": self._owner, "beat": beat}).encode()


def _name(stage: str, key: str) -> str:
    return f"leases/{stage}/{key}.json"


def _owner(content: bytes) -> str:
    """The owner of a lease; empty for one that is absent or damaged."""
    try:
        return str(json.loads(content)["owner"])
    except (ValueError, KeyError, TypeError):
        return ""
