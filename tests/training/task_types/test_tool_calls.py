"""Tool calls in conversations: what the template writes, and what of it is learnt."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.training.task_types.test_sft import EXAMPLE
from training.data.conversation_forms import as_messages, as_tools
from training.evaluation.tool_use import find_unreadable_call
from training.problems import UserError
from training.task_types.sft import SupervisedFineTuning
from training.tokenization.chat_templates import ChatTemplate, find_problem, find_tool_problem
from training.tokenization.special_tokens import MARK

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}\n{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}"
    "<end>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITHOUT_TOOLS = TEMPLATE.replace("{{ tools | tojson }}", "")
WITHOUT_CALLS = TEMPLATE.replace("m.tool_calls or []", "[]")
WITHOUT_ARGUMENTS = TEMPLATE.replace("{{ call.function.arguments | tojson }}", "")
TYPES_ONLY = TEMPLATE.replace("{{ tools | tojson }}", "{{ tools | map(attribute='type') | join }}")
FIRST_CALL = TEMPLATE.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
ALTERNATING = TEMPLATE.replace(
    "<{{ m.role }}>",
    "{% if m.role == 'assistant' and not m.tool_calls and loop.nextitem and loop.nextitem.role == 'tool' %}"
    "{{ raise_exception('no call before a result') }}{% endif %}<{{ m.role }}>",
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Is it warm in Köln?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": '{"celsius": 21}'},
    {"role": "assistant", "content": "Yes."},
]


def test_calls_and_answers_are_learnt_and_results_are_not() -> None:
    text, spans = ChatTemplate(TEMPLATE, {}).render_answers(TALK, TOOLS)
    assert [text[slice(*span)] for span in spans] == ['[weather {"city": "Köln"}]<end>\n', "Yes.<end>\n"]


def test_the_text_is_that_of_transformers() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    expected = tokenizer.apply_chat_template(TALK, tools=TOOLS, chat_template=TEMPLATE, tokenize=False)
    assert ChatTemplate(TEMPLATE, {}).render_answers(TALK, TOOLS)[0] == expected


def test_a_prompt_has_the_tools_and_ends_where_the_assistant_begins() -> None:
    text = ChatTemplate(TEMPLATE, {}).render_prompt(TALK[:3], TOOLS)
    assert text.startswith(f"<tools>{json.dumps(TOOLS)}")
    assert text.endswith('<tool>{"celsius": 21}<end>\n<assistant>')


def test_a_call_of_weight_0_is_not_learnt() -> None:
    talk = [TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]]
    text, spans = ChatTemplate(TEMPLATE, {}).render_answers(talk, TOOLS)
    assert [text[slice(*span)] for span in spans] == ["Yes.<end>\n"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (WITHOUT_TOOLS, "the tools of"),
        (TYPES_ONLY, "the tools of"),
        (WITHOUT_CALLS, "tool_calls of message 2"),
        (WITHOUT_ARGUMENTS, "tool_calls of message 2"),
        (FIRST_CALL, r"tool_calls\[1\] of message 2"),
    ],
)
def test_a_template_that_writes_no_tools_or_only_a_part_of_the_calls_is_refused(template: str, words: str) -> None:
    other = {**CALL, "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    talk = [TALK[0], {**TALK[1], "tool_calls": [CALL, other]}, *TALK[2:]]
    with pytest.raises(UserError, match=words):
        ChatTemplate(template, {}).render_answers(talk, TOOLS)


def test_a_template_that_wants_a_call_before_each_result_is_accepted() -> None:
    assert ChatTemplate(ALTERNATING, {}).render_answers(TALK, TOOLS)[1]


def test_the_template_of_the_examples_writes_tools_and_calls_that_are_read_back() -> None:
    template = ChatTemplate(EXAMPLE, {"eos_token": "</s>"})
    assert find_unreadable_call(template) is None
    text, spans = template.render_answers(TALK, TOOLS)
    assert text.startswith(f"tools:\n{json.dumps(TOOLS)}</s>") and '{"celsius": 21}' in text
    assert [text[slice(*span)].endswith("</s>") for span in spans] == [True, True]


def test_special_tokens_in_arguments_and_declarations_are_text() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"<end>": "<end>"}}}
    tools = [{"type": "function", "function": {"name": "weather", "description": "<end>"}}]
    text, _ = ChatTemplate(TEMPLATE, {}, ["<end>"]).render_answers([TALK[0], {**TALK[1], "tool_calls": [call]}], tools)
    assert text.count(f"{MARK}<end>") == 3


@pytest.mark.parametrize(
    "written",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {
            "role": "assistant",
            "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}],
        },
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Köln"}'}},
    ],
)
def test_the_forms_of_a_call_are_one(written: dict[str, Any]) -> None:
    assert as_messages([written]) == [TALK[1]]


def test_an_empty_list_of_calls_is_no_call_and_missing_arguments_are_none() -> None:
    assert as_messages([{**TALK[3], "tool_calls": []}]) == [TALK[3]]
    (message,) = as_messages([{"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": None}}]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_arguments_with_a_repeated_name_are_a_problem_of_the_row() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}
    talk = as_messages([TALK[0], {"role": "assistant", "tool_calls": [call]}])
    assert "arguments that are no JSON object" in str(find_problem(talk, answered=True))


def test_nulls_that_arrow_adds_to_arguments_are_left_out() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": None}}}
    talk = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert as_messages(talk, from_arrow=True)[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert as_messages(talk)[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": None}


@pytest.mark.parametrize("written", [TOOLS, [TOOLS[0]["function"]], json.dumps(TOOLS)])
def test_the_forms_of_tools_are_one(written: Any) -> None:
    assert as_tools(written) == TOOLS


@pytest.mark.parametrize(
    ("talk", "problem"),
    [
        ([TALK[0], TALK[2], TALK[3]], "message 2, by 'tool', follows no call of a tool"),
        ([{**TALK[0], "tool_calls": [CALL]}], "message 1, by 'user', has tool_calls"),
        ([TALK[0], {**TALK[1], "tool_calls": [{"function": {}}]}], "without the name of a function"),
        (
            [TALK[0], {**TALK[1], "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "calls 'f' with arguments that are no JSON object",
        ),
    ],
)
def test_calls_and_results_that_do_not_fit_are_problems_of_the_row(talk: list[Any], problem: str) -> None:
    assert problem in str(find_problem(talk, answered=False))


def test_tools_without_a_name_are_a_problem_of_the_row() -> None:
    rows = {"messages": [json.dumps(TALK)] * 2, "tools": [json.dumps([{"type": "function"}]), json.dumps(TOOLS)]}
    (check, words, mask), *_ = SupervisedFineTuning().row_problems(pa.RecordBatch.from_pydict(rows))
    assert check == "messages" and "tool 1 has no name" in words
    assert mask.tolist() == [True, False]
    assert find_tool_problem(None) is None


def test_a_request_keeps_the_tools_of_its_row() -> None:
    rows = pa.RecordBatch.from_pydict({"messages": [json.dumps(TALK)], "tools": [json.dumps(TOOLS)]})
    asked = SupervisedFineTuning().without_answers(rows)
    assert json.loads(asked.column("messages")[0].as_py()) == TALK[:3]
    assert asked.column("tools").to_pylist() == [json.dumps(TOOLS)]
