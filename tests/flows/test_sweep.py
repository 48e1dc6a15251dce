"""`finetune sweep`, whole: what trials share, what a kill costs, and what becomes of the best one."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.flows.forked import finetune
from tests.flows.small import FinishedRun, command, environment

pytestmark = pytest.mark.slow

SPACE = {
    "training.learning_rate": {"log": [1e-3, 2e-2]},
    "training.per_device_train_batch_size": {"choice": [16, 32]},
}
SHORT = {"num_train_epochs": 2}
GRID = {"training.learning_rate": {"choice": [5e-3, 1e30]}}


def write_sweep(finished: FinishedRun, file: Path, sweep: dict[str, Any], **fields: Any) -> Path:
    """The small recipe with fields of its own and a sweep."""
    document = yaml.safe_load(finished.file.read_text())
    recipe = document["deployments"][0]["parameters"]["recipe"]
    recipe["training"] |= {"num_train_epochs": 4, "checkpoint_interval_s": 600.0}
    for name, value in fields.items():
        recipe[name] = {**recipe.get(name, {}), **value}
    entry = {"name": "small", "entrypoint": "flows.sweep:sweep", "parameters": {"recipe": recipe, "sweep": sweep}}
    other = {"name": "small", "entrypoint": "flows.finetune:finetune", "parameters": {"recipe": recipe}}
    file.write_text(yaml.safe_dump({"deployments": [entry, other]}, sort_keys=False))
    return file


def run_sweep(home: Path, file: Path, server: dict[str, str], *more: str) -> dict[str, Any]:
    out = file.with_suffix(".json")
    done = finetune(home, "sweep", str(file), "--json", str(out), *more, **server)
    assert done.returncode == 0, done.stdout + done.stderr
    return {**json.loads(out.read_text()), "printed": done.stdout, "errors": done.stderr}


def without_times(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**trial, "seconds": 0, "flow_run_id": ""} for trial in result["trials"]]


@pytest.fixture(scope="module")
def swept(finished: FinishedRun, server: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A sweep of five trials with asha, over a home in which the small recipe ran before."""
    folder = tmp_path_factory.mktemp("sweep")
    shutil.copytree(finished.home, folder / "home", symlinks=True)
    file = write_sweep(finished, folder / "sweep.yaml", {"space": SPACE, "trials": 5, "pruner": "asha", "seed": 1})
    return {"home": folder / "home", "file": file, **run_sweep(folder / "home", file, server)}


def test_trials_share_what_no_setting_changes_and_the_best_one_is_released(swept: dict[str, Any]) -> None:
    home = swept["home"]
    for stage in ("load_data", "load_model", "tokenize"):
        assert len([*home.glob(f"artifacts/{stage}/*/manifest.json")]) == 1, stage
    states = [trial["state"] for trial in swept["trials"]]
    assert len(states) == 5 and set(states) == {"completed", "paused"}
    completed = [trial for trial in swept["trials"] if trial["state"] == "completed"]
    assert swept["best"]["value"] == max(trial["value"] for trial in completed)
    run = swept["run"]
    fits = {stage["name"]: stage["state"] for stage in run["stages"]}
    assert fits["fit"] == fits["tokenize"] == "cached"
    selection = run["verdict"]["selection"]
    assert (selection["trial"], selection["trials"]) == (swept["best"]["number"], 5)
    assert any("among 5 trials" in warning for warning in run["verdict"]["warnings"])
    assert f"Best: trial {swept['best']['number']}, accuracy " in swept["printed"]


def test_the_best_model_equals_that_of_an_ordinary_run_with_its_settings(
    swept: dict[str, Any], finished: FinishedRun, server: dict[str, str], tmp_path: Path
) -> None:
    """A trial that paused and was resumed is among those that completed."""
    overrides = [f"--set={name}={value}" for name, value in swept["best"]["settings"].items()]
    home, out = shutil.copytree(finished.home, tmp_path / "home", symlinks=True), tmp_path / "out.json"
    alone = finetune(home, "run", str(swept["file"]), *overrides, "--json", str(out), **server)
    assert alone.returncode == 0, alone.stderr
    assert json.loads(out.read_text())["model"]["sha256"] == swept["run"]["model"]["sha256"]


def test_each_trial_is_a_child_run_in_mlflow_with_its_settings_and_a_subflow_in_prefect(
    swept: dict[str, Any], prefect_server: None
) -> None:
    from mlflow import MlflowClient
    from prefect.client.orchestration import get_client

    client = MlflowClient(f"sqlite:///{swept['home'] / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    parent = f"tags.`mlflow.parentRunId` = '{swept['mlflow_run_id']}'"
    children = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id], parent)}
    for trial in swept["trials"]:
        child = children[f"trial {trial['number']}"]
        assert child.data.params["training.learning_rate"] == str(trial["settings"]["training.learning_rate"])
        assert child.info.status == {"completed": "FINISHED", "paused": "KILLED"}[trial["state"]]
    assert len(children) == 6  # and the run that released the best one
    pictures = {file.path for file in client.list_artifacts(swept["mlflow_run_id"], "pictures")}
    assert {"pictures/history.png", "pictures/slices.png", "pictures/parallel_coordinates.png"} <= pictures
    with get_client(sync_client=True) as prefect:
        first = prefect.read_flow_run(swept["trials"][0]["flow_run_id"])
    assert first.name.startswith("trial 1 · learning_rate ") and first.parent_task_run_id is not None


def test_variants_are_compared_over_seeds_and_nothing_is_released(
    finished: FinishedRun, server: dict[str, str], tmp_path: Path
) -> None:
    """The recipe with its own seed is the training of the run before."""
    home = shutil.copytree(finished.home, tmp_path / "home", symlinks=True)
    sweep = {"variants": {"hardly": {"training.learning_rate": 1e-6}}, "seeds": [42, 43, 44]}
    training = {"num_train_epochs": 8, "checkpoint_interval_s": 0.3}
    file = write_sweep(finished, tmp_path / "sweep.yaml", sweep, training=training)
    before = len([*home.glob("artifacts/fit/*")])
    result = run_sweep(home, file, server)
    assert (result["state"], result["run"], result["best"]) == ("completed", None, None)
    assert [trial["settings"]["training.seed"] for trial in result["trials"]] == [42, 42, 43, 43, 44, 44]
    assert len([*home.glob("artifacts/fit/*")]) == before + 5
    (gain,) = result["gains"]
    values = [trial["value"] for trial in result["trials"]]
    assert (gain["recipe_values"], gain["values"]) == (values[::2], values[1::2])
    assert gain["answer"] == "variant" and gain["high"] < 0
    assert gain["summary"].startswith("hardly is worse than the recipe: it is the settings, not the seed. accuracy ")
    assert gain["summary"] in result["printed"]


def test_the_same_command_again_repeats_no_trial_and_more_trials_continue_the_study(
    swept: dict[str, Any], server: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    shutil.copytree(swept["home"], home, symlinks=True)
    before = sorted(home.glob("artifacts/fit/*"))
    again = run_sweep(home, swept["file"], server)
    assert again["trials"] == swept["trials"] and again["study"] == swept["study"]
    assert sorted(home.glob("artifacts/fit/*")) == before
    more = run_sweep(home, swept["file"], server, "--trials", "6")
    assert len(more["trials"]) == 6 and more["study"] == swept["study"]
    assert [trial["settings"] for trial in more["trials"][:5]] == [trial["settings"] for trial in swept["trials"]]


def test_checkpoints_of_stopped_trials_are_removed_only_after_the_end_of_their_sweep(
    swept: dict[str, Any], server: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    shutil.copytree(swept["home"], home, symlinks=True)
    paused = sum(trial["state"] == "paused" for trial in swept["trials"])
    assert len([*home.glob("jobs/*/checkpoints")]) == paused > 0
    outbox = home / "runs" / swept["flow_run_id"] / "outbox.jsonl"
    ended = outbox.read_text()
    outbox.write_text("".join(line for line in ended.splitlines(True) if '"entry": "end"' not in line))
    kept = finetune(home, "store", "--remove", "--yes", **server)
    assert kept.returncode == 0 and len([*home.glob("jobs/*/checkpoints")]) == paused, kept.stderr
    outbox.write_text(ended)
    assert finetune(home, "store", "--remove", "--yes", **server).returncode == 0
    assert [*home.glob("jobs/*")] == [] and Path(
        swept["run"]["model"]["path"].replace(str(swept["home"]), str(home))
    ).is_dir()


@pytest.mark.drill
def test_a_sweep_that_is_killed_ends_with_the_same_trials_and_the_same_model(
    swept: dict[str, Any], finished: FinishedRun, server: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    shutil.copytree(finished.home, home, symlinks=True)
    for seconds in (4.0, 7.0):
        process = subprocess.Popen(
            command("sweep", str(swept["file"])),
            env=environment(home, **server),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
    file = tmp_path / "sweep.yaml"
    shutil.copyfile(swept["file"], file)
    resumed = run_sweep(home, file, server)
    assert without_times(resumed) == without_times(swept)
    assert resumed["run"]["model"]["sha256"] == swept["run"]["model"]["sha256"]


@pytest.fixture(scope="module")
def tried(finished: FinishedRun, server: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A grid of two trials, one after the other: one fails."""
    folder = tmp_path_factory.mktemp("grid")
    shutil.copytree(finished.home, folder / "home", symlinks=True)
    file = write_sweep(finished, folder / "sweep.yaml", {"space": GRID, "sampler": "grid"}, training=SHORT)
    return {"home": folder / "home", **run_sweep(folder / "home", file, server)}


def test_a_trial_that_fails_is_reported_with_its_reason_and_the_sweep_goes_on(tried: dict[str, Any]) -> None:
    (failed,) = (trial for trial in tried["trials"] if trial["state"] == "failed")
    assert failed["settings"] == {"training.learning_rate": 1e30} and "learning_rate" in failed["reason"]
    assert tried["state"] == "completed" and tried["best"]["settings"]["training.learning_rate"] < 1


def test_too_many_failed_trials_end_the_sweep(finished: FinishedRun, server: dict[str, str], tmp_path: Path) -> None:
    home = tmp_path / "home"
    shutil.copytree(finished.home, home, symlinks=True)
    sweep = {"space": {"training.learning_rate": {"choice": [1e30]}}, "sampler": "grid", "max_failures": 0}
    file = write_sweep(finished, tmp_path / "strict.yaml", sweep, training=SHORT)
    strict = finetune(home, "sweep", str(file), **server)
    assert strict.returncode == 2 and "1 trials failed, and 0 may" in strict.stderr


def test_two_trials_at_once_are_the_same_set_of_trials_with_the_same_figures(
    tried: dict[str, Any], finished: FinishedRun, server: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    shutil.copytree(finished.home, home, symlinks=True)
    sweep = {"space": GRID, "sampler": "grid", "parallel": 2}
    at_once = run_sweep(home, write_sweep(finished, tmp_path / "sweep.yaml", sweep, training=SHORT), server)
    figures = [
        sorted((trial["settings"]["training.learning_rate"], trial["value"] or 0.0) for trial in result["trials"])
        for result in (tried, at_once)
    ]
    assert figures[0] == figures[1] and len(figures[0]) == 2


def test_settings_that_do_not_reach_training_are_tried_with_one_training(
    finished: FinishedRun, server: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    shutil.copytree(finished.home, home, symlinks=True)
    before = {*home.glob("artifacts/fit/*")}
    space = {"training.logging_steps": {"choice": [10, 20]}}
    sweep = {"space": space, "sampler": "grid"}
    result = run_sweep(home, write_sweep(finished, tmp_path / "sweep.yaml", sweep, training=SHORT), server)
    assert [trial["state"] for trial in result["trials"]] == ["completed"] * 2
    assert len({*home.glob("artifacts/fit/*")} - before) == 1
    assert result["best"]["similar"] == [2] and "cannot be told apart" in result["printed"]


def test_a_sweep_whose_time_is_over_stops_its_trial_with_a_checkpoint_and_the_next_one_resumes_it(
    finished: FinishedRun, server: dict[str, str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    shutil.copytree(finished.home, home, symlinks=True)
    long = {"num_train_epochs": 400}
    sweep = {"space": SPACE, "trials": 2, "timeout_s": 0.5}
    file, out = write_sweep(finished, tmp_path / "sweep.yaml", sweep, training=long), tmp_path / "out.json"
    over = finetune(home, "sweep", str(file), "--json", str(out), **server)
    assert over.returncode == 2 and "no trial has completed: raise sweep.trials or sweep.timeout_s" in over.stderr
    (trial,) = json.loads(out.read_text())["trials"]
    assert trial["state"] == "interrupted"
    assert len({path.parent for path in home.glob("jobs/*/checkpoints/checkpoint-*")}) == 1


def test_a_mistake_in_the_file_ends_the_command_before_anything_runs(finished: FinishedRun, tmp_path: Path) -> None:
    file = write_sweep(finished, tmp_path / "sweep.yaml", {"space": {"training.learning_rate": {"log": [0, 1]}}})
    wrong = finetune(tmp_path / "home", "sweep", str(file))
    assert wrong.returncode == 2 and "sweep.space.training.learning_rate: [0, 1] has no logarithm" in wrong.stderr
    assert not (tmp_path / "home" / "artifacts").exists()
