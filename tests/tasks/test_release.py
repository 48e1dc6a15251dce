"""What a release takes back when it fails: what this run did, and nothing that was there before it."""

from __future__ import annotations

from pathlib import Path

from tasks.registry import register
from tasks.runtime.connection import MODEL_TAG, connect
from tasks.runtime.refs import Pins, Ref, Verdict, Version
from tasks.runtime.stage import Work
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


def test_a_version_that_a_killed_run_left_is_found_and_outlives_the_failure_of_the_next(home: Path) -> None:
    client, work = connect(), Work("key", home / "out", "run")
    client.create_registered_model("small")
    client.create_model_version("small", str(home), tags={MODEL_TAG: TRAINED.parts["model"]})
    found = register.make(work, recipe(), Pins(), PROMOTE, OTHER, TRAINED, SCORES)
    assert found == Version(name="small", version="1") and work.take_back is None
    assert len(client.search_model_versions("name = 'small'")) == 1
