"""A model whose predictions for a row depend on the other rows of a batch is refused before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.training import tiny
from training.engine import collation
from training.jobs.protocol import read_events
from training.problems import UserError
from training.programs import create_model

XLNET = {"model_type": "xlnet", "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}


def world(folder: Path, config: dict[str, Any], side: str = "right") -> Path:
    """The tiny world with another model, and a tokenizer that pads on this side."""
    tiny.make_world(folder)
    tokenizer = folder / "base/tokenizer/tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"padding_side": side}))
    vocabulary = Tokenizer.from_file(str(folder / "base/tokenizer/tokenizer.json"))
    create_model.create(config | {"vocab_size": 120}, vocabulary, seed=1).save_pretrained(folder / "base/model")
    return folder


@pytest.mark.parametrize(
    ("config", "side", "other"), [(XLNET, "right", "left"), (GPT2, "left", "right"), (tiny.CONFIG, "left", "right")]
)
def test_padding_that_changes_predictions_is_refused_with_the_other_side(
    tmp_path: Path, config: dict[str, Any], side: str, other: str
) -> None:
    job = tiny.fit_job(world(tmp_path, config, side), tmp_path / "job")
    with pytest.raises(
        UserError, match=rf"^tokenizer\.padding_side: '{side}' makes .* Set padding_side to '{other}' in"
    ):
        tiny.task_of(job)


@pytest.mark.parametrize(("config", "side"), [(XLNET, "left"), (GPT2, "right"), (tiny.CONFIG, "right")])
def test_padding_that_a_model_ignores_is_right(tmp_path: Path, config: dict[str, Any], side: str) -> None:
    assert tiny.task_of(tiny.fit_job(world(tmp_path, config, side), tmp_path / "job"))
    assert read_events(tmp_path / "job/events.jsonl", 0, ["warning"])[0] == []


def test_padding_that_changes_predictions_a_little_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixing = {"model_type": "fnet", "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    job = tiny.fit_job(world(tmp_path, mixing), tmp_path / "job")
    with pytest.raises(UserError, match="if that does not help, choose another model"):
        tiny.task_of(job)
    monkeypatch.setattr(collation, "TOLERATED", 10)
    tiny.task_of(job)
    (warning,) = read_events(tmp_path / "job/events.jsonl", 0, ["warning"])[0]
    assert warning["message"].startswith("tokenizer.padding_side: 'right' makes the predictions of FNetForSequenceCl")
