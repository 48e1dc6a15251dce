"""An upload in a process of its own, which a test kills: imports no S3 server."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tasks.shared_store import bucket
from tasks.shared_store.bucket import Bucket
from tasks.shared_store.shared_artifacts import SharedStore


def upload(home: Path, url: str, stage: str, key: str, before_part_s: float = 0.0) -> None:
    """Uploads an artifact of the home. Waits so many seconds before each part of a file but the first."""
    if before_part_s:
        chunks = bucket._chunks
        bucket._chunks = lambda source, size, _: chunks(source, size, lambda: time.sleep(before_part_s))
    os.environ["FINETUNE_HOME"] = str(home)
    SharedStore(Bucket(url)).upload(stage, key)
