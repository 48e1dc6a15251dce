"""A home whose MLflow database is not made anew for each test."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tasks.home import home as create_home


@pytest.fixture
def tracked(home: Path, fresh_database: Path) -> Path:
    """A home in which MLflow has its database."""
    shutil.copyfile(fresh_database, create_home() / "mlflow.db")
    return home


@pytest.fixture
def without_openlineage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of OpenLineage's client is not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "openlineage"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "tasks.tracking.openlineage", raising=False)
    monkeypatch.setitem(sys.modules, "openlineage", None)
