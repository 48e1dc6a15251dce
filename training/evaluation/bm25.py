"""BM25: scores of documents by the words that they share with a query, without training. It is the baseline of search.

By the formula of Robertson and Zaragoza (The Probabilistic Relevance Framework: BM25 and Beyond, 2009), with the
inverse document frequency and the usual parameters of Lucene. Words are those of text_statistics.py: runs of letters
and digits in lower case, and single characters of scripts without spaces.

C documents, Q queries, V words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_array

from training.evaluation.predictions import Floats, Rows
from training.evaluation.text_statistics import split_words

K1, B = 1.2, 0.75
"""How soon further occurrences of a word count less, and how much longer documents count less."""


class Bm25:
    """The scores of these documents for any queries."""

    def __init__(self, documents: Sequence[str]) -> None:
        self._words: dict[str, int] = {}
        for document in documents:
            for word in split_words(document):
                self._words.setdefault(word, len(self._words))
        counts = self._count(documents)
        with_word = np.bincount(counts.indices, minlength=len(self._words))
        rarity = np.log1p((len(documents) - with_word + 0.5) / (with_word + 0.5))
        lengths = counts.sum(axis=1)
        damping = K1 * (1 - B + B * lengths / max(1.0, lengths.sum() / max(1, len(documents))))
        per_word = np.repeat(damping, np.diff(counts.indptr))
        counts.data = rarity[counts.indices] * counts.data * (K1 + 1) / (counts.data + per_word)
        self._weights = counts  # (C, V)

    def scores(self, queries: Sequence[str]) -> Floats:
        """(Q, C) of all documents; 0 for those without a word of the query."""
        return np.asarray((self._count(queries) @ self._weights.T).toarray())

    def score_pairs(self, queries: Sequence[str], documents: Rows) -> Floats:
        """(N,) of N documents, by their places, each for the query at the same place of N."""
        return np.asarray(self._count(queries).multiply(self._weights[documents]).sum(axis=1))

    def _count(self, texts: Sequence[str]) -> csr_array:
        """(N, V) how often each word is in each text; words of no document are left out."""
        found = [Counter(map(self._words.get, split_words(text))) for text in texts]
        for count in found:
            count.pop(None, None)
        starts = np.cumsum([0, *map(len, found)])
        words = np.array([word for count in found for word in count], np.int64)
        times = np.array([number for count in found for number in count.values()], np.float64)
        return csr_array((times, words, starts), shape=(len(texts), len(self._words)))
