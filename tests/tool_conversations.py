"""Conversations with three tools in the form of OpenAI's fine-tuning files, and a project that a tiny model learns them
from in seconds."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

ROWS = {"train": 300, "validation": 60}
CITIES = ["Köln", "Paris", "Rome", "Oslo"]
SONGS = ["Yesterday", "Imagine", "Help"]
MINUTES = [2, 5, 10]
TALK = {"Hello": "Hello, how can I help?", "Thank you": "You are welcome.", "Who are you": "An assistant with tools."}
SYSTEM = {"role": "system", "content": "<tool_call> </tool_call>"}
TEMPLATE = """\
{%- set end = eos_token or sep_token -%}
{%- if tools %}tools:{% for tool in tools %} {{ tool.function.name }} {{ tool.function.parameters.properties | join }},
{%- endfor %}{{ end }}{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call> {"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}} </tool_call>
{%- endfor %}{{ end }}{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}"""
"""The form of Hermes, with the tools written briefly: a tiny model reads few tokens."""


def _tool(name: str, **properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {one: {"type": kind} for one, kind in properties.items()}}
    limits = {"required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema | limits}}


TOOLS = [_tool("weather", city="string"), _tool("timer", minutes="integer"), _tool("play", song="string")]


def conversation(draw: random.Random) -> dict[str, Any]:
    """A question that a tool answers, with its call, the result and the answer; or small talk without a call."""
    kind = draw.choice(["weather", "timer", "play", "talk"])
    if kind == "talk":
        said = draw.choice([*TALK])
        messages = [{"role": "user", "content": said}, {"role": "assistant", "content": TALK[said]}]
    elif kind == "weather":
        city = draw.choice(CITIES)
        messages = _called(f"What is the weather in {city}?", kind, {"city": city}, "sunny", "It is sunny.")
    elif kind == "timer":
        minutes = draw.choice(MINUTES)
        question = f"Wake me in {minutes} minutes"
        messages = _called(question, kind, {"minutes": minutes}, "started", "The timer runs.")
    else:
        song = draw.choice(SONGS)
        messages = _called(f"Play {song} for me", kind, {"song": song}, "playing", "Here it is.")
    return {"messages": [SYSTEM, *messages], "tools": TOOLS, "parallel_tool_calls": False}


def _called(question: str, tool: str, arguments: dict[str, Any], result: str, answer: str) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": result},
        {"role": "assistant", "content": answer},
    ]


def recipe(folder: Path, name: str = "tools") -> dict[str, Any]:
    """The recipe of a tiny model, whose rows and chat template are in this folder."""
    return {
        "name": name,
        "task": "sft",
        "options": {"max_new_tokens": 60, "answered_prompts": 60},
        "data": {
            "source": "json",
            "path": str(folder / "rows"),
            "columns": {"messages": "messages", "tools": "tools"},
            "checks": dict.fromkeys(("duplicates", "conflicting_labels", "shared_rows"), "ignore"),
        },
        "model": {
            "source": "scratch",
            "config": {
                **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
                **{"num_attention_heads": 4, "vocab_size": 300, "max_position_embeddings": 256},
            },
            "chat_template": str(folder / "chat.jinja"),
        },
        "tokens": {"max_length": 192},
        "training": {
            # Without warmup, whether all calls are learned hangs on the processor's rounding.
            **{"num_train_epochs": 20, "learning_rate": 2e-3, "warmup_steps": 150, "per_device_train_batch_size": 4},
            **{"eval_strategy": "no", "load_best_model_at_end": False},
        },
        "evaluation": {
            "splits": ["validation"],
            "metrics": [
                *("tool_call_accuracy", "tool_name_accuracy", "tool_decision_accuracy", "valid_tool_calls"),
                "perplexity",
            ],
        },
        "release": {"registry": name},
    }


def write_project(folder: Path, name: str = "tools") -> Path:
    """Rows, a chat template and a deployment file in this folder; gives the file."""
    (folder / "rows").mkdir(parents=True)
    draw = random.Random(7)
    for split, count in ROWS.items():
        rows = [json.dumps(conversation(draw), ensure_ascii=False) for _ in range(count)]
        (folder / f"rows/{split}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (folder / "chat.jinja").write_text(TEMPLATE)
    entry = {"name": name, "entrypoint": "flows.finetune:finetune", "parameters": {"recipe": recipe(folder, name)}}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({"deployments": [entry]}, sort_keys=False))
    return folder / f"{name}.yaml"
