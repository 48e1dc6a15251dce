"""Division of batches that fits into memory, remembered for the next run on the same hardware.

    <home>/memory/<digest>.json    the work, and the number that its batches are divided by

An optimizer step keeps its rows, in more and smaller passes.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from tasks.cache import settings
from tasks.cache.digests import digest_of
from tasks.jobs.hardware import memory
from training.jobs.protocol import sha256, write_atomically


class Fits:
    """How large a batch of one kind of work may be on this machine.

    Args:
        rows: the rows of its largest batch as the recipe wants it.
        model: the model's folder; its config.json tells its size, whatever its weights.
        what: whatever else the need for memory hangs on; JSON values.
    """

    def __init__(self, rows: int, model: Path, **what: Any) -> None:
        self._rows = rows
        config = sha256(model / "config.json")
        self._what = {"rows": rows, "config": config, "hardware": memory(), **what}
        self.file = settings.home() / "memory" / f"{digest_of(self._what)[:40]}.json"
        """Where it is remembered; without it, the recipe's own batches are tried again."""
        self.division = 1
        """By how much batches are divided."""
        with contextlib.suppress(OSError, ValueError, KeyError):  # nothing learnt, or not to be read any more
            self.division = int(json.loads(self.file.read_bytes())["division"])

    @property
    def rows(self) -> int:
        """Rows of the largest batch as it is now."""
        return -(-self._rows // self.division)

    def halve(self) -> bool:
        """Halves the batches; False where they are single rows already."""
        if self.rows == 1:
            return False
        self.division *= 2
        return True

    def remember(self) -> None:
        """Has the next work of this kind begin with batches of this size: they did fit."""
        self.file.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(self.file, json.dumps({**self._what, "division": self.division}, indent=1).encode())
