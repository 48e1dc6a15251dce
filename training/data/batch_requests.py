"""OpenAI's batch files: a request a line, and the responses in the form of its output files.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […]}}
    {"custom_id": "a", "messages": […], "tools": […]}

A response has the same form for a request without an answer, with the status 400 and an error, as in the output of
vLLM's `run-batch`.

Source: https://platform.openai.com/docs/guides/batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from training.data.row_problems import RowProblem, shorten

ID = "custom_id"
_PLAIN: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "stop": ([],),
    "logprobs": (False,),
    "stream": (False,),
}
"""Fields of a request that would change the form of its answer, with the values, besides null, that do not."""
_TOOLS = {"functions": "function_call", "tools": "tool_choice"}
"""The fields with declarations of tools, the older one first, and the fields that may turn them off."""
_OF_SAMPLING = (
    *("max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
)
"""Fields of generation: the options of the model decide."""


@dataclass(frozen=True)
class RefusedRequest(RowProblem):
    """A request that cannot be answered."""

    kept: Mapping[str, Any] = field(default_factory=dict)
    """Its `custom_id`."""


def is_request(row: Mapping[str, Any]) -> bool:
    """Whether a JSON object is a request."""
    return ID in row and (isinstance(row.get("body"), Mapping) or "messages" in row)


def conversation_column(columns: Mapping[str, str], forms: Mapping[str, str]) -> str | None:
    """The rows' name of the column that holds a conversation to answer: messages, or a prompt that may be messages.
    `columns` are the rows' names of the columns that the model reads, by the task type's, and `forms` their forms."""
    return columns.get("messages") or (columns.get("prompt") if forms.get("prompt") == "content" else None)


def as_row(
    number: int,
    request: Mapping[str, Any],
    column: str,
    tools_column: str | None = None,
    *,
    takes_prompts: bool = False,
) -> dict[str, Any] | RefusedRequest:
    """The request as a row with its messages in this column and its tools in the other, beside its `custom_id` and what
    else it has outside its body; or its problem, as row `number`. With `takes_prompts`, a column of prompts holds tools
    for which there is no other.

    Contents of several parts become one text, a line a part, and messages by the developer are those by the system.
    """
    body = _body(request)
    kept = {name: value for name, value in request.items() if name not in ("body", "messages", *_TOOLS)}
    for name, plain in _PLAIN.items():
        value = body.get(name)
        if value is not None and value not in plain:
            words = f"wants another answer than one whole text, by `{name}`"
            return RefusedRequest(number, "malformed", words, f": {shorten(value)}", kept)
    if "messages" not in body:
        return RefusedRequest(number, "malformed", "has no messages in its request", kept=kept)
    messages = body["messages"]
    row = {**kept, column: [*map(plain_message, messages)] if isinstance(messages, list) else messages}
    for name, choice in _TOOLS.items():
        if (tools := body.get(name)) and body.get(choice) != "none":
            if tools_column is None and takes_prompts:
                row[column] = {"messages": row[column], "tools": tools}
                continue
            if tools_column is None:
                words = f"has `{name}`, and the model was trained without a column data.columns.tools"
                return RefusedRequest(number, "malformed", words, f": {shorten(tools)}", kept)
            row[tools_column] = tools
    return row


def ignored_fields(request: Mapping[str, Any]) -> set[str]:
    """The fields of the request that would change its answer elsewhere, and do not here."""
    body = _body(request)
    ignored = {name for name in _OF_SAMPLING if body.get(name) is not None}
    return ignored - {"temperature"} if body.get("temperature") == 0 else ignored  # the likeliest text, as here


def _body(request: Mapping[str, Any]) -> Mapping[str, Any]:
    body: Mapping[str, Any] = request["body"] if isinstance(request.get("body"), Mapping) else request
    return body


def plain_message(message: Any) -> Any:
    """Returns a message with its text parts as one text, a line a part, and the role system in place of developer."""
    if not isinstance(message, Mapping):
        return message
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        content = "\n".join(part["text"] for part in content)
    changed = {"role": "system" if role == "developer" else role, "content": content}
    return {name: changed.get(name, value) for name, value in message.items()}


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


@dataclass(frozen=True)
class BatchAnswer:
    """The answer to a request."""

    message: Mapping[str, Any]
    prompt_tokens: int
    tokens: int
    """Of the text, with the one that ends it."""
    finish_reason: str
    """`stop`, `length` for a text that was cut, or `tool_calls`."""


def response(
    custom_id: Any, answer: BatchAnswer | None, error: str | None, *, place: str, model: str, created_s: int
) -> dict[str, Any]:
    """The line of the output file for a request: the answer, or the error of a row that has none.

    Args:
        custom_id: that of the request; None for a line that is no request.
        answer: None if there is an error.
        error: the reason.
        place: of the request among all requests of the model: its ids are made of it.
        model: `NAME/VERSION`.
        created_s: Unix time.
    """
    number = hashlib.blake2b(place.encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()
    line = {"id": f"batch_req_{number}", ID: custom_id}
    if answer is None:
        failure = {"code": "invalid_request", "message": error or "the model generates no answer"}
        body: dict[str, Any] = {
            "error": {"message": failure["message"], "type": "invalid_request_error", "param": None, "code": None}
        }
        return {**line, "response": {"status_code": 400, "request_id": number, "body": body}, "error": failure}
    body = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": created_s,
        "model": model,
        "choices": [{"index": 0, "message": answer.message, "logprobs": None, "finish_reason": answer.finish_reason}],
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.tokens,
            "total_tokens": answer.prompt_tokens + answer.tokens,
        },
    }
    return {**line, "response": {"status_code": 200, "request_id": number, "body": body}, "error": None}
