"""Code that a recipe from a server names runs only with the user's consent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.states import Crashed

from flows.cli.main import main
from tasks.cache.results import PinnedVersion
from tasks.registry import untrusted_code
from tasks.registry.lineage import LINEAGE
from tasks.registry.monitored_versions import MonitoredVersion, read_recipe
from tasks.tracking.connection import FLOW_RUN_TAG
from tests.raised import raised_problems
from training.problems import UserError
from training.recipe import parse

RECIPE: dict[str, Any] = {
    "name": "foreign",
    "task": "sequence-classification",
    "data": {"source": "csv", "path": "rows.csv", "text": ["text"], "label": "label"},
    "model": {"source": "scratch", "config": {"model_type": "bert", "vocab_size": 100}},
}
HOSTILE = {**RECIPE, "task": "hostile:Kind", "training": {"callbacks": ["os:getcwd"]}}
LISTED = ("task: 'hostile:Kind' is code", "training.callbacks: 'os:getcwd' is code", "--run-code")


@flow(name="finetune")
def ours() -> None:
    """Never run."""


@pytest.fixture
def payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that importing `hostile` writes."""
    written = tmp_path / "payload"
    (tmp_path / "hostile.py").write_text(f"open({str(written)!r}, 'w').close()\nKind = int\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "hostile", raising=False)
    return written


def registered(home: Path, database: Path, recipe: dict[str, Any]) -> None:
    """A version in the home's registry, whose record has this recipe."""
    run = home / "runs" / "run-1"
    run.mkdir(mode=0o700, parents=True)
    home.chmod(0o700)
    (home / "mlflow.db").write_bytes(database.read_bytes())
    lock = {"num_machines": 1, "started_from": None}
    record = {
        "recipe_without_defaults": recipe,
        "recipe": recipe,
        "lock": lock,
        "stages": [],
        "model": {"digest": "d", "files": {}},
        **{"training": None, "environment": None, "metrics": None, "code": {"files": {}}, "libraries": {}},
    }
    (run / LINEAGE).write_text(json.dumps({**record, "run": {"flow_run_id": "run-1"}}))
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    client.create_registered_model("foreign")
    client.create_model_version("foreign", str(run), tags={FLOW_RUN_TAG: "run-1"})


def monitored() -> MonitoredVersion:
    """The version of `registered`, as its tags name it."""
    pinned = PinnedVersion(name="foreign", version="1", model="weights", max_length=64)
    nothing: dict[str, Any] = {"options": {}, "columns": {}, "expected": {}, "predict": None, "mlflow_run": None}
    place = {"recipe": "foreign", "split": "test", "load_data": "key"}
    return MonitoredVersion(pinned=pinned, task="sequence-classification", **nothing, **place)


def test_reproduce_lists_the_code_that_a_record_names_and_imports_none_of_it(
    home: Path, payload: Path, fresh_database: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registered(home, fresh_database, HOSTILE)
    assert main(["reproduce", "foreign/1"]) == 2
    printed = capsys.readouterr().err
    assert [text for text in LISTED if text not in printed] == [] and not payload.exists()
    assert main(["reproduce", "foreign/1", "--run-code"]) == 2  # it runs, and is no task type
    assert payload.exists() and "hostile:Kind' is the class int" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["hostile://Kind", "hostile:Kind://x"])
def test_reproduce_lists_a_task_type_whose_name_looks_like_a_url(
    home: Path, payload: Path, fresh_database: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    registered(home, fresh_database, {**RECIPE, "task": name})
    assert main(["reproduce", "foreign/1"]) == 2
    assert f"task: {name!r} is code" in capsys.readouterr().err and not payload.exists()


def test_an_evaluation_imports_no_code_that_the_recipe_of_a_version_names(
    home: Path, payload: Path, fresh_database: Path
) -> None:
    registered(home, fresh_database, HOSTILE)
    version = monitored()
    with pytest.raises(UserError) as caught:
        read_recipe(version, run_code=False)
    assert [text for text in LISTED if text not in str(caught.value)] == [] and not payload.exists()
    own = version.model_copy(update={"task": "hostile:Kind"})
    with pytest.raises(UserError) as caught:
        read_recipe(own, run_code=False)  # consent to one class is consent to nothing else
    assert [problem.where for problem in caught.value.problems] == ["training.callbacks"] and not payload.exists()
    with pytest.raises(UserError, match="is the class int"):
        read_recipe(version, run_code=True)
    assert payload.exists()


def test_power_lists_the_code_of_a_recipe_and_has_the_option_that_it_names(
    home: Path,
    payload: Path,
    fresh_database: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    registered(home, fresh_database, HOSTILE)
    monkeypatch.setattr("flows.cli.power.find_monitored", lambda *_: monitored())
    assert main(["power", "foreign"]) == 2
    printed = capsys.readouterr().err
    assert [text for text in LISTED if text not in printed] == [] and not payload.exists()
    assert main(["power", "foreign", "--run-code"]) == 2  # it runs, and is no task type
    assert payload.exists() and "hostile:Kind' is the class int" in capsys.readouterr().err


def test_a_record_cannot_name_a_folder_of_its_author_as_the_run_to_which_the_user_consented(
    home: Path, payload: Path, fresh_database: Path, tmp_path: Path
) -> None:
    registered(home, fresh_database, HOSTILE)
    (theirs := tmp_path / "theirs").mkdir()
    code = [["task", "hostile:Kind"], ["training.callbacks", "os:getcwd"]]
    (theirs / "code.json").write_text(json.dumps(code))
    record = home / "runs" / "run-1" / LINEAGE
    version = monitored()
    for run in (str(theirs), f"../../{theirs.name}"):
        record.write_text(json.dumps({**json.loads(record.read_text()), "run": {"flow_run_id": run}}))
        with pytest.raises(UserError, match=r"lineage.json of foreign/1 is damaged \(run.flow_run_id is"):
            read_recipe(version, run_code=False)
    assert not payload.exists()


def test_resume_lists_the_code_that_the_server_names_and_imports_none_of_it(
    prefect_server: None, home: Path, payload: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with get_client(sync_client=True) as client:
        parameters = {"recipe": RECIPE, "overrides": {"task": "hostile:Kind", "training.callbacks": ["os:getcwd"]}}
        run = client.create_flow_run(ours, parameters=parameters, state=Crashed())
    assert main(["resume", str(run.id)]) == 2
    printed = capsys.readouterr().err
    assert [text for text in LISTED if text not in printed] == [] and not payload.exists()
    assert main(["resume", str(run.id), "--run-code"]) == 2
    assert payload.exists()


def test_a_run_that_began_in_this_home_needs_consent_to_no_code_but_what_was_added(home: Path) -> None:
    own = {**RECIPE, "training": {"callbacks": ["my:Callback"]}}
    (home / "runs" / "run-1").mkdir(mode=0o700, parents=True)
    home.chmod(0o700)
    untrusted_code.record_code("run-1", parse(own))
    untrusted_code.require_consent("the Prefect server", own, run="run-1")
    problems = raised_problems(
        untrusted_code.require_consent, "the Prefect server", own, overrides={"training.loss": "its:loss"}, run="run-1"
    )
    assert [problem.where for problem in problems] == ["training.loss"]
    with pytest.raises(UserError):
        untrusted_code.require_consent("the Prefect server", own, run="run-2")
