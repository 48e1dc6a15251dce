"""Uploads that are going on, as a removal must know them.

    uploads/<stage>/<key>.<random>.json    the manifest that an upload is about to write
    leases/removal/all.json                the lease of a removal

An upload does not send an object that exists, and a removal removes objects that no manifest names: together they could
lose one. So an upload first writes its announcement, and then waits while there is a removal; a removal first takes its
lease, and then reads the announcements, whose objects it keeps. Whichever comes second sees the other.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from threading import Event

from tasks.shared_store.bucket import Bucket, BucketError
from tasks.shared_store.leases import Leases
from tasks.shared_store.transfers import check

FOLDER = "uploads"
REMOVAL = ("removal", "all")
"""The lease of a removal."""


@contextlib.contextmanager
def announce(bucket: Bucket, leases: Leases, stage: str, key: str, manifest: bytes, *stops: Event) -> Iterator[None]:
    """Keeps the objects of the manifest from removal during the block.

    Raises Stopped if one of the events is set while a removal goes on, and BucketError.
    """
    name = f"{FOLDER}/{stage}/{key}.{uuid.uuid4().hex[:8]}.json"
    bucket.create(name, manifest)
    try:
        leases.wait_for_end(*REMOVAL, lambda: any(stop.is_set() for stop in stops))
        check(*stops)
        yield
    finally:
        with contextlib.suppress(BucketError):  # it is removed later, when it is old
            bucket.remove(name)
