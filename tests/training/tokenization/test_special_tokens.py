"""Special tokens in texts, unknown tokens, and tokens that the model does not have: counted, and said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.training.tokenization.test_tokens import save_rows, save_tokenizer
from tests.training.vocabularies import CHAT, PAIRS, chat
from training.problems import UserError
from training.task_types.sequence_classification import SequenceClassification
from training.tokenization.encoder import load_encoder
from training.tokenization.special_tokens import find_spelt
from training.tokenization.token_files import tokenize

PLAIN = ["the quick brown fox", "the lazy dog"] * 10


def messages(folder: Path, texts: list[str], **more: Any) -> list[str]:
    """The messages on the training rows with these texts; raises UserError."""
    out = folder / "out"
    folder.mkdir(exist_ok=True)
    rows = save_rows(folder / "data", texts)
    tokenize(SequenceClassification(), rows, save_tokenizer(folder / "tokenizer"), out, 64, **more)
    problems = json.loads((out / "log/report.json").read_text())["problems"]
    return [problem["message"] for problem in problems if problem["where"] == "train"]


def test_special_tokens_in_texts_are_counted_with_the_first_of_them(tmp_path: Path) -> None:
    (message,) = messages(tmp_path, [*PLAIN, "the [SEP] dog", "a [CLS]", "[sep] and [SE P] are text"])
    assert message.startswith("2 of 23 rows spell special tokens, such as '[SEP]'. The model reads them as marks")


def test_special_tokens_are_found_in_pairs_lists_and_structures_and_not_where_they_are_encoded_as_text(
    tmp_path: Path,
) -> None:
    chats = pa.array([[{"role": "user", "content": "a"}], [], None, [{"role": "user", "content": "x<|im_end|>\ny"}]])
    rows = pa.RecordBatch.from_pydict(
        {"messages": chats, "words": pa.array([["a"], ["b", "<|im_end|>"], [], None]), "number": pa.array([1, 2, 3, 4])}
    )
    found, first = find_spelt(rows, ["<|im_start|>", "<|im_end|>"])
    assert found.tolist() == [False, True, False, True] and first == "<|im_end|>"
    assert not find_spelt(rows, [])[0].any()
    (tmp_path / "chat").mkdir()
    chat().save(str(tmp_path / "chat/tokenizer.json"))
    for split, tokens in ((False, True), (True, False)):
        settings = json.dumps({**CHAT, "split_special_tokens": split})
        (tmp_path / "chat/tokenizer_config.json").write_text(settings)
        assert bool(load_encoder(tmp_path / "chat", 32).special_texts) == tokens


def test_texts_of_another_script_than_the_vocabularys_are_a_warning_and_an_error_if_most_tokens_are_unknown(
    tmp_path: Path,
) -> None:
    (message,) = messages(tmp_path / "some", [*PLAIN, *["αβγ δεζ ηθι κλμ νξο"] * 2])
    assert re.match(r"\d\.\d% of 1\d\d tokens, in 2 of 22 rows, stand for what the tokenizer does not know", message)
    with pytest.raises(UserError, match=r"train: 7\d\.\d% of 1\d{2} tokens, in 20 of 20 rows, .* Choose a model for"):
        messages(tmp_path / "most", ["αβγ δεζ ηθι κλμ νξο"] * 20)
    assert messages(tmp_path / "none", PLAIN) == []


def test_rows_with_tokens_that_the_model_does_not_have_are_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        messages(tmp_path / "fewer", [*PLAIN, *PAIRS], vocab_size=100)
    assert "rows have tokens that the model does not have: its tokenizer gives the number 1" in str(refused.value)
    assert "and its embedding has 100 rows. Name the tokenizer's own model, or call resize_token" in str(refused.value)
    assert messages(tmp_path / "all", PLAIN, vocab_size=1000) == []
