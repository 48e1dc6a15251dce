"""What a person sees of a stage at work."""

from __future__ import annotations

import io
import re

import pytest

from flows import terminal


def test_progress_shows_rows_a_second_and_until_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "FILE_S", 0.0)
    err = io.StringIO()
    shown = terminal.Terminal(io.StringIO(), err)
    shown.stage_started("fit", "k")
    for done in (1, 2):
        event = {"kind": "progress", "done": done, "total": 4, "loss": 0.5, "samples_per_second": 1391.25}
        shown.stage_events("fit", [event])
    assert re.search(r"2/4  loss 0.500  1,391 rows/s  0 s left, until \d\d:\d\d\n$", err.getvalue())
