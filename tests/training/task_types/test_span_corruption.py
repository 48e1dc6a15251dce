"""Span corruption: the spans that are missing, and what a model makes of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from training.batching.batches import IGNORED
from training.batching.corrupted_spans import CorruptedSpans, Corruption
from training.batching.random_states import SeededBatch
from training.problems import UserError
from training.programs.create_model import learner, save_tokenizer

NOUNS = ("cat", "dog", "hammer", "saw", "cow")
TEXTS = [f"{one} {other} and {third}" for one in NOUNS for other in NOUNS for third in NOUNS]
T5 = Corruption(density=0.15, mean_span=3.0)
VOCABULARY = 300


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(learner(writes=False, sentinels=100)(lambda: iter(TEXTS), VOCABULARY), None, folder)
    found: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return found


def test_a_new_tokenizer_has_the_sentinels_within_its_vocabulary(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) <= VOCABULARY
    (number,) = tokenizer("<extra_id_99>", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(number) == "<extra_id_99>"


@pytest.mark.parametrize("length", [1, 2, 3, 7, 40, 400, 5000])
def test_input_and_target_together_are_the_text_and_as_long_as_the_counts_say(
    length: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    draw = np.random.default_rng(length)
    begin, *_, end = tokenizer("x")["input_ids"]
    text = draw.integers(5, len(tokenizer) - 100, size=length)
    row = {"input_ids": np.array([begin, *text, end], np.int32)}
    batch = CorruptedSpans(tokenizer, 1, T5)(SeededBatch([row], [4, 1], [7]))
    given, wanted = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    missing, spans = map(int, T5.count(np.array(length)))
    assert len(given) == length - missing + spans + 2 and len(wanted) == missing + spans + 2
    assert (given[0], given[-1], wanted[0], wanted[-1]) == (begin, end, begin, end)
    names = tokenizer.convert_ids_to_tokens(wanted[1:-1])
    marks = [place for place, name in enumerate(names) if name.startswith("<extra_id_")]
    assert [names[place] for place in marks] == [f"<extra_id_{number}>" for number in range(spans)]
    parts = dict(zip(marks, np.split(np.array(wanted[1:-1]), marks)[1:], strict=True))
    filled = []
    for token in given[1:-1]:
        name = tokenizer.convert_ids_to_tokens(token)
        filled += parts[names.index(name)][1:].tolist() if name.startswith("<extra_id_") else [token]
    assert filled == text.tolist()


def test_counts_are_those_of_t5s_formula_up_to_its_sentinels() -> None:
    """By hand: round(0.15 n) tokens, round of a third of them spans."""
    missing, spans = T5.count(np.array([0, 1, 2, 3, 10, 100, 512, 10_000]))
    assert missing.tolist() == [0, 1, 1, 1, 2, 15, 77, 1500]
    assert spans.tolist() == [0, 1, 1, 1, 1, 5, 26, 100]


def test_spans_are_drawn_from_seed_epoch_and_row_alone(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"input_ids": np.array(tokenizer(text)["input_ids"], np.int32)} for text in TEXTS[:6]]
    collate = CorruptedSpans(tokenizer, 1, T5)

    def lines(numbers: list[int], seeds: list[int]) -> list[list[int]]:
        batch = collate(SeededBatch([rows[number] for number in numbers], seeds, numbers))
        return [[token for token in line if token != IGNORED] for line in batch["labels"].tolist()]

    together = lines([0, 1, 2, 3, 4, 5], [4, 1])
    assert lines([5, 2], [4, 1]) == [together[5], together[2]]
    assert lines([0, 1, 2, 3, 4, 5], [4, 2]) != together
    assert collate(rows)["labels"].tolist() == collate(rows)["labels"].tolist()


def test_every_division_into_spans_is_equally_likely(tokenizer: PreTrainedTokenizerFast) -> None:
    """Of 6 tokens, 3 missing in 2 spans: 2 lengths at 6 places, in 6,000 draws each about 500 times."""
    row = {"input_ids": np.array([*tokenizer("x")["input_ids"][:1], *range(10, 16), *tokenizer("x")["input_ids"][-1:]])}
    collate = CorruptedSpans(tokenizer, 1, Corruption(density=0.5, mean_span=1.5))
    batch = collate(SeededBatch([row] * 6000, [1, 1], [*range(6000)]))
    lines = np.concatenate([batch["input_ids"].numpy(), batch["labels"].numpy()], axis=1)
    _, counts = np.unique(lines, axis=0, return_counts=True)
    assert len(counts) == 12 and abs(counts - 500).max() < 100  # 4.7 standard deviations


def test_a_tokenizer_without_sentinels_is_refused_with_those_that_have_them(tmp_path: Path) -> None:
    save_tokenizer(learner(writes=True, sentinels=0)(lambda: iter(TEXTS), VOCABULARY), None, tmp_path)
    load: Callable[[Path], PreTrainedTokenizerFast] = PreTrainedTokenizerFast.from_pretrained
    with pytest.raises(UserError, match=re.escape("it has no token <extra_id_0>, and span-corruption needs")):
        CorruptedSpans(load(tmp_path), 1, T5)


def test_of_byt5_the_sentinels_are_the_last_bytes_in_descending_order_as_in_t5s_code() -> None:
    """Its sentinel_id is the vocabulary's size less 1, and a ByteVocabulary has 259 ids."""
    tokenizer = ByT5Tokenizer()
    ids = np.array(tokenizer("Früher schrieb man “so”, heute so. " * 10)["input_ids"], np.int32)
    corruption = Corruption(density=0.15, mean_span=6.0)
    batch = CorruptedSpans(tokenizer, 1, corruption)(SeededBatch([{"input_ids": ids}], [4, 1], [7]))
    given, wanted = (batch[name][0].numpy() for name in ("input_ids", "labels"))
    (spans,) = corruption.count(np.array([len(ids) - 1]))[1]
    marks = range(258, 258 - spans, -1)
    assert spans == 10 and given[np.isin(given, marks)].tolist() == wanted[np.isin(wanted, marks)].tolist() == [*marks]
    missing = np.split(wanted[:-1], np.flatnonzero(np.isin(wanted, marks)))[1:]
    kept = np.split(given, np.flatnonzero(np.isin(given, marks)))
    whole = [kept[0], *(part for span, rest in zip(missing, kept[1:], strict=True) for part in (span[1:], rest[1:]))]
    assert np.concatenate(whole).tolist() == ids.tolist() and wanted[-1] == tokenizer.eos_token_id
