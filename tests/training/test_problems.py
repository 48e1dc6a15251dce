"""Whose mistake an error is."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from training.data.arrow_columns import as_json
from training.problems import UserError, user_code_error

KIND = """
import json

def call(it):
    return it()

def parse(rows):
    return json.loads(rows)
"""


def failing(error: Exception) -> Callable[[], None]:
    def it() -> None:
        raise error

    return it


def test_an_author_is_blamed_for_what_fails_in_their_code_and_libraries_and_not_for_the_machine_or_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "an_authors.py").write_text(KIND)
    monkeypatch.syspath_prepend(tmp_path)
    theirs = importlib.import_module("an_authors")
    monkeypatch.delitem(sys.modules, "an_authors")

    def error_of(call: Callable[[], object]) -> UserError | None:
        monkeypatch.setitem(sys.modules, "an_authors", theirs)
        with pytest.raises(Exception) as caught:
            call()
        return user_code_error("an_authors", caught.value)

    mistakes = [
        lambda: theirs.parse("{"),
        lambda: theirs.call(lambda: torch.ones(2) @ torch.ones(3)),
        lambda: theirs.call(failing(RuntimeError("Expected all tensors on the same device, but found cuda:0 and cpu"))),
    ]
    for mistake in mistakes:
        found = error_of(mistake)
        assert found is not None and f"failed in {tmp_path}/an_authors.py line " in str(found)
    of_machine = [OSError("gone"), MemoryError(), RuntimeError("CUDA error: an illegal memory access")]
    of_machine += [torch.AcceleratorError("launch failure")]
    assert [error_of(lambda error=error: theirs.call(failing(error))) for error in of_machine] == [None] * 4
    assert error_of(lambda: theirs.call(lambda: as_json(float("nan")))) is None
