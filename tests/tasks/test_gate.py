"""Whether a model has earned its promotion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.gate import gate
from tasks.runtime.refs import Comparison, Ref, Verdict
from tasks.runtime.stage import Work
from tests.made import BESIDE
from training.recipe import parse

VALUES = {"accuracy": 0.8, "f1": 0.7, "log_loss": 0.4, "precision": float("nan")}
BETTER = BESIDE.model_copy(update={"warnings": ["small/1 does not know the label new: it gets no row of these right."]})


def judge(bounds: dict[str, Any], beside: Comparison | None = None) -> Verdict:
    recipe = parse(
        {
            "name": "test",
            "kind": "sequence-classification",
            "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label"},
            "model": {"source": "hub", "path": "me/model"},
            "evaluation": {"metrics": ["accuracy", "f1", "log_loss", "precision"]},
            "release": {"gate": bounds},
        }
    )
    figures = {"validation": {name: {"value": value, "low": None, "high": None} for name, value in VALUES.items()}}
    scores = Ref(kind="score", key="k", digest="d", figures=figures)
    compared = Ref(kind="compare", key="k", digest="d", figures=beside.model_dump()) if beside else None
    verdict = gate.make(Work("k", Path(), "run"), recipe, scores, compared)
    assert isinstance(verdict, Verdict)
    return verdict


@pytest.mark.parametrize(
    ("bounds", "missed"),
    [
        ({}, []),
        ({"minimum": {"accuracy": 0.8}}, []),
        ({"minimum": {"accuracy": 0.81}}, ["accuracy 0.8 < 0.81"]),
        ({"minimum": {"accuracy": 0.5, "f1": 0.9}}, ["f1 0.7 < 0.9"]),
        ({"minimum": {"f1": 0.0}, "maximum": {"log_loss": 0.4}}, []),
        ({"maximum": {"log_loss": 0.39}}, ["log_loss 0.4 > 0.39"]),
        ({"minimum": {"precision": 0.0}}, ["precision nan < 0"]),
    ],
)
def test_a_model_is_rejected_when_it_misses_a_bound_and_each_is_named(
    bounds: dict[str, Any], missed: list[str]
) -> None:
    verdict = judge(bounds)
    assert verdict.decision == ("reject" if missed else "promote")
    assert all(f"validation.{figure}" in verdict.reason for figure in missed)
    assert [str(check) for check in verdict.checks if not check.held] == [f"validation.{figure}" for figure in missed]


FACTS = "accuracy 0.8710 beside 0.8603 of small/1 on the same 1,872 rows of test: 52 rows better, 32 worse; "
MEANINGS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "promote", "that is better by at least 0.0021 at 95% confidence."),
    ({"better": False, "p_value": 0.3}, "keep", "that it is better may be chance (p = 0.3)."),
    ({"better": False, "gain": 0.0}, "keep", "that is not better."),
    ({"better": False, "margin": 0.01}, "keep", "that it is better by more than 0.01 may be chance (p = 0.019)."),
    ({"better": False, "margin": 0.02}, "keep", "that is not better by more than 0.02."),
    ({"margin": -0.01, "at_least": -0.004}, "promote", "that is worse by at most 0.0040 at 95% confidence."),
    ({"better": False, "margin": -0.01}, "keep", "it may be worse by more than 0.01 (p = 0.019)."),
    ({"better": False, "margin": -0.01, "gain": -0.02}, "keep", "that is worse by more than 0.01."),
    ({"better": False, "gain": float("nan")}, "keep", "one of these is no number, so nothing shows that it is better."),
]


@pytest.mark.parametrize(("found", "decision", "meaning"), MEANINGS)
def test_a_model_is_promoted_or_kept_for_a_reason_in_one_sentence(
    found: dict[str, Any], decision: str, meaning: str
) -> None:
    verdict = judge({}, BETTER.model_copy(update=found))
    assert (verdict.decision, verdict.reason) == (decision, FACTS + meaning)


def test_a_better_model_that_misses_a_bound_is_rejected_with_the_comparison_as_evidence() -> None:
    verdict = judge({"minimum": {"accuracy": 0.9}}, BETTER)
    assert (verdict.decision, verdict.comparison) == ("reject", BETTER)


def test_a_split_that_also_chose_the_checkpoint_is_warned_of() -> None:
    (warning,) = judge({}).warnings
    assert warning.startswith("validation also chose the checkpoint")


def test_what_makes_the_champion_less_comparable_is_a_warning_of_the_verdict() -> None:
    assert BETTER.warnings[0] in judge({}, BETTER).warnings
