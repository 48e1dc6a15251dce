"""A home whose MLflow database is not made anew for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tasks.home import home as create_home


@pytest.fixture
def tracked(home: Path, fresh_database: Path) -> Path:
    """A home in which MLflow has its database."""
    shutil.copyfile(fresh_database, create_home() / "mlflow.db")
    return home
