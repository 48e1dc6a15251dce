"""MLflow's database in the home folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import tasks
from tasks.runtime.connection import connect, find_or_create_run

ROOT = Path(tasks.__path__[0]).parent


def test_a_process_killed_while_it_makes_the_database_leaves_none_and_the_next_makes_a_whole_one(home: Path) -> None:
    program = "from tasks.runtime.connection import connect; connect()"
    maker = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    aside = home / ".mlflow.db-new"
    while maker.poll() is None and not (aside.exists() and aside.stat().st_size > 0):
        time.sleep(0.001)
    os.kill(maker.pid, signal.SIGKILL)
    assert maker.wait() == -signal.SIGKILL
    assert not (home / "mlflow.db").exists() and aside.stat().st_size > 0
    client = connect()
    run = client.get_run(find_or_create_run(client, "recipe", "flow"))
    assert run.info.status == "RUNNING"
    assert not list(home.glob(".mlflow.db-new*"))
