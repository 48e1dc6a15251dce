"""OpenAI's batch files: a request a line, and the responses in the form of its output files.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […]}}
    {"custom_id": "a", "messages": […]}

Source: https://platform.openai.com/docs/guides/batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ID = "custom_id"


def is_request(row: Mapping[str, Any]) -> bool:
    """Whether a JSON object is a request with messages."""
    body = row.get("body", row)
    return ID in row and isinstance(body, Mapping) and "messages" in body


def as_row(request: Mapping[str, Any], column: str) -> dict[str, Any]:
    """The request as a row with its `custom_id` and its messages in this column."""
    body = request.get("body", request)
    return {ID: request[ID], column: body["messages"]}


def response(custom_id: Any, answer: str | None, error: str | None, *, model: str, created_s: int) -> dict[str, Any]:
    """The line of the output file for a request: the answer, or the error of a row that has none.

    `model` is `NAME/VERSION`, `created_s` a Unix time.
    """
    if error is not None or answer is None:
        failure = {"code": "invalid_request", "message": error or "the model generates no answer"}
        return {ID: custom_id, "response": None, "error": failure}
    message = {"role": "assistant", "content": answer}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    body = {"object": "chat.completion", "created": created_s, "model": model, "choices": [choice]}
    return {ID: custom_id, "response": {"status_code": 200, "body": body}, "error": None}
