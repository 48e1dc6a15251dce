"""Comparisons on the same rows, counted by a real registry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tasks.champion import count_comparison
from tasks.compare import ingredients
from tasks.runtime.comparisons import COMPARISON_TAG, count_of
from tasks.runtime.connection import MODEL_TAG, connect
from tasks.runtime.refs import Champion, Counted, Ref
from tasks.runtime.stage import Work
from training.recipe import Recipe, parse
from training.spending import level_of

CHAMPION = Champion(name="reviews", version="1", model="champion", max_length=32)


def recipe(**gate: Any) -> Recipe:
    return parse(
        {
            "name": "test",
            "kind": "sequence-classification",
            "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label"},
            "model": {"source": "hub", "path": "me/model"},
            "evaluation": {"metrics": ["accuracy", "f1"]},
            "release": {"registry": "reviews", "gate": {"control": "all", **gate}},
        }
    )


def rows(digest: str) -> Ref:
    return Ref(kind="load_data", key="k", digest="d", parts={"validation.arrow": digest, "labels.json": "l"})


def count(model: str, champion: Champion | None = CHAMPION, data: str = "rows", **gate: Any) -> Counted | None:
    """What a run counts that has trained this model."""
    trained = Ref(kind="fit", key="k", digest="d", parts={"model": model})
    found = count_comparison.make(Work("k", Path(), "run"), recipe(**gate), rows(data), trained, champion)
    assert found is None or isinstance(found, Counted)
    return found


@pytest.fixture
def client(tracked: Path) -> MlflowClient:
    return connect()


def number(model: str, **other: Any) -> int:
    found = count(model, **other)
    assert found
    return found.comparison


def test_each_comparison_on_the_same_rows_takes_more_confidence_and_a_known_one_keeps_its_own(
    client: MlflowClient,
) -> None:
    assert [number("a"), number("b"), number("a"), number("c")] == [1, 2, 1, 3]
    assert number("a", compare="f1") == 4  # another chance
    found = count("b")
    assert found and 1 - found.confidence == pytest.approx(level_of(2, 0.05))


def test_new_rows_begin_anew(client: MlflowClient) -> None:
    assert [number("a"), number("b"), number("b", data="new"), number("b")] == [1, 2, 1, 2]


def test_two_homes_that_took_one_number_share_no_level(client: MlflowClient) -> None:
    assert count_of("reviews", "rows", "ours") == 1
    client.set_registered_model_tag("reviews", f"{COMPARISON_TAG}rows.theirs", "1")
    assert count_of("reviews", "rows", "ours") == 2
    assert count_of("reviews", "rows", "third") == 3


def test_the_champion_itself_is_not_counted(client: MlflowClient) -> None:
    client.create_registered_model("reviews")
    client.create_model_version("reviews", "file:///nowhere", tags={MODEL_TAG: "a"})
    client.set_registered_model_alias("reviews", "champion", "1")
    assert count("a", champion=None) is None
    assert number("b") == 1


def test_a_comparison_is_made_again_if_its_number_is_another() -> None:
    predictions = Ref(kind="predict", key="k", digest="d", parts={"validation.parquet": "p"})
    tokens, trained, rival = (Ref(kind=stage, key="k", digest="r") for stage in ("tokenize", "fit", "predict_champion"))

    def values(count: Counted | None) -> Any:
        return ingredients(recipe(), rows("rows"), tokens, trained, predictions, CHAMPION, rival, count).values

    first, second = (Counted(comparison=n, confidence=0.99) for n in (1, 2))
    assert values(None) != values(first) != values(second) and values(first) == values(first)
