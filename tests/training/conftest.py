"""A small world to train in, shared by a module's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import fork_server
from tests.training import tiny


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # the models are too small for more, and forks inherit it
    home = tmp_path_factory.mktemp("world")
    fork_server.call(tiny.make_world, home)
    yield home
    os.environ.pop("OMP_NUM_THREADS")
    if before is not None:
        os.environ["OMP_NUM_THREADS"] = before
