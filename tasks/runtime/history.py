"""What is remembered of a recipe, by its name: the last artifact of each stage, and the last completed run.

    <home>/recipes/<name>/stages/<stage>    a key
    <home>/recipes/<name>/results/<stage>   what an action gave, with its key
    <home>/recipes/<name>/pins.json         what its names last meant
    <home>/recipes/<name>/completed.json    the result of the last completed run

Only explanations and the check that nothing changed read it; no artifact is named by it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tasks.runtime import settings
from tasks.runtime.refs import Pins
from training.protocol import write_atomically


def recipes() -> list[str]:
    """The names of all recipes of which something is remembered."""
    return sorted(path.name for path in (settings.home() / "recipes").glob("*") if path.is_dir())


class History:
    """The memory of one recipe name."""

    def __init__(self, recipe: str) -> None:
        self._folder: Path = settings.home() / "recipes" / recipe

    def last_key(self, stage: str) -> str | None:
        """The key that the stage had when it last ended well."""
        path = self._folder / "stages" / stage
        return path.read_text().strip() if path.is_file() else None

    def remember_key(self, stage: str, key: str) -> None:
        """Notes that the stage ended well under this key."""
        (self._folder / "stages").mkdir(parents=True, exist_ok=True)
        write_atomically(self._folder / "stages" / stage, key.encode())

    def last_result(self, stage: str, key: str) -> Any:
        """What the action gave when it last ended well, as JSON values. Raises LookupError where it is not known."""
        try:
            kept = json.loads((self._folder / "results" / stage).read_bytes())
            if kept["key"] == key:
                return kept["result"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LookupError(stage) from error
        raise LookupError(stage)

    def remember_result(self, stage: str, key: str, result: BaseModel | None) -> None:
        """Notes what the action gave under this key."""
        (self._folder / "results").mkdir(parents=True, exist_ok=True)
        values = None if result is None else result.model_dump(mode="json")
        write_atomically(self._folder / "results" / stage, json.dumps({"key": key, "result": values}).encode())

    def last_pins(self) -> Pins | None:
        """What the recipe's names last meant."""
        try:
            return Pins.model_validate_json((self._folder / "pins.json").read_bytes())
        except (OSError, ValueError):  # none yet, damaged, or of another version: only a help is lost
            return None

    def remember_pins(self, pins: Pins) -> None:
        """Notes what the recipe's names mean now."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._folder / "pins.json", pins.model_dump_json().encode())

    def last_completed(self) -> dict[str, Any] | None:
        """The result of the last completed run."""
        try:
            return dict(json.loads((self._folder / "completed.json").read_bytes()))
        except (OSError, ValueError):
            return None

    def remember_completed(self, result: dict[str, Any]) -> None:
        """Keeps the result of a completed run."""
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._folder / "completed.json", json.dumps(result, indent=1).encode())

    def keys(self) -> set[str]:
        """The keys of the last artifact of each stage, and of all stages of the last completed run."""
        last = {path.read_text().strip() for path in (self._folder / "stages").glob("*")}
        done = self.last_completed() or {"stages": []}
        return last | {stage["key"] for stage in done["stages"] if stage["key"]}
