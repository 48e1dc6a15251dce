"""Comparisons that learn on one half of the rows to tell new rows from reference rows, and are judged on the other.

words        A domain classifier: logistic regression on TF-IDF of words. Its most telling words explain the difference.
embeddings   The witness function of the maximum mean discrepancy (MMD; Gretton et al., 2012), as in Kübler et al., A
             Witness Two-Sample Test (2022): the difference of the two samples' mean Gaussian kernels.

Rabanser, Günnemann and Lipton, Failing Loudly (2019), compare such tests. A single split keeps the test exact: the
folds of a cross-validation depend on each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from training.evaluation.drift.effects import Effect, Floats, compare_scores
from training.evaluation.words import split_words

FEWEST_ROWS = 4
"""Of a sample: each half has two, so that the variance of its scores is defined."""
MAX_WORDS = 20_000
TELLING_WORDS = 10


@dataclass(frozen=True)
class HeldOut:
    """The held-out AUC of scores that tell new rows from reference rows, and what they are based on."""

    effect: Effect
    details: Mapping[str, Any]


def compare_words(
    reference: Sequence[str], new: Sequence[str], threshold: float, confidence: float = 0.95, seed: int = 0
) -> HeldOut:
    """The domain classifier. `details["words"]`: the words that speak most for new rows, and then those that speak most
    for reference rows, each with its share of both samples' rows."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    halves, others = zip(*(_split(len(sample), seed) for sample in (reference, new)), strict=True)
    learned = [[sample[row] for row in rows] for sample, rows in zip((reference, new), halves, strict=True)]
    judged = [[sample[row] for row in rows] for sample, rows in zip((reference, new), others, strict=True)]
    vectorizer = TfidfVectorizer(
        tokenizer=split_words, token_pattern=None, lowercase=False, min_df=2, max_features=MAX_WORDS, sublinear_tf=True
    )
    try:
        features = vectorizer.fit_transform([*learned[0], *learned[1]])
    except ValueError:  # no word occurs in two rows
        return HeldOut(Effect(0.5, 0.5, 0.5, 1.0, 1.0), {"words": []})
    is_new = np.repeat([0, 1], [len(part) for part in learned])
    classifier = LogisticRegression(class_weight="balanced", solver="liblinear", random_state=seed)
    classifier.fit(features, is_new)
    scores = [classifier.decision_function(vectorizer.transform(part)) for part in judged]
    effect = compare_scores(scores[0], scores[1], threshold, confidence)
    # The mean contribution to the scores of the rows that have the word.
    weights = classifier.coef_[0] * np.asarray(features.mean(axis=0)).ravel()
    return HeldOut(effect, {"words": _telling(weights, vectorizer.get_feature_names_out(), reference, new, vectorizer)})


def _telling(
    weights: Floats, names: npt.NDArray[Any], reference: Sequence[str], new: Sequence[str], vectorizer: Any
) -> list[dict[str, Any]]:
    order = np.argsort(weights, kind="stable")
    chosen = [*order[::-1][:TELLING_WORDS], *order[:TELLING_WORDS]]
    shares = [np.asarray((vectorizer.transform(sample) > 0).mean(axis=0)).ravel() for sample in (reference, new)]
    found = {
        str(names[place]): {
            "word": str(names[place]),
            "speaks_for": "new" if weights[place] > 0 else "reference",
            "reference": round(float(shares[0][place]), 4),
            "new": round(float(shares[1][place]), 4),
        }
        for place in chosen
        if weights[place]
    }
    return [*found.values()]


def compare_embeddings(
    reference: Floats, new: Floats, threshold: float, confidence: float = 0.95, seed: int = 0
) -> HeldOut:
    """The witness of the MMD on embeddings (N, D) and (M, D). `details["mmd"]`: the MMD of the two halves that it was
    learned from, an unbiased estimate, 0 if that is negative."""
    halves, others = zip(*(_split(len(sample), seed) for sample in (reference, new)), strict=True)
    first, second = reference[halves[0]], new[halves[1]]
    bandwidth = _median_distance(np.concatenate([first, second]), seed)

    def witness(rows: Floats) -> Floats:
        return _kernel(rows, second, bandwidth).mean(axis=1) - _kernel(rows, first, bandwidth).mean(axis=1)

    effect = compare_scores(witness(reference[others[0]]), witness(new[others[1]]), threshold, confidence)
    within = sum(_mean_off_diagonal(_kernel(sample, sample, bandwidth)) for sample in (first, second))
    squared = within - 2 * float(_kernel(first, second, bandwidth).mean())
    return HeldOut(effect, {"mmd": float(np.sqrt(max(0.0, squared)))})


def _split(rows: int, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Two random halves of the rows."""
    order = np.random.default_rng([seed, rows]).permutation(rows)
    return order[: rows // 2], order[rows // 2 :]


def _squared_distances(first: Floats, second: Floats) -> Floats:
    squares = (first**2).sum(axis=1)[:, None] + (second**2).sum(axis=1)[None]
    return np.asarray(np.maximum(squares - 2 * first @ second.T, 0))


def _kernel(first: Floats, second: Floats, bandwidth: float) -> Floats:
    return np.asarray(np.exp(-_squared_distances(first, second) / (2 * bandwidth**2)))


def _median_distance(rows: Floats, seed: int, most: int = 500) -> float:
    """The median of the distances between rows, the usual bandwidth of the Gaussian kernel."""
    chosen = rows[np.random.default_rng([seed, len(rows)]).permutation(len(rows))[:most]]
    above = np.triu_indices(len(chosen), 1)
    return float(np.sqrt(np.median(_squared_distances(chosen, chosen)[above]))) or 1.0


def _mean_off_diagonal(kernel: Floats) -> float:
    rows = len(kernel)
    return float((kernel.sum() - np.trace(kernel)) / (rows * (rows - 1)))
