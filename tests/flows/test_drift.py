"""`finetune drift`: new rows against the validation rows of a registered version."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from flows.cli.main import main
from tasks.prefect.deployments import read_deployments
from tests.flows.forked import finetune
from tests.flows.small import FinishedRun, write_rows
from tests.raised import raised_problems
from tests.s3 import BUCKET, KEYS, S3
from tests.tasks.shared import s3
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

__all__ = ["s3"]

FEW = ("--set", "min_rows=50")  # the small recipe has 60 rows of validation


@pytest.fixture
def own_home(finished: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the home in which the small recipe ran."""
    home = shutil.copytree(finished.home, tmp_path / "home", symlinks=True)
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    return home


def write_german(path: Path, rows: int) -> None:
    """A CSV file of texts in another language, some of them empty."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["text"])
        table.writerows([[f"Der Hund Nummer {n} frißt sehr gern Äpfel." if n % 4 else ""] for n in range(rows)])


def drift(home: Path, *arguments: str, **more: str) -> tuple[dict[str, Any], str]:
    """The result of the command, and its output."""
    out = home.parent / "drift.json"
    run = finetune(home, "drift", "small", *FEW, *arguments, "--json", str(out), **more)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(out.read_text()), run.stdout


@dataclass(frozen=True)
class Looks:
    """A home with two reports, on rows of the same kind and on rows of another language."""

    home: Path
    german: Path
    steady: dict[str, Any]
    drifted: dict[str, Any]
    printed: list[str]


@pytest.fixture(scope="module")
def looks(finished: FinishedRun, server: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Looks:
    folder = tmp_path_factory.mktemp("looks")
    home, new, german = folder / "home", folder / "new", folder / "german.csv"
    shutil.copytree(finished.home, home, symlinks=True)
    new.mkdir()
    write_rows(new / "monday.csv", 150, seed=3)
    write_rows(new / "tuesday.csv", 50, seed=4)
    steady, first = drift(home, "--input", str(new), **server)
    write_german(german, 120)
    drifted, second = drift(home, "--input", str(german), **server)
    return Looks(home, german, steady, drifted, [first, second])


def test_new_rows_of_the_same_kind_are_steady_and_others_drifted_and_the_version_has_both_reports(
    looks: Looks, server: dict[str, str]
) -> None:
    found, printed = looks.steady["drift"], looks.printed[0]
    assert found["verdict"] == "steady" and "Verdict: steady" in printed
    assert found["rows"] == {"reference": 60, "new": 200} and found["look"] == 1
    found, printed = looks.drifted["drift"], looks.printed[1]
    assert found["verdict"] == "drifted" and found["look"] == 2
    verdicts = {line["name"]: line["verdict"] for line in found["comparisons"]}
    assert verdicts["words"] == verdicts["empty rows"] == "drifted"
    assert "Typical of new rows:" in printed and found["input"] == {"rows": 120, "without_prediction": 30}
    states = {stage["name"]: stage["state"] for stage in looks.drifted["stages"]}
    assert states["profile"] == "cached"
    # The same rows again are no further look.
    again, _ = drift(looks.home, "--input", str(looks.german), **server)
    assert again["drift"] == found and again["stages"][3]["state"] == "cached"
    client = MlflowClient(f"sqlite:///{looks.home / 'mlflow.db'}")
    version = client.get_model_version("small", "1")
    assert json.loads(version.tags["finetune.drift"])["verdict"] == "drifted"
    assert [metric.step for metric in client.get_metric_history(version.run_id, "drift/words")][:2] == [1, 2]
    pages = [file.path for file in client.list_artifacts(version.run_id, "drift/look-0002")]
    assert pages == ["drift/look-0002/report.json", "drift/look-0002/report.png"]
    assert str(client.get_model_version_by_alias("small", "champion").version) == "1"


def test_the_event_and_the_table_of_a_report_are_on_the_server(looks: Looks, prefect_server: None) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    run = looks.drifted["flow_run_id"]
    of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
    with get_client(sync_client=True) as client:
        (table,) = [one for one in client.read_artifacts(artifact_filter=of_run) if one.key == "finetune-drift"]
        assert "drifted in" in str(table.description)
        assert str(client.read_flow_run(run).name).startswith("drift of small")

        def stored() -> list[dict[str, Any]]:
            answer = client._client.post("/events/filter", json={"filter": {"event": {"name": ["finetune.drift"]}}})
            return [one for one in answer.json()["events"] if one["payload"]["flow_run_id"] == run]

        wait_until(lambda: bool(stored()), 30)
        (event,) = stored()
    assert event["resource"]["prefect.resource.id"] == "finetune.model.small"
    assert event["resource"]["finetune.drift"] == event["payload"]["verdict"] == "drifted"
    assert event["payload"]["version"] == "small/1" and event["payload"]["summary"].startswith("drifted in")


def test_rows_in_a_bucket_are_compared_as_those_of_a_folder(
    own_home: Path, tmp_path: Path, server: dict[str, str], s3: S3
) -> None:
    write_rows(tmp_path / "monday.csv", 60, seed=3)
    here, _ = drift(own_home, "--input", str(tmp_path / "monday.csv"), **server)
    s3.put("new/monday.csv", (tmp_path / "monday.csv").read_bytes())
    login = {**s3.environment(), **KEYS}
    there, _ = drift(own_home, "--input", f"s3://{BUCKET}/new", **server, **login)
    assert there["drift"] == here["drift"]
    states = {stage["name"]: stage["state"] for stage in there["stages"]}
    assert states["observe"] == states["drift"] == "cached"


def test_too_few_rows_are_undecided_and_no_look(own_home: Path, tmp_path: Path, server: dict[str, str]) -> None:
    write_rows(tmp_path / "few.csv", 20, seed=3)
    result, printed = drift(own_home, "--input", str(tmp_path / "few.csv"), **server)
    assert result["drift"]["verdict"] == "undecided" and result["drift"]["look"] is None
    assert "too few" in printed and "small/1" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--input", "{tmp}/nothing.csv", "{tmp}/no.csv"], "--input: '{tmp}/no.csv' does not exist"),
        (["--input", "{tmp}/*.csv"], "--input: {tmp}/*.csv has no file of rows"),
        (["--input", "{tmp}"], "--input: {tmp} has no file of rows: give files with one of the suffixes .txt"),
        (["--input", "{tmp}", "--set", "auk=0.6"], "--set auk: is unknown: choose from cohens_w"),
        (["--input", "{tmp}", "--set", "auc=0.2"], "--set auc: Input should be greater than or equal to 0.5"),
        (["--input", "{tmp}", "--set", "auc=high"], "--set: 'auc=high' is not FIELD=NUMBER"),
    ],
)
def test_a_mistake_is_one_message_and_changes_nothing(
    words: list[str], message: str, own_home: Path, tmp_path: Path, server: dict[str, str]
) -> None:
    (tmp_path / "empty").mkdir()
    folder = str(tmp_path / "empty")
    run = finetune(own_home, "drift", "small", *(word.replace("{tmp}", folder) for word in words), **server)
    assert run.returncode == 2 and message.replace("{tmp}", folder) in run.stderr, run.stderr
    assert "Traceback" not in run.stderr and not (own_home / "artifacts" / "observe").exists()


def test_a_version_whose_rows_are_gone_is_refused_with_the_next_step(
    own_home: Path, tmp_path: Path, server: dict[str, str]
) -> None:
    shutil.rmtree(own_home / "artifacts" / "load_data")
    write_rows(tmp_path / "new.csv", 60, seed=3)
    run = finetune(own_home, "drift", "small", "--input", str(tmp_path / "new.csv"), **server)
    assert run.returncode == 2 and "run its recipe again here" in run.stderr


def test_the_input_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["drift", "small"])
    assert "--input" in capsys.readouterr().err


def test_a_nightly_report_and_a_retraining_after_drift_can_be_deployed(tmp_path: Path) -> None:
    entry = {
        "name": "nightly",
        "entrypoint": "flows.drift:drift",
        "parameters": {"model": "small", "inputs": ["incoming/*.csv"]},
        "schedules": [{"cron": "0 3 * * *", "timezone": "UTC"}],
        "work_pool": {"name": "finetune"},
    }
    file = tmp_path / "drift.yaml"
    file.write_text(yaml.safe_dump({"deployments": [entry]}))
    assert [(found.flow, found.name) for found in read_deployments([file])] == [("drift", "nightly")]
    file.write_text(yaml.safe_dump({"deployments": [entry | {"parameters": {"model": "small", "input": "a.csv"}}]}))
    problems = raised_problems(read_deployments, [file])
    assert [problem.where.rpartition(".")[2] for problem in problems] == ["inputs", "input"]
