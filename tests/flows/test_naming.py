"""Names of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.naming import flow_run_name, run_name
from tests.flows.small import write_project
from training.recipe import load

KEY = "70c15ef49fa3a36b1311abd76a21bf48339ba089"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ({}, "small · bert from scratch · lr 5e-3"),
        ({"training.learning_rate": 3e-5}, "small · bert from scratch · lr 3e-5"),
        ({"training.learning_rate": 0.05, "training.seed": 7}, "small · bert from scratch · lr 0.05 · seed 7"),
        ({"model": {"source": "hub", "path": "distilbert/distilbert-base-uncased"}}, "small · distilbert · lr 5e-3"),
        ({"model": {"source": "hub", "path": "google-bert/bert-large-cased"}}, "small · bert-large-cased · lr 5e-3"),
        ({"model": {"source": "folder", "path": f"artifacts/fit/{KEY}/model"}}, "small · 70c15ef49fa3 · lr 5e-3"),
        ({"model.start_from": "champion"}, "small · bert from champion · lr 5e-3"),
        ({"training.lerning_rate": 1}, "small"),
    ],
)
def test_a_run_is_named_by_recipe_model_rate_and_what_was_overridden(
    tmp_path: Path, overrides: dict[str, Any], name: str
) -> None:
    assert run_name(load(write_project(tmp_path)), overrides) == name


def test_a_name_is_never_longer_than_can_be_read(tmp_path: Path) -> None:
    overrides = {f"model.config.{name}_dropout_prob": "x" * 100 for name in ("hidden", "attention_probs", "classifier")}
    name = run_name(load(write_project(tmp_path)), overrides)
    assert len(name) == 120 and name.endswith("…")


def test_a_flow_run_whose_recipe_is_none_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.runtime import flow_run

    for recipe, name in (({"name": "small", "kind": "none"}, "small"), ("nonsense", "?")):
        monkeypatch.setattr(flow_run, "get_parameters", lambda recipe=recipe: {"recipe": recipe})
        assert flow_run_name() == name
