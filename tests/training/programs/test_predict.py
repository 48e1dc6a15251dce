"""One stored row a prediction, in the rows' own order."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.training import programs_here, tiny
from tests.training.programs_here import PREDICT, warnings_of
from training.batching.batches import TokenRows
from training.models.loading import export, load_for_training, load_tokenizer, load_trained
from training.programs import predict
from training.task_types import load


@pytest.fixture(scope="module")
def trained(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.export_untrained(world / "base", tmp_path_factory.mktemp("trained"))


def run(world: Path, model: Path, job_dir: Path, batch_size: int) -> Path:
    settings = PREDICT | {"splits": ["train", "validation"], "batch_size": batch_size}
    inputs = {"model": model, "tokens": world / "tokens"}
    assert programs_here.run(predict, job_dir, inputs, task="sequence-classification", **settings)["rows"] == 210
    return job_dir / "output"


def test_rows_are_predicted_in_their_order_as_the_model_predicts_each(
    world: Path, trained: Path, tmp_path: Path
) -> None:
    table = pq.read_table(run(world, trained, tmp_path / "job", batch_size=16) / "validation.parquet")
    rows = TokenRows(world / "tokens/validation.arrow")
    assert table["row"].to_pylist() == list(range(60))
    assert table["label"].to_pylist() == rows.labels.tolist()
    assert table["tokens"].to_pylist() == [len(rows[number]["input_ids"]) for number in range(60)]
    model = load_trained(load("sequence-classification"), trained)
    for number in (0, 17, 59):
        with torch.inference_mode():
            expected = model(torch.tensor([rows[number]["input_ids"].tolist()])).logits[0].numpy()
        logits = np.array(table["logits"][number].as_py())
        assert logits == pytest.approx(expected, abs=1e-5)
        assert table["prediction"][number].as_py() == logits.argmax()


def test_a_model_that_predicts_the_same_for_all_rows_is_warned_of(world: Path, trained: Path, tmp_path: Path) -> None:
    model = load_trained(load("sequence-classification"), trained)
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.copy_(torch.tensor([1.0, 0.0, 0.0]))
    export(model, trained, tmp_path / "constant")
    run(world, tmp_path / "constant", tmp_path / "job", batch_size=64)
    found = warnings_of(tmp_path / "job")
    assert [message.split(" are the same for (nearly) all rows")[0] for message in found] == [
        "the predictions for train",
        "the predictions for validation",
    ]
    assert "training.learning_rate" in found[0] and "training.class_weights: balanced" in found[0]


def test_two_runs_write_the_same_bytes(world: Path, trained: Path, tmp_path: Path) -> None:
    first, second = (run(world, trained, tmp_path / name, batch_size=16) for name in "ab")
    for split in ("train", "validation"):
        assert (first / f"{split}.parquet").read_bytes() == (second / f"{split}.parquet").read_bytes()


def test_export_with_another_models_tokenizer_keeps_its_own_weights(world: Path, tmp_path: Path) -> None:
    both = tmp_path / "both"
    for folder in ("model", "tokenizer"):
        shutil.copytree(world / "base" / folder, both, dirs_exist_ok=True)
    task = load("sequence-classification")
    model = load_for_training(task, both, tiny.LABELS, load_tokenizer(both), seed=1)
    export(model, both, tmp_path / "out")
    again = load_trained(task, tmp_path / "out")
    assert torch.equal(again.classifier.weight, model.classifier.weight)
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (both / "tokenizer.json").read_bytes()


def test_initial_head_is_drawn_by_the_seed(world: Path) -> None:
    task, tokenizer = load("sequence-classification"), load_tokenizer(world / "base/tokenizer")

    def head(seed: int) -> torch.Tensor:
        return load_for_training(task, world / "base/model", tiny.LABELS, tokenizer, seed=seed).classifier.weight

    assert torch.equal(head(1), head(1))
    assert not torch.equal(head(1), head(2))
