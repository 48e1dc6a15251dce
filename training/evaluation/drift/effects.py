"""Two-sample comparisons: an effect size with its interval, and two p-values.

`p_value` is for no difference at all, `p_threshold` for a difference of at most the threshold. In large samples nearly
every difference is significant, so only the second one supports the claim that a difference matters.

compare_categories  Cohen's w of two groups of equal size, 0 to 1: for two equally frequent categories, the difference
                    of their shares. Its interval inverts the noncentral chi-squared distribution (Steiger, Beyond the
                    F test, 2004).
compare_flags       The same for two categories, of which one may be rare: Fisher's exact test bounds both p-values.
compare_numbers     The Kolmogorov-Smirnov distance, 0 to 1: the largest difference of the shares of rows below any
                    number. Its interval is the band of Dvoretzky, Kiefer and Wolfowitz for two samples.
compare_scores      The AUC of scores that were learned on other rows, 0.5 to 1: the probability that a new row scores
                    higher than a reference row, with the variance of DeLong, DeLong and Clarke-Pearson (1988).

Two comparisons learn on one half of the rows to tell new rows from reference rows, and are judged on the other half by
their scores. Rabanser, Günnemann and Lipton, Failing Loudly (2019), compare such tests. A single split keeps the test
exact: the folds of a cross-validation depend on each other.

compare_words       A domain classifier: logistic regression on TF-IDF of words. Its most telling words explain the
                    difference.
compare_embeddings  The witness function of the maximum mean discrepancy (MMD; Gretton et al., 2012), as in Kübler et
                    al., A Witness Two-Sample Test (2022): the difference of the two samples' mean Gaussian kernels.

N reference rows, M new rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.special import expit, logit
from scipy.stats import chi2, fisher_exact, kstwobign, ncx2, norm, rankdata
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from training.evaluation.predictions import Floats
from training.evaluation.text_statistics import split_words

CONFIDENCE = 0.95
"""Of the intervals of effects."""
SEED = 0
LEAST_EXPECTED = 5.0
"""Expected rows of a category in each sample: rarer categories are pooled."""


@dataclass(frozen=True)
class Effect:
    """A difference between the reference rows and the new rows."""

    value: float
    low: float
    high: float
    """Ends of the two-sided interval at CONFIDENCE."""
    p_value: float
    """Upper bound of the probability of such a difference without a true one."""
    p_threshold: float
    """The same if the true difference is at most the threshold; never smaller than `p_value`."""


def compare_categories(reference: Sequence[Hashable], new: Sequence[Hashable], threshold: float) -> Effect:
    """Compares the shares of categories. Categories that are rare in both samples are pooled."""
    return _chi_squared(_pool_rare(_count(reference, new)), threshold)


def compare_flags(reference: npt.NDArray[np.bool_], new: npt.NDArray[np.bool_], threshold: float) -> Effect:
    """Compares the shares of rows with a property."""
    counts = np.array([[sample.sum(), len(sample) - sample.sum()] for sample in (reference, new)], np.float64)
    counts = counts[:, counts.sum(axis=0) > 0]
    found = _chi_squared(counts, threshold)
    if counts.shape[1] < 2 or _expected(counts).min() >= LEAST_EXPECTED:
        return found
    exact = float(fisher_exact(counts.astype(np.int64)).pvalue)
    p_value = max(found.p_value, exact)
    return Effect(found.value, found.low, found.high, p_value, max(found.p_threshold, p_value))


def compare_numbers(reference: Floats, new: Floats, threshold: float) -> Effect:
    """Compares two distributions of numbers, of any shape and with any ties (then the test is conservative)."""
    places = np.concatenate([reference, new])
    below = [np.searchsorted(np.sort(sample), places, side="right") / len(sample) for sample in (reference, new)]
    distance = float(np.abs(below[0] - below[1]).max())
    scale = np.sqrt(len(reference) * len(new) / (len(reference) + len(new)))
    band = float(kstwobign.isf(1 - CONFIDENCE)) / scale
    return Effect(
        value=distance,
        low=max(0.0, distance - band),
        high=min(1.0, distance + band),
        p_value=float(kstwobign.sf(scale * distance)),
        p_threshold=float(kstwobign.sf(scale * max(0.0, distance - threshold))),
    )


def compare_scores(reference: Floats, new: Floats, threshold: float) -> Effect:
    """The AUC of held-out scores that are meant to be higher for new rows; the tests are one-sided."""
    n, m = len(reference), len(new)
    ranks = rankdata(np.concatenate([reference, new]))
    above = (ranks[n:] - rankdata(new)) / n  # (M,) the share of reference rows below each new row, ties half
    below = 1 - (ranks[:n] - rankdata(reference)) / m  # (N,) the share of new rows above each reference row
    auc = float(above.mean())
    ties = np.unique(ranks, return_counts=True)[1].astype(np.float64)
    null = (n + m + 1 - ((ties**3 - ties).sum() / ((n + m) * (n + m - 1)))) / (12 * n * m)
    p_value = float(norm.sf((auc - 0.5) / np.sqrt(null))) if null > 0 else 1.0
    variance = float(above.var(ddof=1) / m + below.var(ddof=1) / n)
    at_threshold = max(variance, _hanley_mcneil(threshold, n, m))
    # On the scale of logits, the interval stays between 0 and 1. Without an exchanged pair, half a row counts as one.
    least = 0.5 / min(n, m)
    clipped = float(np.clip(auc, least, 1 - least))
    error = np.sqrt(max(variance, least**2)) / (clipped * (1 - clipped))
    half = float(norm.isf((1 - CONFIDENCE) / 2) * error)
    return Effect(
        value=auc,
        low=float(expit(logit(clipped) - half)),
        high=float(expit(logit(clipped) + half)),
        p_value=p_value,
        p_threshold=max(p_value, float(norm.sf((auc - threshold) / np.sqrt(at_threshold)))),
    )


def _hanley_mcneil(auc: float, n: int, m: int) -> float:
    """The variance of the estimate of an AUC (Hanley and McNeil, 1982)."""
    both_new, both_reference = auc / (2 - auc), 2 * auc**2 / (1 + auc)
    return (auc * (1 - auc) + (m - 1) * (both_new - auc**2) + (n - 1) * (both_reference - auc**2)) / (n * m)


def _count(reference: Sequence[Hashable], new: Sequence[Hashable]) -> Floats:
    """(2, C) the rows of each category."""
    places: dict[Hashable, int] = {}
    for value in (*reference, *new):
        places.setdefault(value, len(places))
    codes = [np.array([places[value] for value in sample], np.int64) for sample in (reference, new)]
    return np.array([np.bincount(code, minlength=len(places)) for code in codes], np.float64)


def _expected(counts: Floats) -> Floats:
    return counts.sum(axis=1, keepdims=True) * counts.sum(axis=0, keepdims=True) / counts.sum()


def _pool_rare(counts: Floats) -> Floats:
    """Joins all categories with few expected rows into one, and that one with the next rarest if it is rare too."""
    order = np.argsort(_expected(counts).min(axis=0), kind="stable")
    rare = int((_expected(counts).min(axis=0) < LEAST_EXPECTED).sum())
    counts = counts[:, order]
    if rare:
        counts = np.concatenate([counts[:, :rare].sum(axis=1, keepdims=True), counts[:, rare:]], axis=1)
    while counts.shape[1] > 1 and _expected(counts)[:, 0].min() < LEAST_EXPECTED:
        counts = np.concatenate([counts[:, :2].sum(axis=1, keepdims=True), counts[:, 2:]], axis=1)
    return counts


def _chi_squared(counts: Floats, threshold: float) -> Effect:
    """The comparison of the two rows of a table (2, C) without empty columns."""
    freedom = counts.shape[1] - 1
    if freedom < 1:
        return Effect(0.0, 0.0, 0.0, 1.0, 1.0)
    expected = _expected(counts)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    n, m = counts.sum(axis=1)
    scale = float(4 * n * m / (n + m))  # the noncentrality is scale * w ** 2

    def effect(noncentrality: float) -> float:
        return float(min(1.0, np.sqrt(noncentrality / scale)))

    tail = (1 - CONFIDENCE) / 2
    return Effect(
        value=effect(max(0.0, statistic - freedom)),
        low=effect(_noncentrality(statistic, freedom, 1 - tail)),
        high=effect(_noncentrality(statistic, freedom, tail)),
        p_value=float(chi2.sf(statistic, freedom)),
        p_threshold=float(ncx2.sf(statistic, freedom, scale * threshold**2)),
    )


def _noncentrality(statistic: float, freedom: int, level: float) -> float:
    """The noncentrality with which the distribution function at the statistic is the level; 0 if there is none."""

    def difference(noncentrality: float) -> float:
        return float(ncx2.cdf(statistic, freedom, noncentrality) - level)

    if difference(1e-9) <= 0:
        return 0.0
    # The mean of the distribution is freedom + noncentrality, and its variance 2 * freedom + 4 * noncentrality.
    highest = statistic + 10 * np.sqrt(4 * statistic + 2 * freedom) + 10
    return float(brentq(difference, 1e-9, highest))


FEWEST_ROWS = 4
"""Of a sample: each half has two, so that the variance of its scores is defined."""
MAX_WORDS = 20_000
TELLING_WORDS = 10
MEASURED_ROWS = 500
"""Rows whose distances give the bandwidth of the kernel."""


@dataclass(frozen=True)
class HeldOut:
    """The held-out AUC of scores that tell new rows from reference rows, and what they are based on."""

    effect: Effect
    details: Mapping[str, Any]


def compare_words(reference: Sequence[str], new: Sequence[str], threshold: float) -> HeldOut:
    """The domain classifier. `details["words"]`: the words that speak most for new rows, and then those that speak most
    for reference rows, each with its share of both samples' rows."""
    halves, others = zip(*(_split(len(sample)) for sample in (reference, new)), strict=True)
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
    classifier = LogisticRegression(class_weight="balanced", solver="liblinear", random_state=SEED)
    classifier.fit(features, is_new)
    scores = [classifier.decision_function(vectorizer.transform(part)) for part in judged]
    effect = compare_scores(scores[0], scores[1], threshold)
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


def compare_embeddings(reference: Floats, new: Floats, threshold: float) -> HeldOut:
    """The witness of the MMD on embeddings (N, D) and (M, D). `details["mmd"]`: the MMD of the two halves that it was
    learned from, an unbiased estimate, 0 if that is negative."""
    halves, others = zip(*(_split(len(sample)) for sample in (reference, new)), strict=True)
    first, second = reference[halves[0]], new[halves[1]]
    bandwidth = _median_distance(np.concatenate([first, second]))

    def witness(rows: Floats) -> Floats:
        return _kernel(rows, second, bandwidth).mean(axis=1) - _kernel(rows, first, bandwidth).mean(axis=1)

    effect = compare_scores(witness(reference[others[0]]), witness(new[others[1]]), threshold)
    within = sum(_mean_off_diagonal(_kernel(sample, sample, bandwidth)) for sample in (first, second))
    squared = within - 2 * float(_kernel(first, second, bandwidth).mean())
    return HeldOut(effect, {"mmd": float(np.sqrt(max(0.0, squared)))})


def _split(rows: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Two random halves of the rows."""
    order = np.random.default_rng([SEED, rows]).permutation(rows)
    return order[: rows // 2], order[rows // 2 :]


def _squared_distances(first: Floats, second: Floats) -> Floats:
    squares = (first**2).sum(axis=1)[:, None] + (second**2).sum(axis=1)[None]
    return np.asarray(np.maximum(squares - 2 * first @ second.T, 0))


def _kernel(first: Floats, second: Floats, bandwidth: float) -> Floats:
    return np.asarray(np.exp(-_squared_distances(first, second) / (2 * bandwidth**2)))


def _median_distance(rows: Floats) -> float:
    """The median of the distances between rows, the usual bandwidth of the Gaussian kernel."""
    chosen = rows[np.random.default_rng([SEED, len(rows)]).permutation(len(rows))[:MEASURED_ROWS]]
    above = np.triu_indices(len(chosen), 1)
    return float(np.sqrt(np.median(_squared_distances(chosen, chosen)[above]))) or 1.0


def _mean_off_diagonal(kernel: Floats) -> float:
    rows = len(kernel)
    return float((kernel.sum() - np.trace(kernel)) / (rows * (rows - 1)))
