"""Comparisons on the same rows, counted by a real registry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Barrier, current_thread
from typing import Any

import pytest
from mlflow import MlflowClient

from tasks.cache.results import Artifact, Champion, NumberedComparison
from tasks.cache.stage import Work
from tasks.registry import comparisons
from tasks.registry.comparisons import CLAIM, COMPARISON_TAG, number_comparison
from tasks.stages.compare import compare, count_comparison
from tasks.tracking.connection import MODEL_TAG, connect
from training.evaluation.significance import alpha_spent
from training.recipe import Recipe, parse

CHAMPION = Champion(name="reviews", version="1", model="champion", max_length=32)


def recipe(metrics: Sequence[str] = ("accuracy", "f1"), **gate: Any) -> Recipe:
    return parse(
        {
            "name": "test",
            "task": "sequence-classification",
            "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label"},
            "model": {"source": "hub", "path": "me/model"},
            "evaluation": {"metrics": [*metrics]},
            "release": {"registry": "reviews", "gate": {"control": "all", **gate}},
        }
    )


def rows(digest: str) -> Artifact:
    return Artifact(stage="load_data", key="k", digest="d", parts={"validation.arrow": digest, "labels.json": "l"})


def count(
    model: str, rival: str | None = "theirs", data: str = "rows", predicted: str = "", **gate: Any
) -> NumberedComparison | None:
    """The number of a run that has trained this model. Its predictions are named like it by default."""
    trained = Artifact(stage="fit", key="k", digest="d", parts={"model": model})
    new, old = (
        Artifact(stage=stage, key="k", digest="d", parts={"validation.parquet": str(digest)})
        for stage, digest in (("predict", predicted or model), ("predict_champion", rival))
    )
    inputs = (recipe(**gate), rows(data), trained, new, old if rival else None)
    found = count_comparison.make(Work("k", Path(), "run"), *inputs)
    assert found is None or isinstance(found, NumberedComparison)
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
    assert found and 1 - found.confidence == pytest.approx(alpha_spent(2, 0.05))


def test_other_predictions_of_one_model_or_of_its_rival_are_another_comparison(client: MlflowClient) -> None:
    assert [number("a"), number("a", predicted="beams"), number("a", rival="beams")] == [1, 2, 3]
    assert [number("b", predicted="a"), number("a", predicted="beams")] == [1, 2]  # the same tests


def test_an_edited_metric_of_the_users_is_another_comparison(
    client: MlflowClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    evaluation = {"metrics": ["accuracy", "mine:Errors"], "compare": "errors"}
    found = []
    for code in ("class Errors: share = 1", "class Errors: share = 2", "class Errors: share = 1  # as before"):
        (tmp_path / "mine.py").write_text(code)
        found.append(number("a", **evaluation))
    assert [*found, number("a", **evaluation, maximum={"errors": 9.0})] == [1, 2, 1, 3]  # less of it is better


def test_new_rows_begin_anew(client: MlflowClient) -> None:
    assert [number("a"), number("b"), number("b", data="new"), number("b")] == [1, 2, 1, 2]


def test_a_settled_number_never_moves_and_no_other_home_gets_it(client: MlflowClient) -> None:
    assert number_comparison("reviews", "rows", "ours") == 1
    client.set_registered_model_tag("reviews", f"{COMPARISON_TAG}rows.theirs", f"{CLAIM}1")
    assert number_comparison("reviews", "rows", "ours") == 1
    assert number_comparison("reviews", "rows", "theirs") == 2
    assert number_comparison("reviews", "rows", "third") == 3


def test_homes_that_count_in_step_settle_on_different_numbers(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.create_registered_model("reviews")
    both, rounds, read = Barrier(2, timeout=20), Counter[str](), comparisons._read_numbers

    def in_step(*given: Any) -> Any:
        rounds[current_thread().name] += 1
        if rounds[current_thread().name] > 9:
            both.abort()
        both.wait()
        found = read(*given)
        both.wait()
        return found

    monkeypatch.setattr(comparisons, "_read_numbers", in_step)
    monkeypatch.setattr(comparisons, "named_lock", lambda name: nullcontext())  # a lock of one home
    with ThreadPoolExecutor(2) as homes:
        found = [*homes.map(lambda home: number_comparison("reviews", "rows", home), ["ours", "theirs"])]
    assert len(set(found)) == 2


def test_the_champion_itself_is_not_counted(client: MlflowClient) -> None:
    client.create_registered_model("reviews")
    client.create_model_version("reviews", "file:///nowhere", tags={MODEL_TAG: "a"})
    client.set_registered_model_alias("reviews", "champion", "1")
    assert count("a", rival=None) is None
    assert number("b") == 1


def test_a_comparison_is_made_again_if_its_number_is_another(home: Path) -> None:
    predictions = Artifact(stage="predict", key="k", digest="d", parts={"validation.parquet": "p"})
    tokens, trained, rival = (
        Artifact(stage=stage, key="k", digest="r") for stage in ("tokenize", "fit", "predict_champion")
    )

    def values(count: NumberedComparison | None) -> Any:
        return (
            compare.prepare(recipe(), CHAMPION, count, rows("rows"), tokens, trained, predictions, rival)
            .inputs()
            .values
        )

    first, second = (NumberedComparison(comparison=n, confidence=0.99) for n in (1, 2))
    assert values(None) != values(first) != values(second) and values(first) == values(first)
