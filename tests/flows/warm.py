"""What commands do again and again, done once by the server of forks: each reads the project's code for its keys, which
takes most of a second, and the help of all commands, and sets Prefect's logging up; a sweep imports the libraries of
its pictures."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import tasks
from flows.cli.main import parser
from tasks.cache.code import code_behind
from tests import fork_server
from tests.flows.forked import QUIET

ROOT = Path(tasks.__path__[0]).parent
files = [file.relative_to(ROOT) for package in ("tasks", "training") for file in (ROOT / package).rglob("*.py")]
code_behind(".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files)
parser()
for library in ("matplotlib.pyplot", "optuna.visualization.matplotlib", "sklearn.ensemble"):
    importlib.import_module(library)
os.environ |= QUIET
fork_server.refresh_prefect_settings()
