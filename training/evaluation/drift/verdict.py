"""The drift report: all comparisons of new rows with reference rows, and the verdict.

A difference counts only if it is significant and large enough. Both are judged by Holm's method (1979) over all
comparisons of the report, at the error level that is left for this look at the model:

drifted     some difference is significantly larger than its threshold;
watch       some difference is significant, and its estimate is above the threshold;
steady      neither;
undecided   there are fewer than `min_rows` rows on either side, and nothing is compared.

The accuracy without labels is estimated by confidence-based performance estimation (CBPE). The probability that a
prediction is right is estimated from the model's confidence, by a calibration that is learned on reference rows with
labels. Its mean over new rows estimates their accuracy. It holds as long as equally confident predictions are right as
often as on the reference rows, so it cannot see labels that changed their meaning. Guo et al., On Calibration of Modern
Neural Networks (2017); Platt (1999); Zadrozny and Elkan (2002) for isotonic regression.

N reference rows, M new rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from training.data.vectors import as_matrix
from training.evaluation.drift.effects import (
    CONFIDENCE,
    FEWEST_ROWS,
    Effect,
    compare_categories,
    compare_embeddings,
    compare_flags,
    compare_numbers,
    compare_words,
)
from training.evaluation.predictions import Floats, Mask
from training.evaluation.text_statistics import FIELD, count_characters, find_empty, find_repeated, find_scripts

Verdict = Literal["steady", "watch", "drifted", "undecided"]
Unit = Literal["cohens_w", "distance", "auc"]
MAX_CATEGORIES = 100
"""A text field of predictions with more different values is compared by length."""
LABEL, PROBABILITY = "label", "probability"
"""The fields of a record with one label, which the estimate of accuracy needs."""
DIGITS = 2
"""Of compared probabilities: in a model that is always sure, every row's third digit may change and mean nothing."""
FOLDS = 5
DRAWS = 200
LEAST_OF_EACH = 10
"""Right predictions, and wrong ones, that an estimate needs among the reference rows."""
Calibrate = Callable[[Floats], Floats]


@dataclass(frozen=True)
class Thresholds:
    """The smallest effects that matter, by unit, as in release.drift of the recipe."""

    cohens_w: float
    distance: float
    auc: float

    def of(self, unit: Unit) -> float:
        return float(getattr(self, unit))


@dataclass(frozen=True)
class Observations:
    """What is known about a sample of rows. P of the N rows have a prediction."""

    texts: Sequence[str]  # (N,)
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Of the predictions: numbers or texts by name."""
    tokens: Floats | None = None  # (P,)
    tokens_per_word: Floats | None = None  # (P,) higher for misspelt words and other languages
    unknown: Floats | None = None  # (P,) the share of unknown tokens
    embeddings: Floats | None = None  # (P, D)
    confidence: Floats | None = None  # (P,) the probability of the predicted label
    correct: Any = None  # (P,) whether it is right; None without labels


def read_observations(folder: Path) -> Observations:
    """Reads observations.parquet. The row statistics are those of rows with a prediction."""
    table = pq.read_table(folder / "observations.parquet")
    texts = table["text"].to_pylist()
    if "tokens" not in table.column_names:  # no row has a prediction
        return Observations(texts)
    predicted = table.filter(table["tokens"].is_valid())
    fields = {
        name.removeprefix(FIELD): [value for value in predicted[name].to_pylist() if value is not None]
        for name in predicted.column_names
        if name.startswith(FIELD)
    }
    tokens = predicted["tokens"].to_numpy().astype(np.float64)
    words = np.maximum(1, [len(text.split()) for text in predicted["text"].to_pylist()])
    confidence = correct = None
    has_label = len(fields.get(LABEL, ())) == len(fields.get(PROBABILITY, ())) == len(predicted) > 0
    if has_label and not isinstance(fields[LABEL][0], float):
        confidence = np.array(fields[PROBABILITY], np.float64)
        fields[PROBABILITY] = confidence.round(DIGITS).tolist()
        if "label" in predicted.column_names:
            correct = np.array(fields[LABEL], object) == np.array(predicted["label"].to_pylist(), object)
    unknown = predicted["unknown"].to_numpy() if "unknown" in predicted.column_names else None
    vectors = predicted["embedding"]
    embeddings = as_matrix(vectors, len(vectors[0])).astype(np.float64) if len(predicted) else None
    return Observations(texts, fields, tokens, tokens / words, unknown, embeddings, confidence, correct)


def build_report(
    reference: Observations, new: Observations, thresholds: Thresholds, *, alpha: float, min_rows: int
) -> dict[str, Any]:
    """The report as plain values: `verdict`, `rows`, `alpha`, `comparisons`, and `estimated_accuracy` or null."""
    rows = {"reference": len(reference.texts), "new": len(new.texts)}
    if min(rows.values()) < min_rows:
        return {"verdict": "undecided", "rows": rows, "alpha": alpha, "comparisons": [], "estimated_accuracy": None}
    verdict, findings = judge(compare(reference, new, thresholds), alpha)
    accuracy = estimate(reference, new)
    return {
        "verdict": verdict,
        "rows": rows,
        "alpha": alpha,
        "comparisons": [finding.to_json() for finding in findings],
        "estimated_accuracy": asdict(accuracy) if accuracy else None,
    }


@dataclass(frozen=True)
class DriftComparison:
    """One line of the report."""

    name: str
    unit: Unit
    threshold: float
    effect: Effect
    details: Mapping[str, Any] = field(default_factory=dict)


def compare(reference: Observations, new: Observations, thresholds: Thresholds) -> list[DriftComparison]:
    """All comparisons that both samples have the values for. A value that is the same in all rows of both is left out:
    it would only weaken the others."""
    found: list[DriftComparison] = []

    def add(name: str, unit: Unit, function: Callable[..., Effect], first: Any, second: Any) -> None:
        if len(first) and len(second) and _varies(first, second):
            found.append(DriftComparison(name, unit, thresholds.of(unit), function(first, second, thresholds.of(unit))))

    for name in reference.fields:
        if name in new.fields:
            unit, function, values = _compare_field(reference.fields[name], new.fields[name])
            add(f"predicted {name}", unit, function, *values)
    if reference.tokens is not None and new.tokens is not None:
        add("tokens", "distance", compare_numbers, reference.tokens, new.tokens)
    if reference.tokens_per_word is not None and new.tokens_per_word is not None:
        add("tokens per word", "distance", compare_numbers, reference.tokens_per_word, new.tokens_per_word)
    if reference.unknown is not None and new.unknown is not None:
        add("unknown tokens", "distance", compare_numbers, reference.unknown, new.unknown)
    found += _compare_texts(reference.texts, new.texts, thresholds)
    filled = [[text for text in sample.texts if text.strip()] for sample in (reference, new)]
    if min(map(len, filled)) >= FEWEST_ROWS:
        words = compare_words(filled[0], filled[1], thresholds.auc)
        found.append(DriftComparison("words", "auc", thresholds.auc, words.effect, words.details))
    first, second = reference.embeddings, new.embeddings
    if first is not None and second is not None and min(len(first), len(second)) >= FEWEST_ROWS:
        rows = compare_embeddings(first, second, thresholds.auc)
        found.append(DriftComparison("embeddings", "auc", thresholds.auc, rows.effect, rows.details))
    return found


def _compare_texts(reference: Sequence[str], new: Sequence[str], thresholds: Thresholds) -> list[DriftComparison]:
    """Of characters, scripts, empty and repeated texts."""
    found = []
    filled = [[text for text in sample if text.strip()] for sample in (reference, new)]
    classes = [count_characters(sample) for sample in filled]
    for name in classes[0] if all(filled) else ():
        if _varies(classes[0][name], classes[1][name]):
            effect = compare_numbers(classes[0][name], classes[1][name], thresholds.distance)
            found.append(DriftComparison(name.replace("_", " "), "distance", thresholds.distance, effect))
    first_scripts, second_scripts = map(find_scripts, filled)
    if _varies(first_scripts, second_scripts):
        effect = compare_categories(first_scripts, second_scripts, thresholds.cohens_w)
        found.append(DriftComparison("script", "cohens_w", thresholds.cohens_w, effect))
    same = min(len(reference), len(new))
    flags = {
        "empty rows": [find_empty(sample) for sample in (reference, new)],
        "repeated rows": [find_repeated(sample[:same]) for sample in (reference, new)],
    }
    for name, (first, second) in flags.items():
        if not _varies(first, second):
            continue
        shares = {"reference_share": round(float(first.mean()), 4), "new_share": round(float(second.mean()), 4)}
        effect = compare_flags(first, second, thresholds.cohens_w)
        found.append(DriftComparison(name, "cohens_w", thresholds.cohens_w, effect, shares))
    return found


def _varies(first: Iterable[Any], second: Iterable[Any]) -> bool:
    """Whether any two values of both samples differ."""
    return len({*first, *second}) > 1


def _compare_field(reference: Sequence[Any], new: Sequence[Any]) -> tuple[Unit, Callable[..., Effect], tuple[Any, Any]]:
    """How a field of predictions is compared: as numbers, categories, or texts of some length."""
    samples = (reference, new)
    if all(isinstance(value, int | float) and not isinstance(value, bool) for sample in samples for value in sample):
        return "distance", compare_numbers, (np.array(reference, np.float64), np.array(new, np.float64))
    if len({value for sample in samples for value in sample}) > MAX_CATEGORIES:
        lengths = [np.array([len(str(value)) for value in sample], np.float64) for sample in samples]
        return "distance", compare_numbers, (lengths[0], lengths[1])
    return "cohens_w", compare_categories, samples


@dataclass(frozen=True)
class JudgedComparison:
    """A comparison with its p-values after Holm's method."""

    comparison: DriftComparison
    p_value: float
    p_threshold: float
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        compared = self.comparison
        effect = {name: getattr(compared.effect, name) for name in ("value", "low", "high")}
        return {
            "name": compared.name,
            "unit": compared.unit,
            **effect,
            "threshold": compared.threshold,
            "p_value": self.p_value,
            "p_threshold": self.p_threshold,
            "verdict": self.verdict,
            **compared.details,
        }


def judge(comparisons: Sequence[DriftComparison], alpha: float) -> tuple[Verdict, list[JudgedComparison]]:
    """The verdict at this error level, and the comparisons with their corrected p-values."""
    differs = adjust_holm([comparison.effect.p_value for comparison in comparisons])
    matters = adjust_holm([comparison.effect.p_threshold for comparison in comparisons])
    findings = []
    for comparison, p_value, p_threshold in zip(comparisons, differs, matters, strict=True):
        verdict: Verdict = "steady"
        if p_threshold <= alpha:
            verdict = "drifted"
        elif p_value <= alpha and comparison.effect.value >= comparison.threshold:
            verdict = "watch"
        findings.append(JudgedComparison(comparison, p_value, p_threshold, verdict))
    order: tuple[Verdict, ...] = ("drifted", "watch", "steady")
    return next(found for found in order if found == "steady" or found in {f.verdict for f in findings}), findings


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """The p-values after Holm's step-down method: comparing each with alpha keeps the probability of any false
    discovery at alpha, however the tests depend on each other."""
    order = np.argsort(p_values, kind="stable")
    adjusted = np.empty(len(p_values))
    factors = len(p_values) - np.arange(len(p_values))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(np.array(p_values)[order] * factors))
    return [float(value) for value in adjusted]


@dataclass(frozen=True)
class EstimatedAccuracy:
    """The estimated accuracy on new rows, and the true one on the reference rows."""

    value: float
    low: float
    high: float
    """Ends of the interval for the accuracy on exactly these rows."""
    reference: float
    method: str
    """The calibration, `isotonic` or `platt`."""


def estimate(reference: Observations, new: Observations) -> EstimatedAccuracy | None:
    """The accuracy on the new rows as estimated from confidence; None without labels or confidences, or with fewer than
    LEAST_OF_EACH right or wrong predictions on the reference rows: they show too little of the model's mistakes."""
    if reference.confidence is None or reference.correct is None or new.confidence is None or not len(new.confidence):
        return None
    if min(reference.correct.sum(), (~reference.correct).sum()) < LEAST_OF_EACH:
        return None
    return estimate_accuracy(reference.confidence, reference.correct, new.confidence)


def estimate_accuracy(confidence: Floats, correct: Mask, new_confidence: Floats, seed: int = 0) -> EstimatedAccuracy:
    """Estimates the accuracy on the new rows. Its interval covers three sources of chance: the reference rows (by the
    bootstrap), the choice of the calibration's parameters with them, and the labels of the new rows.

    Args:
        confidence: (N,) the probability of the predicted label on the reference rows, which the model has not trained
            on.
        correct: (N,) whether it was the true label.
        new_confidence: (M,)
        seed: Of the bootstrap.
    """
    method = _choose_method(confidence, correct)
    random = np.random.default_rng(seed)
    value = float(_fit(method, confidence, correct)(new_confidence).mean())
    draws = np.empty(DRAWS)
    for draw in range(DRAWS):
        rows = random.integers(0, len(confidence), len(confidence))
        chances = _fit(method, confidence[rows], correct[rows])(new_confidence)
        draws[draw] = (random.random(len(chances)) < chances).mean()
    low, high = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return EstimatedAccuracy(value, float(min(low, value)), float(max(high, value)), float(correct.mean()), method)


def _choose_method(confidence: Floats, correct: Mask) -> str:
    """The calibration with the smaller log loss on rows that it was not learned from."""
    fold = np.arange(len(correct)) % FOLDS
    np.random.default_rng(0).shuffle(fold)
    losses = {}
    for method in ("platt", "isotonic"):
        chances = np.empty(len(correct))
        for held_out in range(FOLDS):
            rest = fold != held_out
            chances[~rest] = _fit(method, confidence[rest], correct[rest])(confidence[~rest])
        losses[method] = -np.log(np.where(correct, chances, 1 - chances)).mean()
    return min(losses, key=lambda name: losses[name])


def _fit(method: str, confidence: Floats, correct: Mask) -> Calibrate:
    """The function from confidences to probabilities of being right, within half a row of 0 and 1."""
    rows, right = len(correct), int(correct.sum())
    least = 0.5 / (rows + 1)
    if right in (0, rows):
        return lambda given: np.full(len(given), (right + 0.5) / (rows + 1))
    if method == "isotonic":
        model = IsotonicRegression(y_min=least, y_max=1 - least, out_of_bounds="clip").fit(confidence, correct)
        return lambda given: np.asarray(model.predict(given), np.float64)
    logistic = LogisticRegression(C=100.0, solver="newton-cholesky").fit(_logits(confidence), correct)
    return lambda given: np.clip(logistic.predict_proba(_logits(given))[:, 1], least, 1 - least)


def _logits(confidence: Floats) -> Floats:
    """(N, 1)"""
    clipped = np.clip(confidence, 1e-6, 1 - 1e-6)
    return np.asarray(np.log(clipped / (1 - clipped)))[:, None]
