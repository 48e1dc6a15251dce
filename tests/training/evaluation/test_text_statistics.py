"""Words of texts: runs of letters in any script, and characters where a script has no spaces between words."""

from __future__ import annotations

import random
import unicodedata

import pytest

from training.evaluation.drift.effects import compare_words
from training.evaluation.text_statistics import split_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don't stop, x_2!", ["don", "t", "stop", "x", "2"]),
        ("Fußgänger ÜBER naïve", ["fußgänger", "über", "naïve"]),
        (unicodedata.normalize("NFD", "Äpfel"), ["äpfel"]),
        ("Русская ёлка", ["русская", "ёлка"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("한국어 단어", ["한국어", "단어"]),
        ("我喜欢 tea。", ["我", "喜", "欢", "tea"]),
        ("ดีใจ", ["ดี", "ใ", "จ"]),
    ],
)
def test_words_of_every_script_are_found(text: str, words: list[str]) -> None:
    assert split_words(text) == words


@pytest.mark.parametrize(("usual", "other"), [("我你他喜欢茶水", "车路桥船票站门"), ("กขคงจ", "ฉชซฌญ")])
def test_new_words_are_found_in_scripts_without_spaces(usual: str, other: str) -> None:
    draw = random.Random(1)
    reference, new = (["".join(draw.choices(letters, k=9)) for _ in range(60)] for letters in (usual, other))
    found = compare_words(reference, new, 0.6)
    assert found.effect.value > 0.9
    assert {entry["word"] for entry in found.details["words"] if entry["speaks_for"] == "new"} <= {*other}
