"""History of a recipe by name: the last key of each stage, and the last completed run.

    <home>/recipes/<name>/stages/<stage>    a key
    <home>/recipes/<name>/results/<stage>   the result of an action, with its key
    <home>/recipes/<name>/commits.json      the last commit of each repository of the Hub, by name and revision
    <home>/recipes/<name>/unreachable.json  the flow runs of `retrain`, in a row, that the Hub did not answer
    <home>/recipes/<name>/completed.json    the result of the last completed run
    <home>/recipes/<name>/compared.json     the rows that drift reports have compared, of a batch prediction

It serves explanations and the check for changes; no key depends on it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from tasks.cache.results import Lock, PinnedCommit
from tasks.home import home
from training.jobs.protocol import write_atomically

Values = TypeVar("Values", dict[str, Any], list[str])


def recipes() -> list[str]:
    """The names of all recipes with a history."""
    return sorted(path.name for path in (home() / "recipes").glob("*") if path.is_dir())


class History:
    """The history of one recipe name."""

    def __init__(self, recipe: str) -> None:
        self._folder: Path = home() / "recipes" / recipe

    def last_key(self, stage: str) -> str | None:
        """The key of the stage's last success."""
        path = self._folder / "stages" / stage
        return path.read_text().strip() if path.is_file() else None

    def remember_key(self, stage: str, key: str) -> None:
        """Stores the key of a successful stage."""
        (self._folder / "stages").mkdir(parents=True, exist_ok=True)
        write_atomically(self._folder / "stages" / stage, key.encode())

    def last_result(self, stage: str, key: str) -> Any:
        """The action's last result as JSON values. Raises LookupError if it is unknown or had another key."""
        try:
            kept = json.loads((self._folder / "results" / stage).read_bytes())
            if kept["key"] == key:
                return kept["result"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LookupError(stage) from error
        raise LookupError(stage)

    def remember_result(self, stage: str, key: str, result: BaseModel | None) -> None:
        """Stores the result of an action."""
        (self._folder / "results").mkdir(parents=True, exist_ok=True)
        values = None if result is None else result.model_dump(mode="json")
        write_atomically(self._folder / "results" / stage, json.dumps({"key": key, "result": values}).encode())

    def last_commit(self, kind: str, name: str) -> PinnedCommit | None:
        """The last known commit of a repository of the Hub; `kind` is model or dataset, `name` owner/name@revision."""
        commit = self._read("commits.json", dict).get(f"{kind} {name}")
        return PinnedCommit(name=name, commit=commit) if isinstance(commit, str) else None

    def remember_commits(self, lock: Lock) -> None:
        """Stores the commits of the lock; those of other names and revisions are kept."""
        found = [*(("dataset", one.hub) for one in lock.sets), ("model", lock.model_hub)]
        named = {f"{kind} {pin.name}": pin.commit for kind, pin in found if pin}
        if named:
            self._write("commits.json", self._read("commits.json", dict) | named)

    def count_unreachable(self, run: str) -> int:
        """Adds a flow run without an answer of the Hub. Returns how many there are in a row; a retry counts once."""
        runs = self._read("unreachable.json", list)
        if run not in runs:
            runs.append(run)
            self._write("unreachable.json", runs)
        return len(runs)

    def forget_unreachable(self) -> None:
        """Resets the count after an answer of the Hub."""
        (self._folder / "unreachable.json").unlink(missing_ok=True)

    def last_completed(self) -> dict[str, Any] | None:
        """The result of the last completed run, with the model's path in the home where it is now."""
        result = self._read("completed.json", dict)
        artifacts = {stage["name"]: stage.get("artifact") for stage in result.get("stages", ())}
        if result.get("model") and artifacts.get("fit"):
            result["model"]["path"] = str(home() / artifacts["fit"] / "model")
        return result or None

    def remember_completed(self, result: dict[str, Any]) -> None:
        """Stores the result of a completed run."""
        self._write("completed.json", result)

    def last_compared(self) -> list[Any] | None:
        """The rows that drift reports have compared, JSON values; None without a record."""
        found = self._read("compared.json", dict).get("rows")
        return found if isinstance(found, list) else None

    def remember_compared(self, rows: Sequence[Any]) -> None:
        """Stores the rows that drift reports have compared."""
        self._write("compared.json", {"rows": rows})

    def keys(self) -> set[str]:
        """The keys of the last artifact of each stage, and of all stages of the last completed run."""
        last = {path.read_text().strip() for path in (self._folder / "stages").glob("*")}
        done = self.last_completed() or {"stages": []}
        return last | {stage["key"] for stage in done["stages"] if stage["key"]}

    def _read(self, name: str, form: type[Values]) -> Values:
        """The JSON value in a file; an empty value if the file is missing or damaged."""
        try:
            value = json.loads((self._folder / name).read_bytes())
        except (OSError, ValueError):
            return form()
        return value if isinstance(value, form) else form()

    def _write(self, name: str, value: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._folder / name, json.dumps(value, indent=1).encode())
