"""Whether a model has earned its promotion."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.gate import gate
from tasks.runtime.refs import Ref
from tasks.runtime.stage import Work
from training.recipe import parse


@pytest.mark.parametrize(
    ("minimum", "promoted"),
    [
        ({}, True),
        ({"validation.accuracy": 0.8}, True),
        ({"validation.accuracy": 0.81}, False),
        ({"validation.accuracy": 0.5, "validation.f1": 0.9}, False),
        ({"validation.f1": 0.0}, True),
        ({"validation.precision": 0.0}, False),  # not a number
    ],
)
def test_a_model_is_promoted_when_every_minimum_holds(minimum: dict[str, float], promoted: bool) -> None:
    recipe = parse(
        {
            "name": "test",
            "kind": "sequence-classification",
            "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label"},
            "model": {"source": "hub", "path": "me/model"},
            "evaluation": {"metrics": ["accuracy", "f1", "precision"]},
            "release": {"minimum": minimum},
        }
    )
    values = {"accuracy": 0.8, "f1": 0.7, "precision": float("nan")}
    figures = {"validation": {name: {"value": value, "low": None, "high": None} for name, value in values.items()}}
    verdict = gate.make(Work("k", Path(), "run"), recipe, Ref(kind="score", key="k", digest="d", figures=figures))
    assert verdict.promote is promoted
    assert {check.figure: check.minimum for check in verdict.checks} == minimum
