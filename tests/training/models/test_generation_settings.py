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
from training.models.generation_settings import FILE, require_loadable, require_usable
from training.models.loading import export, load_for_training, load_tokenizer

ADVICE = "correct the file, or choose another model."
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": "x"}, "num_beams 'x', which should be a valid integer"),
    ({"guidance_scale": "x"}, "guidance_scale 'x', which should be a valid number"),
    ({"pad_token_id": [1]}, "pad_token_id [1], which should be a valid integer"),
    ({"eos_token_id": "x"}, "eos_token_id 'x', which should be a valid integer or a valid list"),
    ({"num_return_sequences": 7}, "num_return_sequences 7, which should be at most num_beams, 1"),
    ({"repetition_penalty": 0}, "repetition_penalty 0, which should be greater than 0"),
    ({"early_stopping": "maybe"}, "early_stopping 'maybe', which should be a valid boolean or 'never'"),
    ({"bad_words_ids": [["a"]]}, "bad_words_ids [['a']], which should be a valid integer"),
    (
        {"cache_implementation": "quantized"},
        "cache_implementation 'quantized', which should be 'dynamic', 'static' or null",
    ),
]
NOT_LOADABLE: list[tuple[dict[str, Any], str]] = [
    ({"sequence_bias": {"a": 1}}, "has to be a dict with tuples as keys"),
    ({"cache_implementation": "nope"}, "Invalid `cache_implementation` (nope)"),
    ({"watermarking_config": {"nope": 1}}, "unexpected keyword argument 'nope'"),
    ({"compile_config": 3}, "You provided `compile_config`"),
]
USABLE: list[dict[str, Any]] = [
    *({"top_k": -1}, {"top_k": 50.0}, {"top_p": 5, "do_sample": True}, {"temperature": "0.7"}),
    *({"min_length": -1}, {"max_time": 0}, {"bos_token_id": [1, 2]}, {"sequence_bias": [[[5], 2.0]]}),
    *({"num_beam_groups": 2, "diversity_penalty": 0.5}, {"low_memory": True}, {"prompt_lookup_num_tokens": 3}),
    *({"cache_implementation": "static"}, {"guidance_scale": 1.5}),
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


def test_guidance_is_refused_for_models_with_an_encoder_alone(tmp_path: Path) -> None:
    folder = write(tmp_path, {"guidance_scale": 1.5})
    (problem,) = raised_problems(require_usable, folder, "AutoModelForSeq2SeqLM", "model.path")
    allowed = "1 or null, because the model has an encoder"
    assert problem.message == f"{FILE} has guidance_scale 1.5, which should be {allowed}: {ADVICE}"
    require_usable(folder, "AutoModelForCausalLM", "model.path")
    require_usable(write(tmp_path, {"guidance_scale": 1}), "AutoModelForSeq2SeqLM", "model.path")


@pytest.mark.parametrize(
    ("settings", "cause"), NOT_LOADABLE, ids=[next(iter(settings)) for settings, _ in NOT_LOADABLE]
)
def test_a_setting_that_transformers_cannot_load_is_one_message_with_the_cause(
    settings: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, settings)
    (problem,) = raised_problems(require_loadable, folder, "AutoModelForCausalLM", "model.path")
    assert problem.where == "model.path" and problem.message.startswith(f"{FILE} cannot be used by transformers (")
    assert cause in problem.message and problem.message.endswith(ADVICE)
    require_loadable(tmp_path, "AutoModel", "model.path")


def test_a_cache_that_needs_a_gpu_is_refused_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"cache_implementation": "offloaded"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (problem,) = raised_problems(require_loadable, tmp_path, "AutoModelForCausalLM", "model.path")
    assert (problem.where, problem.message) == (
        "model.path",
        f"{FILE} has cache_implementation 'offloaded', which needs a GPU, and there is none here: {ADVICE}",
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    require_loadable(tmp_path, "AutoModelForCausalLM", "model.path")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tasks.make_world("causal-lm", tmp_path_factory.mktemp("world") / "world") / "base/output"


@pytest.mark.parametrize("settings", USABLE, ids=json.dumps)
def test_settings_that_transformers_accepts_or_that_are_unset_end_neither_saving_nor_generation(
    settings: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    tokenizer, rows = load_tokenizer(base / "tokenizer"), pa.record_batch({"text": ["cat", "dog red tall"]})
    write(base / "model", settings)
    for beams in (1, 4):
        task, folder = task_types.load("causal-lm", {"max_new_tokens": 3, "num_beams": beams}), tmp_path / str(beams)
        export(load_for_training(task, base / "model", [], tokenizer, seed=0), base / "tokenizer", folder)
        assert len(Predictor(task, folder, folder, 16).predict(rows)) == 2


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
