"""Exports are released only if they are not inferior to their model on the same rows."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pyarrow.parquet as pq
import pytest
import torch

from tasks.reports.model_reports import describe_refused
from tests import task_types as tiny
from tests.training.programs_here import run
from training.evaluation.scores import ComparedExport
from training.jobs.protocol import OUTPUT
from training.models.loading import export, load_for_training, load_tokenizer
from training.programs import compare_exports, export_model, predict
from training.recipe.tables.exports import EXPORTS
from training.task_types import load

pytestmark = pytest.mark.slow


class World:
    """Rows, a model with a random head, and its exports."""

    def __init__(
        self, task: str, metric: str, home: Path, row: Callable[[random.Random], dict[str, Any]] | None = None
    ) -> None:
        self.task, self.metric, self.home = task, metric, home
        values = tiny.recipe_of(task, tiny.write_rows(task, home / "world/rows", row))
        values["model"]["config"] = {**values["model"]["config"], "num_hidden_layers": 1}  # each takes a second
        world = tiny.build_world(values, home / "world")
        base, labels = world / "base/output", json.loads((world / "data/labels.json").read_text())
        torch.manual_seed(2)
        self.options = values["options"]
        task_type, tokenizer = load(task, self.options), load_tokenizer(base / "tokenizer")
        model = load_for_training(task_type, base / "model", labels, tokenizer, seed=3)
        export(model, base / "tokenizer", home / "model")
        self.inputs = {"model": home / "model", "tokens": world / "tokens", "data": world / "data"}
        settings = {"splits": ["validation"], "batch_size": 16, "mixed_precision": "no"}
        self.run("predictions", predict, {"task": task, "options": self.options, **settings})
        exports = {"auto_class": load(task).auto_class, "exports": ["onnx", "onnx-int8"]}
        self.run("exports", export_model, exports)

    def run(self, name: str, program: ModuleType, settings: dict[str, Any]) -> dict[str, Any]:
        """Runs a program, whose output is an input of later ones."""
        folder = self.home / name
        shutil.rmtree(folder, ignore_errors=True)
        result = run(program, folder, self.inputs, **settings)
        self.inputs[name] = folder / OUTPUT
        return result

    def compare(self, margin: float) -> dict[str, Any]:
        """Compares the exports, of which each may lose `margin` in the metric."""
        settings = {"task": self.task, "options": self.options, "split": "validation", "champion": "the model"}
        settings |= {"metrics": [self.metric], "figure": self.metric, "less_is_better": [], "margin": -margin}
        settings |= {"confidence": 0.95, "exports": ["onnx", "onnx-int8"], "batch_size": 16, "mixed_precision": "no"}
        return self.run("compared", compare_exports, settings)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tags(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World("token-classification", "accuracy", tmp_path_factory.mktemp("tags"))


def test_an_export_is_compared_with_the_model_on_every_row_and_both_are_timed(tags: World) -> None:
    found = tags.compare(margin=0.2)
    assert json.loads((tags.home / "compared" / OUTPUT / "log" / "exports.json").read_text()) == found
    assert {name: one["released"] for name, one in found.items()} == {"onnx": True, "onnx-int8": True}
    plain, comparison = found["onnx"], found["onnx"]["comparison"]
    assert (comparison["rows"], comparison["margin"], comparison["gain"], comparison["lost"]) == (60, -0.2, 0.0, 0)
    assert plain["rows_per_second"] > 0 and plain["torch_rows_per_second"] > 0 and plain["torch_precision"] == "no"
    assert found["onnx-int8"]["bytes"] < plain["bytes"]
    stored, given = (
        pq.read_table(folder / "validation.parquet")
        for folder in (tags.inputs["predictions"], tags.home / "compared" / OUTPUT / "onnx")
    )
    assert given.schema == stored.schema and given["prediction"] == stored["prediction"]


def test_an_export_that_loses_too_much_is_not_released_and_the_reason_names_what_to_do(
    tags: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pq.read_table(tags.inputs["predictions"] / "validation.parquet")
    place = table.column_names.index("prediction")
    pq.write_table(table.set_column(place, "prediction", table["label"]), tmp_path / "validation.parquet")
    monkeypatch.setitem(tags.inputs, "predictions", tmp_path)  # a model that makes no mistake
    found = tags.compare(margin=0.2)["onnx"]
    assert not found["released"] and found["comparison"]["champion_value"] == 1.0
    reason = describe_refused("onnx", ComparedExport.model_validate(found))
    assert re.fullmatch(
        r"onnx is not released: accuracy 0\.\d+ against 1\.0000 of the model on the same 60 rows of validation, so it "
        r"is worse by more than 0\.2: allow a larger release\.export_margin, or leave this export out\.",
        reason,
    )


def same_words(draw: random.Random) -> dict[str, Any]:
    """Words, and the same words in another order, which the mean of random embeddings finds."""
    words = draw.sample(tiny.EVERY_WORD, k=4)
    return {"anchor": " ".join(words), "positive": " ".join(sorted(words))}


def one_of_eight(draw: random.Random) -> dict[str, Any]:
    """A query with eight documents, of which one is relevant."""
    query, *documents = (" ".join(draw.sample(tiny.EVERY_WORD, k=4)) for _ in range(9))
    return {"query": query, "documents": documents, "labels": [1.0] + [0.0] * 7}


def destroy(file: Path) -> None:
    """A quantization that loses everything: all weights of matrices become 0."""
    model = onnx.load(file)
    for weights in model.graph.initializer:
        values = onnx.numpy_helper.to_array(weights)
        if values.ndim == 2:
            weights.CopyFrom(onnx.numpy_helper.from_array(np.zeros_like(values), weights.name))
    onnx.save(model, file)


@pytest.mark.parametrize(
    ("task", "metric", "row", "unit"),
    [
        ("embedding", "ndcg_at_10", same_words, "queries"),
        ("sentence-similarity", "spearman", None, "rows"),
        ("reranking", "ndcg_at_10", one_of_eight, "queries"),
    ],
)
def test_exports_of_embeddings_and_rerankers_give_the_same_numbers_and_one_that_lost_its_weights_is_refused(
    task: str, metric: str, row: Any, unit: str, tmp_path: Path
) -> None:
    world = World(task, metric, tmp_path, row)
    destroy(world.inputs["exports"] / EXPORTS["onnx-int8"].file)
    found = world.compare(margin=0.1)
    assert {name: one["released"] for name, one in found.items()} == {"onnx": True, "onnx-int8": False}
    comparison = found["onnx"]["comparison"]
    assert (comparison["metric"], comparison["unit"], comparison["rows"]) == (metric, unit, 60)
    assert comparison["gain"] == pytest.approx(0, abs=1e-6)
    column = "logits" if task == "reranking" else "embeddings"
    ours, theirs = (
        pq.read_table(folder / "validation.parquet")[column].combine_chunks().flatten().to_numpy()
        for folder in (world.inputs["predictions"], tmp_path / "compared" / OUTPUT / "onnx")
    )
    np.testing.assert_allclose(theirs, ours, atol=1e-5)
