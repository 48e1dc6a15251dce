"""Blocks of rows in the home: jobs that differ in their rows alone share what they have computed for the same ones.

    <home>/blocks/<family>/ROWS-CONTENT.arrow    a block: see training/jobs/blocks.py
    <home>/blocks/<family>/users/STAGE.KEY       an artifact that was made with blocks of the family

A family is what changes a block besides its rows: model, settings, code and libraries. Garbage collection removes a
family when none of its artifacts is needed any more.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.cache.digests import digest_of
from tasks.cache.stage import Work
from tasks.cache.store import link_or_copy
from tasks.home import home
from training.jobs.blocks import BLOCKS, find_blocks, is_intact

USERS = "users"


def family_of(inputs: Mapping[str, Any], without: tuple[str, ...]) -> str:
    """The name of the family of blocks of a job.

    Args:
        inputs: The content of the job's key, by flat name.
        without: The names in it, or the sections of names, that change no block.
    """
    left = {
        name: value
        for name, value in inputs.items()
        if name not in without and not name.startswith(tuple(f"{section}." for section in without))
    }
    return digest_of({"blocks": left})[:40]


@contextlib.contextmanager
def shared_blocks(work: Work, family: str) -> Iterator[None]:
    """Gives the job links to the intact blocks of the family, and keeps those that it has computed in the block, even
    if it fails. Damaged ones are removed with a warning, so that they are computed again."""
    kept, own = home() / "blocks" / family, work.job / BLOCKS
    own.mkdir(parents=True, exist_ok=True)
    _remove_damaged(work, own)
    _remove_damaged(work, kept)
    _link(kept, own)
    try:
        yield
    finally:
        (kept / USERS).mkdir(mode=0o700, parents=True, exist_ok=True)
        _link(own, kept)
        (kept / USERS / f"{work.stage}.{work.key}").touch()


def users_of(family: Path) -> list[tuple[str, str]]:
    """The artifacts that were made with blocks of a family in the home: stage and key of each."""
    names = [path.name.partition(".") for path in sorted((family / USERS).glob("*"))]
    return [(stage, key) for stage, _, key in names]


def _remove_damaged(work: Work, folder: Path) -> None:
    damaged = [block for block in find_blocks(folder).values() if not is_intact(block)]
    for block in damaged:
        block.unlink(missing_ok=True)
    if damaged:
        work.warning(f"{len(damaged)} damaged blocks of rows in {folder} are computed again: check the disk")


def _link(source: Path, target: Path) -> None:
    there = find_blocks(target)
    for rows, block in find_blocks(source).items():
        aside = target / f".{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):  # another job has found it damaged
            if rows not in there:
                link_or_copy(str(block), str(aside))
                aside.rename(target / block.name)
