"""The shared store of the environment, for the person who maintains it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from tasks.home import named_lock
from tasks.shared_store import garbage_collection
from tasks.shared_store.bucket import VARIABLE, Bucket, BucketError, Entry, Forbidden
from tasks.shared_store.garbage_collection import Content, Plan
from tasks.shared_store.leases import Leases
from training.problems import UserError

GRACE = timedelta(days=1)
"""What is younger is never removed: its run may not have told MLflow yet."""


class Maintenance:
    """A bucket that is inspected or cleaned up.

    Args:
        bucket: the bucket.
        find_needed: finds the keys that are needed.
        grace: the age from which anything is removed.
    """

    def __init__(self, bucket: Bucket, find_needed: Callable[[], Collection[str]], grace: timedelta) -> None:
        self.url, self._bucket, self._find_needed, self._grace = bucket.url, bucket, find_needed, grace

    @classmethod
    def of_environment(cls, find_needed: Callable[[], Collection[str]]) -> Maintenance:
        """The store of FINETUNE_STORE. Raises UserError if the variable is missing or no URL of a store."""
        url = os.environ.get(VARIABLE)
        if not url:
            message = "is not set: name the shared store, such as s3://bucket/prefix."
            raise UserError.of("store", VARIABLE, message)
        return cls(Bucket(url), find_needed, GRACE)

    def list_content(self) -> Content:
        """What the bucket holds. Raises UserError if it cannot be listed."""
        with _as_user_errors():
            return garbage_collection.read_content(self._bucket)

    def inspect(self) -> tuple[Content, Plan]:
        """What the bucket holds, and what could be removed. Raises UserError if it cannot be read."""
        with _as_user_errors():
            content = garbage_collection.read_content(self._bucket)
            # The bucket's clock is read by writing to it, which a removal does.
            oldest_kept = datetime.now(UTC) - self._grace
            return content, garbage_collection.make_plan(self._bucket, content, self._find_needed(), oldest_kept)

    def remove(self, chosen: Plan, on_wait: Callable[[str], None]) -> list[Entry]:
        """Removes what is chosen and still unneeded, and returns what it was. Raises UserError if the bucket refuses or
        does not answer."""
        leases = Leases(self._bucket)
        # A lease of the same home is taken over at once, so that of a killed removal keeps nobody waiting.
        with _as_user_errors(), named_lock("removal"):
            return garbage_collection.remove(
                self._bucket, leases, self._find_needed, chosen.entries, self._grace, on_wait
            )


@contextmanager
def _as_user_errors() -> Iterator[None]:
    try:
        yield
    except Forbidden as error:
        message = (
            f"the credentials do not suffice ({error}). To show needs the rights to read and to list, --remove also "
        )
        message += "those to write and to delete."
        raise UserError.of("store", VARIABLE, message) from error
    except BucketError as error:
        raise UserError.of("store", VARIABLE, f"{error}.") from error
