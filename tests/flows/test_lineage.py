"""The lineage of a model: shown from the home and from MLflow alone, and reproduced."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main
from flows.cli.reproduce import _describe_difference, _fresh_home
from flows.cli.runs import _lines
from tasks.cache.results import Artifact, Lock
from tasks.cache.stage import Row
from tasks.home import home as create_home
from tasks.registry import lineage
from tasks.registry.reproduction import (
    Difference,
    RecordedBatches,
    differences,
    differing_files,
    pair_metrics,
    recorded_recipe,
)
from tasks.stages.fit import batch_division
from tests.flows.forked import finetune
from tests.flows.small import FinishedRun
from training.jobs.protocol import sha256
from training.problems import UserError
from training.recipe import load


@pytest.fixture
def record(finished: FinishedRun) -> dict[str, Any]:
    """The record of the finished run."""
    kept = finished.home / "runs" / finished.result["flow_run_id"] / "lineage.json"
    return dict(json.loads(kept.read_text()))


def show(name: str, out: Path) -> dict[str, Any]:
    assert main(["show", name, "--json", str(out)]) == 0
    return dict(json.loads(out.read_text()))


def test_a_record_of_an_earlier_version_with_another_name_for_the_recipe_is_shown_the_same(
    record: dict[str, Any], tmp_path: Path, home: Path
) -> None:
    run = record["run"]["flow_run_id"]
    file = home / "runs" / run / "lineage.json"
    file.parent.mkdir(parents=True)
    earlier = {("said" if name == lineage.RECIPE_WITHOUT_DEFAULTS else name): value for name, value in record.items()}
    file.write_text(json.dumps(earlier))
    assert show(run, tmp_path / "out.json") == record


def test_a_long_file_name_is_shown_apart_from_its_path(record: dict[str, Any]) -> None:
    name = "special_tokens_map.json"
    record["lock"]["model_files"] = {name: {"path": "/models/it.json", "size_bytes": 5, "sha256": "ab"}}
    lines = [*_lines(record, 200)]
    assert f"  {name}  /models/it.json, 5 bytes" in lines and "                sha256 ab" in lines


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("run.flow_run_id", "../../elsewhere"),
        ("recipe.name", "../x"),
        ("lock.model_files", {"../../config.json": {"path": "/etc/hostname", "sha256": "x"}}),
        ("lock.started_from", {"name": "n", "version": "1", "model": "m", "key": "../x", "max_length": 8}),
        ("stages", [{"name": "load_data", "key": "../../x"}]),
        ("training.micro_batch_size", 0),
        ("environment.threads", 10**9),
        ("metrics", {"validation": 7}),
    ],
)
def test_a_record_whose_values_would_lead_out_of_the_home_or_to_no_end_is_one_message(
    record: dict[str, Any], home: Path, path: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = home / "runs" / record["run"]["flow_run_id"] / "lineage.json"
    file.parent.mkdir(parents=True)
    *sections, name = path.split(".")
    inner = record
    for section in sections:
        inner = inner[section]
    inner[name] = value
    file.write_text(json.dumps(record))
    assert main(["show", file.parent.name]) == 2
    assert f"the lineage.json of {file.parent.name} is damaged ({path}" in capsys.readouterr().err


def test_the_lineage_of_a_version_is_shown_from_the_home_and_the_same_from_mlflow_alone(
    finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = finished.result["flow_run_id"], tmp_path / "out.json"
    names = ["small/1", "small@champion", run[:8], "small"]
    monkeypatch.setenv("FINETUNE_HOME", str(finished.home))
    here = [show(name, out) for name in names]
    printed = capsys.readouterr().out
    monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / "other"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{finished.home / 'mlflow.db'}")
    assert [show(name, out) for name in names] == here
    assert capsys.readouterr().out == printed

    record = here[0]
    assert record["registered"]["version"] == "1" and record["registered"]["aliases"] == ["champion"]
    assert [record["run"][name] for name in ("flow_run_id", "mlflow_run_id")] == [run, finished.result["mlflow_run_id"]]
    assert record["run"]["state"] == "completed" and record["metrics"] == finished.result["metrics"]
    assert [(stage["name"], stage["key"]) for stage in record["stages"]] == [
        (stage["name"], stage["key"]) for stage in finished.result["stages"]
    ]
    (fitted,) = (stage for stage in record["stages"] if stage["name"] == "fit")
    kept = json.loads((finished.home / "artifacts/fit" / fitted["key"] / "inputs.json").read_text())
    assert kept == fitted["inputs"] | {
        **{f"code.{path}": record["code"]["files"][path] for path in fitted["code"]},
        **{f"library.{name}": record["libraries"][name] for name in fitted["libraries"]},
    }
    assert record["environment"]["threads"] > 0 and record["training"]["micro_batch_size"] == 16
    assert max(map(len, printed.splitlines())) <= 100
    rows = finished.file.parent / "train.csv"
    # By name: files that come to the folder later are none of the recorded rows.
    assert record["recipe"]["data"]["splits"] == {s: [str(rows.with_stem(s))] for s in ("train", "validation")}
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    expected = [finished.result["model"]["sha256"], sha256(rows), f"{rows.stat().st_size:,} bytes", fitted["key"][:12]]
    expected += [
        run,
        "train 240, validation 60; 2 labels",
        record["environment"]["processor"],
        git,
        "learning_rate: 0.005",
    ]
    assert [text for text in expected if text not in " ".join(printed.split())] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smal", "no run and no recipe that has run is named 'smal': small. Registered: small. Did you mean 'small'?"),
        ("smal/1", "no model 'smal' is registered"),
        ("small/9", "'small' has no version '9': it has 1."),
        ("small@champoin", "Did you mean 'champion'?"),
    ],
)
def test_a_name_that_does_not_exist_is_reported_with_the_nearest(
    finished: FinishedRun, name: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FINETUNE_HOME", str(finished.home))
    assert main(["show", name]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.drill
def test_a_model_is_made_again_to_the_byte_and_nothing_is_left_or_registered(
    finished: FinishedRun, server: dict[str, str], tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    home = shutil.copytree(finished.home, tmp_path / "home", symlinks=True)
    again = finetune(home, "reproduce", "small/1", **server)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "All inputs are as recorded" in again.stdout
    assert f"The same bytes: sha256 {finished.result['model']['sha256']} model.safetensors" in again.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert len(MlflowClient(f"sqlite:///{home / 'mlflow.db'}").search_model_versions("name = 'small'")) == 1


def test_a_file_that_has_changed_or_is_missing_is_reported_before_anything_is_made(
    finished: FinishedRun,
    record: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    home = shutil.copytree(finished.home, tmp_path / "home", symlinks=True)
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    kept = home / "runs" / finished.result["flow_run_id"] / "lineage.json"
    (pin,) = record["lock"]["data_files"]["train"]
    pin["sha256"] = "0" * 64
    kept.write_text(json.dumps(record))
    assert main(["reproduce", "small/1"]) == 2
    assert f"{pin['path']}: has sha256 {sha256(Path(pin['path']))[:12]} instead" in capsys.readouterr().err
    record["recipe"]["data"]["splits"]["train"] = [str(finished.file.parent / "gone.csv")]
    kept.write_text(json.dumps(record))
    assert main(["reproduce", "small/1"]) == 2
    assert "gone.csv" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_file_is_no_home_to_reproduce_in(home: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^--into: .*/file is not a folder"), _fresh_home(tmp_path / "file", "m"):
        pass


@pytest.fixture
def tracked(home: Path, fresh_database: Path) -> Path:
    """A home in which MLflow has its database."""
    shutil.copyfile(fresh_database, create_home() / "mlflow.db")
    return home


MAKES_A_MODEL_AGAIN = """
import sys
from flows.cli.reproduce import _fresh_home
with _fresh_home(None, "m") as home:
    (home / "runs" / "run").mkdir(parents=True)
    print(home, flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("remover", ["store", "reproduce"])
def test_the_home_of_a_reproduction_is_listed_and_kept_while_it_runs_and_goes_once_it_was_killed(
    tracked: Path, capsys: pytest.CaptureFixture[str], remover: str
) -> None:
    argv = [sys.executable, "-c", MAKES_A_MODEL_AGAIN]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert main(["store", "--remove", "--yes"]) == 0
        assert f"a reproduction that is running: {folder}" in capsys.readouterr().out and folder.is_dir()
        with pytest.raises(UserError, match="another `finetune reproduce` runs in"), _fresh_home(folder, "m"):
            pass
        process.kill()
    assert main(["store"]) == 0
    printed = capsys.readouterr().out
    assert f"{folder} is of a `finetune reproduce` that was killed." in printed and "reproductions" in printed
    if remover == "store":
        assert main(["store", "--remove", "--yes"]) == 0
        assert "Removed 1 of 1" in capsys.readouterr().out
    else:
        with _fresh_home(None, "other") as fresh:
            assert fresh.is_dir() and not folder.exists()
    assert not folder.exists()


def test_a_home_that_the_user_was_told_of_is_never_removed(tracked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tracked.with_name(f"{tracked.name}-reproduced-mine")
    with _fresh_home(kept, "m"):
        (kept / "runs").mkdir()
    with _fresh_home(None, "other"):
        pass
    assert main(["store", "--remove", "--yes"]) == 0
    assert f"a reproduction that was kept: {kept}" in capsys.readouterr().out and kept.is_dir()


def test_each_ingredient_that_differs_is_named_with_both_values(record: dict[str, Any]) -> None:
    lock = Lock.model_validate(record["lock"])
    machine = {name: record["environment"][name] for name in ("device", "threads")}
    assert differences(record, lock, machine) == []
    torch = record["libraries"]["torch"]
    digest = record["code"]["files"]["training/programs/fit.py"]
    record["libraries"] |= {"torch": "1.0", "gone-library": "2.0"}
    record["code"]["files"] |= {"training/programs/fit.py": "0" * 64, "my_engine.py": "1" * 64}
    found = differences(record, lock.model_copy(update={"data_fingerprint": "second"}), {**machine, "device": "Z80"})
    assert [tuple(one) for one in found] == [
        ("library torch", "1.0", torch),
        ("library gone-library", "2.0", "none"),
        ("code training/programs/fit.py", "0" * 12, digest[:12]),
        ("code my_engine.py", "1" * 12, "none"),
        ("device", machine["device"], "Z80"),
        ("rows' fingerprint", "none", "second"),
    ]


@pytest.mark.parametrize(("value", "differs", "code"), [(0.85, True, 0), (0.85, False, 1), (0.75, True, 1)])
def test_other_bytes_are_a_reproduction_where_something_differs_and_the_figures_agree(
    value: float, differs: bool, code: int
) -> None:
    recorded = {"model.safetensors": {"sha256": "a" * 64}, "config.json": {"sha256": "c" * 64}}
    here = {**recorded, "model.safetensors": {"sha256": "b" * 64}}
    assert differing_files(recorded, here) == ["model.safetensors"] and differing_files(recorded, recorded) == []
    figures = pair_metrics(
        {"validation": {"accuracy": {"value": 0.875, "low": 0.8125, "high": 0.9375}}},
        {"validation": {"accuracy": {"value": value, "low": value - 0.0625, "high": value + 0.0625}}},
    )
    differing = [Difference("library torch", "1", "2")] if differs else []
    lines, given = _describe_difference(["model.safetensors"], recorded, here, differing, figures)
    assert given == code
    assert ("do not agree" in lines[-1]) == (value == 0.75)


def test_batches_are_divided_as_they_were(record: dict[str, Any], home: Path) -> None:
    record["recipe"]["evaluation"]["unknown"] = []  # a field of then, left to its default
    recipe, lock = recorded_recipe(record), Lock.model_validate(record["lock"])
    record["training"]["micro_batch_size"] = 4  # of 16
    model = Artifact(stage="load_model", key="k", digest="d")
    (home / model.location / "model").mkdir(parents=True)
    home.chmod(0o700)
    (home / model.location / "model/config.json").write_text("{}")
    listener = RecordedBatches(recipe, record, batch_division)
    listener.stage_ended(Row("resolve", "r", "ran", 0.0), lock)
    listener.stage_ended(Row("load_model", "k", "ran", 0.0), model)
    assert batch_division(recipe, lock, model.path / "model").divisor == 4


def test_a_model_is_made_again_without_the_files_of_its_gate(record: dict[str, Any]) -> None:
    record["recipe"]["release"]["gate"]["must_hold"] = {"path": "gone.csv"}
    assert recorded_recipe(record).release.gate.must_hold is None


def test_a_record_holds_no_credentials(finished: FinishedRun, home: Path) -> None:
    run = home / "runs/run"
    run.mkdir(mode=0o700, parents=True)
    home.chmod(0o700)
    lock = Lock(data_fingerprint="postgresql://me:planted@rows.example/reviews, table 7")
    (run / "lock.json").write_text(lock.model_dump_json())
    record = lineage.build_record(load(finished.file), "run", [], mlflow_run=None)
    assert "planted" not in json.dumps(record)
    assert record["lock"]["data_fingerprint"] == "postgresql://rows.example/reviews, table 7"
    lines = list(_lines(record, 100))
    assert lines[0] == "small, flow run run" and len(lines) > 20  # as far as it came
