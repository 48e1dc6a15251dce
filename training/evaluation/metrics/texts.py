"""Metrics of generated texts: (N,) predictions and (N,) references.

All are computed from sums over rows. N rows, D sets of rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from datasets import Value

from training.evaluation.metrics.definition import SumMetric

Texts = Sequence[str]
Floats = npt.NDArray[np.float64]


class TextMetric(SumMetric):
    """A metric of texts: subclasses define `statistics(predictions, references) -> (N, S)` and `of_sums`.
    evaluate's `compute` passes both as lists."""

    _given: ClassVar[dict[str, Any]] = {"predictions": Value("string"), "references": Value("string")}
    _format = None


class Bleu(TextMetric):
    """How many of the predictions' words, pairs, triples and quadruples of words are in the references, less where
    predictions are too short. From 0 to 100, by sacrebleu's corpus BLEU (13a tokens, exponential smoothing)."""

    name = "bleu"

    def statistics(self, **inputs: Any) -> Floats:
        return _row_statistics(_bleu(), **inputs)

    def of_sums(self, sums: Floats) -> Floats:
        bleu = _bleu()
        return np.array([bleu._compute_score_from_stats(line.astype(np.int64).tolist()).score for line in sums])


class Chrf(TextMetric):
    """The F-score, with recall counted twice, of up to six characters in a row. From 0 to 100, by sacrebleu's corpus
    chrF2."""

    name = "chrf"

    def statistics(self, **inputs: Any) -> Floats:
        return _row_statistics(_chrf(), **inputs)

    def of_sums(self, sums: Floats) -> Floats:
        chrf = _chrf()
        return np.array([chrf._compute_score_from_stats(line.tolist()).score for line in sums])


def _row_statistics(metric: Any, predictions: Texts, references: Texts) -> Floats:
    """Sacrebleu's own statistics of each row."""
    return np.array(metric._extract_corpus_statistics(list(predictions), [list(references)]), np.float64)


def _bleu() -> Any:
    from sacrebleu.metrics.bleu import BLEU  # here, because the import takes a third of a second

    return BLEU()


def _chrf() -> Any:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF()


class _MeanOfTexts(TextMetric):
    """The mean of a value of each row."""

    def _of_row(self, prediction: str, reference: str) -> float:
        raise NotImplementedError

    def statistics(self, **inputs: Any) -> Floats:
        texts = zip(inputs["predictions"], inputs["references"], strict=True)
        found = [(self._of_row(*both), 1.0) for both in texts]
        return np.array(found, np.float64).reshape(len(found), 2)

    def of_sums(self, sums: Floats) -> Floats:
        return np.asarray(sums[:, 0] / sums[:, 1])


class ExactMatch(_MeanOfTexts):
    """The share of predictions that are their references, but for white space at either end. From 0 to 1."""

    name = "exact_match"

    def _of_row(self, prediction: str, reference: str) -> float:
        return float(prediction.strip() == reference.strip())


class Rouge1(_MeanOfTexts):
    """The mean F-score of the words that a prediction and its reference share. Words are runs of the letters a to z and
    of digits, in lower case, with their endings. From 0 to 1, as by rouge-score's rouge1."""

    name = "rouge1"
    _order = 1

    def _of_row(self, prediction: str, reference: str) -> float:
        ours, theirs = (_runs(_words(text), self._order) for text in (prediction, reference))
        return _f1((ours & theirs).total(), ours.total(), theirs.total())


class Rouge2(Rouge1):
    """The same of pairs of words in a row. From 0 to 1, as by rouge-score's rouge2."""

    name = "rouge2"
    _order = 2


class RougeL(_MeanOfTexts):
    """The same of the longest sequence of words that both have in this order, others between them or not. From 0 to 1,
    as by rouge-score's rougeL."""

    name = "rougeL"

    def _of_row(self, prediction: str, reference: str) -> float:
        ours, theirs = _words(prediction), _words(reference)
        return _f1(_longest_shared(ours, theirs), len(ours), len(theirs))


def _words(text: str) -> list[str]:
    return re.findall("[a-z0-9]+", text.lower())


def _runs(words: list[str], length: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[start : start + length]) for start in range(len(words) - length + 1))


def _f1(both: int, ours: int, theirs: int) -> float:
    return 2 * both / (ours + theirs) if both else 0.0


def _longest_shared(first: list[str], second: list[str]) -> int:
    """The length of the longest common subsequence, a bit for each word of `first` (Hyyrö, 2004)."""
    places: dict[str, int] = {}
    for place, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << place
    whole = rest = (1 << len(first)) - 1
    for word in second:
        found = rest & places.get(word, 0)
        rest = ((rest + found) | (rest - found)) & whole
    return len(first) - rest.bit_count()
