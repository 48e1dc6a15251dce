"""The division of batches that fits into memory, kept for the next run on the same hardware.

    <home>/memory/<digest>.json    the kind of work, and the divisor of its batches

An optimizer step has the same rows in more and smaller passes.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from tasks.cache.digests import digest_of
from tasks.home import home
from tasks.jobs.hardware import memory
from training.jobs.protocol import sha256, write_atomically


class BatchDivision:
    """The batches of one kind of work on this machine, divided until they fit into memory.

    Args:
        rows: rows of the recipe's largest batch.
        model: the model's folder; its config.json determines its size.
        other: everything else that determines the memory; JSON values.
    """

    def __init__(self, rows: int, model: Path, **other: Any) -> None:
        self._rows = rows
        config = sha256(model / "config.json")
        self._work = {"rows": rows, "config": config, "hardware": memory(), **other}
        self.file = home() / "memory" / f"{digest_of(self._work)[:40]}.json"
        self.divisor = self.lasting = 1
        """The division now, and the one that the next work of this kind begins with."""
        with contextlib.suppress(OSError, ValueError, KeyError):  # the first work of this kind, or a damaged file
            self.divisor = self.lasting = int(json.loads(self.file.read_bytes())["division"])

    @property
    def rows(self) -> int:
        """Rows of the largest batch after the division."""
        return -(-self._rows // self.divisor)

    def halve(self, lasting: bool = True) -> bool:
        """Halves the batches, and if `lasting` also those of the next work of this kind. Returns False if they are
        single rows already."""
        if self.rows == 1:
            return False
        self.divisor *= 2
        if lasting:
            self.lasting = self.divisor
        return True

    def save(self) -> None:
        """Makes the next work of this kind begin with the lasting division."""
        if self.lasting == 1:
            return
        self.file.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(self.file, json.dumps({**self._work, "division": self.lasting}, indent=1).encode())
