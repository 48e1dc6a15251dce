"""Conversations in the forms of other tools, as lists of messages with role and content.

    [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]     ShareGPT
    {"messages": [{"role": "user", "content": "Hi"}]}                         `input` of OpenAI's preference files
    [{"role": "developer", "content": "Be brief."}]                           OpenAI: a newer name of system

Sources: https://github.com/lm-sys/FastChat, https://platform.openai.com/docs/guides/direct-preference-optimization.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def as_messages(value: Any) -> Any:
    """Returns the conversation as a list of messages; any other value as it is."""
    if isinstance(value, Mapping) and isinstance(value.get("messages"), list):
        others = {name for name, one in value.items() if one not in (None, [])} - {"messages"}
        if others <= {"parallel_tool_calls"}:
            value = value["messages"]
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        return value
    return [_as_message(message) for message in value]


def _as_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    given = {name: one for name, one in message.items() if one is not None}
    if given.keys() >= {"from", "value"} and not given.keys() & {"role", "content"}:
        role = _ROLES.get(_text(given["from"]))
        if role is not None:
            others = {name: one for name, one in given.items() if name not in ("from", "value")}
            return {"role": role, "content": given["value"], **others}
    if _text(message.get("role")) == "developer":
        return {**message, "role": "system"}
    return message


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
