"""`finetune run`, whole: what it leaves, what it repeats, what it survives."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows import finetune as flow
from flows.callers import Caller
from flows.cli.local_flow import fine_tune_here
from flows.cli.main import main
from tasks.cache.stage import Listener
from tasks.home import home as create_home
from tasks.prefect import flow_runs
from tasks.tracking import run_tracker
from tasks.tracking.connection import MlflowFailed, connect
from tasks.tracking.outbox import OUTBOX
from tests.flows.forked import code_with_forked_programs, finetune
from tests.flows.small import FinishedRun, command, environment, states, write_project
from tests.fork_server import NEW_PYTHON, PAUSE
from tests.servers import closed_port
from training.jobs.processes import find_readers
from training.jobs.protocol import sha256
from training.problems import UserError
from training.recipe import parse

STAGES = [
    *("resolve", "load_data", "load_model", "tokenize", "fit", "predict", "score", "find_champion"),
    *("compare", "gate", "register", "promote"),
]
CACHED = [*STAGES[1:7], "compare"]


def test_the_result_of_a_run_has_its_stages_its_metrics_and_its_model(finished: FinishedRun) -> None:
    result = finished.result
    assert result["state"] == "completed" and result["problems"] == []
    assert [stage["name"] for stage in result["stages"]] == STAGES
    assert {stage["state"] for stage in result["stages"]} == {"ran"}
    for stage in result["stages"]:
        assert (stage["artifact"] is not None) == (stage["name"] in CACHED)
        assert stage["artifact"] is None or (finished.home / stage["artifact"] / "manifest.json").is_file()
    accuracy = result["metrics"]["validation"]["accuracy"]
    assert 0.8 < accuracy["low"] <= accuracy["value"] <= accuracy["high"] <= 1
    shown = "{value:.4f} ({low:.3f} to {high:.3f}; baseline {baseline:.3f})".format(**accuracy)
    assert f"validation accuracy {shown}, f1 " in finished.printed
    assert set(result["metrics"]["validation"]) == {"accuracy", "f1", "precision", "recall"}
    model = Path(result["model"]["path"])
    assert sorted(p.name for p in model.iterdir()) >= ["config.json", "model.safetensors"]
    assert result["model"]["registered"] == "small/1"
    assert result["verdict"]["comparison"]["champion"] == "the constant answer 'neg'"
    assert all(name in finished.printed for name in STAGES)


def test_a_run_is_tracked_in_one_mlflow_run_with_curve_figures_and_files(finished: FinishedRun) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{finished.home / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == finished.result["mlflow_run_id"] and run.info.status == "FINISHED"
    assert run.data.tags["finetune.flow_run_id"] == finished.result["flow_run_id"]
    assert run.info.run_name == "small · bert from scratch · lr 5e-3"
    note = run.data.tags["mlflow.note.content"].split("\n\n")
    assert note[1] == f"**promote**: {finished.result['verdict']['reason']}"
    accuracy = finished.result["metrics"]["validation"]["accuracy"]["value"]
    assert f"| **validation** (judged) | accuracy | {accuracy:.4f} |" in note[-1]
    # The server that lived as long as the run has no page.
    assert note[0] == f"Flow run {finished.result['flow_run_id']} · [small version 1](#/models/small/versions/1)"
    assert run.data.params["training.learning_rate"] == "0.005"
    keys = {stage["name"]: stage["key"] for stage in finished.result["stages"]}
    assert all(run.data.tags[f"{name}.key"] == keys[name] for name in STAGES)
    curve = client.get_metric_history(run.info.run_id, "fit/eval_accuracy")
    assert [point.step for point in curve] == list(range(15, 121, 15))
    for name, value in finished.result["metrics"]["validation"]["accuracy"].items():
        assert run.data.metrics[f"score/validation/accuracy/{name}"] == value
    assert [entry.dataset.name for entry in run.inputs.dataset_inputs] == ["train", "validation"]
    tops = ("", "load_data", "tokenize", "fit", "score")
    files = {f.path for top in tops for f in client.list_artifacts(run.info.run_id, top)}
    expected = {"recipe.yaml", "load_data/report.json", "fit/events.jsonl", "score/confusion_validation.png"}
    expected |= {"load_data/lengths.png", "load_data/labels.png", "tokenize/lengths.png"}
    expected |= {"score/calibration_validation.png", "score/precision_recall_validation.png"}
    assert expected | {"fit/loss.png", "score/predictions_sample.csv"} <= files


def test_the_registered_version_is_safetensors_with_its_lineage_and_its_metrics(
    finished: FinishedRun,
) -> None:
    from mlflow import MlflowClient
    from mlflow.models import Model

    client = MlflowClient(f"sqlite:///{finished.home / 'mlflow.db'}")
    version = client.get_model_version_by_alias("small", "champion")
    assert str(version.version) == "1"
    for stage in (stage for stage in finished.result["stages"] if stage["artifact"]):
        assert version.tags[f"finetune.{stage['name']}.key"] == stage["key"]
        assert len(version.tags[f"finetune.{stage['name']}.digest"]) == 64
    assert json.loads(version.tags["finetune.figures"]) == finished.result["metrics"]
    assert version.tags["finetune.verdict"] == finished.result["verdict"]["decision"] == "promote"
    assert version.tags["finetune.verdict_reason"] == finished.result["verdict"]["reason"]
    rows = finished.file.parent / "train.csv"
    assert json.loads(version.tags["finetune.data_files"])["train"] == [f"train.csv {sha256(rows)}"]
    assert json.loads(version.tags["finetune.libraries"])["torch"] == importlib.metadata.version("torch")
    git = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    assert version.tags.get("finetune.git_commit", "") == commit and len(version.tags["finetune.recipe_digest"]) == 64
    accuracy = finished.result["metrics"]["validation"]["accuracy"]["value"]
    assert f"| **validation** (judged) | accuracy | {accuracy:.4f} |" in version.description
    stored = [path for path in (finished.home / "mlartifacts").rglob("*") if path.is_file()]
    assert any(path.name == "model.safetensors" for path in stored)
    assert not [path for path in stored if path.suffix in (".bin", ".pkl", ".pt", ".pth", ".pickle")]
    # Models of homes that were copied from this one lie here, too.
    its_own = [path for path in stored if version.source.rpartition("/")[2] in path.parts]
    (described,) = [Model.load(path) for path in its_own if path.name == "MLmodel"]
    assert described.signature.inputs.input_names() == ["text"]
    assert described.run_id == finished.result["mlflow_run_id"]
    logged, run = client.get_logged_model(described.model_id), client.get_run(described.run_id)
    on = {one.key: (one.dataset_name, one.value) for one in logged.metrics}
    assert on["score/validation/accuracy/value"] == ("validation", accuracy)
    assert {*on} >= {name for name in run.data.metrics if name.startswith(("fit/eval_", "score/", "gate/"))}
    assert logged.params == run.data.params and logged.tags["mlflow.note.content"] == version.description
    assert [output.step for output in run.outputs.model_outputs] == [run.data.metrics["fit/best_step"]]
    assert described.signature.outputs.input_names() == ["label", "score"]
    (example,) = [path for path in its_own if path.name == "input_example.json"]
    assert [list(row) for row in json.loads(example.read_text())] == [["text"], ["text"]]


@pytest.mark.slow
def test_a_second_run_reports_that_nothing_changed_without_unneeded_imports(
    finished: FinishedRun, tmp_path: Path
) -> None:
    program = (
        "import sys; from flows.cli.main import main; code = main(sys.argv[1:]);"
        "print(*sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'transformers', 'datasets', 'evaluate',"
        " 'prefect', 'mlflow', 'cryptography', 'sigstore', 'model_signing'}), file=sys.stderr); sys.exit(code)"
    )
    argv = [command()[0], "-c", program, "run", str(finished.file), "--json", str(tmp_path / "out.json")]
    run = subprocess.run(argv, env=environment(finished.home), capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "Nothing changed" in run.stdout
    assert run.stderr.split() == []
    assert set(states(tmp_path / "out.json").values()) == {"cached"}
    # The alias is read from the home's database without MLflow.
    # The home is a copy of the one that trained: the path is where the model is now.
    path = finished.home / "artifacts" / finished.result["model"]["path"].partition("/artifacts/")[2]
    model = json.loads((tmp_path / "out.json").read_text())["model"]
    assert model == {**finished.result["model"], "path": str(path), "alias": "champion"}


def test_an_unchanged_run_ends_with_the_alias_of_now_and_the_next_commands(
    finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FINETUNE_HOME", str(shutil.copytree(finished.home, tmp_path / "home", symlinks=True)))
    client = connect()
    client.delete_registered_model_alias("small", "champion")
    client.set_registered_model_alias("small", "challenger", "1")
    assert main(["run", str(finished.file)]) == 0
    printed = capsys.readouterr().out
    assert "Verdict of that run: promote\n" in printed
    assert printed.partition("Registered: ")[2].splitlines() == [
        "small version 1, challenger",
        "Next:",
        '  finetune predict small@challenger "some text"',
        "  finetune serve   small@challenger",
        "  finetune promote small 1    # makes it the champion",
    ]
    client.set_registered_model_alias("small", "champion", "1")
    assert main(["run", str(finished.file)]) == 0
    assert capsys.readouterr().out.partition("Registered: ")[2].splitlines() == [
        "small version 1, champion",
        "Next:",
        '  finetune predict small "some text"',
        "  finetune serve   small",
    ]


@pytest.mark.slow
def test_a_forced_stage_and_one_of_new_rows_run_and_what_reads_nothing_new_is_cached(
    finished: FinishedRun, server: dict[str, str], tmp_path: Path
) -> None:
    """A column that the recipe does not name is another one: all rows are read again, and nothing is trained anew."""
    home = shutil.copytree(finished.home, tmp_path / "home", symlinks=True)
    file = write_project(tmp_path / "project")
    for rows in file.parent.glob("*.csv"):
        rows.write_text(rows.read_text().replace("horror", "western"))
    run = finetune(home, "run", str(file), "--force", "score", "--json", str(tmp_path / "out.json"), **server)
    assert run.returncode == 0, run.stderr
    ran = [name for name, state in states(tmp_path / "out.json").items() if state == "ran" and name in CACHED]
    assert ran == ["load_data", "score"]


@pytest.mark.drill
def test_damage_to_every_artifact_is_rebuilt_to_the_same_bytes(
    finished: FinishedRun, server: dict[str, str], tmp_path: Path
) -> None:
    home = shutil.copytree(finished.home, tmp_path / "home", symlinks=True)
    artifacts = [home / stage["artifact"] for stage in finished.result["stages"] if stage["artifact"]]
    for harm, artifact in zip(cycle([_delete, _truncate, _flip]), artifacts, strict=False):
        harm(max((p for p in artifact.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size))
    run = finetune(home, "run", str(finished.file), "--json", str(tmp_path / "out.json"), **server)
    assert run.returncode == 0, run.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert {name for name, state in states(tmp_path / "out.json").items() if state == "ran"} >= set(CACHED)
    assert result["model"]["sha256"] == finished.result["model"]["sha256"]
    assert [s["key"] for s in result["stages"]] == [s["key"] for s in finished.result["stages"]]
    assert len(list((home / "quarantine").iterdir())) == len(artifacts)


def _delete(file: Path) -> None:
    file.unlink()


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
def test_interrupted_killed_then_run_twice_at_once_it_ends_with_the_same_bytes(
    finished: FinishedRun, server: dict[str, str], fresh_database: Path, tmp_path: Path
) -> None:
    home, file = tmp_path / "home", write_project(tmp_path / "project")
    home.mkdir()
    shutil.copy(fresh_database, home / "mlflow.db")
    # Predictions and scores are found again if the weights are the same.
    shutil.copytree(finished.home / "artifacts", home / "artifacts", ignore=shutil.ignore_patterns("fit"))
    home.chmod(0o700)

    # As a terminal does on Ctrl-C, with a Prefect server of the run's own.
    new = [NEW_PYTHON, "-c", code_with_forked_programs("from flows.cli.main import start; start()")]
    stopped = _start(new, home, file, tmp_path / "asked.json")
    _wait_for_checkpoint(home, stopped, after=_newest_checkpoint(home))
    os.killpg(stopped.pid, signal.SIGINT)
    printed = stopped.communicate(timeout=60)[0]
    assert stopped.returncode == 130, printed
    assert "Run the same command again" in printed and "Traceback" not in printed
    assert json.loads((tmp_path / "asked.json").read_text())["state"] == "interrupted"
    _assert_nothing_runs_within_5_s(home)

    killed = _start([sys.executable, "-m", "tests.flows.forked"], home, file, tmp_path / "killed.json", **server)
    _wait_for_checkpoint(home, killed, after=_newest_checkpoint(home))
    killed.kill()
    killed.communicate()
    _assert_nothing_runs_within_5_s(home)

    outs = [tmp_path / "first.json", tmp_path / "second.json"]
    with ThreadPoolExecutor() as both:
        for run in both.map(lambda out: finetune(home, "run", str(file), "--json", str(out), **server), outs):
            assert run.returncode == 0, run.stdout + run.stderr
    stages = [states(tmp_path / f"{n}.json") for n in ("first", "second")]
    assert sorted(one["fit"] for one in stages) == ["cached", "resumed"]
    assert {one[name] for one in stages for name in ("predict", "score")} == {"cached"}
    for n in ("first", "second"):
        result = json.loads((tmp_path / f"{n}.json").read_text())
        assert result["model"]["sha256"] == finished.result["model"]["sha256"]
        assert result["metrics"] == finished.result["metrics"]
        assert result["model"]["registered"] == "small/1"


def _start(argv: list[str], home: Path, file: Path, out: Path, **more: str) -> subprocess.Popen[str]:
    """A command in a process of its own, whose programs are forks and whose training takes half a minute."""
    return subprocess.Popen(
        [*argv, "run", str(file), "--json", str(out)],
        env=environment(home, **{PAUSE: "0.2"}, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell has what it runs in the background ignore Ctrl-C, perhaps these tests, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _newest_checkpoint(home: Path) -> int:
    steps = [int(path.name.split("-")[1]) for path in home.glob("jobs/*/checkpoints/checkpoint-*")]
    return max(steps, default=0)


def _wait_for_checkpoint(home: Path, run: subprocess.Popen[str], after: int) -> None:
    deadline = time.monotonic() + 120
    while _newest_checkpoint(home) <= after:
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _assert_nothing_runs_within_5_s(home: Path) -> None:
    mark = f"FINETUNE_HOME={home}".encode()
    deadline = time.monotonic() + 5
    while True:
        left = [pid for pid in os.listdir("/proc") if pid.isdigit() and mark in _environ(pid)]
        left += [str(pid) for lock in home.glob("jobs/*/lock") for pid in find_readers(lock)]
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _environ(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def test_six_mistakes_give_six_messages_and_store_nothing(tmp_path: Path) -> None:
    file = write_project(tmp_path / "project")
    document = yaml.safe_load(file.read_text())
    recipe = document["deployments"][0]["parameters"]["recipe"]
    recipe["training"] |= {"learning_rat": 1, "lr_scheduler_type": "cosin", "num_train_epochs": -1}
    recipe["evaluation"]["metrics"] = ["acuracy"]
    recipe["data"]["text"] = []
    del recipe["task"]
    file.write_text(yaml.safe_dump(document))
    out = tmp_path / "out.json"
    run = finetune(tmp_path / "home", "run", str(file), "--json", str(out))
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert len(run.stderr.splitlines()) == 6
    for words in ("learning_rate", "'cosine'", "num_train_epochs", "'accuracy'", "data.text", "task"):
        assert words in run.stderr
    assert len(json.loads(out.read_text())["problems"]) == 6
    assert not list((tmp_path / "home").rglob("*/*"))


def test_a_champion_that_mlflow_does_not_tell_of_is_a_failed_result(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"http://127.0.0.1:{closed_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    file, out = write_project(tmp_path / "project"), tmp_path / "out.json"
    assert main(["run", str(file), "--set", "model.start_from=champion", "--json", str(out)]) == 1
    result = json.loads(out.read_text())
    (problem,) = result["problems"]
    assert (result["state"], problem["where"]) == ("failed", "resolve")
    assert problem["message"].startswith(f"MLflow at {uri} fails") and problem["message"] in capsys.readouterr().err


def test_bad_rows_are_the_users_mistake_reported_with_file_and_row(
    server: dict[str, str], fresh_database: Path, tmp_path: Path
) -> None:
    file = write_project(tmp_path / "project")
    (tmp_path / "home").mkdir(mode=0o700)
    shutil.copy(fresh_database, tmp_path / "home/mlflow.db")
    rows = tmp_path / "project" / "train.csv"
    rows.write_text(rows.read_text() + ",pos\nfine film,\n")
    run = finetune(tmp_path / "home", "run", str(file), "--json", str(tmp_path / "out.json"), **server)
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
    assert "train.csv" in run.stderr and "242" in run.stderr and "243" in run.stderr
    assert not list((tmp_path / "home" / "artifacts" / "load_data").iterdir())
    _assert_trackers_have(json.loads((tmp_path / "out.json").read_text()), tmp_path / "home")


def _assert_trackers_have(result: dict[str, Any], home: Path) -> None:
    """The problems of a run that failed on its rows, in MLflow and as a table in Prefect."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey

    files = list((home / "mlartifacts").rglob("problems.json"))
    assert [json.loads(file.read_text()) for file in files] == [result["problems"]]
    with get_client(sync_client=True) as client:
        of_this_run = ArtifactFilterFlowRunId(any_=[result["flow_run_id"]])
        chosen = ArtifactFilter(flow_run_id=of_this_run, key=ArtifactFilterKey(any_=["finetune-data-report"]))
        (table,) = client.read_artifacts(artifact_filter=chosen)
    assert [row["message"] for row in json.loads(table.data)] == [p["message"] for p in result["problems"]]


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")


def fail_with(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.fixture
def run_flow(
    home: Path, prefect_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], dict[str, Any]]:
    """Runs the flow as `finetune run` does, in this process, with an MLflow that is down; gives its result."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setattr(run_tracker, "DEAD_WAIT_S", 0.1)
    file = yaml.safe_load(write_project(tmp_path / "project").read_text())
    recipe = parse(file["deployments"][0]["parameters"]["recipe"])
    # Followers stay in the context in which they are set.
    return lambda: fine_tune_here(recipe)


def test_a_flow_that_fails_before_its_stages_has_the_reason_in_its_result(
    run_flow: Callable[[], dict[str, Any]], home: Path
) -> None:
    home.mkdir(mode=0o700)
    (home / "runs").write_text("no folder")
    result = run_flow()
    assert result["state"] == "failed"
    ((kind, where, message),) = (problem.values() for problem in result["problems"])
    assert (kind, where) == ("internal", "run") and str(home / "runs") in message


@pytest.mark.parametrize("place", ["start_tracking", "pipeline"])
def test_a_full_disk_is_reported_once_with_its_folder_wherever_it_is_met(
    run_flow: Callable[[], dict[str, Any]], home: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(flow, place, fail_with(FULL))
    result = run_flow()
    assert result["state"] == "failed"
    (problem,) = result["problems"]
    assert (problem["kind"], problem["where"]) == ("disk", str(home))
    assert problem["message"].startswith("the disk is full. Make room")


def test_a_full_disk_of_a_server_is_not_reported_as_this_machines(
    run_flow: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "pipeline", fail_with(MlflowFailed("MLflow at http://server fails (disk is full).")))
    assert [problem["kind"] for problem in run_flow()["problems"]] == ["internal"]


def test_a_complete_run_that_cannot_be_remembered_is_complete_with_a_warning(
    run_flow: Callable[[], dict[str, Any]], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "pipeline", lambda *_: None)
    home.mkdir(mode=0o700)
    (home / "recipes").write_text("no folder")
    result = run_flow()
    assert result["state"] == "completed" and result["problems"] == []
    assert "This run is complete, but" in result["warnings"][-1] and str(home) in result["warnings"][-1]


def test_records_lost_for_mlflow_are_not_promised_to_the_next_run(
    run_flow: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: Any) -> None:
        (tracking_file,) = create_home().glob(f"runs/*/{OUTBOX}")
        tracking_file.unlink()
        tracking_file.mkdir()

    monkeypatch.setattr(flow, "pipeline", breaks)
    (warning,) = run_flow()["warnings"]
    assert "is lost" in warning and "next run" not in warning


def test_records_that_the_prefect_server_missed_are_promised_to_the_next_run_that_runs_a_stage(
    run_flow: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "pipeline", lambda *_: None)
    monkeypatch.setattr(flow_runs, "server_answers", lambda: False)
    result = run_flow()
    assert result["state"] == "completed" and flow_runs.has_pending_state(result["flow_run_id"])
    assert "The next run that executes a stage sends it" in result["warnings"][-1]


def test_the_release_run_of_a_sweep_on_a_worker_waits_for_a_server_that_is_away(
    home: Path, prefect_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sweep follows it, which is no sign of a person who waits."""
    ended: list[dict[str, Any]] = []

    class Keeper(Listener):
        def run_ended(self, result: dict[str, Any]) -> None:
            ended.append(result)

    file = yaml.safe_load(write_project(tmp_path / "project").read_text())
    monkeypatch.setattr(flow, "pipeline", fail_with(UserError([])))
    monkeypatch.setattr(flow_runs, "server_answers", lambda: False)
    release = Caller(listeners=(Keeper(),)).bind(flow.finetune, flow.run_finetune)
    state = release(recipe=parse(file["deployments"][0]["parameters"]["recipe"]), return_state=True)
    assert not state.is_crashed()
    assert ended and not flow_runs.has_pending_state(ended[0]["flow_run_id"])


def test_a_registered_model_answers_with_labels_and_probabilities(finished: FinishedRun) -> None:
    predicted = finetune(finished.home, "predict", "small", "a great film", "the plot was awful")
    assert predicted.returncode == 0, predicted.stderr
    lines = predicted.stdout.splitlines()
    assert lines[0] == "a great film" and lines[1].endswith("pos")
    assert lines[3] == "the plot was awful" and lines[4].endswith("neg")
    assert sum(float(line.split("%")[0]) for line in lines[1:3]) == pytest.approx(100, abs=0.2)


def test_asking_a_model_that_is_not_registered_names_those_that_are(
    finished: FinishedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FINETUNE_HOME", str(finished.home))
    assert main(["predict", "smal", "a great film"]) == 2
    assert "Did you mean 'small'?" in capsys.readouterr().err
