"""Commands over a large home, compared with the home of one run.

The large home is the small one with copies of its run, under new ids: 10,000 artifacts, 2,000 runs (their folders, and
their rows in the databases of Prefect and MLflow) and 500 registered versions.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sqlite3
import statistics
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

from tasks.cache.digests import digest_of
from tests.benchmarks.subject import Subject
from tests.benchmarks.table import Row
from tests.flows.small import command, environment, finetune, write_project

ARTIFACTS, RUNS, VERSIONS, RECIPES, MODELS = 10_000, 2_000, 500, 20, 5
ROUNDS = 5
START_ROUNDS = 3
MAX_RATIO = 1.5
LISTINGS = {"`finetune runs`": ["runs"], "`finetune models`": ["models"], "`finetune store`": ["store"]}


def measure(subject: Subject) -> list[Row]:
    """Wall seconds of commands over both homes, in turn."""
    folder = subject.folder / "scale"
    file, homes = write_project(folder / "project"), {"small": folder / "small", "large": folder / "large"}
    _require(finetune(homes["small"], "run", str(file)))
    shutil.copytree(homes["small"], homes["large"], symlinks=True)
    began = time.monotonic()
    enlarge(homes["large"])
    size = f"{ARTIFACTS:,} artifacts, {RUNS:,} runs, {VERSIONS} versions; made in {time.monotonic() - began:.0f} s"
    changed = ["run", str(file), "--set", "evaluation.metrics=[accuracy, f1]"]
    commands: dict[str, tuple[int, Callable[[Path], float]]] = {
        "nothing changed: `finetune run`": (ROUNDS, lambda home: _time(home, "run", str(file))),
        "`finetune plan`": (ROUNDS, lambda home: _time(home, "plan", str(file))),
        **{name: (ROUNDS, lambda home, argv=argv: _time(home, *argv)) for name, argv in LISTINGS.items()},
        "start of a run": (START_ROUNDS, lambda home: _time_first_stage(home, *changed, "--force", "score")),
    }
    rows = []
    for name, (rounds, run) in commands.items():
        walls_s: dict[str, list[float]] = {home: [] for home in homes}
        for _, (which, home) in itertools.product(range(rounds), homes.items()):
            walls_s[which].append(run(home))
        small_s, large_s = (statistics.median(walls_s[which]) for which in homes)
        how = f"{large_s:.2f} s, and {small_s:.2f} s over the home of one run; medians of {rounds} in turn"
        rows.append(Row(f"{name}, large / small home", large_s / small_s, how, most=MAX_RATIO))
        if len(rows) == 1:
            rows[0] = Row(rows[0].what, rows[0].value, f"{how}; large: {size}", most=MAX_RATIO)
    return rows


def enlarge(home: Path) -> None:
    """Copies the run of the home under new ids until the home has the numbers above."""
    (run,) = (path.name for path in (home / "runs").iterdir())
    copies = [str(uuid.uuid4()) for _ in range(RUNS - 1)]
    keys = _copy_artifacts(home)
    _copy_histories(home)
    _copy_run_folders(home, run, copies, keys)
    _copy_mlflow(home / "mlflow.db", run, copies)
    _copy_prefect(home / "prefect" / "prefect.db", run, copies)


def _copy_artifacts(home: Path) -> dict[str, list[str]]:
    """Returns the keys of the copies by the key of the artifact."""
    originals = sorted(path for path in (home / "artifacts").glob("*/*") if path.is_dir())
    keys: dict[str, list[str]] = {path.name: [] for path in originals}
    for _, original in zip(range(ARTIFACTS - len(originals)), itertools.cycle(originals), strict=False):
        key = uuid.uuid4().hex + uuid.uuid4().hex[:8]
        keys[original.name].append(key)
        copy = original.with_name(key)
        shutil.copytree(original, copy, copy_function=_copy_beginning)
        manifest = json.loads((original / "manifest.json").read_bytes())
        manifest["ref"]["key"] = key
        manifest["digest"] = digest_of({"ref": manifest["ref"], "files": manifest["files"]})
        (copy / "manifest.json").unlink()
        (copy / "manifest.json").write_text(json.dumps(manifest))
    return keys


def _copy_beginning(source: str, target: str) -> None:
    with open(source, "rb") as file:
        Path(target).write_bytes(file.read(256))


def _copy_histories(home: Path) -> None:
    for number in range(1, RECIPES):
        shutil.copytree(home / "recipes" / "small", home / "recipes" / _recipe(number))


def _recipe(number: int) -> str:
    return "small" if number % RECIPES == 0 else f"small-{number % RECIPES}"


def _copy_run_folders(home: Path, run: str, copies: list[str], keys: Mapping[str, list[str]]) -> None:
    """The runs have the artifacts in turn."""
    files = {path.name: path.read_text() for path in (home / "runs" / run).iterdir() if path.is_file()}
    for number, copy in enumerate(copies):
        folder = home / "runs" / copy
        folder.mkdir(mode=0o700)
        for name, text in files.items():
            text = text.replace(run, copy).replace('"experiment": "small"', f'"experiment": "{_recipe(number + 1)}"')
            text = text.replace('"small/1"', f'"{_model(number)}/{_version(number)}"')
            for original, own in keys.items():
                text = text.replace(original, own[number % len(own)])
            (folder / name).write_text(text)
        (folder / "delivered").write_text(f"{(folder / 'outbox.jsonl').stat().st_size} end")


def _model(number: int) -> str:
    return "small" if number % MODELS == 0 else f"small-{number % MODELS}"


def _version(number: int) -> int:
    """The version of a run; the first version of `small` is that of the original run."""
    return number % VERSIONS // MODELS + 2


def _copy_mlflow(database: Path, run: str, copies: list[str]) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        (mlflow_run,) = connection.execute("SELECT run_uuid FROM runs").fetchone()
        (experiment,) = connection.execute("SELECT experiment_id FROM runs").fetchone()
        for number in range(1, RECIPES):
            fresh = {"experiment_id": experiment + number, "name": _recipe(number)}
            _copy_rows(connection, "experiments", f"experiment_id = {experiment}", [fresh])
        ids = {copy: uuid.uuid4().hex for copy in copies}
        for table in ("runs", "params", "metrics", "latest_metrics", "tags"):
            fresh_rows = [
                {"run_uuid": ids[copy]}
                | ({"experiment_id": experiment + (number + 1) % RECIPES} if table == "runs" else {})
                for number, copy in enumerate(copies)
            ]
            _copy_rows(connection, table, f"run_uuid = '{mlflow_run}'", fresh_rows)
        connection.executemany(
            "UPDATE tags SET value = ? WHERE run_uuid = ? AND value = ?", [(copy, ids[copy], run) for copy in copies]
        )
        for number in range(1, MODELS):
            for table in ("registered_models", "registered_model_tags"):
                _copy_rows(connection, table, "name = 'small'", [{"name": _model(number)}])
        versions = {(_model(number), _version(number)): copy for number, copy in enumerate(copies[: VERSIONS - 1])}
        for table in ("model_versions", "model_version_tags"):
            fresh_rows = [
                {"name": name, "version": version} | ({"run_id": ids[copy]} if table == "model_versions" else {})
                for (name, version), copy in versions.items()
            ]
            _copy_rows(connection, table, "name = 'small' AND version = 1", fresh_rows)
        connection.executemany(
            "UPDATE model_version_tags SET value = ? WHERE name = ? AND version = ? AND value = ?",
            [(copy, name, version, run) for (name, version), copy in versions.items()],
        )


def _copy_prefect(database: Path, run: str, copies: list[str]) -> None:
    """Copies the flow run with its states, task runs, logs, artifacts and events."""
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        of_run = f"flow_run_id = '{run}'"
        of_tasks = f"task_run_id IN (SELECT id FROM task_run WHERE {of_run})"
        selections = {
            "flow_run": f"id = '{run}'",
            "flow_run_state": of_run,
            "task_run": of_run,
            "task_run_state": of_tasks,
            "log": of_run,
            "artifact": of_run,
            "events": "TRUE",
            "event_resources": "TRUE",
        }
        tables = {}
        for table, condition in selections.items():
            cursor = connection.execute(f"SELECT * FROM {table} WHERE {condition}")
            tables[table] = ([column[0] for column in cursor.description], cursor.fetchall())
        own = {row[columns.index("id")] for columns, rows in tables.values() for row in rows}
        for table, (columns, rows) in tables.items():
            marks = ", ".join("?" * len(columns))
            identifiers = {index for index, name in enumerate(columns) if name == "id" or name.endswith("_id")}
            copied = (
                tuple(
                    _derive(value, copy, run) if index in identifiers and value in own else value
                    for index, value in enumerate(row)
                )
                for copy in copies
                for row in rows
            )
            connection.executemany(f"INSERT INTO {table} VALUES ({marks})", copied)


def _derive(id: str, copy: str, run: str) -> str:
    """The id of a copied row: the copy's own for the flow run, one derived from both for the others."""
    return copy if id == run else str(uuid.uuid5(uuid.UUID(copy), id))


def _copy_rows(connection: sqlite3.Connection, table: str, condition: str, fresh: list[dict[str, object]]) -> None:
    """Copies the rows of a condition for each of the dictionaries, which name the columns that differ."""
    cursor = connection.execute(f"SELECT * FROM {table} WHERE {condition}")
    columns, rows = [column[0] for column in cursor.description], cursor.fetchall()

    def copies() -> Iterator[tuple[object, ...]]:
        for values in fresh:
            for row in rows:
                yield tuple(values.get(column, value) for column, value in zip(columns, row, strict=True))

    connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", copies())


def _time(home: Path, *arguments: str) -> float:
    began = time.monotonic()
    ran = finetune(home, *arguments)
    wall_s = time.monotonic() - began
    _require(ran)
    return wall_s


def _time_first_stage(home: Path, *arguments: str) -> float:
    """Seconds until the first stage's line; the run continues to its end."""
    began = time.monotonic()
    with subprocess.Popen(command(*arguments), env=environment(home), stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        line = run.stdout.readline()
        wall_s = time.monotonic() - began
        run.stdout.read()
    if run.returncode != 0 or not line:
        raise RuntimeError(f"{' '.join(arguments)} ended with exit code {run.returncode}: {line}")
    return wall_s


def _require(ran: subprocess.CompletedProcess[str]) -> None:
    if ran.returncode != 0:
        raise RuntimeError(ran.stdout + ran.stderr)
