"""Whether a model has earned its promotion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.gate import gate
from tasks.runtime.refs import Comparison, Ref, Verdict
from tasks.runtime.stage import Work
from training.recipe import parse

VALUES = {"accuracy": 0.8, "f1": 0.7, "log_loss": 0.4, "precision": float("nan")}
BETTER = Comparison(
    champion="small/1", metric="accuracy", split="validation", rows=100, value=0.8, champion_value=0.7, gain=0.1,
    at_least=0.02, margin=0.0, confidence=0.95, method="mcnemar", p_value=0.01, better=True,
)  # fmt: skip


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


def test_a_model_no_better_than_the_champion_is_kept_and_a_better_one_promoted() -> None:
    assert judge({}, BETTER).decision == "promote"
    kept = judge({}, BETTER.model_copy(update={"better": False, "p_value": 0.3}))
    assert kept.decision == "keep" and "p = 0.3" in kept.reason
    assert judge({"minimum": {"accuracy": 0.9}}, BETTER).decision == "reject"


def test_a_split_that_also_chose_the_checkpoint_is_warned_of() -> None:
    (warning,) = judge({}).warnings
    assert warning.startswith("validation also chose the checkpoint")
