"""Metrics of tool calls: what counts as the same call, as a valid one, and as a right decision."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from training.evaluation import metrics
from training.evaluation.baseline import choose_rival, compute_values
from training.evaluation.constant_predictions import Constant
from training.evaluation.predictions import Likelihoods
from training.evaluation.tool_use import (
    Conversations,
    baseline_of_calls,
    find_unreadable_call,
    is_valid,
    read_turns,
    with_turns,
    write_turns,
)
from training.problems import UserError
from training.programs.compare import CompareSettings, compare_models
from training.programs.score import compute_scores
from training.recipe.tables.metrics import TOOL_METRICS
from training.tokenization.chat_templates import ChatTemplate
from training.tokenization.tool_calls import ToolCall

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time"}},
]


def spelt(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def rows(*turns: tuple[list[tuple[str, dict[str, Any]]], str]) -> Conversations:
    """A row for each turn, which is the expected calls and the generated text."""
    stored = []
    for expected, text in turns:
        calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in expected]
        stored.append(read_turns(write_turns(TOOLS, [(calls, text)])))
    ones = np.ones(len(turns), np.int64)
    return with_turns(Likelihoods(ones.astype(np.float64), ones, ones), stored)


def values(*turns: tuple[list[tuple[str, dict[str, Any]]], str]) -> list[float]:
    """tool_call_accuracy, tool_name_accuracy, tool_decision_accuracy, valid_tool_calls"""
    found = metrics.compute(TOOL_METRICS, rows(*turns))
    return [found[name] for name in TOOL_METRICS]


KÖLN = ("weather", {"city": "Köln"})
NAN = float("nan")


@pytest.mark.parametrize(
    ("expected", "text", "figures"),
    [
        ([KÖLN], spelt("weather", city="Köln"), [1, 1, 1, 1]),
        ([KÖLN], spelt("weather", city="Bonn"), [0, 1, 1, 1]),
        ([KÖLN], spelt("weather", city=4711), [0, 1, 1, 0]),
        ([KÖLN], spelt("weather", city="Köln", unit="C"), [0, 1, 1, 0]),
        ([KÖLN], spelt("time"), [0, 0, 1, 1]),
        ([KÖLN], spelt("date"), [0, 0, 1, 0]),
        ([KÖLN], "It rains.", [0, 0, 0, NAN]),
        ([KÖLN], '<tool_call>{"name": "weather", "argu', [0, 0, 1, 0]),
        ([KÖLN], spelt("weather", city="Köln") * 2, [0, 0, 1, 1]),
        ([KÖLN], spelt("weather", city="Köln") + "<tool_call>{", [0, 0, 1, 0.5]),
        ([KÖLN, ("time", {})], spelt("time") + spelt("weather", city="Köln"), [1, 1, 1, 1]),
        ([], "Hello.", [NAN, NAN, 1, NAN]),
        ([], spelt("time"), [NAN, NAN, 0, 1]),
    ],
)
def test_the_figures_of_an_answer(expected: list[tuple[str, dict[str, Any]]], text: str, figures: list[float]) -> None:
    np.testing.assert_array_equal(values((expected, text)), figures)


@pytest.mark.parametrize(
    ("expected", "made", "same"),
    [
        ({"a": 1, "b": [1, {"c": None}]}, {"b": [1.0, {"c": None}], "a": 1.0}, True),
        ({"a": 1}, {"a": True}, False),
        ({"a": 0}, {"a": False}, False),
        ({"a": "1"}, {"a": 1}, False),
        ({"a": [1, 2]}, {"a": [2, 1]}, False),
        ({}, {"a": None}, False),
    ],
)
def test_arguments_are_compared_as_json_values(expected: dict[str, Any], made: dict[str, Any], same: bool) -> None:
    assert values(([("time", expected)], spelt("time", **made)))[0] == same


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "dict"},  # no JSON Schema
        {"properties": {"a": {"$ref": "http://127.0.0.1:9/nowhere.json"}}},
        {"properties": {"a": {"pattern": "("}}},
        {"$ref": "#"},
        None,
    ],
)
def test_parameters_that_are_no_schema_fit_any_arguments_and_nothing_is_fetched(parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert is_valid(ToolCall("f", {"a": "x"}), tools)
    assert not is_valid(ToolCall("g", {}), tools)


def test_figures_are_of_all_turns_of_rows_with_intervals_and_rows_without_tools_do_not_count() -> None:
    right, wrong = ([KÖLN], spelt("weather", city="Köln")), ([KÖLN], "No.")
    found = rows(*[right] * 30, *[wrong] * 10)
    empty = with_turns(Likelihoods(np.ones(9), np.ones(9, np.int64), np.ones(9, np.int64)), [()] * 9)
    (score,) = compute_scores(["tool_call_accuracy"], found.concatenate(empty)).values()
    assert score["value"] == 0.75
    assert score["low"] is not None and score["high"] is not None
    assert 0.5 < score["low"] < 0.75 < score["high"] < 1


def test_the_baseline_makes_no_call_or_a_frequent_one_whichever_is_better_by_the_metric() -> None:
    talk = ([], "")
    train = rows(*[talk] * 6, *[([KÖLN], "")] * 3, ([("time", {})], ""))
    of_tokens = Constant("of tokens", lambda given, split: given)
    baseline = baseline_of_calls(of_tokens, [*train.turns])
    test = rows(*[talk] * 2, *[([KÖLN], spelt("weather", city="Köln"))] * 2)
    chosen = {name: choose_rival(baseline, name) for name in (*TOOL_METRICS, "perplexity")}
    assert chosen["tool_decision_accuracy"].name == chosen["perplexity"].name == "of tokens"
    assert chosen["tool_call_accuracy"].name == """'weather({"city": "Köln"})'"""
    found = {
        name: compute_values([name], constant.predict(test, "test"))[name]  # type: ignore[arg-type]
        for name, constant in chosen.items()
    }
    assert found["tool_decision_accuracy"] == 0.5 and found["tool_call_accuracy"] == 1


def test_without_tool_calls_the_baseline_is_that_of_tokens_and_can_be_compared() -> None:
    test = rows(([], ""), ([], ""))
    baseline = baseline_of_calls(Constant("of tokens", lambda given, split: given), [])
    constant = choose_rival(baseline, "perplexity")
    assert constant.name == "of tokens"
    assert len(test.worst_cases(constant.predict(test, "test"))[0]) > 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("form", "readable"),
    [
        ('<tool_call>{"name": "NAME", "arguments": ARGUMENTS}</tool_call>', True),
        ('{"name": "NAME", "parameters": ARGUMENTS}', True),
        ("[NAME ARGUMENTS]", False),
        ("", None),
    ],
)
def test_a_template_whose_calls_are_not_read_back_is_found(form: str, readable: bool | None) -> None:
    call = form.replace("NAME", "{{ call.function.name }}").replace(
        "ARGUMENTS", "{{ call.function.arguments | tojson }}"
    )
    text = "{{ tools }}{% for m in messages %}{{ m.role }} {{ m.content }}{% for call in m.tool_calls or [] %}" + call
    text += "{% endfor %}<end>{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
    written = find_unreadable_call(ChatTemplate(text, {}))
    assert (written is None) is (readable is not False)


def test_a_model_with_better_calls_passes_the_test_against_a_worse_one_of_other_tokens_and_not_on_few_rows() -> None:
    settings = CompareSettings(
        **{"task": "sft", "options": {}, "split": "test", "metrics": ["tool_call_accuracy"], "margin": 0.0},
        **{"figure": "tool_call_accuracy", "less_is_better": [], "confidence": 0.95, "champion": "a/1"},
    )
    right, wrong = ([KÖLN], spelt("weather", city="Köln")), ([KÖLN], "No.")
    for count, better in ((40, True), (3, False)):
        new, old = rows(*[right] * count), rows(*[wrong] * count)
        other = Likelihoods(old.loss, old.targets + 1, old.hits)
        found = compare_models(new, with_turns(other, [*old.turns]), settings)
        assert (found.value, found.champion_value) == (1, 0)
        assert found.better is better


LAUGHS = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)} | {"a40": {}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"city": {"pattern": "^(a|a)*$"}}},
        {"properties": {"city": {"patternProperties": {"^(a|a)*$": {}}}}},
        {"$defs": LAUGHS, "$ref": "#/$defs/a0"},
        {"properties": {"cities": {"uniqueItems": True}}},
    ],
    ids=["pattern", "names", "references", "items"],
)
def test_a_schema_that_would_take_years_is_one_message(parameters: dict[str, Any]) -> None:
    text = "a" * 40 + "!"
    city: Any = {text: 1} if "patternProperties" in str(parameters) else text
    call = ToolCall("weather", {"city": city, "cities": [{"name": number} for number in range(20_000)]})
    with pytest.raises(UserError, match=r"data\.tools: the JSON Schema of the tool 'weather' takes more than 1 s"):
        is_valid(call, [{"type": "function", "function": {"name": "weather", "parameters": parameters}}])
