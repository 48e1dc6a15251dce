"""The shipped sst2 deployment against a Hub: pinned, retried after its branches moved, offline, and refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient
from prefect.settings import PREFECT_SERVER_DATABASE_CONNECTION_URL

from tests.flows.forked import finetune
from tests.flows.small import environment
from tests.hub.server import Hub
from tests.hub.sst2 import MODEL, ROWS, distilbert_files, sst2_files
from tests.hub.stages import run_stages

pytestmark = pytest.mark.slow

SST2 = str(Path(__file__).parents[2] / "deployments" / "sst2.yaml")
REPO = "tester/sst2"
RELEASED = [
    SST2,
    "--set",
    f"release.hub={{repo: {REPO}, license: apache-2.0, revision: next, checkpoints: every_save}}",
    "--set",
    "release.gate.baseline=false",  # so few rows and steps teach a model nothing
]
COMMITS = (("load_data", ROWS, "commit"), ("load_model", MODEL, "commit"))


@dataclass(frozen=True)
class Shipped:
    """What the shipped recipe left: a run that failed at the weights, and two retries when both branches had moved. The
    first of them fails when it publishes the model."""

    hub: Hub
    home: Path
    env: dict[str, str]
    first: dict[str, str]
    """Repository to the commit of its branch when the first run began."""
    moved: dict[str, str]
    failed: subprocess.CompletedProcess[str]
    failed_requests: list[str]
    result: dict[str, Any]
    left: list[str]
    """The artifacts that the failed run left."""
    unpublished: subprocess.CompletedProcess[str]
    versions: list[Any]
    """Those in the registry when it could not be published."""
    retried: subprocess.CompletedProcess[str]
    retry_requests: list[str]


@pytest.fixture(scope="module")
def shipped(
    tmp_path_factory: pytest.TempPathFactory, server: dict[str, str], fresh_database: Path
) -> Iterator[Shipped]:
    folder = tmp_path_factory.mktemp("sst2")
    home, out = folder / "home", folder / "out.json"
    home.mkdir(mode=0o700)
    shutil.copy(fresh_database, home / "mlflow.db")
    with Hub() as hub:
        first = {ROWS: hub.repo("dataset", ROWS, sst2_files(), gated=True)}
        first[MODEL] = hub.repo("model", MODEL, distilbert_files(folder / "model"))
        env = {**hub.environment(folder / "hf", hub.token(ROWS)), **server}

        hub.fault = lambda method, path: 503 if method == "GET" and path.endswith("/model.safetensors") else None
        failed = finetune(home, "run", *RELEASED, "--json", str(out), **env)
        failed_requests, result = [*hub.requests], json.loads(out.read_text())
        left = [str(path.relative_to(home / "artifacts")) for path in home.glob("artifacts/*/*")]

        hub.fault = lambda method, path: None
        moved = {ROWS: hub.commit("dataset", ROWS, sst2_files(train_rows=200))}
        moved[MODEL] = hub.commit("model", MODEL, {"README.md": b"# Another one"})
        hub.requests.clear()
        # A request before the upload of a card, and not for checkpoints.
        hub.fault = lambda method, path: 500 if path == "/api/validate-yaml" else None
        unpublished = retry(result["flow_run_id"], home, env)
        hub.fault = lambda method, path: None
        client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
        versions = [*client.search_model_versions("name = 'sst2'"), *client.get_registered_model("sst2").aliases]
        retried = retry(result["flow_run_id"], home, env)
        retry_requests = [*hub.requests]
        yield Shipped(
            hub,
            home,
            env,
            first,
            moved,
            failed,
            failed_requests,
            result,
            left,
            unpublished,
            versions,
            retried,
            retry_requests,
        )


def retry(run: str, home: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Prefect's own retry of a flow run."""
    return subprocess.run(
        [sys.executable, "-m", "prefect", "flow-run", "retry", run, "--entrypoint", "flows.finetune:finetune"],
        env=environment(home, **env),
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_weights_that_do_not_come_end_the_run_with_one_message_and_nothing_half_stored(shipped: Shipped) -> None:
    assert shipped.failed.returncode == 1, shipped.failed.stderr
    start, message, next_step = shipped.failed.stderr.splitlines()
    assert message.startswith(f"model.path: the Hub cannot be asked for {MODEL!r} at {shipped.first[MODEL]!r}")
    assert "503" in message and "the fault is the Hub's. Run the same command again later." in message
    assert (start, next_step) == (
        "sst2: starting",
        "Completed stages are stored: the same command continues from there.",
    )
    assert "Traceback" not in shipped.failed.stdout
    (key,) = [stage["key"] for stage in shipped.result["stages"] if stage["name"] == "load_data"]
    assert shipped.left == [f"load_data/{key}"]


def test_a_retry_ends_with_the_commits_of_the_first_try_although_the_branches_moved(shipped: Shipped) -> None:
    assert shipped.retried.returncode == 0, shipped.retried.stdout + shipped.retried.stderr
    lock = json.loads((shipped.home / "runs" / shipped.result["flow_run_id"] / "lock.json").read_text())
    assert lock["data_hub"] == {"name": f"{ROWS}@main", "commit": shipped.first[ROWS]}
    assert lock["model_hub"] == {"name": f"{MODEL}@main", "commit": shipped.first[MODEL]}
    for stage, name, field in COMMITS:
        (made,) = shipped.home.glob(f"artifacts/{stage}/*/inputs.json")
        assert json.loads(made.read_text())[field] == shipped.first[name]
    completed = json.loads((shipped.home / "recipes" / "sst2" / "completed.json").read_text())
    assert completed["flow_run_id"] == shipped.result["flow_run_id"]
    assert completed["model"]["registered"] == "sst2/2"


def test_a_push_that_fails_leaves_no_version_and_no_alias_and_the_next_try_trains_nothing_again(
    shipped: Shipped,
) -> None:
    assert shipped.unpublished.returncode == 1 and "release.hub.repo: writing to" in shipped.unpublished.stderr
    assert "sst2 version 1 was removed again" in shipped.unpublished.stderr and shipped.versions == []
    completed = json.loads((shipped.home / "recipes" / "sst2" / "completed.json").read_text())
    states = {stage["name"]: stage["state"] for stage in completed["stages"]}
    assert states["fit"] == states["score"] == "cached" and states["publish"] == states["promote"] == "ran"
    client = MlflowClient(f"sqlite:///{shipped.home / 'mlflow.db'}")
    aliases = client.get_registered_model("sst2").aliases
    assert {alias: str(version) for alias, version in aliases.items()} == {"champion": "2"}


def test_mlflow_holds_the_commits(shipped: Shipped) -> None:
    client = MlflowClient(f"sqlite:///{shipped.home / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("sst2").experiment_id])
    assert run.data.tags["finetune.flow_run_id"] == shipped.result["flow_run_id"] and run.info.status == "FINISHED"
    for stage, name, field in COMMITS:
        file = client.download_artifacts(run.info.run_id, f"{stage}/inputs.json")
        assert json.loads(Path(file).read_text())[field] == shipped.first[name]


def test_no_file_is_loaded_twice_and_below_the_model_nothing_uses_the_hub(shipped: Shipped) -> None:
    weights = f"/{MODEL}/resolve/{shipped.first[MODEL]}/model.safetensors"
    retried = [path for path in shipped.retry_requests if MODEL in path or ROWS in path]
    # Files are loaded at the same time: some may not have begun when the weights failed, and come with the retry.
    loaded = [path for path in _loaded(shipped.failed_requests + retried) if not path.endswith("/model.safetensors")]
    assert sorted(loaded) == sorted({*loaded})
    assert _loaded(retried).count(weights) == 1
    assert {request.split()[1] for request in retried} == {*_loaded(retried)}


def test_only_what_is_needed_is_loaded_and_no_code_and_no_pickle(shipped: Shipped) -> None:
    rows = {"README.md", "sst2/train-00000-of-00001.parquet", "sst2/validation-00000-of-00001.parquet"}
    model, tokenizer = {"config.json", "model.safetensors"}, {"tokenizer.json", "tokenizer_config.json"}
    loaded = _loaded(shipped.failed_requests + shipped.retry_requests)
    assert {path.split("/resolve/")[1][41:] for path in loaded} == rows | model | tokenizer
    (artifact,) = shipped.home.glob("artifacts/load_model/*")
    assert {path.name for path in (artifact / "model").iterdir()} == model
    assert {path.name for path in (artifact / "tokenizer").iterdir()} == tokenizer


def _loaded(requests: list[str]) -> list[str]:
    """The paths of the files that these requests asked for."""
    return [path for method, path in map(str.split, requests) if method == "GET" and "/resolve/" in path]


def test_the_published_model_is_the_trained_one_and_its_checkpoints_came_before_it(shipped: Shipped) -> None:
    completed = json.loads((shipped.home / "recipes" / "sst2" / "completed.json").read_text())
    assert completed["model"]["published"] == f"{shipped.hub.url}/{REPO}/tree/next"
    repo = shipped.hub.repos["models", REPO]
    trained = {path.name: path.read_bytes() for path in Path(completed["model"]["path"]).iterdir()}
    files = {path: file.content for path, file in repo.at("next").files.items()}
    published = {path: content for path, content in files.items() if not path.startswith("last-weights/")}
    assert files.keys() - published.keys() >= {"last-weights/model.safetensors", "last-weights/config.json"}
    assert published.keys() - trained.keys() == {"README.md", "loss.png", ".eval_results/finetune.yaml"}
    assert {name: published[name] for name in trained} == trained
    titles, commit = [], repo.commits.get(repo.branches["next"])
    while commit is not None:
        titles.append(commit.title)
        commit = repo.commits.get(commit.parent or "")
    assert titles[0].startswith("sst2 ") and "checkpoint" not in titles[0] and titles[-1] == "initial commit"
    assert titles[1:-1] and all(title.startswith("sst2 checkpoint-") for title in titles[1:-1])
    assert repo.at("main").files == {}


def test_plan_reports_moved_branches_and_requests_metadata_alone(shipped: Shipped) -> None:
    shipped.hub.requests.clear()
    plan = finetune(shipped.home, "plan", *RELEASED, **shipped.env)
    assert plan.returncode == 0, plan.stderr
    for name in (ROWS, MODEL):
        assert f"{name} at main {shipped.first[name]} → {shipped.moved[name]}" in plan.stdout
    data, model = f"/api/datasets/{ROWS}", f"/api/models/{MODEL}"
    assert shipped.hub.requests == [f"GET {data}/revision/main", f"GET {data}/auth-check", f"GET {model}/revision/main"]


def test_a_new_run_sees_where_the_branches_are_now_and_stores_no_half_of_their_rows(
    shipped: Shipped, tmp_path: Path
) -> None:
    home, out = shutil.copytree(shipped.home, tmp_path / "home", symlinks=True), tmp_path / "out.json"
    shipped.hub.fault = lambda method, path: 503 if method == "GET" and path.endswith(".parquet") else None
    try:
        run = finetune(home, "run", *RELEASED, "--json", str(out), **shipped.env)
    finally:
        shipped.hub.fault = lambda method, path: None
    assert run.returncode == 1
    _, message, _ = run.stderr.splitlines()
    assert message.startswith(f"data.path: the Hub cannot be asked for {ROWS!r} at {shipped.moved[ROWS]!r}")
    lock = json.loads((home / "runs" / json.loads(out.read_text())["flow_run_id"] / "lock.json").read_text())
    assert {name: lock[f"{part}_hub"]["commit"] for part, name in (("data", ROWS), ("model", MODEL))} == shipped.moved
    kept = [[path.name for path in folder.glob("artifacts/load_data/*")] for folder in (home, shipped.home)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("how", ["stopped", "offline"])
def test_without_the_hub_stored_artifacts_are_used_and_reported_even_if_a_later_stage_changes(
    shipped: Shipped, how: str
) -> None:
    env = {**shipped.env, "HF_HUB_OFFLINE": str(int(how == "offline"))}
    shipped.hub.requests.clear()
    if how == "stopped":
        shipped.hub.stop()
    try:
        run = finetune(shipped.home, "run", *RELEASED, **env)
        plan = finetune(shipped.home, "plan", *RELEASED, "--set", "training.learning_rate=1e-3", **env)
    finally:
        if how == "stopped":
            shipped.hub.start()
    assert run.returncode == plan.returncode == 0, run.stderr + plan.stderr
    assert f"Nothing changed since flow run {shipped.result['flow_run_id']}." in run.stdout
    assert f"Published: {shipped.hub.url}/{REPO}/tree/next" in run.stdout
    rows = {line.split()[0]: line for line in plan.stdout.splitlines()}
    assert [name for name, line in rows.items() if "cached" in line] == ["load_data", "load_model", "tokenize"]
    assert "training.learning_rate 2e-05 → 0.001" in rows["fit"]
    for name, commit in shipped.first.items():
        for printed in (run.stdout, plan.stdout):
            assert f"the Hub cannot be asked for {name!r}: using commit {commit[:12]}, as last time" in printed
    assert shipped.hub.requests == []


def test_artifacts_that_are_no_longer_stored_come_from_the_clients_cache_without_the_hub(
    shipped: Shipped, tmp_path: Path
) -> None:
    recipe = yaml.safe_load(Path(SST2).read_text())["deployments"][0]["parameters"]["recipe"]
    for section, name in (("data", ROWS), ("model", MODEL)):
        recipe[section]["revision"] = shipped.first[name]
    env = {**shipped.env, "HF_HUB_OFFLINE": "1"}
    made, _ = run_stages(tmp_path, [[["load_data", recipe]], [["load_model", recipe]]], env)
    stored = [
        json.loads(next(shipped.home.glob(f"artifacts/{name}/*/manifest.json")).read_text()) for name, *_ in COMMITS
    ]
    assert made == [manifest["ref"]["digest"] for manifest in stored]


def test_the_token_stands_in_no_file_of_the_home_and_in_nothing_printed(shipped: Shipped) -> None:
    token = shipped.env["HF_TOKEN"]
    files = [path for path in shipped.home.rglob("*") if path.is_file()]
    assert len(files) > 30 and any(path.name == "mlflow.db" for path in files)
    assert [path for path in files if token.encode() in path.read_bytes()] == []
    for run in (shipped.failed, shipped.unpublished, shipped.retried):
        assert token not in run.stdout + run.stderr
    commits = [commit for repo in shipped.hub.repos.values() for commit in repo.commits.values()]
    uploads = [file.content for commit in commits for file in commit.files.values()]
    database = Path(str(PREFECT_SERVER_DATABASE_CONNECTION_URL.value()).partition(":///")[2])
    stored = [file.read_bytes() for file in database.parent.glob(f"{database.name}*")]
    assert stored and [held for held in [*uploads, *stored] if token.encode() in held] == []


def test_a_mistake_is_the_users_turn_and_a_dead_network_is_not(tmp_path: Path) -> None:
    with Hub() as hub:
        hub.repo("dataset", ROWS, {})
        hub.repo("model", MODEL, {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b""})
        env = hub.environment(tmp_path / "hf")
        wrong = finetune(tmp_path / "home", "plan", *RELEASED, "--set", "data.revision=v9", **env)
    dead = finetune(tmp_path / "home", "plan", *RELEASED, **env)
    assert (wrong.returncode, dead.returncode) == (2, 1)
    assert wrong.stderr == f"data.revision: {ROWS!r} has no revision 'v9': name a branch, a tag or a commit.\n"
    assert [line.split(" the Hub cannot be asked ")[0] for line in dead.stderr.splitlines()] == [
        "data.path:",
        "model.path:",
    ]
