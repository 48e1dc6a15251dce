"""`finetune runs`: the runs that MLflow has."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest

from flows.cli.main import main
from tasks.tracking.connection import FLOW_RUN_TAG, connect
from tasks.tracking.outbox import Outbox
from tests.flows.small import FinishedRun


def test_runs_are_listed_newest_first_with_the_judged_figure_verdict_and_version(
    finished: FinishedRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FINETUNE_HOME", str(finished.home))
    client, done, out = connect(), finished.result, tmp_path / "runs.json"
    experiment = client.get_experiment_by_name("small")
    assert experiment is not None
    of_others = client.create_run(experiment.experiment_id)
    made, own = [of_others.info.run_id], [str(uuid.uuid4()) for _ in range(3)]
    for run in own:
        made.append(client.create_run(experiment.experiment_id, tags={FLOW_RUN_TAG: run}).info.run_id)
        Outbox(run)
    failed, killed, goes_on = own
    Outbox(failed).put("end", status="FAILED")  # MLflow did not get it
    try:
        with Outbox(goes_on).claim_run():
            assert main(["runs", "small", "--json", str(out)]) == 0
        listed: list[dict[str, Any]] = json.loads(out.read_text())
        printed = capsys.readouterr().out.splitlines()
        assert main(["runs", "--limit", "1"]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 2
    finally:  # the finished home is that of other tests too
        for mlflow_run in made:
            client.delete_run(mlflow_run)
        for run in own:
            shutil.rmtree(Outbox(run).folder)
    assert [(run["flow_run_id"], run["state"]) for run in listed] == [
        (goes_on, "running"),
        (killed, "killed"),
        (failed, "failed"),
        (done["flow_run_id"], "completed"),
    ]
    assert listed[3]["judged"] == {
        "split": "validation",
        "metric": "accuracy",
        **{name: pytest.approx(done["metrics"]["validation"]["accuracy"][name]) for name in ("value", "low", "high")},
    }
    assert (listed[3]["verdict"], listed[3]["version"]) == ("promote", "small/1")
    assert [line.split()[0] for line in printed] == [
        "run",
        *(run[:8] for run in (goes_on, killed, failed, done["flow_run_id"])),
    ]
    assert "promote  small/1  accuracy 1.0000 (" in printed[4]


def test_status_with_a_name_shows_the_last_runs_of_the_recipe(
    finished: FinishedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FINETUNE_HOME", str(finished.home))
    assert main(["status", "small"]) == 0
    head, *runs = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["run", "recipe"]
    assert finished.result["flow_run_id"][:8] in [line.split()[0] for line in runs]
    assert main(["status", "smal"]) == 2


def test_a_recipe_that_has_not_run_is_reported_with_those_that_have(
    finished: FinishedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FINETUNE_HOME", str(finished.home))
    assert main(["runs", "smal"]) == 2
    assert capsys.readouterr().err == "RECIPE: no recipe 'smal' has run: small. Did you mean 'small'?\n"
    with pytest.raises(SystemExit, match="2"):
        main(["runs", "--limit", "0"])
    assert "--limit: '0' is not a number above 0" in capsys.readouterr().err
