"""The large home of the benchmark, made small: its copies are artifacts, runs and versions to every command."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from flows.cli.main import main
from tests.benchmarks import scale
from tests.flows.forked import finetune
from tests.flows.small import FinishedRun

pytestmark = pytest.mark.slow

SIZES = {"ARTIFACTS": 30, "RUNS": 5, "VERSIONS": 4, "RECIPES": 2, "MODELS": 2}


@pytest.fixture(scope="module")
def own_run(finished: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a run of this process: the servers of its tests share a database, which is not in the home, and
    another process may have made the finished run."""
    home = tmp_path_factory.mktemp("own") / "home"
    run = finetune(home, "run", str(finished.file))
    assert run.returncode == 0, run.stderr
    return home


@pytest.fixture
def large(own_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    shutil.copytree(own_run, home, symlinks=True)
    shared = os.environ["PREFECT_SERVER_DATABASE_CONNECTION_URL"].removeprefix("sqlite+aiosqlite:///")
    (home / "prefect").mkdir(exist_ok=True)
    with closing(sqlite3.connect(shared)) as old, closing(sqlite3.connect(home / "prefect/prefect.db")) as new:
        old.backup(new)
    monkeypatch.setenv("FINETUNE_HOME", str(home))
    for name, number in SIZES.items():
        monkeypatch.setattr(scale, name, number)
    scale.enlarge(home)
    return home


def test_each_copy_is_an_artifact_a_run_and_a_version_to_the_commands(
    finished: FinishedRun, large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["store"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    stages = {path.name for path in (large / "artifacts").iterdir()}
    assert sum(int(row[1]) for row in table if row[0] in stages) == 30
    assert ["runs", "5"] in [row[:2] for row in table]
    assert main(["runs", "--json", str(tmp_path / "runs.json")]) == 0
    assert main(["models", "--json", str(tmp_path / "models.json")]) == 0
    runs, models = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("runs", "models"))
    assert sorted(run["recipe"] for run in runs) == ["small"] * 3 + ["small-1"] * 2
    assert {model["name"]: len(model["versions"]) for model in models} == {"small": 3, "small-1": 1}
    capsys.readouterr()
    assert main(["run", str(finished.file)]) == 0
    assert "Nothing changed since flow run" in capsys.readouterr().out


def test_each_copy_of_the_run_has_rows_in_the_database_of_prefect(own_run: Path, large: Path) -> None:
    (original,) = (path.name for path in (own_run / "runs").iterdir())
    with closing(sqlite3.connect(large / "prefect" / "prefect.db")) as database:
        tasks = dict(database.execute("SELECT flow_run_id, count(*) FROM task_run GROUP BY flow_run_id"))
        copies = {path.name for path in (large / "runs").iterdir()} - {original}
        assert len(copies) == 4 and {tasks[copy] for copy in copies} == {tasks[original]}
