"""Generated texts as messages with tool calls."""

from __future__ import annotations

import json
import random
import subprocess
from itertools import pairwise
from typing import Any

import pytest

from tests.fork_server import NEW_PYTHON
from training.tokenization.tool_calls import ParsedAnswer, ToolCall, parse_answer, parse_message, settled_content

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}},
]
WEATHER, TIME = ToolCall("weather", {"city": "Köln"}), ToolCall("time", {})
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (HERMES, [WEATHER]),
        (f'{HERMES}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>', [WEATHER, TIME]),
        (HERMES.removesuffix("</tool_call>"), [WEATHER]),  # the model ended the answer
        (HERMES.replace('{"city": "Köln"}', json.dumps('{"city": "Köln"}')), [WEATHER]),
        ("<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n</function>\n</tool_call>", [WEATHER]),
        ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln"}}]', [WEATHER]),
        ('[TOOL_CALLS]weather[ARGS]{"city": "Köln"}[TOOL_CALLS]time[ARGS]{}', [WEATHER, TIME]),
        ('{"name": "weather", "parameters": {"city": "Köln"}}', [WEATHER]),
        ('{"name": "weather", "parameters": {"city": "Köln"}}; {"name": "time", "parameters": {}}', [WEATHER, TIME]),
        ('<|python_tag|>{"type": "function", "function": "x", "name": "time", "parameters": {}}', [TIME]),
        # Marks that are special tokens are missing in decoded texts.
        ('[{"name": "weather", "arguments": {"city": "Köln"}}, {"name": "time", "arguments": {}}]', [WEATHER, TIME]),
        ('weather{"city": "Köln"}', [WEATHER]),
    ],
)
def test_the_form_of_each_family_is_read(text: str, calls: list[ToolCall]) -> None:
    assert parse_answer(text, TOOLS) == ParsedAnswer("", calls)


def test_a_message_has_the_form_of_the_api() -> None:
    text = f"<think>\nA city.\n</think>\n\nI look it up.\n{HERMES}"
    message = parse_message(text, TOOLS)
    (call,) = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": "I look it up.", "reasoning_content": "A city."}
    assert call["type"] == "function" and call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Köln"}
    assert len(call["id"]) == 9 and call["id"].isalnum()
    assert parse_message(HERMES, TOOLS)["content"] is None
    assert parse_message("It rains.", TOOLS) == {"role": "assistant", "content": "It rains."}


def test_an_id_that_the_model_writes_is_kept() -> None:
    text = '[TOOL_CALLS][{"name": "time", "arguments": {}, "id": "a1b2c3d4e"}]'
    assert parse_message(text, TOOLS)["tool_calls"][0]["id"] == "a1b2c3d4e"


def test_parameters_in_tags_have_the_types_that_the_tool_declares() -> None:
    text = "<tool_call><function=weather><parameter=city>\n12\n</parameter><parameter=days>12</parameter></function>"
    assert parse_answer(text, TOOLS).calls == [ToolCall("weather", {"city": "12", "days": 12})]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Kö',
        '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": "A", "city": "B"}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>',
        '{"name": "weather", "parameters": {"city": ',
        "<tool_call>" + "[" * 100_000,
    ],
)
def test_a_call_that_cannot_be_read_stays_text(text: str) -> None:
    answer = parse_answer(text, TOOLS)
    assert answer.content == text
    assert not answer.calls and len(answer.broken_calls) == 1


def test_calls_beside_a_broken_one_are_read() -> None:
    answer = parse_answer(f"{HERMES}\n<tool_call>oh</tool_call>\n{HERMES}", TOOLS)
    assert answer == ParsedAnswer("<tool_call>oh</tool_call>", [WEATHER, WEATHER], ["<tool_call>oh"])


@pytest.mark.parametrize("text", ['{"city": "Köln"}', "[1, 2]", "Weather is nice.", "weather is nice.", '{"name": 1}'])
def test_other_texts_are_no_calls(text: str) -> None:
    assert parse_message(text, TOOLS) == {"role": "assistant", "content": text}


def test_nothing_is_a_call_without_tools() -> None:
    assert parse_message(HERMES) == {"role": "assistant", "content": HERMES}
    assert settled_content(HERMES) == HERMES


def test_a_closing_mark_in_an_argument_is_text() -> None:
    text = HERMES.replace("Köln", "</tool_call><tool_call>")
    assert parse_answer(text, TOOLS).calls == [ToolCall("weather", {"city": "</tool_call><tool_call>"})]


@pytest.mark.parametrize(
    ("text", "settled"),
    [
        ("I look it up. <tool", "I look it up."),
        (f"I look it up.\n{HERMES}", "I look it up."),
        ("a < b", "a < b"),
        ("a <", "a"),
        ('{"name"', ""),
        ('{"city"', '{"city"'),
        ("weath", ""),
        ("weather is", "weather is"),
        ("<think>so", ""),
        ("<think>so</think>\n\nYes", "Yes"),
    ],
)
def test_a_stream_may_send_what_cannot_become_a_call(text: str, settled: str) -> None:
    assert settled_content(text, TOOLS) == settled


def test_text_that_was_sent_is_the_beginning_of_the_content_however_the_answer_goes_on() -> None:
    pieces: list[Any] = [
        HERMES,
        "<think>",
        "</think>",
        "\n",
        " ",
        "a <b",
        "[TOOL_CALLS]",
        "weather",
        "[ARGS]",
        "{",
        "}",
    ]
    pieces += ['{"name": "time", "parameters": {}}', "[", "]", "<|python_tag|>", "<tool_call>", "</tool_call>"]
    pieces += ["Hi"]
    draw = random.Random(0)
    for _ in range(500):
        text = "".join(draw.choices(pieces, k=draw.randint(1, 6)))
        content = parse_answer(text, TOOLS).content
        sent = [settled_content(text[:end], TOOLS) for end in range(len(text) + 1)]
        assert all(content.startswith(part) for part in sent), text
        assert all(later.startswith(part) for part, later in pairwise(sent)), text


def test_the_parser_needs_no_torch() -> None:
    code = (
        "import sys, training.tokenization.tool_calls; sys.exit(not sys.modules.keys().isdisjoint(['torch', 'jinja2']))"
    )
    subprocess.run([NEW_PYTHON, "-c", code], check=True, timeout=60)
