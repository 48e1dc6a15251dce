"""A recipe whose model is the champion of another recipe."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest

from flows.cli.main import main
from flows.pipeline import pipeline
from flows.plan import find_unchanged_run, list_changes
from flows.retrain import retrain
from tasks.cache.planner import Planner
from tasks.prefect import events
from tests.flows.forked import finetune
from tests.flows.small import FinishedRun, artifact_of, write_project
from training.recipe import Recipe, load, parse

ROOT = Path(__file__).resolve().parents[2]
SECOND = {
    "name": "second",
    "data.label": "genre",  # three labels: the first model's head has two
    "model": {"source": "registry", "path": "small@champion"},
    "training.num_train_epochs": 1,
    "release": {"registry": "second", "gate": {"baseline": False}},
}


def second(project: Path) -> Recipe:
    return parse(load(project).model_dump(exclude_unset=True), SECOND)


def planned(recipe: Recipe) -> Planner:
    planner = Planner(recipe.name)
    pipeline(planner, recipe)
    return planner


@pytest.mark.drill
def test_a_new_champion_of_the_first_recipe_trains_the_second_again_which_is_reproduced_from_the_first_one(
    finished: FinishedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = shutil.copytree(finished.home, tmp_path / "home", symlinks=True)
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    project = write_project(tmp_path / "project")
    first, recipe = load(project), second(project)

    result = retrain(recipe, return_state=True).result()
    assert result["model"]["registered"] == "second/1"
    weights = "model/model.safetensors"
    trained, started = artifact_of(finished.home, finished.result, "fit"), artifact_of(home, result, "load_model")
    assert (started / weights).read_bytes() == (trained / weights).read_bytes()
    assert retrain(recipe, return_state=True).name == "Unchanged"
    assert main(["show", "second/1"]) == 0
    assert "registry      small version 1\n" in capsys.readouterr().out

    other = {"training.seed": 7, "release.gate.margin": -1}
    assert retrain(first, other, return_state=True).result()["model"]["registered"] == "small/2"
    planner = planned(recipe)
    assert find_unchanged_run("second", planner.rows) is None
    (why,) = list_changes("second", planner.rows)
    assert why.startswith("load_model: the model of small@champion that training starts from ")
    again = retrain(recipe, return_state=True).result()
    assert again["model"]["registered"] == "second/2" and again["why"] == [why]
    assert main(["rollback", "small"]) == 0
    assert not [row for row in planned(recipe).rows if row.state == "will run" and row.name == "fit"]
    assert main(["promote", "small", "2"]) == 0

    # On another machine, which has the registry and the rows alone.
    elsewhere = {**server, "MLFLOW_TRACKING_URI": f"sqlite:///{home / 'mlflow.db'}"}
    made = finetune(tmp_path / "elsewhere", "reproduce", "second/1", **elsewhere)
    assert made.returncode == 0, made.stdout + made.stderr
    assert f"The same bytes: sha256 {result['model']['sha256']} model.safetensors" in made.stdout


def test_a_plan_says_that_a_recipe_starts_from_the_version_that_is_champion_now(
    finished: FinishedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model_unchecked: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FINETUNE_HOME", str(finished.home))
    words = ["--set", "model.source=registry", "--set", "model.config=null"]
    assert main(["plan", str(finished.file), *words, "--set", "model.path=small/1"]) == 0
    assert main(["plan", str(finished.file), *words, "--set", "model.path=smal@champion"]) == 2
    printed = capsys.readouterr()
    assert "model.path: no model 'smal' is registered in" in printed.err and "Did you mean 'small'?" in printed.err
    assert main(["plan", str(finished.file), *words, "--set", "model.path=small@champion", "--set",
                 "release.registry=second"]) == 0  # fmt: skip
    assert "training starts from small/1, which is small@champion" in capsys.readouterr().out


def test_check_counts_tokens_with_the_tokenizer_of_the_version(
    finished: FinishedRun,
    monkeypatch: pytest.MonkeyPatch,
    model_unchecked: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FINETUNE_HOME", str(finished.home))
    words = ["--set", "model.source=registry", "--set", "model.config=null", "--set", "model.path=small/1"]
    assert main(["check", str(finished.file), *words]) == 0
    from_registry = capsys.readouterr().out
    assert main(["check", str(finished.file)]) == 0
    scratch = capsys.readouterr().out
    assert [line for line in scratch.splitlines() if "train" in line] == [
        line for line in from_registry.splitlines() if "train" in line
    ]
    assert "not checked" not in from_registry


@pytest.mark.slow
def test_a_promotion_of_the_first_recipe_starts_the_deployment_of_the_second(
    home: Path, server: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The deployment of the page on chains."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId

    for name, value in server.items():
        monkeypatch.setenv(name, value)
    page = (ROOT / "docs/how-to/chains.md").read_text()
    example = re.search(r"<!-- test: chain -->\n```yaml\n(.*?)```", page, re.DOTALL)
    assert example is not None
    (tmp_path / "chain.yaml").write_text(example[1])
    assert main(["deploy", str(tmp_path / "chain.yaml")]) == 0
    for decision in ("keep", "promote"):
        events.emit_verdict("support-sft", {"decision": decision})
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("retrain/support-preference")
        only = DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id]))
        until = time.monotonic() + 30
        while not (runs := client.read_flow_runs(deployment_filter=only)) and time.monotonic() < until:
            time.sleep(0.1)
    assert [run.parameters["reason"] for run in runs] == ["a new champion of support-sft"]
