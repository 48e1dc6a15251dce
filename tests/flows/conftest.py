"""One complete run, shared by all tests that look at what a run leaves."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator

import pytest

from tests.flows.forked import finetune
from tests.flows.small import FinishedRun, write_project


@pytest.fixture(scope="session")
def server(prefect_server: None) -> dict[str, str]:
    """Points a command at the tests' server, so that it starts none of its own: seconds less for each run."""
    from prefect.settings import PREFECT_API_URL

    return {"PREFECT_API_URL": str(PREFECT_API_URL.value())}


@pytest.fixture(scope="module")
def shared_server(server: dict[str, str]) -> Iterator[None]:
    """All commands of a module use the tests' server."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The small recipe, run once, as a person would run it: of all processes that test, the first to ask runs it."""
    own = tmp_path_factory.mktemp("finished")
    folder = own.parents[1] / "finished" if "PYTEST_XDIST_WORKER" in os.environ else own
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ran = folder / "ran.json"
        if not ran.exists():
            file, out = write_project(folder / "project"), folder / "out.json"
            run = finetune(folder / "home", "run", str(file), "--json", str(out))
            assert run.returncode == 0, run.stdout + run.stderr
            ran.write_text(json.dumps({"result": json.loads(out.read_text()), "printed": run.stdout}))
    if folder != own:  # each process changes a home of its own
        shutil.copytree(folder / "home", own / "home", symlinks=True)
    return FinishedRun(own / "home", folder / "project" / "small.yaml", **json.loads(ran.read_text()))
