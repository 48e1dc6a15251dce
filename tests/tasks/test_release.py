"""What a release takes back when it fails: what this run did, and nothing that was there before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from tasks.registry import promote, register
from tasks.runtime import promotions
from tasks.runtime.connection import MODEL_TAG, MlflowFailed, connect
from tasks.runtime.refs import Pins, Ref, Verdict, Version
from tasks.runtime.stage import Work
from training.problems import NETWORK, UserError
from training.recipe import Recipe, parse

TRAINED = Ref(kind="fit", key="t", digest="trained", parts={"model": "m" * 40})
OTHER = Ref(kind="load_data", key="o", digest="other")
SCORES = Ref(kind="score", key="s", digest="scores")
PROMOTE = Verdict(decision="promote", reason="it reaches every minimum.")


def recipe() -> Recipe:
    return parse(
        {
            "name": "small",
            "kind": "sequence-classification",
            "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label"},
            "model": {"source": "folder", "path": "models/small"},
            "release": {"registry": "small"},
        }
    )


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions are made as the child program makes them, and no model is logged."""

    def log(work: Work, recipe: Recipe, pins: Pins, run: str, tags: dict[str, str], made: object) -> str:
        return str(connect().create_model_version("small", "file:///nowhere", tags=tags).version)

    monkeypatch.setattr("tasks.registry._log_model", log)


def registered(work: Work, verdict: Verdict = PROMOTE) -> Version | None:
    given = register.make(work, recipe(), Pins(), verdict, OTHER, TRAINED, SCORES)
    assert given is None or isinstance(given, Version)
    return given


def test_a_version_is_taken_back_but_not_with_an_alias_of_which_only_the_answer_was_lost(
    tracked: Path, logged: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, real = connect(), MlflowClient.set_registered_model_alias
    client.create_registered_model("small")

    def moved_but_timed_out(*asked: Any) -> None:
        real(*asked)
        raise MlflowException("read timed out")

    for version in ("1", "2"):
        work = Work("key", tracked / "out", "run")
        assert registered(work) == Version(name="small", version=version) and work.take_back is not None
        if version == "2":
            monkeypatch.setattr(MlflowClient, "set_registered_model_alias", moved_but_timed_out)
            with pytest.raises(MlflowFailed, match="read timed out"):
                promote.make(work, recipe(), Version(name="small", version=version), PROMOTE)
        told = work.take_back()
        assert told.startswith(f"small version {version} {'was removed again' if version == '1' else 'stays'}")
    (left,) = client.search_model_versions("name = 'small'")
    assert str(left.version) == str(client.get_registered_model("small").aliases["champion"]) == "2"


def test_nothing_is_registered_to_be_promoted_over_a_champion_that_it_was_not_compared_with(
    tracked: Path, logged: None
) -> None:
    client = connect()
    client.create_registered_model("small")
    client.create_model_version("small", "file:///nowhere")
    client.set_registered_model_alias("small", "champion", "1")
    with pytest.raises(UserError, match=r"^release\.registry: small/1 became champion after there was none") as raised:
        registered(Work("key", tracked / "out", "run"))
    assert raised.value.problems[0].kind == NETWORK and len(client.search_model_versions("name = 'small'")) == 1
    kept = Verdict(decision="keep", reason="it may be chance.")
    assert registered(Work("key", tracked / "out", "run"), kept) == Version(name="small", version="2")


def test_a_version_that_a_person_took_the_alias_from_is_known_as_such_before_it_is_published(
    tracked: Path, logged: None
) -> None:
    client, work = connect(), Work("key", tracked / "out", "run")
    client.create_registered_model("small")
    mine = registered(work)
    assert mine == Version(name="small", version="1")
    promote.make(work, recipe(), mine, PROMOTE)
    client.create_model_version("small", "file:///nowhere")
    promotions.promote("small", "2", why="it is kinder")
    again = registered(work)
    assert again is not None and again.taken is not None and "version 2 that" in again.taken


def test_a_version_that_a_killed_run_left_is_found_and_outlives_the_failure_of_the_next(tracked: Path) -> None:
    client, work = connect(), Work("key", tracked / "out", "run")
    client.create_registered_model("small")
    client.create_model_version("small", str(tracked), tags={MODEL_TAG: TRAINED.parts["model"]})
    assert registered(work) == Version(name="small", version="1") and work.take_back is None
    assert len(client.search_model_versions("name = 'small'")) == 1
