"""Conversations in the forms of other tools."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from training.data.arrow_columns import from_arrow, from_json
from training.data.conversation_forms import as_messages
from training.tokenization.chat_templates import find_problem

ASKED, ANSWERED = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CALL = {"name": "f", "arguments": {"a": 1}}
CALLED = {"type": "function", "function": CALL}
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (SHAREGPT, [ASKED, ANSWERED]),
        (SHAREGPT[1], [ANSWERED]),
        ([{**SHAREGPT[1], "weight": 0}], [{**ANSWERED, "weight": 0}]),
        (
            [SHAREGPT[0], {"from": "function_call", "value": json.dumps(CALL)}, {"from": "observation", "value": "5"}],
            [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALLED]}, {"role": "tool", "content": "5"}],
        ),
        (
            [{"from": "function_call", "value": json.dumps([CALL, {**CALL, "arguments": '{"a": 1}'}])}],
            [{"role": "assistant", "content": "", "tool_calls": [CALLED, CALLED]}],
        ),
        ({"messages": [ASKED], "tools": [], "parallel_tool_calls": True}, [ASKED]),
        ([{"role": "developer", "content": "Be brief."}], [{"role": "system", "content": "Be brief."}]),
    ],
)
def test_a_form_of_another_tool_becomes_messages(value: Any, expected: Any) -> None:
    assert as_messages(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        "text",
        [ASKED, ANSWERED],
        [{"from": "Berlin", "value": "5"}],
        {"from": "Berlin", "value": "5"},
        {"messages": [ASKED], "tools": [{"type": "function"}]},
        {"messages": [ASKED], "answer": "x"},
    ],
)
def test_any_other_value_stays_as_it_is(value: Any) -> None:
    assert as_messages(value) == value


@pytest.mark.parametrize("value", ["f(5)", '{"arguments": {}}', "[5]"])
def test_a_call_of_sharegpt_without_a_name_is_a_problem_of_the_row(value: str) -> None:
    talk = as_messages([SHAREGPT[0], {"from": "function_call", "value": value}])
    assert "without the name of a function" in str(find_problem(talk, answered=True))


def test_json_and_arrow_are_stored_alike() -> None:
    stored = '[{"role":"user","content":"Hi"},{"role":"assistant","content":"Hello"}]'
    in_json = '[{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]'
    assert from_json(pa.array([in_json]), "messages", "value")[0].to_pylist() == [stored]
    assert from_arrow(pa.array([SHAREGPT]), "messages", "value", ())[0].to_pylist() == [stored]
