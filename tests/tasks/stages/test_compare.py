"""The model that a new one is compared with, and the key of the comparison."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.cache.results import Artifact, PinnedVersion
from tasks.stages.compare import compare, has_opponent
from training.recipe import Recipe, parse

pytestmark = pytest.mark.usefixtures("home")

CHAMPION = PinnedVersion(name="small", version="1", model="m", max_length=8)
PARTS = {
    "load_data": {"train.arrow": "1", "test.arrow": "2", "validation.arrow": "2", "labels.json": "3"},
    "tokenize": {"train.arrow": "4", "validation.arrow": "5"},
    "fit": {"model": "6"},
    "predict": {"validation.parquet": "7"},
}


def recipe(task: str = "sequence-classification", **gate: Any) -> Recipe:
    return parse(
        {
            "name": "test",
            "task": task,
            "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label"},
            "model": {"source": "hub", "path": "me/model"},
            "release": {"gate": gate},
        }
    )


def flat(recipe: Recipe, champion: PinnedVersion | None = None, **parts: dict[str, str]) -> dict[str, Any]:
    refs = [
        Artifact(stage=stage, key="k", digest="d", parts={**PARTS[stage], **parts.get(stage, {})}) for stage in PARTS
    ]
    rival = Artifact(stage="predict_champion", key="k", digest="r") if champion else None
    return compare.flat_inputs(recipe, champion, None, *refs, rival)[0]


def test_a_model_without_a_champion_is_compared_with_the_baseline_unless_the_recipe_wants_none() -> None:
    assert has_opponent(recipe(), None) and has_opponent(recipe(baseline=False), CHAMPION)
    assert not has_opponent(recipe(baseline=False), None)


@pytest.mark.parametrize(
    "changed", [{"load_data": {"train.arrow": "x"}}, {"tokenize": {"train.arrow": "x"}}, {"fit": {"model": "x"}}]
)
def test_the_inputs_of_the_baseline_count_only_where_there_is_no_champion(changed: dict[str, Any]) -> None:
    assert flat(recipe(), **changed) != flat(recipe())
    assert flat(recipe(), CHAMPION, **changed) == flat(recipe(), CHAMPION)


def test_the_groups_of_the_judged_rows_count_if_there_are_any() -> None:
    grouped = {"load_data": {"validation.groups.arrow": "g"}}
    for champion in (None, CHAMPION):
        plain, found = flat(recipe(), champion), flat(recipe(), champion, **grouped)
        (more,) = found.keys() - plain.keys()
        assert more.endswith("load_data/validation.groups.arrow") and {**plain, more: "g"} == found


def test_a_model_may_be_worse_than_the_champion_where_the_recipe_allows_it_but_not_than_the_baseline() -> None:
    allowed = recipe(margin=-0.02)
    assert flat(allowed, CHAMPION)["margin"] == -0.02
    assert flat(allowed)["margin"] == 0 and flat(recipe(margin=0.1))["margin"] == 0.1
