"""One complete run, shared by all tests that look at what a run leaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

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
def finished(
    make_once: Callable[[str, Callable[[Path], None]], Path], tmp_path_factory: pytest.TempPathFactory
) -> FinishedRun:
    """The small recipe, run once, as a person would run it. Each process has a copy of the home."""

    def run_small(folder: Path) -> None:
        file, out = write_project(folder / "project"), folder / "out.json"
        run = finetune(folder / "home", "run", str(file), "--json", str(out))
        assert run.returncode == 0, run.stdout + run.stderr
        (folder / "printed.txt").write_text(run.stdout)

    folder = make_once("finished", run_small)
    home = shutil.copytree(folder / "home", tmp_path_factory.mktemp("finished") / "home", symlinks=True)
    result, printed = json.loads((folder / "out.json").read_text()), (folder / "printed.txt").read_text()
    return FinishedRun(home, folder / "project" / "small.yaml", result, printed)
