"""Responses to requests: errors in OpenAI's form, and the end of requests whose client has gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse

from training.programs.serve import Failed, FinishedAnswer, Predicted, Refused, Text

T = TypeVar("T")
Said = Predicted | Text | FinishedAnswer | Refused | Failed
CLIENT_GONE = 499
"""The status of a request whose client has gone, as nginx counts it. Nobody receives it."""
CONTEXT_LENGTH = "context_length"
"""The kind of a problem with too many tokens."""


class RequestRefused(Exception):
    """A request without an answer."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s

    def body(self) -> dict[str, Any]:
        """The body of the response."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The response."""
        headers = {"Retry-After": str(self.retry_after_s)} if self.retry_after_s else {}
        return JSONResponse(self.body(), self.status, headers)


def refuse(param: str, message: str) -> RequestRefused:
    """The error of a field of the request."""
    return RequestRefused(400, f"{param}: {message}", param)


def require_served(model: str, name: str, version: str) -> None:
    """Raises RequestRefused for a request to another model than this version of `name`."""
    if model not in (name, f"{name}/{version}"):
        raise RequestRefused(404, f"there is no model {model!r}: {name} is served.", "model", "model_not_found")


def said_error(said: Said) -> RequestRefused:
    """The error that a model's program reports."""
    if isinstance(said, Failed):
        return RequestRefused(500, f"the model failed: {said.message}")
    assert isinstance(said, Refused)
    message = "\n".join(f"{problem.where}: {problem.message}" for problem in said.problems)
    first = said.problems[0]
    code = "context_length_exceeded" if first.kind == CONTEXT_LENGTH else None
    return RequestRefused(400, message, first.where, code)


async def until_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of the work, which is cancelled if the client goes away."""
    task = asyncio.current_task()
    assert task is not None

    async def cancel_at_end() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    watching = asyncio.create_task(cancel_at_end())
    try:
        return await work
    except asyncio.CancelledError:
        if watching.done() and not task.uncancel():
            raise RequestRefused(CLIENT_GONE, "the client has gone.") from None
        raise
    finally:
        watching.cancel()


class StreamOf(StreamingResponse):
    """A stream, and what is to be closed at its end, also if its client goes away before it begins."""

    def __init__(self, events: AsyncIterator[str], release: contextlib.AsyncExitStack, **options: Any) -> None:
        super().__init__(events, **options)
        self._release = release

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends the stream."""
        async with self._release:
            await super().__call__(scope, receive, send)
