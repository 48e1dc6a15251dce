"""What a release takes back when it fails: what this run did, and nothing that was there before it."""

from __future__ import annotations

from pathlib import Path

from mlflow import MlflowClient

from tasks.registry import promote, register
from tasks.runtime.connection import MODEL_TAG, connect
from tasks.runtime.refs import Pins, Ref, Verdict, Version
from tasks.runtime.stage import Work
from tests.made import BESIDE, LABELS, artifact, predictions
from training.recipe import Recipe, parse

TRAINED = Ref(kind="fit", key="t", digest="trained", parts={"model": "m" * 40})
SCORED = Ref(kind="score", key="s", digest="d", figures={"validation": {}})
PROMOTE = Verdict(decision="promote", reason="it is better.", comparison=BESIDE)


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
    made = (artifact("load_data", {"labels.json": LABELS}), TRAINED, predictions("validation", [0, 1], [0, 0]), SCORED)
    found = register.make(work, recipe(), Pins(), PROMOTE, *made)
    assert found == Version(name="small", version="2") and work.take_back is None
    assert len(client.search_model_versions("name = 'small'")) == 2
    promote.make(work, recipe(), Version(name="small", version="2"), PROMOTE)
    assert aliases(client) == {"champion": "2"} and work.take_back is not None
    work.take_back()
    assert aliases(client) == {"champion": "1", "challenger": "2"}
    promote.make(work, recipe(), Version(name="small", version="1"), Verdict(decision="keep", reason="perhaps chance."))
    assert aliases(client)["challenger"] == "1"
    work.take_back()
    assert aliases(client) == {"champion": "1", "challenger": "2"}
