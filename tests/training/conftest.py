"""A small world to train in: each module has a copy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import fork_server
from tests.training import tiny


@pytest.fixture(scope="session")
def made_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(fork_server.call(tiny.make_world, tmp_path_factory.mktemp("made")))


@pytest.fixture(scope="module")
def world(made_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # the models are too small for more, and forks inherit it
    yield shutil.copytree(made_world, tmp_path_factory.mktemp("world"), dirs_exist_ok=True)
    os.environ.pop("OMP_NUM_THREADS")
    if before is not None:
        os.environ["OMP_NUM_THREADS"] = before
