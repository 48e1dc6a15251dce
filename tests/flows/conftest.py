"""One complete run, shared by all tests that look at what a run leaves."""

from __future__ import annotations

import json

import pytest

from tests.flows.small import FinishedRun, finetune, write_project


@pytest.fixture(scope="session")
def server(prefect_server: None) -> dict[str, str]:
    """Points a command at the tests' server, so that it starts none of its own: seconds less for each run."""
    from prefect.settings import PREFECT_API_URL

    return {"PREFECT_API_URL": str(PREFECT_API_URL.value())}


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The small recipe, run once, as a person would run it."""
    folder = tmp_path_factory.mktemp("finished")
    file, out = write_project(folder / "project"), folder / "out.json"
    run = finetune(folder / "home", "run", str(file), "--json", str(out))
    assert run.returncode == 0, run.stdout + run.stderr
    return FinishedRun(folder / "home", file, json.loads(out.read_text()), run.stdout)
