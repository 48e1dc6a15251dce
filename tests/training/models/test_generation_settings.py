"""Mistakes in a base model's generation_config.json are one message before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from tests import task_types as tiny_tasks
from tests.raised import raised_problems
from training import task_types
from training.engine.predictor import Predictor
from training.models.generation_settings import FILE, require_usable
from training.models.loading import export, load_for_training, load_tokenizer

ADVICE = "correct the file, or choose another model."
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": "x"}, "num_beams 'x', which should be a valid integer"),
    ({"top_p": 5}, "top_p 5, which should be less than or equal to 1"),
    ({"pad_token_id": [1]}, "pad_token_id [1], which should be a valid integer"),
    ({"eos_token_id": "x"}, "eos_token_id 'x', which should be a valid integer or a valid list"),
    ({"num_return_sequences": 7}, "num_return_sequences 7, which should be at most num_beams, 1"),
    ({"repetition_penalty": 0}, "repetition_penalty 0, which should be greater than 0"),
    ({"early_stopping": "maybe"}, "early_stopping 'maybe', which should be a valid boolean or 'never'"),
    ({"bad_words_ids": [["a"]]}, "bad_words_ids [['a']], which should be a valid integer"),
]
UNUSABLE = {"return_dict_in_generate": True, "output_scores": True, "constraints": "x", "stop_strings": ["a"]}


def write(folder: Path, content: Any) -> Path:
    (folder / FILE).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[next(iter(settings)) for settings, _ in WRONG])
def test_a_setting_that_generation_cannot_use_is_named_with_its_file(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (problem,) = raised_problems(require_usable, write(tmp_path, settings), "AutoModelForCausalLM", "model.path")
    assert (problem.where, problem.message) == ("model.path", f"{FILE} has {message}: {ADVICE}")
    require_usable(tmp_path, "AutoModel", "model.path")


@pytest.mark.parametrize("content", ["[1, 2]", "{", '"text"'])
def test_a_file_without_a_json_object_is_refused(content: str, tmp_path: Path) -> None:
    (problem,) = raised_problems(require_usable, write(tmp_path, content), "AutoModelForSeq2SeqLM", "field")
    assert problem.message == f"{FILE} has no JSON object: correct or remove it."


def test_what_generation_cannot_use_is_unset_and_a_padding_token_that_the_model_lacks_is_replaced(
    tmp_path: Path,
) -> None:
    task = task_types.load("causal-lm", {"max_new_tokens": 3})
    base = tiny_tasks.make_world("causal-lm", tmp_path / "world") / "base/output"
    tokenizer, rows = load_tokenizer(base / "tokenizer"), pa.record_batch({"text": ["cat", "dog red tall"]})
    write(base / "model", {"num_beams": "x"})
    (problem,) = raised_problems(load_for_training, task, base / "model", [], tokenizer, seed=0)
    assert problem.message.startswith(f"{FILE} has num_beams 'x'")
    found = {}
    for pad in (None, -1, 100_000):
        write(base / "model", {**({} if pad is None else UNUSABLE), "pad_token_id": pad})
        torch.manual_seed(0)
        export(load_for_training(task, base / "model", [], tokenizer, seed=0), base / "tokenizer", tmp_path / str(pad))
        found[pad] = Predictor(task, tmp_path / str(pad), tmp_path / str(pad), 16).predict(rows)
        assert json.loads((tmp_path / str(pad) / FILE).read_text())["pad_token_id"] == tokenizer.pad_token_id
    assert found[None] == found[-1] == found[100_000]
