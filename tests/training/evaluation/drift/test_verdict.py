"""The verdict: steady without a shift, however often one looks; drifted with one that matters."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from training.evaluation.drift import verdict as drift_report
from training.evaluation.drift.effects import Effect
from training.evaluation.drift.report_plots import draw_report
from training.evaluation.drift.verdict import (
    DriftComparison,
    Observations,
    Thresholds,
    adjust_holm,
    build_report,
    compare,
    estimate_accuracy,
    judge,
)
from training.evaluation.significance import alpha_spent

USUAL = Thresholds(cohens_w=0.1, distance=0.1, auc=0.55)
"""The defaults of the recipe."""

WORDS = [f"word{number}" for number in range(300)]
REPORTS = 100


def rows(seed: int, number: int = 200, new_words: float = 0.0, hard: float = 1.0) -> Observations:
    """Texts of random words with a model's outputs. A share of the rows is of another kind."""
    draw, arrays = random.Random(seed), np.random.default_rng(seed)
    texts, is_other = [], arrays.random(number) < new_words
    for other in is_other:
        words = [draw.choice(WORDS) for _ in range(draw.randint(4, 12))]
        texts.append(" ".join(["newcomer", *words] if other else words))
    confidence = arrays.beta(4 / hard, 1, number) / 2 + 0.5
    return Observations(
        texts=texts,
        fields={"label": np.where(arrays.random(number) < 0.4, "yes", "no").tolist(), "probability": confidence},
        tokens=np.array([len(text.split()) for text in texts], np.float64),
        unknown=np.where(is_other, 0.5, 0.0),
        embeddings=arrays.standard_normal((number, 8)) + 2.0 * is_other[:, None],
    )


def verdict(new: Observations, alpha: float = 0.05, min_rows: int = 100) -> str:
    report = build_report(rows(0, 400), new, USUAL, alpha=alpha, min_rows=min_rows)
    return str(report["verdict"])


@pytest.mark.slow
def test_without_a_shift_one_report_in_twenty_is_not_steady_at_most() -> None:
    """Reference rows are drawn again too. The benchmark of `tests/drift` does this with real rows."""
    found = [judge(compare(rows(n, 300), rows(10_000 + n), USUAL), 0.05)[0] for n in range(REPORTS)]
    assert REPORTS - found.count("steady") <= 12  # 5, and three standard deviations


def test_a_third_of_rows_of_another_kind_is_drift_in_nearly_every_report() -> None:
    assert [verdict(rows(seed, 300, new_words=0.35)) for seed in range(1, 11)].count("drifted") >= 9


@pytest.mark.parametrize("with_text", [1, 2, 3, 4])
def test_few_rows_with_a_text_leave_all_figures_defined(with_text: int) -> None:
    """An undefined p-value would also hide every other difference of the report."""
    new = rows(1, 300, new_words=0.5)
    few = replace(new, texts=[text if place < with_text else "" for place, text in enumerate(new.texts)])
    report = build_report(rows(0, 400), few, USUAL, alpha=0.05, min_rows=100)
    json.dumps(report, allow_nan=False)
    assert report["verdict"] == "drifted"
    assert ("words" in [line["name"] for line in report["comparisons"]]) == (with_text == 4)


def test_the_most_telling_words_are_those_of_the_new_rows() -> None:
    report = build_report(rows(0, 400), rows(1, 300, new_words=0.5), USUAL, alpha=0.05, min_rows=100)
    (line,) = [line for line in report["comparisons"] if line["name"] == "words"]
    assert line["words"][0]["word"] == "newcomer" and line["words"][0]["speaks_for"] == "new"
    assert line["words"][0]["reference"] == 0 and 0.4 < line["words"][0]["new"] < 0.6


def test_fewer_rows_than_the_least_number_give_no_verdict() -> None:
    assert verdict(rows(1, 99, new_words=1.0)) == "undecided"


def test_later_looks_need_stronger_evidence_and_all_looks_share_the_error_level() -> None:
    levels = [alpha_spent(look, 0.05) for look in range(1, 2_000)]
    assert levels == sorted(levels, reverse=True) and sum(levels) < 0.05
    new = rows(1, 130, new_words=0.14)
    assert verdict(new) == "watch" and verdict(new, alpha=alpha_spent(300, 0.05)) == "steady"


def test_a_significant_difference_below_its_threshold_is_steady() -> None:
    small = DriftComparison("tokens", "distance", 0.1, Effect(0.05, 0.04, 0.06, p_value=1e-9, p_threshold=1.0))
    large = DriftComparison("tokens", "distance", 0.1, Effect(0.12, 0.09, 0.15, p_value=1e-9, p_threshold=0.2))
    clear = DriftComparison("tokens", "distance", 0.1, Effect(0.30, 0.25, 0.35, p_value=1e-9, p_threshold=1e-9))
    assert [judge([found], 0.05)[0] for found in (small, large, clear)] == ["steady", "watch", "drifted"]


def test_many_comparisons_are_corrected_together() -> None:
    assert adjust_holm([0.01, 0.04, 0.03, 0.2]) == pytest.approx([0.04, 0.09, 0.09, 0.2])
    one = DriftComparison("tokens", "distance", 0.1, Effect(0.3, 0.2, 0.4, p_value=0.01, p_threshold=0.01))
    other = DriftComparison("words", "auc", 0.6, Effect(0.5, 0.4, 0.6, p_value=0.5, p_threshold=0.9))
    assert judge([one], 0.05)[0] == "drifted" and judge([one, *[other] * 9], 0.05)[0] == "steady"


def test_equal_rows_in_a_larger_sample_are_not_more_often_repeated() -> None:
    """Of 3,000 draws from 500 texts, nearly all are repeated; of 200 draws, few."""
    texts = [
        np.random.default_rng(seed).integers(0, 500, number).astype(str).tolist()
        for seed, number in ((1, 3000), (2, 200))
    ]
    (line,) = [c for c in compare(Observations(texts[0]), Observations(texts[1]), USUAL) if c.name == "repeated rows"]
    assert line.effect.p_value > 0.01


def test_rows_in_another_script_and_empty_rows_are_found_by_name() -> None:
    new = ["привет мир как дела"] * 100 + [""] * 100
    found = {c.name: c for c in compare(Observations(rows(0).texts), Observations(new), USUAL)}
    assert all(found[name].effect.p_threshold < 1e-6 for name in ("script", "empty rows", "repeated rows"))


# The accuracy without labels: its interval has the true one, as long as labels mean the same.


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark of `tests/drift` has all."""
    monkeypatch.setattr(drift_report, "DRAWS", 80)


def confidences(random: np.random.Generator, number: int, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Confidences of an overconfident model, and whether it is right. With a shift, there are more hard rows."""
    logits = np.abs(random.normal(2.0 - shift, 1.5, number))
    return 1 / (1 + np.exp(-logits)), random.random(number) < 1 / (1 + np.exp(-0.5 * logits))


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, 1.5])
def test_the_interval_has_the_true_accuracy_in_nine_of_ten_cases(shift: float) -> None:
    covered, errors = 0, []
    for trial in range(12):
        random = np.random.default_rng([trial, 1])
        confidence, correct = confidences(random, 600)
        new, truth = confidences(random, 400, shift)
        found = estimate_accuracy(confidence, correct, new, seed=trial)
        covered += found.low <= truth.mean() <= found.high
        errors.append(found.value - truth.mean())
    assert covered >= 10
    assert abs(np.mean(errors)) < 0.015


def test_the_estimate_corrects_an_overconfident_model() -> None:
    random = np.random.default_rng(2)
    confidence, correct = confidences(random, 2000)
    found = estimate_accuracy(confidence, correct, confidences(random, 500)[0])
    assert confidence.mean() - correct.mean() > 0.1 and abs(found.value - correct.mean()) < 0.03
    assert found.reference == correct.mean()


@pytest.mark.parametrize("right", [0, 60])
def test_reference_rows_that_are_all_right_or_all_wrong_leave_some_doubt(right: int) -> None:
    found = estimate_accuracy(np.linspace(0.5, 1, 60), np.arange(60) < right, np.linspace(0.5, 1, 50))
    assert 0 < found.value < 1


def test_labels_that_changed_their_meaning_are_not_seen() -> None:
    """The caveat of every report, as a fact."""
    random = np.random.default_rng(3)
    confidence, correct = confidences(random, 1000)
    new, truth = confidences(random, 1000)
    found = estimate_accuracy(confidence, correct, new)
    assert found.low > (~truth).mean() + 0.1


def test_report_is_drawn_if_any_difference_matters(tmp_path: Path) -> None:
    """At the smallest thresholds that a recipe takes, effects cannot be drawn as multiples of the threshold."""
    reference, new = rows(0, 400), rows(1, 300, new_words=0.5)
    report = build_report(reference, new, Thresholds(cohens_w=0, distance=0, auc=0.5), alpha=0.05, min_rows=100)
    assert report["verdict"] == "drifted"
    draw_report(report, reference, new, "a version", tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 0
