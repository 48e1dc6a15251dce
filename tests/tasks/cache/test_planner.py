"""The walk that only looks: what would run, and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tasks.cache import store
from tasks.cache.history import History
from tasks.cache.planner import UNKNOWN, PlannedStage, Planner, Repeatable, differences
from tasks.cache.stage import Inputs, Stage, Work, action
from tasks.home import MARK
from tests.tasks.plain_stages import stage

calls: list[str] = []


def inputs(length: int) -> Inputs:
    return Inputs({"tokens": {"max_length": length}})


@stage(inputs, may_repeat=True)
def tokenize(work: Work, length: int) -> Mapping[str, Any]:
    raise AssertionError("planner makes nothing")


@stage(lambda above, rate=1: Inputs({"upstream": {"tokenize": above.digest}, "rate": rate}))
def fit(work: Work, above: Any, rate: int = 1) -> Mapping[str, Any]:
    raise AssertionError("planner makes nothing")


@stage(lambda above: Inputs({"upstream": {"fit": above.digest}}))
def predict(work: Work, above: Any) -> Mapping[str, Any]:
    raise AssertionError("planner makes nothing")


@stage(lambda above: Inputs({"upstream": {"tokenize": above.digest}}), where="there is a champion")
def compare(work: Work, above: Any) -> Mapping[str, Any]:
    raise AssertionError("planner makes nothing")


@action(lambda: Inputs({"recipe": 1}), read_only=True)
def resolve(work: Work) -> int:
    calls.append(work.run)
    return 128


@action(lambda value: Inputs({"value": getattr(value, "digest", value)}))
def publish(work: Work, value: Any) -> str:
    raise AssertionError("planner acts on nothing")


def publish_tokens(length: int) -> Any:
    """The artifact of a run of `tokenize`."""
    return publish_output(tokenize, length)


def publish_output(of: Stage[Any], *inputs: Any) -> Any:
    flat, _ = of.flat_inputs(*inputs)
    key = of.key(flat)
    with store.filling(of.name, key) as aside:
        (aside / "train.arrow").write_text(str(inputs))
        ref = store.publish(aside, of.name, key, flat, {"tokens": inputs[0]} if of is tokenize else {})
    History("recipe").remember_key(of.name, key)
    return ref


def look(of: Stage[Any], *inputs: Any, force: frozenset[str] = frozenset()) -> tuple[Any, PlannedStage]:
    planner = Planner("recipe", force)
    result = planner(of, *inputs)
    return result, planner.rows[0]


def test_a_stage_that_never_ran_will_run(home: Path) -> None:
    result, row = look(tokenize, 128)
    assert result is UNKNOWN
    assert (row.state, row.reasons) == ("will run", ("it has not run before",)) and row.key is not None


def test_a_whole_artifact_is_cached_and_handed_on_with_its_figures(home: Path) -> None:
    ref = publish_tokens(128)
    result, row = look(tokenize, 128)
    assert result == ref and (row.state, row.key, ref.result) == ("cached", ref.key, {"tokens": 128})


def test_a_changed_ingredient_is_named_with_both_values(home: Path) -> None:
    publish_tokens(128)
    assert look(tokenize, 256)[1].reasons == ("tokens.max_length 128 → 256",)


def test_a_deleted_artifact_is_a_reason_to_run(home: Path) -> None:
    ref = publish_tokens(128)
    store.discard("tokenize", ref.key, "test")
    assert look(tokenize, 128)[1].reasons == ("its artifact is gone",)


def test_a_damaged_artifact_will_be_made_again_and_looking_leaves_it_where_it_is(home: Path) -> None:
    ref = publish_tokens(128)
    (ref.path / "train.arrow").write_text("x")
    result, row = look(tokenize, 128)
    assert result is UNKNOWN and row.state == "will run"
    assert row.reasons[0].startswith("damaged: ") and "train.arrow" in row.reasons[0]
    assert (ref.path / "train.arrow").read_text() == "x" and not (home / "quarantine").exists()


def test_a_forced_stage_will_run_and_what_it_gives_is_not_known(home: Path) -> None:
    publish_tokens(128)
    result, row = look(tokenize, 128, force=frozenset({"tokenize"}))
    assert result is UNKNOWN and (row.state, row.reasons) == ("will run", ("forced",))


def test_everything_below_a_stage_that_will_run_runs_too_with_that_reason(home: Path) -> None:
    planner = Planner("recipe")
    tokens = planner(tokenize, 128)
    trained = planner(fit, tokens)
    planner(publish, trained)
    assert [(row.name, row.state, row.key is None) for row in planner.rows] == [
        ("tokenize", "will run", False),
        ("fit", "will run", True),
        ("publish", "will run", True),
    ]
    assert planner.rows[1].reasons == ("tokenize runs before it",)


def walk_after_a_run(length: int, rate: int = 1) -> dict[str, tuple[str, str]]:
    """State and reason of each stage, where a run with length 128 and rate 1 has completed."""
    publish_output(predict, publish_output(fit, publish_tokens(128)))
    planner = Planner("recipe")
    trained = planner(fit, planner(tokenize, length), rate)
    planner(publish, planner(predict, trained))
    assert all(row.key is None for row in planner.rows if row.state == "may run")
    return {row.name: (row.state, "; ".join(row.reasons)) for row in planner.rows}


def test_below_a_stage_that_may_give_the_same_again_a_stage_may_run_with_that_condition(home: Path) -> None:
    assert walk_after_a_run(256) == {
        "tokenize": ("will run", "tokens.max_length 128 → 256"),
        "fit": ("may run", "only if tokenize gives something else than last time"),
        "predict": ("may run", "only if fit gives something else than last time"),
        "publish": ("will run", "its inputs are different"),
    }


def test_below_such_a_stage_a_changed_setting_of_ones_own_is_a_reason_to_run(home: Path) -> None:
    rows = walk_after_a_run(256, rate=2)
    assert rows["fit"] == ("will run", "rate 1 → 2")
    assert rows["predict"] == ("will run", "fit runs before it")


def test_below_a_training_that_runs_everything_runs(home: Path) -> None:
    rows = walk_after_a_run(128, rate=2)
    assert rows["tokenize"][0] == "cached" and rows["predict"] == ("will run", "fit runs before it")


def test_an_action_below_may_act_if_the_last_run_did_the_same(home: Path) -> None:
    History("recipe").remember_key("publish", publish.key({"value": "x"}))
    last = Repeatable("x")
    planner = Planner("recipe")
    planner(tokenize, 128)
    assert isinstance(planner(publish, last), Repeatable) and planner(publish, UNKNOWN) is UNKNOWN
    assert planner(publish, Repeatable("y")) is UNKNOWN
    assert [row.state for row in planner.rows] == ["will run", "may run", "will run", "will run"]
    assert planner.rows[-1].reasons == ("its inputs are different",)


def test_a_foreseeable_action_is_called_without_a_run(home: Path) -> None:
    calls.clear()
    result, row = look(resolve)
    assert (result, row.state, calls) == (128, "ran", [""])


def test_a_stage_that_is_not_always_run_may_run_where_that_is_not_known(home: Path) -> None:
    planner = Planner("recipe")
    rival = planner(compare, planner(tokenize, 128))
    assert rival is UNKNOWN
    assert (planner.rows[1].state, planner.rows[1].reasons) == ("may run", ("where there is a champion",))


def test_an_action_is_done_when_the_last_run_did_the_same(home: Path) -> None:
    _, row = look(publish, 1)
    assert (row.state, row.reasons) == ("will run", ("it acts on the outside world",))
    assert row.key is not None
    History("recipe").remember_key("publish", row.key)
    assert look(publish, 1)[1].state == "cached"
    assert look(publish, 2)[1].state == "will run"


def test_a_planner_creates_nothing(home: Path) -> None:
    planner = Planner("recipe")
    length = planner(resolve)
    planner(fit, planner(tokenize, length))
    assert [path.name for path in home.iterdir()] == [MARK]
    ref = publish_tokens(128)
    before = sorted(home.rglob("*"))
    assert Planner("recipe")(tokenize, 128) == ref
    assert sorted(home.rglob("*")) == before


CHANGES: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"tokens.max_length": 128}, {"tokens.max_length": 256}, ["tokens.max_length 128 → 256"]),
    ({"model.path": None}, {"model.path": "m"}, ["model.path none → m"]),
    ({"model.config": None}, {"model.config": {}}, ["model.config none → {}"]),
    ({"model.config": {}}, {"model.config.hidden_size": 8}, ["model.config.hidden_size none → 8"]),
    (
        {"code.training/tokenization/encoder.py": "a"},
        {"code.training/tokenization/encoder.py": "b"},
        ["training/tokenization/encoder.py changed"],
    ),
    ({}, {"code.training/new.py": "b"}, ["training/new.py added"]),
    ({"code.training/old.py": "a"}, {}, ["training/old.py removed"]),
    ({"library.torch": "2.12.0"}, {"library.torch": "2.13.0"}, ["torch 2.12.0 → 2.13.0"]),
    ({}, {"library.deepspeed": "0.19.8"}, ["deepspeed none → 0.19.8"]),
    ({"files.train": ["a"]}, {"files.train": ["b"]}, ["data/train.csv changed"]),
    ({"files.train": ["a"]}, {}, ["data/train.csv is gone"]),
    ({"files.train": ["a"]}, {"files": {}}, ["data/train.csv is gone"]),
    ({"upstream.fit": "a"}, {"upstream.fit": "b"}, ["fit gave something else"]),
    ({"upstream": {}}, {"upstream.fit": "b"}, ["fit gave something else"]),
    ({"commit": "a"}, {"commit": "b"}, ["glue at main a → b"]),
    ({"kind": "x" * 60}, {"kind": "y"}, [f"kind {'x' * 37}… → y"]),
    ({"same": 1}, {"same": 1}, []),
]


@pytest.mark.parametrize(("before", "now", "phrases"), CHANGES)
def test_a_change_is_described_in_one_phrase(before: dict[str, Any], now: dict[str, Any], phrases: list[str]) -> None:
    assert differences(before, now, {"files.train": "data/train.csv", "commit": "glue at main"}) == phrases


def test_the_users_own_changes_come_before_code_and_libraries() -> None:
    before = {"code.training/programs/fit.py": 1, "library.torch": 1, "training.seed": 1}
    now = {"code.training/programs/fit.py": 2, "library.torch": 2, "training.seed": 2}
    assert differences(before, now, {}) == ["training.seed 1 → 2", "training/programs/fit.py changed", "torch 1 → 2"]
