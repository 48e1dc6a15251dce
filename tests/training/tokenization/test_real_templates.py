"""Conversations by the chat templates of published models: the tokens are those of transformers, and the targets are
what the assistant writes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from training.evaluation.tool_use import find_unreadable_call
from training.problems import UserError
from training.task_types.preference import Preference
from training.task_types.sft import SupervisedFineTuning
from training.tokenization import encoder
from training.tokenization.chat_templates import ChatTemplate
from training.tokenization.features import RefusedRows
from training.tokenization.tool_calls import parse_answer

FOLDER = Path(__file__).with_name("chat_templates")
SPECIAL = {
    "qwen3": ["<|im_start|>", "<|im_end|>"],
    "llama-3.2": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral-nemo": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
    "gemma-3": ["<bos>", "<start_of_turn>", "<end_of_turn>"],
    "smollm3": ["<|im_start|>", "<|im_end|>"],
}
END = {"qwen3": 1, "llama-3.2": 3, "mistral-nemo": 1, "gemma-3": 2, "smollm3": 1}
"""The place of the token that ends an answer."""
WORDS = ["warm", "Köln", "a  b", "<tool_call>", "{x}", "line\nbreak", "<|im_end|>", "[INST]", "naïve", "5°"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Finds the {name}.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
    for name in ("weather", "time", "news")
]
Talk = list[dict[str, Any]]


def said(draw: random.Random) -> str:
    return " ".join(["so", *draw.choices(WORDS, k=draw.randint(1, 5)), "it"])


def conversation(draw: random.Random) -> tuple[Talk, list[Any] | None]:
    """Some turns, with a system message or without, and in half of all conversations with calls."""
    tools = draw.choice([TOOLS, None])
    messages: Talk = [{"role": "system", "content": said(draw)}] if draw.random() < 0.3 else []
    for _ in range(draw.choice([1, 1, 2, 3])):
        messages.append({"role": "user", "content": said(draw)})
        if tools and draw.random() < 0.8:
            calls = []
            for _ in range(draw.choice([1, 1, 1, 2])):
                arguments = {"place": said(draw), "days": draw.randint(1, 9)}
                function = {"name": draw.choice(TOOLS)["function"]["name"], "arguments": arguments}
                calls.append({"type": "function", "id": f"call{draw.randint(10000, 99999)}", "function": function})
            content = said(draw) if draw.random() < 0.2 else ""
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
            for call in calls:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": json.dumps(said(draw))})
        messages.append({"role": "assistant", "content": said(draw)})
    return messages, tools


DRAW = random.Random(11)
TALKS = [conversation(DRAW) for _ in range(200)]


def is_single(talk: Talk) -> bool:
    return sum(message["role"] == "user" for message in talk) == 1


# Which conversations a template can write so that nothing is lost, and is the same when a message is answered.
WRITES: dict[str, Callable[[Talk, Any], bool]] = {
    "qwen3": lambda talk, tools: True,
    "llama-3.2": lambda talk, tools: all(
        len(message.get("tool_calls", [0])) == 1 and not (message.get("tool_calls") and message["content"])
        for message in talk
    ),
    "mistral-nemo": lambda talk, tools: (
        talk[0]["role"] != "system"
        and (tools is None or is_single(talk))
        and not any(message.get("tool_calls") and message["content"] for message in talk)
    ),
    "gemma-3": lambda talk, tools: tools is None,
    "smollm3": lambda talk, tools: tools is None,
}


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def answer_of(name: str, message: dict[str, Any], *, last: bool) -> str:
    """The text of the assistant, written by hand."""
    content, calls = message["content"], [call["function"] for call in message.get("tool_calls", ())]
    if name == "qwen3":
        spelt = [
            f'<tool_call>\n{{"name": "{c["name"]}", "arguments": {dumps(c["arguments"])}}}\n</tool_call>' for c in calls
        ]
        thought = "<think>\n\n</think>\n\n" if last else ""
        return thought + "\n".join([*([content] if content else []), *spelt]) + "<|im_end|>\n"
    if name == "llama-3.2":
        spelt = [f'{{"name": "{c["name"]}", "parameters": {dumps(c["arguments"])}}}' for c in calls]
        return "".join(spelt or [content]) + "<|eot_id|>"
    if name == "mistral-nemo":
        spelt = [f'{dumps(call["function"])[:-1]}, "id": "{call["id"]}"}}' for call in message.get("tool_calls", ())]
        return (f"[TOOL_CALLS][{', '.join(spelt)}]" if spelt else content) + "</s>"
    return content + ("<end_of_turn>\n" if name == "gemma-3" else "<|im_end|>\n")


@pytest.fixture(scope="module", params=sorted(SPECIAL))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token for each byte, and the special tokens of the model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL[name])
    begin = {"bos_token": SPECIAL[name][0]} if name not in ("qwen3", "smollm3") else {}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=SPECIAL[name][END[name]], **begin)
    fast.chat_template = (FOLDER / f"{name}.jinja").read_text()
    folder = tmp_path_factory.mktemp(name) / "tokenizer"
    fast.save_pretrained(folder)
    return folder


def features(tokenizer: Path, talk: Talk, tools: Any) -> tuple[list[int], list[int]]:
    rows = {"messages": [json.dumps(talk)], "tools": pa.array([json.dumps(tools) if tools else None], pa.string())}
    made = (
        SupervisedFineTuning()
        .features(encoder.load_fast_encoder(tokenizer, 100_000), pa.RecordBatch.from_pydict(rows))
        .rows
    )
    return made["input_ids"].to_pylist()[0], made["of_answer"].to_pylist()[0]


@pytest.mark.slow
def test_the_tokens_are_those_of_transformers_and_the_targets_what_the_assistant_writes(
    name: str, tokenizer: Path
) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    written = 0
    for talk, tools in TALKS:
        if not WRITES[name](talk, tools):
            with pytest.raises(UserError):
                features(tokenizer, talk, tools)
            continue
        ids, of_answer = features(tokenizer, talk, tools)
        options = {"tools": tools, "date_string": "26 Jul 2024"}
        text = reference.apply_chat_template(talk, tokenize=False, **options)
        assert reference.decode(ids) == text
        if not any(token in json.dumps(talk) for token in SPECIAL[name]):  # those in messages are text here
            assert ids == reference.apply_chat_template(talk, return_dict=False, **options)
        learned = reference.decode([one for one, target in zip(ids, of_answer, strict=True) if target])
        answers = [place for place, message in enumerate(talk) if message["role"] == "assistant"]
        assert learned == "".join(answer_of(name, talk[place], last=place == answers[-1]) for place in answers)
        written += 1
    assert written >= 40


@pytest.mark.slow
@pytest.mark.parametrize("in_prompt", [False, True])
def test_pairs_with_tools_have_the_tokens_of_transformers_and_learn_the_answer_alone(
    name: str, tokenizer: Path, in_prompt: bool
) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    written = called = 0
    for talk, tools in TALKS[:100]:
        answer = next(place for place, message in enumerate(talk) if message["role"] == "assistant")
        prompt, chosen, rejected = talk[:answer], talk[answer], {"role": "assistant", "content": "Never mind."}
        row: dict[str, Any] = {"prompt": prompt, "chosen": [chosen], "rejected": rejected["content"], "tools": tools}
        if in_prompt and tools:
            row = {**row, "prompt": {"messages": prompt, "tools": tools}, "tools": None}
        rows = pa.RecordBatch.from_pydict({column: [json.dumps(value)] for column, value in row.items()})
        if not all(WRITES[name]([*prompt, one], tools) for one in (chosen, rejected)):
            with pytest.raises(RefusedRows):
                Preference().features(encoder.load_fast_encoder(tokenizer, 100_000), rows)
            continue
        (found,) = Preference().features(encoder.load_fast_encoder(tokenizer, 100_000), rows).rows.to_pylist()
        stop, start = found["chosen_length"], 0
        for end, message in ((stop, chosen), (len(found["input_ids"]), rejected)):
            ids, of_answer = found["input_ids"][start:end], found["of_answer"][start:end]
            options = {"tools": tools, "date_string": "26 Jul 2024"}
            assert reference.decode(ids) == reference.apply_chat_template([*prompt, message], tokenize=False, **options)
            if not any(token in json.dumps([*prompt, message]) for token in SPECIAL[name]):
                assert ids == reference.apply_chat_template([*prompt, message], return_dict=False, **options)
            learned = reference.decode([one for one, target in zip(ids, of_answer, strict=True) if target])
            assert learned == answer_of(name, message, last=True)
            start = end
        written += 1
        called += bool(chosen.get("tool_calls"))
    assert written >= 20 and (called >= 10 or name in ("gemma-3", "smollm3"))


def test_calls_that_a_template_writes_are_read_back(name: str, tokenizer: Path) -> None:
    assert find_unreadable_call(ChatTemplate(*encoder.load_fast_encoder(tokenizer, 99).chat or ("", {}))) is None
    for talk, tools in TALKS:
        for message in talk if tools and WRITES[name](talk, tools) else ():
            if calls := message.get("tool_calls"):
                text = answer_of(name, message, last=False).replace("<|im_end|>\n", "")
                for end in ("<|eot_id|>", "</s>"):
                    text = text.removesuffix(end)
                read = parse_answer(text, tools)
                assert [(call.name, call.arguments) for call in read.calls] == [
                    (call["function"]["name"], call["function"]["arguments"]) for call in calls
                ]
