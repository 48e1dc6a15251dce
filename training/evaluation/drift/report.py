"""The drift report: all comparisons of new rows with reference rows, and the verdict.

A difference counts only if it is significant and large enough. Both are judged by Holm's method (1979) over all
comparisons of the report, at the error level that is left for this look at the model:

drifted     some difference is significantly larger than its threshold;
watch       some difference is significant, and its estimate is above the threshold;
steady      neither;
undecided   there are fewer than `min_rows` rows on either side, and nothing is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq

from training.evaluation.drift import held_out
from training.evaluation.drift.effects import Effect, Floats, compare_categories, compare_flags, compare_numbers
from training.evaluation.drift.estimated_accuracy import LEAST_OF_EACH, EstimatedAccuracy, estimate_accuracy
from training.evaluation.drift.text_statistics import (
    FIELD,
    count_characters,
    find_empty,
    find_repeated,
    find_scripts,
)

Verdict = Literal["steady", "watch", "drifted", "undecided"]
Unit = Literal["cohens_w", "distance", "auc"]
MAX_CATEGORIES = 100
"""A text field of predictions with more different values is compared by length."""


@dataclass(frozen=True)
class Thresholds:
    """The smallest effects that matter, by unit. By default, about a tenth of the rows differ: a tenth of the rows has
    another one of two labels, a tenth lies on the other side of some number, or a tenth can be told from all others."""

    cohens_w: float = 0.1
    distance: float = 0.1
    auc: float = 0.55

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


@dataclass(frozen=True)
class DriftComparison:
    """One line of the report."""

    name: str
    unit: Unit
    threshold: float
    effect: Effect
    details: Mapping[str, Any] = field(default_factory=dict)


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


def compare(reference: Observations, new: Observations, thresholds: Thresholds, seed: int = 0) -> list[DriftComparison]:
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
    if min(map(len, filled)) >= held_out.FEWEST_ROWS:
        words = held_out.compare_words(filled[0], filled[1], thresholds.auc, seed=seed)
        found.append(DriftComparison("words", "auc", thresholds.auc, words.effect, words.details))
    first, second = reference.embeddings, new.embeddings
    if first is not None and second is not None and min(len(first), len(second)) >= held_out.FEWEST_ROWS:
        rows = held_out.compare_embeddings(first, second, thresholds.auc, seed=seed)
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


def estimate(reference: Observations, new: Observations) -> EstimatedAccuracy | None:
    """The accuracy on the new rows as estimated from confidence; None without labels or confidences, or with fewer than
    LEAST_OF_EACH right or wrong predictions on the reference rows: they show too little of the model's mistakes."""
    if reference.confidence is None or reference.correct is None or new.confidence is None or not len(new.confidence):
        return None
    if min(reference.correct.sum(), (~reference.correct).sum()) < LEAST_OF_EACH:
        return None
    return estimate_accuracy(reference.confidence, reference.correct, new.confidence)


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


LABEL, PROBABILITY = "label", "probability"
"""The fields of a record with one label, which the estimate of accuracy needs."""
DIGITS = 2
"""Of compared probabilities: in a model that is always sure, every row's third digit may change and mean nothing."""


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
    embeddings = np.stack(predicted["embedding"].to_pylist()).astype(np.float64) if len(predicted) else None
    return Observations(texts, fields, tokens, tokens / words, unknown, embeddings, confidence, correct)
