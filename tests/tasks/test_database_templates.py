"""Databases of a new home, copied from the result of earlier migrations."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from tasks.database_templates import create_database
from tasks.home import home
from tasks.tracking.connection import connect


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the templates, which does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "finetune" / "databases"


def create(file: Path, name: str = "server-1") -> int:
    """Creates a database with one table; returns how often its migrations ran."""
    migrated: list[Path] = []

    def migrate(path: Path) -> None:
        migrated.append(path)
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("CREATE TABLE runs (id TEXT)")

    create_database(file, name, migrate)
    with contextlib.closing(sqlite3.connect(file)) as connection:
        assert connection.execute("SELECT * FROM runs").fetchall() == []
    return len(migrated)


def test_migrations_run_once_for_all_homes_and_again_for_another_version(templates: Path, tmp_path: Path) -> None:
    assert create(tmp_path / "first.db") == 1
    with contextlib.closing(sqlite3.connect(tmp_path / "first.db")) as connection, connection:
        connection.execute("INSERT INTO runs VALUES ('of the first home')")
    assert create(tmp_path / "second.db") == 0
    assert create(tmp_path / "third.db", "server-2") == 1
    assert [path.name.partition("-sqlite")[0] for path in sorted(templates.iterdir())] == ["server-1", "server-2"]


@pytest.mark.parametrize("damage", ["writable by others", "in a folder writable by others", "cut off", "no database"])
def test_a_template_that_cannot_be_trusted_is_made_again(templates: Path, tmp_path: Path, damage: str) -> None:
    create(tmp_path / "first.db")
    (template,) = templates.iterdir()
    if damage == "cut off":
        template.write_bytes(template.read_bytes()[:4096])
    elif damage == "no database":
        template.write_text("not a database")
    else:
        (template if damage == "writable by others" else templates).chmod(0o777)
    assert create(tmp_path / "second.db") == 1
    if damage != "in a folder writable by others":
        assert create(tmp_path / "third.db") == 0


def test_a_database_is_created_without_a_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert create(tmp_path / "first.db") == 1
    assert create(tmp_path / "second.db") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "first.db", "second.db"]


@pytest.mark.slow
def test_databases_of_mlflow_from_one_template_have_no_path_and_no_time_of_another_home(
    templates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    times = []
    for name in ("first", "second"):
        monkeypatch.setenv("FINETUNE_HOME", str(tmp_path / name))
        experiment = connect().get_experiment("0")
        times.append(experiment.creation_time)
        assert experiment.artifact_location == (home() / "mlartifacts" / "0").as_uri()
    assert len(list(templates.iterdir())) == 1 and times[0] < times[1]
