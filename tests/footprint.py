"""Detects files that tests write outside their own folders, such as the checkout's own home folder."""

from __future__ import annotations

from pathlib import Path

State = tuple[int, int]
"""Size in bytes and mtime in ns; zeros for a folder."""

CHECKOUT = Path(__file__).resolve().parents[1]
CACHES = {".pytest_cache", ".mypy_cache", ".ruff_cache", ".import_linter_cache"}
ELSEWHERE = (".prefect", ".mlflow", ".finetune", "mlruns", "mlflow.db")
"""Entries that the libraries make in the user's home folder by default."""


def footprint(unused_home: Path) -> dict[Path, State]:
    """The paths that a stray write would make or change: entries of the checkout, all of its .finetune, and the home
    folder that code uses when no test has given it one."""
    entries = [path for path in CHECKOUT.iterdir() if path.name not in CACHES]
    entries += [unused_home, *(Path.home() / name for name in ELSEWHERE)]
    inside = [path for home in (CHECKOUT / ".finetune", unused_home) for path in home.rglob("*")]
    # Of the checkout's own files only their existence: they may be edited meanwhile.
    return {path: (0, 0) for path in entries if path.exists()} | {path: _state(path) for path in inside}


def changed(before: dict[Path, State], after: dict[Path, State]) -> list[Path]:
    """The paths that are new, missing or different."""
    return sorted(path for path in {*before, *after} if before.get(path) != after.get(path))


def _state(path: Path) -> State:
    status = path.stat()
    return (0, 0) if path.is_dir() else (status.st_size, status.st_mtime_ns)
