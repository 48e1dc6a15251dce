"""The shared store that the environment names."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from tasks.cache.remote import Remote
from tasks.home import home


def open_remote() -> Remote:
    """The store of FINETUNE_STORE: one object for each home, so that a run reports what its plan fetched.

    Raises UserError if the variable is no URL of a store.
    """
    url = os.environ.get("FINETUNE_STORE")
    return _open(url, home()) if url else Remote()


@lru_cache
def _open(url: str, own_home: Path) -> Remote:
    # Imports the client of the bucket: a home that shares nothing does not need it.
    from tasks.shared_store.bucket import Bucket
    from tasks.shared_store.bucket_remote import BucketRemote

    return BucketRemote(Bucket(url))
