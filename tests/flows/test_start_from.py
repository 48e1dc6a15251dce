"""Training that starts from the champion, whole: night after night."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flows.cli.main import main
from flows.pipeline import pipeline
from flows.retrain import retrain
from tasks.cache import store
from tasks.cache.planner import Planner
from tasks.registry.pinned_versions import FETCHED
from tasks.tracking.connection import connect
from tests.flows.small import FinishedRun, artifact_of, write_project, write_rows
from training.problems import UserError
from training.recipe import load, parse

FROM_CHAMPION = {
    "model.start_from": "champion",
    "training.num_train_epochs": 1,
    "release.gate.margin": -1,
}


@pytest.mark.drill
def test_a_retrain_starts_from_the_champions_weights_and_its_own_promotion_is_no_change(
    finished: FinishedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prefect_server: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = shutil.copytree(finished.home, tmp_path / "home", symlinks=True)
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    recipe = load(write_project(tmp_path / "project"))
    rows = tmp_path / "project" / "train.csv"

    # The champion was made of these rows, from scratch: a run with the same start reuses it.
    planner = Planner("small")
    pipeline(planner, parse(recipe.model_dump(exclude_unset=True), {"model.start_from": "champion"}))
    assert not [row for row in planner.rows if row.state == "will run"]

    write_rows(rows, 260, seed=1)
    state = retrain(recipe, FROM_CHAMPION, return_state=True)
    result = state.result()
    assert (state.name, result["verdict"]["decision"], result["model"]["registered"]) == (
        *("Completed", "promote"),
        "small/2",
    )
    champions = artifact_of(finished.home, finished.result, "fit") / "model"
    started = artifact_of(home, result, "load_model")
    for part, file in (("model", "model.safetensors"), ("tokenizer", "tokenizer.json")):
        assert (started / part / file).read_bytes() == (champions / file).read_bytes()
    assert "load_model: model.champion" not in "".join(result["why"])

    again = retrain(recipe, FROM_CHAMPION, return_state=True)
    assert again.name == "Unchanged" and again.result()["flow_run_id"] == result["flow_run_id"]
    capsys.readouterr()
    assert main(["show", "small/2"]) == 0
    assert "champion      small version 1\n" in capsys.readouterr().out

    # New rows go on from the new champion, and after a rollback from the old one.
    write_rows(rows, 280, seed=1)
    looked = parse(recipe.model_dump(exclude_unset=True), FROM_CHAMPION)
    assert str(pipeline(Planner("small"), looked).lock.started_from) == "small/2"
    assert main(["rollback", "small"]) == 0
    assert str(pipeline(Planner("small"), looked).lock.started_from) == "small/1"


def test_the_weights_of_a_champion_outside_the_store_are_fetched_and_a_deleted_champion_is_reported(
    finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks.cache.stage import Work
    from tasks.stages.load_model import load_model
    from tasks.stages.resolve import pin

    home = shutil.copytree(finished.home, tmp_path / "home", symlinks=True)
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    file = write_project(tmp_path / "project")
    write_rows(tmp_path / "project" / "train.csv", 260, seed=1)
    recipe = parse(load(file).model_dump(exclude_unset=True), FROM_CHAMPION)
    lock = pin(recipe)
    trained = artifact_of(home, finished.result, "fit")
    weights = (trained / "model" / "model.safetensors").read_bytes()
    shutil.rmtree(trained)
    with store.filling("load_model", "k") as aside:
        load_model.make(Work("k", aside, "run"), recipe, lock, None)
        assert (aside / "model" / "model.safetensors").read_bytes() == weights
    connect().delete_model_version("small", "1")
    shutil.rmtree(home / "artifacts" / FETCHED)  # the copy that is used without MLflow
    with pytest.raises(UserError, match=r"version small/1, which training starts from, is no longer in MLflow"):
        load_model.make(Work("gone", tmp_path / "gone", "run"), recipe, lock, None)
