"""An MLflow database that is not made anew for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tasks.runtime import settings


@pytest.fixture(scope="session")
def fresh_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated, empty database: making one takes seconds."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments(max_results=1)
    return path


@pytest.fixture
def tracked(home: Path, fresh_database: Path) -> Path:
    """A home in which MLflow has its database."""
    shutil.copyfile(fresh_database, settings.home() / "mlflow.db")
    return home
