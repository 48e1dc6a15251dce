"""Tool calls in the text of an answer: a generated text becomes a message in the form of OpenAI's API.

    <tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>                Hermes, Qwen
    <tool_call><function=weather><parameter=city>Köln</parameter></function></tool_call>     Qwen 3.5, Qwen3-Coder
    [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln"}, "id": "a1b2c3d4e"}]      Mistral
    [TOOL_CALLS]weather[ARGS]{"city": "Köln"}                                                Mistral, newer models
    {"name": "weather", "parameters": {"city": "Köln"}}                                      Llama 3

become {"role": "assistant", "content": None, "tool_calls": [{"id": "a1b2c3d4e", "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}]}

Batch predictions, evaluations, conversations and servers all read answers here. MARKS that are special tokens of a
tokenizer stay in decoded answers. Other servers leave them out, so calls are also read without marks, if nothing else
is in the answer. This module imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Tools = Sequence[Mapping[str, Any]]
"""Declarations of tools: `{"type": "function", "function": {"name": …, "parameters": …}}` each."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None
    """As the model wrote it; most models write none."""


@dataclass(frozen=True)
class ParsedAnswer:
    """The parts of an answer."""

    content: str
    """The text beside the calls; calls that cannot be read are part of it."""
    calls: Sequence[ToolCall] = field(default_factory=list)
    broken_calls: Sequence[str] = field(default_factory=list)
    """The texts of calls that cannot be read, such as those whose arguments are no JSON object."""
    reasoning: str = ""
    """The text between `<think>` and `</think>` at the start of the answer."""


def parse_message(text: str, tools: Tools = ()) -> dict[str, Any]:
    """Returns a generated answer as the assistant's message in the form of OpenAI's API: role, content, and tool_calls
    if there are any, their arguments as JSON texts. A text between `<think>` and `</think>` becomes reasoning_content.

    Without declared tools, nothing is read as a call. Ids that the model does not write are derived from the text, nine
    letters and digits each, as Mistral's templates require them.
    """
    answer = parse_answer(text, tools)
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {
                "id": call.id or hashlib.sha256(f"{place} {text}".encode(errors="replace")).hexdigest()[:9],
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for place, call in enumerate(answer.calls)
        ]
    return message


def parse_answer(text: str, tools: Tools = ()) -> ParsedAnswer:
    """Returns the calls, the content and the reasoning of a generated answer."""
    reasoning, rest = _split_reasoning(text)
    if not tools:
        return ParsedAnswer(rest, reasoning=reasoning)
    found, is_bare = _Found(tools), _may_be_bare(rest, tools)
    if not (is_bare and found.read_bare(rest)):
        start, _ = _find_opening(rest, 0)
        found.add_text(rest[:start].rstrip())
        found.read_marked(rest, start)
        if is_bare and start == len(rest):
            found.broken.append(rest)
    content = rest if not found.calls else "\n".join(found.texts)
    return ParsedAnswer(content, found.calls, found.broken, reasoning)


def settled_content(text: str, tools: Tools = ()) -> str:
    """Returns the part of an unfinished answer that belongs to its content however the answer goes on: a server may
    send it. It ends before anything that can be, or become, the beginning of a call."""
    if "<think>".startswith(text) or (text.startswith("<think>") and "</think>" not in text):
        return ""
    _, rest = _split_reasoning(text)
    if not tools:
        return rest
    if _may_be_bare(rest, tools):
        return ""
    start, _ = _find_opening(rest, 0)
    for opening in _READERS:
        for length in range(min(len(opening) - 1, len(rest)), 0, -1):
            if rest.endswith(opening[:length]):
                start = min(start, len(rest) - length)
    return rest[:start].rstrip()


def _split_reasoning(text: str) -> tuple[str, str]:
    """The reasoning, and the text after it. An answer that ends in its reasoning has no other text."""
    if not text.startswith("<think>"):
        return "", text
    reasoning, _, rest = text.removeprefix("<think>").partition("</think>")
    return reasoning.strip(), rest.lstrip("\n")


def _find_opening(text: str, start: int) -> tuple[int, str]:
    """The place of the first mark of a call, and the mark; the end of the text if there is none."""
    places = [(place, opening) for opening in _READERS if (place := text.find(opening, start)) >= 0]
    return min(places, default=(len(text), ""))


@dataclass
class _Found:
    """The calls and texts of an answer, in the order of reading."""

    tools: Tools
    calls: list[ToolCall] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def add_text(self, text: str) -> None:
        if text:
            self.texts.append(text)

    def read_marked(self, text: str, start: int) -> None:
        """Reads the rest of a text from the first mark on."""
        while start < len(text):
            opening = next(one for one in _READERS if text.startswith(one, start))
            closing, read = _READERS[opening]
            after = start + len(opening)
            try:
                calls, end = read(text, after, self.tools)
                self.calls += calls
            except _Unreadable:
                end = _find_opening(text, after)[0]
                if closing and (closed := text.find(closing, after, end)) >= 0:
                    end = closed
                self.broken.append(text[start:end])
                self.add_text(text[start : end + len(closing) if text.startswith(closing, end) else end].strip())
            end = _skip(text, end)
            if closing and text.startswith(closing, end):
                end += len(closing)
            start, _ = _find_opening(text, end)
            self.add_text(text[end:start].strip())

    def read_bare(self, text: str) -> bool:
        """Reads an answer without marks. Returns whether it consists of calls alone."""
        try:
            calls, end = _read_values(text, 0, self.tools)
        except _Unreadable:
            return False
        if text[end:].strip():
            return False
        self.calls += calls
        return True


class _Unreadable(Exception):
    """A text that is no call."""


def _read_tagged(text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    """A call as JSON, or as tags."""
    place = _skip(text, start)
    if function := _FUNCTION.match(text, place):
        types = _types_of(function["name"].strip(), tools)
        arguments = {}
        for parameter in _PARAMETER.finditer(function["parameters"]):
            name, value = parameter["name"].strip(), parameter["value"]
            arguments[name] = value if "string" in types.get(name, ()) else _loads_or_text(value)
        return [ToolCall(function["name"].strip(), arguments)], function.end()
    value, end = _decode(text, place)
    return [_as_call(one) for one in (value if isinstance(value, list) else [value])], end


def _read_values(text: str, start: int, tools: Tools) -> tuple[list[ToolCall], int]:
    """One call after another: a JSON object, a list of them, or a name with its arguments."""
    calls: list[ToolCall] = []
    end = start
    while (place := _skip(text, end)) < len(text):
        if text[place] in "{[" and not text.startswith(tuple(_READERS), place):
            value, end = _decode(text, place)
            calls += [_as_call(one) for one in (value if isinstance(value, list) else [value])]
        elif named := _NAMED.match(text, place):
            arguments, end = _decode(text, named.end())
            calls.append(_as_call({"name": named["name"].strip(), "arguments": arguments}))
        else:
            break
    if not calls:
        raise _Unreadable
    return calls, end


_READERS: Mapping[str, tuple[str, Callable[[str, int, Tools], tuple[list[ToolCall], int]]]] = {
    "<tool_call>": ("</tool_call>", _read_tagged),
    "[TOOL_CALLS]": ("", _read_values),
    "<|python_tag|>": ("", _read_values),
}
"""The marks before calls: the mark after them, if any, and the function that reads the text between the two."""

MARKS = frozenset(["<think>", "</think>", "</tool_call>", "[CALL_ID]", "[ARGS]", *_READERS])
"""The texts between the parts of an answer that are special tokens of some tokenizers."""

_FUNCTION = re.compile(r"<function=(?P<name>[^>\n]+)>(?P<parameters>.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>", re.DOTALL)
_NAMED = re.compile(r"(?P<name>[\w.:-]+)\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{)")
_BARE = tuple(f'{list_}{{"{name}"' for list_ in ("", "[") for name in ("name", "type", "function", "id"))


def _may_be_bare(text: str, tools: Tools) -> bool:
    """Whether an answer can consist of calls without marks, from how it begins."""
    compact = "".join(text[:200].split())
    if any(compact.startswith(begin) or begin.startswith(compact) for begin in _BARE):
        return bool(compact)
    begins = [f"{_function(tool).get('name')}{then}" for tool in tools for then in ("{", "[ARGS]", "[CALL_ID]")]
    return any(compact.startswith(begin) or begin.startswith(compact) for begin in begins)


def _as_call(value: Any) -> ToolCall:
    """A call from its JSON value. Raises _Unreadable for any other value."""
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = {**value, **value["function"]}
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or not value["name"]:
        raise _Unreadable
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments, _ = _decode(arguments or "{}", 0)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise _Unreadable
    written = value.get("id")
    return ToolCall(value["name"], arguments, written if isinstance(written, str) and written else None)


def _types_of(name: str, tools: Tools) -> dict[str, Sequence[str]]:
    """The types of a tool's parameters, as far as it declares them."""
    functions = (function for tool in tools if (function := _function(tool)).get("name") == name)
    parameters = next(functions, {}).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    found: dict[str, Sequence[str]] = {}
    for parameter, schema in properties.items() if isinstance(properties, Mapping) else ():
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        found[parameter] = [kind] if isinstance(kind, str) else kind if isinstance(kind, list) else []
    return found


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else {}


def _loads_or_text(text: str) -> Any:
    try:
        return _decode(text.strip(), 0)[0]
    except _Unreadable:
        return text


def _decode(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at this place, and the place after it. Raises _Unreadable if there is none."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise _Unreadable from error


def _skip(text: str, start: int) -> int:
    """The next place that has neither white space nor one of the characters that models write between calls."""
    while start < len(text) and (text[start].isspace() or text[start] in ",;"):
        start += 1
    return start


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is repeated")
    return found


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse)
