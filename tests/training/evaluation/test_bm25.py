"""BM25 against its formula, computed word by word."""

from __future__ import annotations

import math

import numpy as np
import pytest

from training.evaluation.bm25 import Bm25

DOCUMENTS = ["The cat sat on the mat.", "A dog; a DOG, a dog!", "cats and dogs", "", "Der Hund von Müller"]


def of_pair(query: str, document: str) -> float:
    documents = [text.lower().replace(".", "").replace(";", "").replace(",", "").replace("!", "") for text in DOCUMENTS]
    words = [text.split() for text in documents]
    mean, own = sum(map(len, words)) / len(words), words[DOCUMENTS.index(document)]
    score = 0.0
    for word in query.lower().split():
        with_word, times = sum(word in other for other in words), own.count(word)
        rarity = math.log(1 + (len(words) - with_word + 0.5) / (with_word + 0.5))
        score += rarity * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * len(own) / mean))
    return score


def test_scores_are_those_of_the_formula_and_words_that_no_document_has_count_nothing() -> None:
    queries = ["the cat", "dog dog zebra", "MÜLLER hund", ""]
    bm25 = Bm25(DOCUMENTS)
    expected = [[of_pair(query.replace("zebra", ""), document) for document in DOCUMENTS] for query in queries]
    assert bm25.scores(queries) == pytest.approx(np.array(expected))
    places = np.array([1, 0, 4])
    pairs = bm25.score_pairs([queries[1], queries[0], queries[2]], places)
    assert pairs == pytest.approx([expected[1][1], expected[0][0], expected[2][4]])


def test_texts_without_spaces_share_characters() -> None:
    scores = Bm25(["猫が好きです", "犬を飼う", "a cat"]).scores(["好きな猫"])
    assert scores[0, 0] > scores[0, 1] == scores[0, 2] == 0
