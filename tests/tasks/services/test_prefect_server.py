"""The Prefect server of a run that has none."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.services.prefect_server import ensure_prefect_server
from tests.fork_server import COMMANDS, Fork, run_code
from tests.processes import argv, listening
from tests.waiting import wait_until
from training.jobs.processes import descendants

START = """
import sys, time
from tasks.services.prefect_server import ensure_prefect_server
print(ensure_prefect_server(), flush=True)
sys.stdin.read()
"""


class Run(NamedTuple):
    """A process that has made sure of a server, and ends when its input does."""

    process: Fork
    url: str
    input: IO[bytes]


@contextmanager
def run(home: Path, **variables: str) -> Iterator[Run]:
    environment = {**os.environ, "FINETUNE_HOME": str(home), **variables}
    del environment["PREFECT_SERVER_DATABASE_CONNECTION_URL"]
    (read, end), (printed, output) = os.pipe(), os.pipe()
    process = Fork(run_code, [START], env=environment, files=(read, output, 2), level=COMMANDS).start()
    for theirs in (read, output):
        os.close(theirs)
    with open(end, "wb") as stdin, open(printed) as stdout:
        try:
            yield Run(process, stdout.readline().strip(), stdin)
        finally:
            process.kill()
            process.join()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def ended_within(url: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while answers(url):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.drill
def test_two_runs_start_a_server_each_on_a_fresh_database_and_neither_outlives_its_run(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with run(home) as killed, run(home) as ended:
        assert killed.url != ended.url and answers(killed.url) and answers(ended.url)
        killed.process.kill()
        assert ended_within(killed.url, 5) and answers(ended.url)
        ended.input.close()
        assert ended.process.join(30) == 0 and ended_within(ended.url, 1)


def test_the_server_of_a_run_requires_the_password_of_the_home_and_keeps_its_database_there(tmp_path: Path) -> None:
    import httpx2

    home = tmp_path / "home"
    with run(home) as (_, url, _):
        password = (home / "services" / "prefect.password").read_text()
        body = {"name": "mine", "flow_id": "00000000-0000-0000-0000-000000000000"}
        requests = {"/deployments/": body, "/block_documents/filter": {"include_secrets": True}, "/flows/count": {}}
        for path, sent in requests.items():
            assert httpx2.post(url + path, json=sent).status_code == 401
        login = ("finetune", password)
        assert httpx2.post(f"{url}/flows/count", auth=login, json={}).text == "0"
        assert httpx2.post(f"{url}/flows/count", auth=login, json={}, headers={"Host": "evil.example"}).is_error
        assert (home / "prefect" / "prefect.db").is_file()
        # Otherwise the server of `finetune up` would not register the types of blocks that its UI offers.
        assert not (home / "prefect" / "memo_store.toml").exists()


def test_a_run_holds_the_port_of_its_server_until_the_server_has_ended(tmp_path: Path) -> None:
    with run(tmp_path / "home") as (process, url, _):
        assert process.pid in listening([process.pid])
        below = descendants(process.pid)
        (server,) = [pid for pid in below if any(word.startswith("--fd=") for word in argv(pid))]
        os.kill(server, signal.SIGKILL)
        wait_until(lambda: not listening([process.pid]))
        assert not answers(url)


@pytest.mark.slow
def test_a_new_home_copies_the_tables_of_prefect_s_server_and_no_one_s_data(tmp_path: Path) -> None:
    for home in (tmp_path / "first", tmp_path / "second"):
        with run(home, XDG_CACHE_HOME=str(tmp_path / "cache")) as (_, url, _):
            assert answers(url)
            (template,) = (tmp_path / "cache" / "finetune" / "databases").iterdir()
            assert read_counts(template) == {"alembic_version": 1}  # no key of encryption, above all
            assert read_counts(home / "prefect" / "prefect.db") == {"alembic_version": 1}


def read_counts(database: Path) -> dict[str, int]:
    """Counts the rows of all tables that are not empty."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        counts = {name: connection.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in tables}
    assert len(tables) > 10
    return {name: count for name, count in counts.items() if count}


def test_a_server_that_the_settings_name_is_used_and_none_is_started() -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}):
        assert ensure_prefect_server() == "http://127.0.0.1:1/api"
