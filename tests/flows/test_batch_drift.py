"""Batch predictions compare the rows that are new in a run with the version's validation rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tasks.cache.stage import Listener, Work
from tasks.prediction.drift_samples import draw_sample
from tasks.registry.monitored_versions import find_monitored
from tasks.stages import profile
from tests.flows.forked import finetune
from tests.flows.small import FinishedRun, write_rows
from tests.flows.test_drift import write_german
from tests.waiting import wait_until
from training.data.listing import SourceFile
from training.recipe import Drift


@pytest.fixture
def home(finished: FinishedRun, tmp_path: Path) -> Path:
    """A copy of the home in which the small recipe ran, whose version asks for 50 rows: it has 60 of validation."""
    folder = shutil.copytree(finished.home, tmp_path / "home", symlinks=True)
    for name in ("predict_shard", "profile", "observe", "drift"):
        shutil.rmtree(folder / "artifacts" / name, ignore_errors=True)
    set_least_rows(folder, 50)
    return folder


def set_least_rows(home: Path, rows: int) -> None:
    """Changes `release.drift.min_rows` in the record of the version's run."""
    for file in home.glob("runs/*/lineage.json"):
        record = json.loads(file.read_text())
        record["recipe"]["release"]["drift"]["min_rows"] = rows
        file.write_text(json.dumps(record))


def predict(home: Path, *more: str, **server: str) -> tuple[dict[str, Any], str]:
    """The result of `finetune predict` over the folder `inbox`, and its output."""
    folder = home.parent
    words = ["--input", str(folder / "inbox"), "--output", str(folder / "out"), "--json", str(folder / "out.json")]
    words += ["--max-error-rate", "0.5"]
    run = finetune(home, "predict", "small", *words, *more, **server)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads((folder / "out.json").read_text()), run.stdout + run.stderr


@pytest.mark.slow
def test_the_rows_of_each_night_are_compared_once_and_the_verdict_is_where_those_of_drift_are(
    home: Path, tmp_path: Path, server: dict[str, str]
) -> None:
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    write_rows(inbox / "monday.csv", 150, seed=3)
    first, printed = predict(home, **server)
    assert first["drift"]["verdict"] == "steady" and first["drift"]["rows"] == {"reference": 60, "new": 150}
    assert first["drift"]["look"] == 1 and "Drift: steady: 150 new rows against 60 validation rows." in printed

    write_german(inbox / "tuesday.csv", 40)
    with (inbox / "monday.csv").open("a") as file:
        file.write("".join("a lovely film,pos,drama\n" for _ in range(5)))
    few, printed = predict(home, **server)
    assert few["drift"]["verdict"] == "undecided" and few["drift"]["rows"] == {"new": 45}
    assert "Drift: undecided: 45 rows wait for more: at least 50 are needed (release.drift.min_rows)" in printed

    write_german(inbox / "wednesday.csv", 80)
    second, printed = predict(home, **server)
    assert second["drift"]["verdict"] == "drifted" and second["drift"]["rows"]["new"] == 125
    assert second["drift"]["look"] == 2 and "Typical of new rows:" in printed
    assert second["drift"]["input"] == {"rows": 125, "without_prediction": 30}

    nothing, printed = predict(home, **server)
    assert nothing["drift"]["reason"] == "no rows are new" and "observe" not in printed

    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    version = client.get_model_version("small", "1")
    summary = json.loads(version.tags["finetune.drift"])
    assert summary["verdict"] == "drifted"
    assert summary["files"] == ["monday.csv", "tuesday.csv", "wednesday.csv"]
    assert [file.path for file in client.list_artifacts(version.run_id, "drift/look-0002")][-1].endswith("report.png")

    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[second["flow_run_id"]]))
    runs = [result["flow_run_id"] for result in (first, few, second, nothing)]
    with get_client(sync_client=True) as client:
        (table,) = [one for one in client.read_artifacts(artifact_filter=of_run) if one.key == "finetune-drift"]
        state = client.read_flow_run(second["flow_run_id"]).state
        assert "drifted in" in str(table.description) and str(state.message).endswith("(drift: drifted)")

        def stored() -> list[dict[str, Any]]:
            answer = client._client.post("/events/filter", json={"filter": {"event": {"name": ["finetune.drift"]}}})
            return [one["payload"] for one in answer.json()["events"] if one["payload"]["flow_run_id"] in runs]

        wait_until(lambda: len(stored()) == 2, 30)
        assert {(one["verdict"], one["look"], one["version"]) for one in stored()} == {
            ("steady", 1, "small/1"),
            ("drifted", 2, "small/1"),
        }


@pytest.mark.slow
def test_rows_that_cannot_be_compared_are_predicted_all_the_same(
    home: Path, tmp_path: Path, server: dict[str, str]
) -> None:
    (tmp_path / "inbox").mkdir()
    write_rows(tmp_path / "inbox" / "monday.csv", 60, seed=3)
    off, printed = predict(home, "--no-drift", **server)
    assert off["drift"] is None and "Drift" not in printed and off["counts"]["new"] == 60
    set_least_rows(home, 61)
    write_rows(tmp_path / "inbox" / "tuesday.csv", 80, seed=4)
    few, _ = predict(home, **server)
    assert few["drift"]["reason"] == ("small/1 has 60 validation rows: at least 61 are needed (release.drift.min_rows)")
    set_least_rows(home, 50)
    shutil.move(home / "artifacts" / "load_data", tmp_path / "aside")
    failed, printed = predict(home, **server)
    assert failed["state"] == "completed" and failed["drift"]["verdict"] == "undecided"
    (warning,) = failed["warnings"]
    assert warning.startswith("The new rows were not compared (drift): ") and "run its recipe again here" in warning
    # What could not be compared is new until it is.
    shutil.move(tmp_path / "aside", home / "artifacts" / "load_data")
    later, _ = predict(home, **server)
    assert later["drift"]["verdict"] == "steady" and later["drift"]["rows"]["new"] == 80
    assert later["counts"]["new"] == 0


class Warnings(Listener):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def stage_events(self, stage: str, events: list[dict[str, Any]]) -> None:
        self.messages += [event["message"] for event in events if event["kind"] == "warning"]


def test_if_memory_runs_out_rows_are_observed_in_half_the_batches(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    monkeypatch.setattr(profile, "PROGRAM", "tests.flows.scarce_memory")
    write_rows(tmp_path / "rows.csv", 70, seed=3)
    version, shown = find_monitored("small"), Warnings()
    sample, _ = draw_sample(version, [SourceFile(str(tmp_path / "rows.csv"))], 50, lambda done, total: None)
    work = Work("k", tmp_path / "out", "run", (shown,), "observe")
    work.out.mkdir()
    found = profile.observe.make(work, version, Drift(), sample)
    assert found == {"rows": 70, "observed": 50, "without_prediction": 0}
    (warning,) = shown.messages
    assert warning.endswith("Continuing with at most 16 rows at a time.")
