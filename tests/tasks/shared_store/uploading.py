"""An upload in a process of its own, which a test kills: imports no S3 server."""

from __future__ import annotations

import os
from pathlib import Path

from tasks.shared_store.bucket import Bucket
from tasks.shared_store.shared_artifacts import SharedStore


def upload(home: Path, url: str, stage: str, key: str) -> None:
    """Uploads an artifact of the home."""
    os.environ["FINETUNE_HOME"] = str(home)
    SharedStore(Bucket(url)).upload(stage, key)
