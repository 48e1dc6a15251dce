"""Packages that are there and are kept from being imported for a while."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from training.jobs.search_path import hide_package


@pytest.fixture
def heavy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a package that can be imported."""
    (tmp_path / "heavy").mkdir()
    for name in ("__init__", "part"):
        (tmp_path / "heavy" / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("heavy", "heavy.part"):
        monkeypatch.setitem(sys.modules, name, None)  # so that what the test imports goes again
        del sys.modules[name]
    return "heavy"


def test_inside_it_cannot_be_found_nor_imported_and_afterwards_it_can(heavy: str) -> None:
    with pytest.raises(ModuleNotFoundError), hide_package(heavy):
        assert find_spec(heavy) is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"{heavy}.part")
        importlib.import_module(heavy)
    assert find_spec(heavy) is not None
    assert importlib.import_module(f"{heavy}.part").__name__ == "heavy.part"


def test_a_package_that_was_imported_before_is_kept(heavy: str) -> None:
    before = importlib.import_module(heavy)
    with hide_package(heavy):
        assert importlib.import_module(heavy) is before
        importlib.import_module(f"{heavy}.part")
    assert sys.modules[heavy] is before
