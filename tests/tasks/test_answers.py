"""Answers in a file: all of them, or what was there before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main, predict
from tasks.registry import predict_rows, prediction_job
from tasks.registry.prediction_job import ModelSpec, predict_file
from training.jobs.protocol import Events, Job
from training.problems import UserError

MODEL = ModelSpec("models:/reviews/1", 32, {"task": "sequence-classification", "options": {}}, {"text": "text"})


@pytest.mark.parametrize("error", [KeyboardInterrupt(), None])
def test_a_prediction_that_is_stopped_leaves_the_file_as_it_was_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    out = tmp_path / "out.csv"
    out.write_text("old")

    def half(model: ModelSpec, settings: Any, inputs: dict[str, str], on_events: Any) -> dict[str, int]:
        Path(inputs["aside"]).write_text("new")
        if error is not None:
            raise error
        return {"rows": 1, "without_prediction": 0}

    monkeypatch.setattr(prediction_job, "_run", half)
    if error is None:
        assert predict_file(MODEL, tmp_path / "in.csv", out, lambda _: None)["rows"] == 1
    else:
        with pytest.raises(KeyboardInterrupt):
            predict_file(MODEL, tmp_path / "in.csv", out, lambda _: None)
    assert list(tmp_path.iterdir()) == [out] and out.read_text() == ("new" if error is None else "old")


def test_all_rows_that_are_no_conversation_are_reported_by_number_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict_rows, "_load_predictor", lambda *_: pytest.fail("a model was loaded"))
    good, bad = [{"role": "user", "content": "2 + 2?"}], [{"role": "bot", "content": "4"}]
    file, rows = tmp_path / "in.jsonl", [*[good] * 2100, bad, None, [], *[bad] * 2]
    file.write_text("".join(json.dumps({"spoken": row}) + "\n" for row in rows))
    wrong = "has no conversation ({}) in column 'spoken'"
    by_bot = wrong.format("message 1 is by 'bot', and roles are system, user, assistant")
    settings = {"task": "sft", "model": "models:/a/1", "max_length": 9, "columns": {"messages": "spoken"}}

    def message_of(inputs: dict[str, str], **changed: Any) -> str:
        job = Job(program="p", key="k", settings=settings | changed, inputs=inputs)
        with pytest.raises(UserError) as caught:
            predict_rows.main(tmp_path, job, Events(tmp_path / "events"))
        return str(caught.value)

    of_file = message_of({"file": str(file), "aside": str(tmp_path / "aside")}, out=str(tmp_path / "out.jsonl"))
    assert of_file.splitlines() == [
        f"{file} row 2101: {by_bot} (3 rows like this: 2101, 2104, 2105): correct or remove them.",
        f"{file} row 2103: {wrong.format('it has no message')}: correct or remove it.",
    ]
    typed = message_of({}, rows=[[json.dumps(good)], [json.dumps(bad)]])
    assert typed == f"TEXT row 2: {by_bot}: correct or remove it."
    assert not (tmp_path / "aside").exists()


def test_values_are_rows_of_all_columns_or_of_those_that_no_row_may_lack() -> None:
    model = ModelSpec("models:/a/1", 32, {"task": "sft"}, {"instruction": "ask", "input": "more"})
    assert prediction_job.split_into_rows(model, ["a"]) == [["a", ""]] and prediction_job.split_into_rows(
        model, ["a", "b"]
    ) == [["a", "b"]]
    pairs = ModelSpec("models:/a/1", 32, {"task": "sequence-classification"}, {"text": "a", "text_pair": "b"})
    with pytest.raises(UserError, match=r"takes 2 values at a time \(a, b\), and there are 3"):
        prediction_job.split_into_rows(pairs, ["x", "y", "z"])


def test_texts_may_stand_behind_options_and_an_unknown_option_is_still_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(predict, "execute", lambda given: calls.append((given.task, given.texts)) or 0)
    for words in (["a", "b", "--task", "x:Y"], ["--task", "x:Y", "a", "b"], ["a", "--task", "x:Y", "b"]):
        assert main.main(["predict", "reviews", *words]) == 0
    assert calls == [("x:Y", ["a", "b"])] * 3
    for wrong in (["predict", "reviews", "a", "--kynd", "x:Y"], ["runs", "a", "b"]):
        with pytest.raises(SystemExit):
            main.main(wrong)
        assert f"unrecognized arguments: {' '.join(wrong[3:] or wrong[2:])}" in capsys.readouterr().err
