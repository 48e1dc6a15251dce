"""A tiny model that learns to call three tools, by whole runs, from files in OpenAI's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import CompletionUsage
from transformers import AutoTokenizer

from tests import tool_conversations
from tests.flows.forked import finetune
from tests.flows.served import Server
from training.tokenization.tool_calls import parse_message

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_conversations.write_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("here") / "home"


@pytest.fixture(scope="module")
def first(project: Path, home: Path, server: dict[str, str]) -> dict[str, Any]:
    return run(project, home, server)


def run(project: Path, home: Path, server: dict[str, str], *settings: str) -> dict[str, Any]:
    out = project.parent / "out.json"
    done = finetune(home, "run", str(project), "--json", str(out), *settings, **server)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_a_tiny_model_makes_at_least_95_of_100_calls_right_and_is_better_than_always_the_same_call(
    first: dict[str, Any],
) -> None:
    figures = first["metrics"]["validation"]
    for name in ("tool_call_accuracy", "tool_name_accuracy", "tool_decision_accuracy", "valid_tool_calls"):
        assert figures[name]["value"] >= 0.95, name
        assert figures[name]["low"] is not None
    assert figures["tool_call_accuracy"]["baseline"] < 0.5


def test_a_worse_model_loses_against_the_champion_by_its_calls(
    project: Path, home: Path, server: dict[str, str], first: dict[str, Any]
) -> None:
    verdict = run(project, home, server, "--set", "training.num_train_epochs=1")["verdict"]
    compared = verdict["comparison"]
    assert verdict["decision"] == "keep" and compared["champion"] == "tools/1"
    assert compared["metric"] == "tool_call_accuracy"
    assert compared["value"] < 0.2 and compared["champion_value"] >= 0.95
    assert compared["lost"] > 20 and not compared["gained"]


def test_predictions_on_request_call_the_tools_of_the_row(
    project: Path, home: Path, server: dict[str, str], first: dict[str, Any]
) -> None:
    rows, out = project.parent / "asked.jsonl", project.parent / "answers.jsonl"
    asked = {"Wake me in 5 minutes": ("timer", {"minutes": 5}), "Play Help for me": ("play", {"song": "Help"})}
    lines = [
        {
            "messages": [tool_conversations.SYSTEM, {"role": "user", "content": question}],
            "tools": tool_conversations.TOOLS,
        }
        for question in asked
    ]
    rows.write_text("\n".join(map(json.dumps, lines)))
    words = ["--input", str(rows), "--output", str(out), "--no-drift"]
    done = finetune(home, "predict", "tools", *words, **server)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line)["generated_text"] for line in out.read_text().splitlines()]
    calls = [parse_message(answer, tool_conversations.TOOLS)["tool_calls"][0]["function"] for answer in answers]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [*asked.values()]


def test_recorded_conversations_are_compared_by_drift_and_with_right_answers_evaluated(
    project: Path, home: Path, server: dict[str, str], first: dict[str, Any]
) -> None:
    record, out = project.parent / "recorded", project.parent / "later.json"
    lines = (project.parent / "rows/validation.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[:20]]
    answers = {}
    with Server(home, "tools", "--record", str(record), **server) as served:
        for row in rows:
            talk = row["messages"]
            stop = next(place for place, message in enumerate(talk) if message["role"] == "assistant")
            part = {"type": "text", "text": talk[stop - 1]["content"]}
            asked = {"messages": [*talk[: stop - 1], {"role": "user", "content": [part]}], "tools": row["tools"]}
            answers[part["text"]] = talk[stop]
            answer = served.client.post("/v1/chat/completions", json={"model": "tools", **asked})
            assert answer.status_code == 200, answer.text
    drift = finetune(home, "drift", "tools", "--input", str(record), "--json", str(out), **server)
    assert drift.returncode == 0, drift.stdout + drift.stderr
    assert json.loads(out.read_text())["drift"]["rows"] == {"reference": 60, "new": 20}
    unanswered = finetune(home, "evaluate", "tools", "--input", str(record), "--json", str(out), **server)
    assert unanswered.returncode == 2
    assert "its last message is by 'user', and must be by 'assistant'" in unanswered.stdout + unanswered.stderr
    for file in record.iterdir():
        recorded = [json.loads(line) for line in file.read_text().splitlines()]
        for row in recorded:
            row["messages"].append(answers[row["messages"][-1]["content"]])
        file.write_text("".join(json.dumps(row) + "\n" for row in recorded))
    evaluated = finetune(home, "evaluate", "tools", "--input", str(record), "--json", str(out), **server)
    assert evaluated.returncode == 0, evaluated.stdout + evaluated.stderr
    found = json.loads(out.read_text())["evaluation"]
    assert found["rows"] == 20 and found["metrics"]["perplexity"]["value"] < 1.5


def test_the_served_model_streams_a_call_and_answers_with_its_result(
    home: Path, server: dict[str, str], first: dict[str, Any]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(next(home.glob("artifacts/fit/*/model")))
    tools: Any = tool_conversations.TOOLS
    messages: list[Any] = [tool_conversations.SYSTEM, {"role": "user", "content": "What is the weather in Rome?"}]

    def count(messages: list[Any], *, prompt: bool) -> int:
        return len(tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=prompt)["input_ids"])

    def ask() -> tuple[Any, CompletionUsage]:
        """The choice that the chunks of a stream make up, and the counts at its end."""
        with api.chat.completions.stream(
            model="tools", messages=messages, tools=tools, stream_options={"include_usage": True}
        ) as stream:
            answer = stream.get_final_completion()
        assert answer.usage
        return answer.choices[0], answer.usage

    def expect_counts(usage: CompletionUsage, answered: dict[str, Any]) -> None:
        prompt, whole = count(messages, prompt=True), count([*messages, answered], prompt=False)
        assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, whole - prompt)
        assert usage.total_tokens == whole

    with Server(home, "tools", **server) as served:
        client = httpx.Client(trust_env=False)
        api = openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.token, max_retries=0, http_client=client)
        choice, usage = ask()
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})
        function = {"name": "weather", "arguments": {"city": "Rome"}}
        expect_counts(usage, {"role": "assistant", "content": "", "tool_calls": [{"function": function}]})
        messages += [choice.message.model_dump(exclude_none=True, include={"role", "tool_calls"})]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        choice, usage = ask()
        assert (choice.message.content, choice.finish_reason) == ("It is sunny.", "stop")
        # apply_chat_template takes arguments as objects.
        messages[2] = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
        expect_counts(usage, {"role": "assistant", "content": "It is sunny."})
