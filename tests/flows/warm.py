"""The project's code as each command reads it for its keys, read once by the server of forks: most of a second."""

from __future__ import annotations

from pathlib import Path

import tasks
from tasks.cache.code import code_behind

ROOT = Path(tasks.__path__[0]).parent
files = [file.relative_to(ROOT) for package in ("tasks", "training") for file in (ROOT / package).rglob("*.py")]
code_behind(".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files)
