"""Answers of an assistant, as they are generated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.training.counting import write_assistant
from training import task_types
from training.engine.conversation import Assistant, Request, Sampling
from training.engine.predictor import Predictor
from training.tokenization.tool_calls import parse_message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assistant(tmp_path_factory.mktemp("assistant"))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(folder: Path, max_length: int = 64, **options: Any) -> Assistant:
    predictor = Predictor(task_types.load("sft", options), folder, folder, max_length)
    return Assistant(predictor, max_length)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_an_answer_comes_in_words_with_one_beam_and_whole_with_several(folder: Path, num_beams: int) -> None:
    parts: list[str] = []
    answer = assistant(folder, num_beams=num_beams).answer([user("six")], parts.append, lambda: False)
    assert parts == (["seven ", "eight ", "nine"] if num_beams == 1 else ["seven eight nine"])
    assert (answer.text, answer.tokens, answer.dropped, answer.stopped) == ("seven eight nine", 4, 0, False)


def test_an_answer_ends_after_max_new_tokens_and_on_request(folder: Path) -> None:
    assert assistant(folder, max_new_tokens=5).answer([user("on")], lambda _: None, lambda: False).tokens == 5
    asked = iter([False, False, True])
    answer = assistant(folder).answer([user("on")], lambda _: None, lambda: next(asked))
    assert (answer.text, answer.stopped) == ("on on on", True)


def test_the_oldest_messages_of_a_conversation_that_is_too_long_are_left_out_but_not_the_systems(folder: Path) -> None:
    model = assistant(folder, max_length=8)
    messages = [{"role": "system", "content": "five"}]
    for _ in range(3):
        messages += [user("one two"), {"role": "assistant", "content": "three"}]
    answer = model.answer([*messages, user("on")], lambda _: None, lambda: False)
    assert (answer.text, answer.dropped) == ("six seven eight nine", 2)  # 3 + 3 + 1 words, and the system's
    answer = model.answer([user("one " * 20 + "seven")], lambda _: None, lambda: False)
    assert (answer.text, answer.dropped) == ("eight nine", 0)


def test_prompts_share_a_batch_only_if_the_longest_answer_fits_behind_the_longest_prompt(folder: Path) -> None:
    model = assistant(folder, max_length=4090)
    long = model.encode_text("one " * 4000 + "seven")
    requests = [Request(long, max_new_tokens=20), Request(model.encode_text("on"), max_new_tokens=200)]
    assert [reply.text for reply in model.generate(requests)] == ["eight nine", " ".join(["on"] * 200)]


def test_a_call_behind_a_special_token_has_the_same_text_served_in_evaluation_and_on_request(folder: Path) -> None:
    task_type = task_types.load("sft", {})
    predictor = Predictor(task_type, folder, folder, max_length=64)
    prompt = Assistant(predictor, 64).encode_messages([user("look")])
    (served,) = Assistant(predictor, 64).generate([Request(prompt)])
    ((evaluated, _),) = task_type.answer(predictor.network, predictor.tokenizer, [prompt.ids])
    rows = pa.RecordBatch.from_pydict({"messages": [json.dumps([user("look")])]})
    (record,) = predictor.predict(rows)
    assert served.text == evaluated == record["generated_text"]
    message = parse_message(served.text, [{"type": "function", "function": {"name": "count"}}])
    assert message["content"] == "so" and message["tool_calls"][0]["function"]["arguments"] == '{"to": 3}'


def test_a_row_that_the_template_refuses_has_no_prediction_and_is_named_and_the_others_have_theirs(
    folder: Path, tmp_path: Path
) -> None:
    refusing = shutil.copytree(folder, tmp_path / "refusing")
    template = (refusing / "chat_template.jinja").read_text()
    rule = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    (refusing / "chat_template.jinja").write_text(rule + template)
    predictor = Predictor(task_types.load("sft", {}), refusing, refusing, max_length=64)
    ruled = [{"role": "system", "content": "five"}, user("six")]
    rows = pa.RecordBatch.from_pydict({"messages": [*map(json.dumps, (ruled, [user("six")], ruled))]})
    first, answered, last = predictor.predict(rows)
    assert first == last == {} and answered["generated_text"] == "seven eight nine"
    (warning,) = predictor.warnings()
    assert warning.startswith("2 rows have no prediction, because the chat template refuses them: it cannot write")
    assert warning.endswith("the conversation: no system.")


def test_a_seed_leaves_other_answers_random_and_an_open_top_p_samples_nothing(folder: Path) -> None:
    model = assistant(folder)
    request = Request(model.encode_text("one"), max_new_tokens=12)
    after = []
    for _ in range(2):
        model.generate([request], Sampling(temperature=2.0, seed=3))
        after.append(model.generate([request], Sampling(temperature=2.0))[0].text)
    assert after[0] != after[1]
    assert model.generate([request], Sampling(top_p=1.0))[0].text == "two three four five six seven eight nine"
