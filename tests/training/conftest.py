"""A small world to train in: each module has a copy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import fork_server
from tests.training import tiny


@pytest.fixture(scope="session")
def made_world(make_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    return make_once("world", lambda folder: fork_server.call(tiny.make_world, folder))


@pytest.fixture(scope="module")
def world(made_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # the models are too small for more, and forks inherit it
    yield shutil.copytree(made_world, tmp_path_factory.mktemp("world"), dirs_exist_ok=True)
    os.environ.pop("OMP_NUM_THREADS")
    if before is not None:
        os.environ["OMP_NUM_THREADS"] = before
