"""A tiny model that learns to call three tools, by whole runs, from files in OpenAI's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import tool_conversations
from tests.flows.forked import finetune
from training.tokenization.tool_calls import parse_message


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


def test_predictions_on_request_call_the_tools_of_the_row(project: Path, home: Path, first: dict[str, Any]) -> None:
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
    done = finetune(home, "predict", "tools", "--input", str(rows), "--output", str(out), "--no-drift")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line)["generated_text"] for line in out.read_text().splitlines()]
    calls = [parse_message(answer, tool_conversations.TOOLS)["tool_calls"][0]["function"] for answer in answers]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [*asked.values()]
