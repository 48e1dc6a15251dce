"""Predictions for values of the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main, predict
from tasks.prediction import single_rows
from tasks.registry.model_spec import ModelSpec
from training.jobs.protocol import Events, Job
from training.problems import UserError


def test_all_rows_that_are_no_conversation_are_reported_by_number_before_a_model_is_loaded(
    tmp_path: Path,
) -> None:
    good, bad = [{"role": "user", "content": "2 + 2?"}], [{"role": "bot", "content": "4"}]
    settings = {"task": "sft", "max_length": 9, "columns": {"messages": "spoken"}}
    # No folder of a model is among the inputs.
    job = Job(program="p", key="k", settings=settings | {"rows": [[json.dumps(row)] for row in (good, bad, bad)]})
    with pytest.raises(UserError) as caught:
        single_rows.main(tmp_path, job, Events(tmp_path / "events"))
    by_bot = (
        "has no conversation (message 1 is by 'bot', and roles are system, user, assistant, tool) in column 'spoken'"
    )
    assert str(caught.value) == f"TEXT row 2: {by_bot} (2 rows like this: 2, 3): correct or remove them."


def test_values_are_rows_of_all_columns_or_of_those_that_no_row_may_lack() -> None:
    model = ModelSpec("models:/a/1", 32, {"task": "sft"}, {"instruction": "ask", "input": "more"})
    assert single_rows.split_into_rows(model, ["a"]) == [["a", ""]] and single_rows.split_into_rows(
        model, ["a", "b"]
    ) == [["a", "b"]]
    pairs = ModelSpec("models:/a/1", 32, {"task": "sequence-classification"}, {"text": "a", "text_pair": "b"})
    with pytest.raises(UserError, match=r"takes 2 values at a time \(a, b\), and there are 3"):
        single_rows.split_into_rows(pairs, ["x", "y", "z"])


def test_texts_may_stand_behind_options_and_an_unknown_option_is_still_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(predict, "predict", lambda given: calls.append((given.task, given.texts)) or 0)
    for words in (["a", "b", "--task", "x:Y"], ["--task", "x:Y", "a", "b"], ["a", "--task", "x:Y", "b"]):
        assert main.main(["predict", "reviews", *words]) == 0
    assert calls == [("x:Y", ["a", "b"])] * 3
    for wrong in (["predict", "reviews", "a", "--kynd", "x:Y"], ["runs", "a", "b"]):
        with pytest.raises(SystemExit):
            main.main(wrong)
        assert f"unrecognized arguments: {' '.join(wrong[3:] or wrong[2:])}" in capsys.readouterr().err
