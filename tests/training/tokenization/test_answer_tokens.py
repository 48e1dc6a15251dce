"""Prompts with answers: a model is asked with the tokens that it was trained with, and trained on the whole answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig

from tests.training import vocabularies
from tests.training.vocabularies import CHAT, FROM_TOKENIZER_JSON, save_repository
from training.data.ipc_files import ipc_writer
from training.task_types.causal_lm import CausalLM
from training.task_types.generation import drop_spaces
from training.task_types.kto import Kto
from training.task_types.preference import Preference
from training.task_types.sft import SupervisedFineTuning
from training.tokenization.answer_tokens import encode_answers
from training.tokenization.encoder import FastEncoder, load_fast_encoder
from training.tokenization.token_files import tokenize

PROMPTS = [
    "Answer:",
    "Answer: ",
    "Answer:  ",
    "Answer:\n",
    "Answer:\n\n",
    "Answer:\n  ",
    "Answer:\t",
    "Antwort\u00a0",
    "a",
]
COMPLETIONS = ["over", " over", "123", "日本", "\nover", "Äpfel the", ". The"]
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def gpt4() -> Tokenizer:
    """As Llama 3's: a letter is joined with any sign before it, and a sign with the line breaks after it."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    trainer = trainers.BpeTrainer(
        vocab_size=360, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = ["Answer:\n\nover", "Answer:\n", "\tover", "\u00a0over"]
    tokenizer.train_from_iterator([*vocabularies.TEXTS, *texts * 9], trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


VOCABULARIES: dict[str, Callable[[], Tokenizer]] = {
    **{name: make for name, (_, make, _) in FROM_TOKENIZER_JSON.items()},
    "signs joined with letters": gpt4,
}


def encoder_of(tokenizer: Tokenizer, eos: int | None = None) -> FastEncoder:
    return FastEncoder(tokenizer, 64, side="right", split_special_tokens=False, eos=eos)


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_a_prompt_alone_has_the_tokens_that_it_has_before_its_answer(kind: str) -> None:
    encoder, joined = encoder_of(VOCABULARIES[kind]()), []
    for prompt in PROMPTS:
        texts = [prompt + completion for completion in COMPLETIONS]
        spans = [[(len(prompt), len(text))] for text in texts]
        (alone,) = encode_answers(encoder, [prompt], [[]], is_text=True, append_eos=False)
        for completion, found in zip(
            COMPLETIONS, encode_answers(encoder, texts, spans, is_text=True, append_eos=False), strict=True
        ):
            before = found.ids[: found.of_answer.argmax()]
            joined += [prompt + "|" + completion] if found.joined else []
            assert found.joined or (before == alone.ids).all() or not len(alone.ids), (prompt, completion)
    # Rows without white space between prompt and answer, or with line breaks in both.
    assert all("a|" in one or "\n|\n" in one or ":|\n" in one or "  |\n" in one for one in joined), joined


def test_the_word_after_a_prompt_that_ends_in_a_space_is_trained_on() -> None:
    encoder = encoder_of(vocabularies.chat(), eos=2)
    (found,) = encode_answers(encoder, ["The over"], [[(4, 8)]], is_text=True, append_eos=True)
    pieces = [encoder.tokenizer.id_to_token(token) for token in found.ids.tolist()]
    assert (pieces, found.of_answer.tolist()) == (["T", "he", "Ġover", "<|im_end|>"], [False, False, True, True])
    (alone,) = encode_answers(encoder, ["The "], [[]], is_text=True, append_eos=True)
    assert (alone.ids.tolist(), alone.spaces) == (found.ids[:2].tolist(), " ")


def test_an_answer_is_given_without_the_spaces_of_its_prompt() -> None:
    texts = [("  over", " "), (" over", "  "), ("over", " "), (" over", ""), ("\tover", " ")]
    assert [drop_spaces(*one) for one in texts] == [" over", "over", "over", " over", "\tover"]


def test_texts_are_continued_from_the_tokens_that_documents_have() -> None:
    encoder = encoder_of(vocabularies.chat())
    (found,) = CausalLM().prompts(encoder, pa.record_batch({"text": ["The "]}), GenerationConfig())
    document = encoder.encode_whole(["The over"]).ids
    assert found.ids.tolist() == document[:2].tolist()


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TALK = [{"role": "user", "content": "The fox"}, {"role": "assistant", "content": "over"}]


@pytest.mark.parametrize("template", [TEMPLATE, TEMPLATE.replace("assistant: {%", "assistant:{%")])
def test_the_first_word_of_an_answer_is_trained_on_if_the_chat_template_has_a_space_before_it(
    tmp_path: Path, template: str
) -> None:
    marked = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}\n"
        "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    for number, text in enumerate((template, marked)):
        folder = save_repository(tmp_path / str(number), "llama", vocabularies.chat(), {**CHAT, "chat_template": text})
        encoder, rows = load_fast_encoder(folder, 64), pa.record_batch({"messages": [json.dumps(TALK)]})
        ((ids, mask),) = zip(
            *(
                SupervisedFineTuning().features(encoder, rows).rows[name].to_pylist()
                for name in ("input_ids", "of_answer")
            ),
            strict=True,
        )
        assert encoder.tokenizer.decode([token for token, target in zip(ids, mask, strict=True) if target]) == " over\n"
        (prompt,) = SupervisedFineTuning().prompts(encoder, rows, GenerationConfig())
        assert prompt.ids.tolist() == ids[: mask.index(1)]


def test_rows_whose_answer_begins_within_a_token_are_counted(tmp_path: Path) -> None:
    folder = save_repository(tmp_path / "it", "llama", vocabularies.chat(), CHAT)
    texts = {"prompt": ["The ov", "The "], "completion": ["er", "over"]}
    (tmp_path / "data").mkdir()
    rows = pa.table(texts)
    for split in ("train", "validation"):
        with ipc_writer(tmp_path / f"data/{split}.arrow", rows.schema) as writer:
            writer.write(rows)
    tokenize(SupervisedFineTuning(), tmp_path / "data", folder, tmp_path / "out", 64)
    problems = json.loads((tmp_path / "out/log/report.json").read_text())["problems"]
    assert [(one["where"], one["level"], one["message"][:19]) for one in problems] == [
        (split, "warning", "in 1 of 2 rows, one") for split in ("train", "validation")
    ]
    encoder, content = load_fast_encoder(folder, 64), [json.dumps(text) for text in texts["prompt"]]
    answers = [json.dumps(text) for text in texts["completion"]]
    pairs = pa.record_batch({"prompt": content, "chosen": answers, "rejected": answers})
    assert Preference().features(encoder, pairs).remarks["joined"] == 1
    rated: Any = pa.record_batch({"prompt": content, "completion": answers, "label": pa.array(np.ones(2, np.bool_))})
    assert Kto().features(encoder, rated).remarks["joined"] == 1
