"""Rollback of a failed release: the changes of this run, and nothing that existed before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from tasks.cache.results import Artifact, Lock, Verdict, Version
from tasks.cache.stage import Work
from tasks.registry import promotions
from tasks.stages.compare import find_champion
from tasks.stages.register import promote, register
from tasks.tracking.connection import MODEL_TAG, MlflowFailed, connect
from tests.made import COMPARISON, FITTED, LABELS, ROWS, artifact, predictions
from training.problems import UserError
from training.recipe import Recipe, parse

TRAINED = Artifact(stage="fit", key="t", digest="trained", parts={"model": "m" * 40}, result=FITTED)
SCORED = Artifact(stage="score", key="s", digest="d", result={"validation": {"accuracy": {"value": 0.9}}})
PROMOTE = Verdict(decision="promote", reason="it is better.", comparison=COMPARISON)


def recipe() -> Recipe:
    return parse(
        {
            "name": "small",
            "task": "sequence-classification",
            "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label"},
            "model": {"source": "folder", "path": "models/small"},
            "release": {"registry": "small"},
        }
    )


@pytest.fixture(autouse=True)
def unsigned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The versions of these tests have no files that could be signed."""
    monkeypatch.setattr("tasks.stages.register.sign_own_version", lambda *given, **named: "")


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions are made as the child program makes them, and no model is logged."""

    def log(work: Work, recipe: Recipe, lock: Lock, run: str, tags: dict[str, str], made: object) -> str:
        return str(connect().create_model_version("small", "file:///nowhere", tags=tags).version)

    monkeypatch.setattr("tasks.stages.register._log_model", log)


def registered(work: Work, verdict: Verdict = PROMOTE) -> Version | None:
    """The result of the stage for the model."""
    made = (
        artifact("load_data", {"labels.json": LABELS}, ROWS),
        TRAINED,
        predictions("validation", [0, 1], [0, 0]),
        SCORED,
    )
    given = register.make(work, recipe(), Lock(), verdict, *made)
    assert given is None or isinstance(given, Version)
    return given


def two_versions() -> MlflowClient:
    """The champion, and one that a run registered before it was killed."""
    client = connect()
    client.create_registered_model("small")
    for digest in ("c" * 40, TRAINED.parts["model"]):
        client.create_model_version("small", "file:///nowhere", tags={MODEL_TAG: digest})
    client.set_registered_model_alias("small", "champion", "1")
    client.set_registered_model_alias("small", "challenger", "2")
    return client


def aliases(client: MlflowClient) -> dict[str, str]:
    return {alias: str(version) for alias, version in client.get_registered_model("small").aliases.items()}


def test_a_version_that_a_killed_run_left_outlives_the_failure_of_the_next_and_aliases_are_put_back(
    tracked: Path,
) -> None:
    client, work = two_versions(), Work("key", tracked / "out", "run")
    assert registered(work) == Version(name="small", version="2") and work.rollback is None
    assert len(client.search_model_versions("name = 'small'")) == 2
    promote.make(work, recipe(), Version(name="small", version="2"), PROMOTE)
    assert aliases(client) == {"champion": "2"} and work.rollback is not None
    registered(Work("key", tracked / "out", "again"), Verdict(decision="promote", reason="there is no other."))
    assert client.get_model_version("small", "2").tags["finetune.verdict_reason"] == PROMOTE.reason
    work.rollback()
    assert aliases(client) == {"champion": "1", "challenger": "2"}
    client.create_model_version("small", "file:///nowhere")
    promote.make(work, recipe(), Version(name="small", version="3"), Verdict(decision="keep", reason="perhaps chance."))
    assert aliases(client)["challenger"] == "3"
    work.rollback()
    assert aliases(client) == {"champion": "1", "challenger": "2"}


def test_a_version_is_taken_back_but_not_with_an_alias_of_which_only_the_answer_was_lost(
    tracked: Path, logged: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, real = connect(), MlflowClient.set_registered_model_alias
    client.create_registered_model("small")

    def moved_but_timed_out(*given: Any) -> None:
        real(*given)
        raise MlflowException("read timed out")

    for version in ("1", "2"):
        work = Work("key", tracked / "out", "run")
        assert registered(work) == Version(name="small", version=version) and work.rollback is not None
        if version == "2":
            monkeypatch.setattr(MlflowClient, "set_registered_model_alias", moved_but_timed_out)
            with pytest.raises(MlflowFailed, match="read timed out"):
                promote.make(Work("key", tracked, "run"), recipe(), Version(name="small", version=version), PROMOTE)
        note = work.rollback()
        assert note.startswith(f"small version {version} {'was removed again' if version == '1' else 'stays'}")
    (left,) = client.search_model_versions("name = 'small'")
    assert str(left.version) == aliases(client)["champion"] == "2"


def test_nothing_is_registered_to_be_promoted_over_a_champion_that_it_was_not_compared_with(
    tracked: Path, logged: None
) -> None:
    client = connect()
    client.create_registered_model("small")
    client.create_model_version("small", "file:///nowhere")
    client.set_registered_model_alias("small", "champion", "1")
    alone = Verdict(decision="promote", reason="there is no other champion.")
    with pytest.raises(UserError, match=r"^release\.registry: version 1 of 'small' became champion during"):
        registered(Work("key", tracked / "out", "run"), alone)
    assert len(client.search_model_versions("name = 'small'")) == 1
    kept = Verdict(decision="keep", reason="it may be chance.")
    assert registered(Work("key", tracked / "out", "run"), kept) == Version(name="small", version="2")


def test_a_version_that_a_person_took_the_alias_from_is_known_as_such_before_it_is_published(tracked: Path) -> None:
    two_versions()
    promote.make(Work("key", tracked, "run"), recipe(), Version(name="small", version="2"), PROMOTE)
    promotions.roll_back("small", why="too slow")
    again = registered(Work("key", tracked / "out", "run"))
    assert again is not None and again.taken is not None and "(too slow)" in again.taken


def test_a_champion_without_our_tags_is_another_one_where_the_registry_was_made_anew(tracked: Path) -> None:
    client, found = connect(), []
    for _ in range(2):
        client.create_registered_model("small")
        client.create_model_version("small", "file:///nowhere")
        client.set_registered_model_alias("small", "champion", "1")
        found.append(find_champion.make(Work("key", tracked, "run"), recipe(), TRAINED, SCORED))
        client.delete_registered_model("small")
    assert [champion.version for champion in found] == ["1", "1"] and found[0].model != found[1].model
