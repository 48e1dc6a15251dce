"""What tests share: an isolated Prefect server, a home folder of their own, and no network."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read when the libraries are imported, and passed on to the programs that tests start.
_scratch = tempfile.TemporaryDirectory(prefix="finetune-tests-")
os.environ.update(
    DO_NOT_TRACK="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_OFFLINE="1",
    MLFLOW_DISABLE_TELEMETRY="true",
    PREFECT_HOME=f"{_scratch.name}/prefect",
    PREFECT_RESULTS_LOCAL_STORAGE_PATH=f"{_scratch.name}/results",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS="60",
)
for name in ("FINETUNE_HOME", "MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
    os.environ.pop(name, None)


def pytest_xdist_auto_num_workers() -> int:
    """What `-n auto` means: one more than there are cores, for the longest tests wait for servers."""
    return (os.cpu_count() or 1) + 1


@pytest.fixture(autouse=True)
def search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders in which code of a user's was found are forgotten after the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A Prefect server with a database of its own; one a session, since it takes seconds to start."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="session")
def fresh_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated, empty database: making one takes seconds."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments(max_results=1)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder, not made yet, that FINETUNE_HOME names during the test."""
    folder = tmp_path / "home"
    monkeypatch.setenv("FINETUNE_HOME", str(folder))
    return folder
