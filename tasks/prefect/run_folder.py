"""The working directory of deployed runs: the folder in which `finetune deploy` was called, where recipes name files.

Prefect starts a run with its working directory first in Python's search path, and reads settings there: libraries would
find files that lie beside the rows. So a run starts in an empty folder, and enters its own when the package `flows` is
imported. Standard library only.
"""

from __future__ import annotations

import os

STEP = f"{__name__}.remember"


def remember(directory: str) -> None:
    """The step by which Prefect prepares a run: its environment has the folder."""
    os.environ["FINETUNE_RUN_FOLDER"] = directory
