"""Conversations in the forms of other tools, as lists of messages with role and content.

    [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]     ShareGPT
    {"from": "gpt", "value": "Hello"}                                         one answer of its preference files
    {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {}}"}     a call of a tool, or a list of calls
    {"from": "observation", "value": "5"}                                     the result of a call
    {"messages": [{"role": "user", "content": "Hi"}], "tools": […]}           `input` of OpenAI's preference files
    [{"role": "developer", "content": "Be brief."}]                           OpenAI: a newer name of system
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]     arguments as JSON texts
    [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]                  OpenAI: an older form

Sources: https://github.com/lm-sys/FastChat, https://platform.openai.com/docs/guides/direct-preference-optimization.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_ROLES |= {"function_call": "assistant", "observation": "tool", "tool": "tool"}
_NEWER_ROLES = {"developer": "system", "function": "tool"}


def as_messages(value: Any, *, from_arrow: bool = False) -> Any:
    """Returns the conversation as a list of messages, one with tools as `{"messages": …, "tools": …}`; any other value
    as it is. Arrow gives all objects of a column the same fields, so with `from_arrow` arguments of calls that are null
    are left out."""
    if isinstance(value, Mapping) and isinstance(value.get("messages"), list):
        given = {name for name, one in value.items() if one not in (None, [])}
        if given <= {"messages", "tools", "parallel_tool_calls"}:
            messages = as_messages(value["messages"], from_arrow=from_arrow)
            return {"messages": messages, "tools": as_tools(value["tools"])} if "tools" in given else messages
    if isinstance(value, Mapping) and value.keys() == {"from", "value"} and _text(value["from"]) in _ROLES:
        value = [value]
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        return value
    return [_as_message(message, from_arrow) for message in value]


def as_tools(value: Any) -> Any:
    """Returns the declarations of tools as templates read them, `{"type": "function", "function": {"name": …}}` each,
    also from their JSON as a text; any other value as it is."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "null")
        except (ValueError, RecursionError):
            return value
    if not isinstance(value, list):
        return value
    value = without_nulls(value)
    is_bare = [isinstance(tool, Mapping) and "name" in tool and "function" not in tool for tool in value]
    return [{"type": "function", "function": tool} if bare else tool for tool, bare in zip(value, is_bare, strict=True)]


def _as_message(message: Mapping[str, Any], from_arrow: bool) -> Mapping[str, Any]:
    given = {name: one for name, one in message.items() if one is not None}
    if given.keys() >= {"from", "value"} and not given.keys() & {"role", "content"}:
        role = _ROLES.get(_text(given["from"]))
        if role is not None:
            others = {name: one for name, one in given.items() if name not in ("from", "value")}
            message = {"role": role, "content": given["value"], **others}
            if _text(given["from"]) == "function_call":
                message = {**message, "content": "", "tool_calls": _calls_in(given["value"])}
    changed = dict(message)
    if (role := _NEWER_ROLES.get(_text(message.get("role")))) is not None:
        changed["role"] = role
    if isinstance(call := changed.get("function_call"), Mapping):
        del changed["function_call"]
        changed["tool_calls"] = [{"type": "function", "function": call}]
    if not changed.get("tool_calls"):  # templates take an empty list for a call
        changed.pop("tool_calls", None)
    if calls := changed.get("tool_calls"):
        changed["content"] = message.get("content") or ""
        if isinstance(calls, list):
            changed["tool_calls"] = [_as_call(call, from_arrow) for call in calls]
    return changed


def _calls_in(value: Any) -> list[Any]:
    """The calls in the JSON of a call, or of a list of calls; another value is one that lacks its name."""
    try:
        found = json.loads(_text(value))
    except (TypeError, ValueError, RecursionError):
        return [value]
    return [{"type": "function", "function": one} for one in (found if isinstance(found, list) else [found])]


def _as_call(call: Any, from_arrow: bool) -> Any:
    """A call with its arguments as an object if they are the JSON of one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = _text(function.get("arguments"))
    if arguments is None:
        arguments = {}
    if from_arrow:
        arguments = without_nulls(arguments)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}", object_pairs_hook=_unique)
        except (ValueError, RecursionError):
            return call
    return {**call, "function": {**function, "arguments": arguments}}


def without_nulls(value: Any) -> Any:
    """Returns the value without fields of objects that are null."""
    if isinstance(value, Mapping):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these names. Raises ValueError if one of them is repeated."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is repeated")
    return found


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
