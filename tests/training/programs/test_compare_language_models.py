"""Exports of language models are judged on the rows of the gate, and a bad one is refused."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tasks.reports.model_reports import describe_refused, tabulate_exports
from tests import task_types as tiny
from tests.training.language_models import make_model, sentences
from tests.training.programs_here import run
from training.data.load_rows import load as load_rows
from training.evaluation.scores import ComparedExport
from training.jobs.protocol import OUTPUT
from training.programs import compare_exports, export_model, predict
from training.recipe import parse
from training.recipe.rules.column_rules import source_columns
from training.recipe.tables.exports import EXPORTS
from training.task_types import load
from training.tokenization.token_files import tokenize

pytestmark = pytest.mark.slow

HAS_RUNTIME = importlib.util.find_spec("llama_cpp") is not None
FORMATS = ["gguf-f16", "gguf-q8_0", "int8", "int4", *(["gguf-q4_k_m"] if HAS_RUNTIME else [])]
MARGINS = {"perplexity": 0.5}


class World:
    """Rows of a task type, a Llama, its predictions and its exports."""

    def __init__(self, task: str, home: Path, formats: list[str]) -> None:
        self.home, self.formats = home, formats
        rows = tiny.write_rows(task, home / "rows")
        if task == "causal-lm":
            for seed, split in enumerate(("train", "validation")):
                texts = (json.dumps({"text": text}) for text in sentences(150, seed))
                (rows / f"{split}.jsonl").write_text("\n".join(texts) + "\n")
        model = home / "base/output/model"
        model.mkdir(parents=True)
        make_model(model, "llama", steps=40)
        shutil.copytree(model, home / "base/output/tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
        recipe = parse(tiny.recipe_of(task, rows) | {"model": {"source": "folder", "path": str(model)}})
        columns = source_columns(recipe)
        files = {split: [str(rows / f"{split}.jsonl")] for split in tiny.ROWS}
        load_rows(recipe.data, columns.task_type, files, home / "data")
        has_reference = getattr(columns.task_type, "needs_reference", False)
        tokens = home / ("tokenized" if has_reference else "tokens")
        tokenize(columns.task_type, home / "data", model, tokens, recipe.tokens.max_length)
        if has_reference:
            tiny.add_reference(recipe, home)
        self.task: dict[str, Any] = recipe.task_and_options
        self.inputs = {"model": model, "tokens": home / "tokens", "data": home / "data"}
        self.metrics = list(recipe.evaluation.metrics)
        settings = {"splits": ["validation"], "batch_size": 16, "mixed_precision": "no"}
        self.run("predictions", predict, {**self.task, **settings})
        self.run("exports", export_model, {"auto_class": load(task).auto_class, "exports": formats})

    def run(self, name: str, program: ModuleType, settings: dict[str, Any]) -> dict[str, Any]:
        folder = self.home / name
        shutil.rmtree(folder, ignore_errors=True)
        result = run(program, folder, self.inputs, **settings)
        self.inputs[name] = folder / OUTPUT
        return result

    def compare(self) -> dict[str, ComparedExport]:
        figure = self.metrics[0]
        settings = {**self.task, "split": "validation", "champion": "the model", "metrics": [figure], "figure": figure}
        settings |= {
            "less_is_better": [],
            "margin": -MARGINS.get(figure, 0.2),
            "confidence": 0.95,
            "reported": self.metrics,
        }
        settings |= {"exports": self.formats, "batch_size": 16, "mixed_precision": "no"}
        found = self.run("compared", compare_exports, settings)
        return {name: ComparedExport.model_validate(one) for name, one in found.items()}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are too small for more
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def texts(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World("causal-lm", tmp_path_factory.mktemp("texts"), FORMATS)


def test_exports_are_judged_by_perplexity_in_their_runtime_and_released(texts: World) -> None:
    found = texts.compare()
    assert [name for name, one in found.items() if one.released] == FORMATS
    for name, one in found.items():
        of_gguf = "llama.cpp (" if HAS_RUNTIME else "its weights in torch"
        assert one.runtime.startswith(of_gguf if name.startswith("gguf") else "transformers")
        assert one.other_tokens == (0 if HAS_RUNTIME and name.startswith("gguf") else None)
        assert one.comparison.metric == "perplexity" and {*one.metrics} == {*texts.metrics}
        assert one.metrics["perplexity"] == pytest.approx(one.comparison.value)
        assert one.bytes == EXPORTS[name].size_in(texts.inputs["exports"])
        assert (one.rows_per_second is None) == (one.runtime == "its weights in torch")
    assert found["gguf-f16"].comparison.gain == pytest.approx(0, abs=0.01)
    (row, *_) = tabulate_exports(found)
    assert row["runtime"] == found["gguf-f16"].runtime and "token_accuracy (of the model)" in row
    assert (row["tokens/s"] != "") == HAS_RUNTIME and "rows/s" not in row


def test_a_bad_quantization_is_refused_and_the_reason_names_what_to_do(texts: World) -> None:
    from gguf import GGUFReader

    file = texts.inputs["exports"] / EXPORTS["gguf-q8_0"].file
    good = file.read_bytes()
    for tensor in GGUFReader(file, "r+").tensors:
        if ".ffn_down." in tensor.name:
            tensor.data[:] = 0
    try:
        found = texts.compare()
    finally:
        file.write_bytes(good)
    assert [name for name, one in found.items() if not one.released] == ["gguf-q8_0"]
    reason = describe_refused("gguf-q8_0", found["gguf-q8_0"])
    assert reason.startswith("gguf-q8_0 is not released: perplexity ") and "so it is worse by more than 0.5:" in reason


@pytest.mark.skipif(not HAS_RUNTIME, reason="llama-cpp-python is not installed")
def test_an_export_whose_tokenizer_reads_other_tokens_is_refused(texts: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from training.models.llama_cpp_model import LlamaCppModel

    tokenize = LlamaCppModel.tokenize
    monkeypatch.setattr(LlamaCppModel, "tokenize", lambda self, text: tokenize(self, text.replace("4", "5")))
    found = texts.compare()["gguf-f16"]
    assert not found.released and found.other_tokens is not None and found.other_tokens > 10
    reason = describe_refused("gguf-f16", found)
    assert f"reads {found.other_tokens} rows of validation as other tokens than the model's tokenizer" in reason


@pytest.mark.parametrize("task", ["sft", "preference", "kto"])
def test_exports_of_tuned_models_are_judged_by_the_metric_of_their_task(task: str, tmp_path: Path) -> None:
    world = World(task, tmp_path, ["gguf-f16", "int8"])
    found = world.compare()
    for one in found.values():
        assert one.comparison.metric == world.metrics[0] and {*one.metrics} == {*one.model_metrics} == {*world.metrics}
        assert one.comparison.champion_value == pytest.approx(one.model_metrics[world.metrics[0]])


def test_whole_number_weights_load_in_transformers_without_the_project(texts: World) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole = AutoModelForCausalLM.from_pretrained(texts.inputs["model"])
    for name, most in (("int8", 0.2), ("int4", 1.0)):
        folder = texts.inputs["exports"] / name
        network, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        inputs = tokenizer(sentences(20, seed=4), padding=True, return_tensors="pt")
        with torch.no_grad():
            expected, found = whole(**inputs).logits, network(**inputs).logits
        there = inputs.attention_mask.bool()
        assert (found.float() - expected)[there].abs().max() < most
        assert EXPORTS[name].size_in(folder.parent) < 0.6 * sum(
            file.stat().st_size for file in texts.inputs["model"].iterdir()
        )
