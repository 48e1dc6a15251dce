"""The history of a recipe: it serves explanations, and no run depends on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.cache.history import History
from tasks.cache.results import Lock, PinnedCommit


def test_it_is_remembered_by_the_recipes_name(home: Path) -> None:
    history = History("sst2")
    history.remember_key("fit", "k")
    pin = PinnedCommit(name="glue@main", commit="c")
    history.remember_commits(Lock(data_hub=pin))
    history.remember_completed({"state": "completed"})
    again = History("sst2")
    assert again.last_key("fit") == "k" and again.last_completed() == {"state": "completed"}
    assert again.last_commit("dataset", "glue@main") == pin and again.last_commit("model", "glue@main") is None
    other = History("demo")
    assert (other.last_key("fit"), other.last_commit("dataset", "glue@main"), other.last_completed()) == (
        None,
        None,
        None,
    )


def test_the_model_of_the_last_run_is_where_the_home_is_now(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [{"name": "fit", "key": "k", "artifact": "artifacts/fit/k"}]
    model = {"path": str(home / "artifacts" / "fit" / "k" / "model")}
    History("demo").remember_completed({"stages": stages, "model": model})
    moved = home.rename(home.with_name("moved"))
    monkeypatch.setenv("FINETUNE_HOME", str(moved))
    found = History("demo").last_completed()
    assert found is not None and found["model"]["path"] == str(moved / "artifacts" / "fit" / "k" / "model")


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"dataset glue@main": 3}', b"\xff"])
def test_a_damaged_memory_is_no_memory(home: Path, damage: bytes) -> None:
    history = History("sst2")
    history.remember_commits(Lock(data_hub=PinnedCommit(name="glue@main", commit="c")))
    (home / "recipes" / "sst2" / "commits.json").write_bytes(damage)
    assert history.last_commit("dataset", "glue@main") is None
    (home / "recipes" / "sst2" / "completed.json").write_bytes(damage[:1])
    assert history.last_completed() is None
