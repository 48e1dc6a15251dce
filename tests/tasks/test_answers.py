"""Answers in a file: all of them, or what was there before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks import answers
from tasks.answers import Asked, ask_of_file

MODEL = Asked("models:/reviews/1", 32, {"kind": "sequence-classification", "options": {}}, {"text": "text"})


@pytest.mark.parametrize("error", [KeyboardInterrupt(), None])
def test_an_answer_that_is_stopped_leaves_the_file_as_it_was_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    out = tmp_path / "out.csv"
    out.write_text("old")

    def half(model: Asked, asked: Any, inputs: dict[str, str], on_events: Any) -> dict[str, int]:
        Path(inputs["aside"]).write_text("new")
        if error is not None:
            raise error
        return {"rows": 1, "unanswered": 0}

    monkeypatch.setattr(answers, "_run", half)
    if error is None:
        assert ask_of_file(MODEL, tmp_path / "in.csv", out, lambda _: None)["rows"] == 1
    else:
        with pytest.raises(KeyboardInterrupt):
            ask_of_file(MODEL, tmp_path / "in.csv", out, lambda _: None)
    assert list(tmp_path.iterdir()) == [out] and out.read_text() == ("new" if error is None else "old")
