"""HTTP/1.1 of the servers of this home, with limits for each connection, so that idle ones of others fill no server."""

from __future__ import annotations

import asyncio
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

CLIENT_S = 30.0
"""A client that sends no whole headers, or reads nothing of its answer, for so long is disconnected."""
OPEN_FILES = 65_536
"""The files and connections that a server may have open, where the system allows so many. By default it is 1,024, which
one process of another user can fill."""


class LimitedHttp(H11Protocol):
    """HTTP/1.1 with limits: of headers in bytes, by h11; of the time in which they arrive; of the time for which a
    client reads nothing while an answer waits."""

    _head: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(CLIENT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel(self._unread)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel(self._head, self._unread)
        super().connection_lost(exc)

    def _limit_head(self) -> None:
        """Begins or ends the time for the headers of the next request."""
        if self.conn.their_state is h11.IDLE:
            self._head = self._head or self.loop.call_later(CLIENT_S, self.transport.close)
        else:
            self._cancel(self._head)
            self._head = None

    @staticmethod
    def _cancel(*timers: asyncio.TimerHandle | None) -> None:
        for timer in timers:
            if timer is not None:
                timer.cancel()


def allow_connections() -> None:
    """Raises this process's limit of open files to OPEN_FILES, or as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
