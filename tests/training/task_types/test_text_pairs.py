"""Any number of labels a row, and numbers: trained, also killed or shared out, predicted, scored and compared."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.arrow import read_arrow, write_arrow
from tests.training import tiny
from tests.training.forks import assert_resumes, curve, finish
from tests.training.programs_here import COMPARE, PREDICT, SCORE, run
from training.batching.batches import PadToLongest, TokenRows
from training.engine.trainer import ExactTrainer
from training.models.loading import load_for_training, load_tokenizer
from training.problems import UserError
from training.programs import compare, predict, score
from training.programs.predict_champion import require_task
from training.recipe import Training
from training.task_types import load
from training.task_types.multi_label_classification import best_threshold

pytestmark = pytest.mark.slow

MANY, REGRESSION = load("multi-label-classification"), load("regression")
ASKED = {
    "many": {"task": "multi-label-classification", "metrics": ["f1_micro", "accuracy"], "labels": tiny.LABELS},
    "numbers": {"task": "regression", "metrics": ["mse", "pearson"], "labels": []},
}
EPOCHS = {"checkpoint_interval_s": 0.02, "metric_for_best_model": "f1_micro"}
CHOSEN_BY_MSE = {"checkpoint_interval_s": 0.02, "metric_for_best_model": "mse", "engine": "accelerate"}


def labels_of(text: str) -> list[int]:
    """The sorts of words that the text has twice or more, perhaps none."""
    return [place for place, name in enumerate(tiny.LABELS) if sum(text.split().count(w) for w in tiny.WORDS[name]) > 2]


@pytest.fixture(scope="module")
def rows(world: Path) -> Path:
    """The world, with the same texts under other labels: data and tokens of both kinds."""
    for split in ("train", "validation"):
        texts = read_arrow(world / f"data/{split}.arrow")["text"].to_pylist()
        plain = TokenRows(world / f"tokens/{split}.arrow")
        ids = [plain[row]["input_ids"].tolist() for row in range(len(plain))]
        for name, labels in {
            "many": [labels_of(text) for text in texts],
            "numbers": [text.split().count("cat") - len(text.split()) / 8 for text in texts],
        }.items():
            tiny.write_tokens(world / name, ids, labels, split)
            table = pa.table({"text": texts, "label": labels})
            (world / f"data-{name}").mkdir(exist_ok=True)
            (world / f"data-{name}/labels.json").write_text(json.dumps(ASKED[name].get("labels", [])))
            write_arrow(world / f"data-{name}/{split}.arrow", table)
    return world


def fit_job(rows: Path, job_dir: Path, name: str, **more: Any) -> Path:
    return tiny.fit_job(rows, job_dir, tokens=name, settings=ASKED[name], **more)


@pytest.fixture(scope="module")
def fitted(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An undisturbed job of each task type."""
    folder, jobs = tmp_path_factory.mktemp("jobs"), {}
    for name, more in {"many": EPOCHS, "numbers": CHOSEN_BY_MSE}.items():
        jobs[name] = fit_job(rows, folder / name, name, **more)
        assert finish(jobs[name]).state == "finished", (jobs[name] / "log.txt").read_text()
    return jobs


@pytest.mark.parametrize(("name", "more"), [("many", EPOCHS), ("numbers", CHOSEN_BY_MSE)])
def test_killed_it_ends_with_the_same_weights_and_thresholds(
    rows: Path, fitted: dict[str, Path], tmp_path: Path, name: str, more: dict[str, Any]
) -> None:
    job_dir = fit_job(rows, tmp_path / "killed", name, **more)
    assert_resumes(job_dir, fitted[name], after=5)
    configs = [(folder / "output/model/config.json").read_bytes() for folder in (job_dir, fitted[name])]
    assert configs[0] == configs[1]


def test_thresholds_are_those_of_the_exported_weights_also_where_processes_share_the_model(
    rows: Path, fitted: dict[str, Path], tmp_path: Path
) -> None:
    """The split is one batch, so that one of the two has none."""
    shared = {"processes": 2, "compute": {"strategy": "fsdp"}, "num_train_epochs": 1}
    both = fit_job(rows, tmp_path / "shared", "many", **EPOCHS | shared)
    assert finish(both).state == "finished", (both / "log.txt").read_text()
    for name, job_dir in {"one": fitted["many"], "two": both}.items():
        config = json.loads((job_dir / "output/model/config.json").read_text())
        predictions = pq.read_table(predicted(rows, job_dir, tmp_path / name, "many"))
        found = MANY.metric_inputs(predictions, tiny.LABELS)
        assert config["problem_type"] == "multi_label_classification"
        assert config["thresholds"] == found.thresholds.tolist() != [0.5, 0.5, 0.5]
        assert config["thresholds"] == pytest.approx(MANY.calibrate(predictions, tiny.LABELS)["thresholds"], abs=1e-6)


def predicted(rows: Path, fit: Path, job_dir: Path, name: str) -> Path:
    """The file that training.programs.predict writes for the validation split."""
    run(predict, job_dir, {"model": fit / "output/model", "tokens": rows / name}, task=ASKED[name]["task"], **PREDICT)
    return job_dir / "output/validation.parquet"


@pytest.mark.parametrize(
    ("name", "figures", "drawn"), [("many", MANY.metrics, "labels"), ("numbers", REGRESSION.metrics, "numbers")]
)
def test_a_model_is_predicted_scored_and_compared(
    rows: Path, fitted: dict[str, Path], tmp_path: Path, name: str, figures: tuple[str, ...], drawn: str
) -> None:
    predictions = predicted(rows, fitted[name], tmp_path / "new", name)
    table = pq.read_table(predictions)
    tokens = TokenRows(rows / f"{name}/validation.arrow")
    assert table["label"].to_pylist() == [row["label"].tolist() for row in tokens]
    asked = {"task": ASKED[name]["task"], "metrics": list(figures)}
    inputs = {"predictions": predictions.parent, "data": rows / f"data-{name}", "tokens": Path(), "model": Path()}
    settings = SCORE | {"splits": ["validation"], "slices": ["length_bucket"]}
    scored = run(score, tmp_path / "score", inputs, **asked | settings)
    last = max(step for step, point in curve(fitted[name]).items() if "eval_loss" in point)
    if name == "numbers":  # of labels the thresholds are others by now
        assert scored["validation"]["mse"]["value"] == pytest.approx(curve(fitted[name])[last]["eval_loss"], rel=1e-5)
    found = json.loads((tmp_path / "score/output/metrics.json").read_text())["validation"]
    assert list(found) == list(figures)
    assert all(one["low"] <= one["value"] <= one["high"] and one["baseline"] is not None for one in found.values())
    log = tmp_path / "score/output/log"
    assert {file.name for file in log.iterdir()} == {
        f"{drawn}_validation.png",
        "predictions_sample.csv",
        "slices_validation_length_bucket.png",
    }
    with (log / "predictions_sample.csv").open() as file:
        worst = list(csv.DictReader(file))
    size = [abs(float(row["error" if name == "numbers" else "log_loss"])) for row in worst]
    assert len(worst) == 50 and size == sorted(size, reverse=True) and size[0] > size[-1]

    places = {"many": ("logits", [[0.0, 0.0, 0.0]] * 60), "numbers": ("prediction", [10.0] * 60)}
    column, blind = places[name]
    at = table.column_names.index(column)
    table = table.set_column(at, column, pa.array(blind, table.schema.field(column).type))
    (tmp_path / "old").mkdir()
    pq.write_table(table, tmp_path / "old/validation.parquet")
    comparison = COMPARE | asked | {"split": "validation", "figure": figures[0]}
    compared = run(compare, tmp_path / "compare", {**inputs, "champion": tmp_path / "old"}, **comparison)
    assert compared["value"] == scored["validation"][figures[0]]["value"] and compared["gain"] > 0
    with (tmp_path / "compare/output/log/disagreements.csv").open() as file:
        assert {row["change"] for row in csv.DictReader(file)} == {"gained"} | ({"lost"} if compared["lost"] else set())


def test_the_loss_of_labels_is_that_of_torch_and_of_the_model_itself(world: Path) -> None:
    tokenizer = load_tokenizer(world / "base/tokenizer")
    rows = [
        {"input_ids": np.array([2, 7, 9, 3], np.int32), "label": np.array([2, 0])},
        {"input_ids": np.array([2, 3], np.int32), "label": np.array([], np.int64)},
    ]
    batch = PadToLongest(tokenizer, 1)(rows)
    assert batch["labels"].tolist() == [[2, 0], [-1, -1]]
    assert PadToLongest(tokenizer, 1)(rows[1:])["labels"].shape == (1, 0)
    model = load_for_training(MANY, world / "base/model", tiny.LABELS, tokenizer, seed=1).eval()
    loss = MANY.loss(Training(), tiny.LABELS, TokenRows(world / "tokens/train.arrow"), outside=False)
    truths = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    with torch.inference_mode():
        outputs = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=truths)
        found = loss(outputs.logits, batch["labels"])
    wanted = torch.nn.functional.binary_cross_entropy(torch.sigmoid(outputs.logits), truths)
    assert found.item() == outputs.loss.item() == pytest.approx(wanted.item(), abs=1e-6)


def test_the_loss_of_numbers_is_the_mean_squared_error_inside_the_model_and_outside(world: Path) -> None:
    tokenizer = load_tokenizer(world / "base/tokenizer")
    rows = [{"input_ids": np.array([2, 7, 3], np.int32), "label": number} for number in np.array([1.5, -2.0])]
    batch = PadToLongest(tokenizer, 1)(rows)
    assert batch["labels"].dtype == torch.float32 and batch["labels"].tolist() == [1.5, -2.0]
    model = load_for_training(REGRESSION, world / "base/model", [], tokenizer, seed=1).eval()
    train = TokenRows(world / "tokens/train.arrow")
    assert REGRESSION.loss(Training(), [], train, outside=False) is None
    outside = REGRESSION.loss(Training(), [], train, outside=True)
    with torch.inference_mode():
        outputs = model(**batch)
    wanted = ((outputs.logits[0] - 1.5) ** 2 + (outputs.logits[1] + 2) ** 2).item() / 2
    assert outside is not None and outside(outputs.logits, batch["labels"]).item() == pytest.approx(wanted, rel=1e-6)
    assert outputs.loss.item() == pytest.approx(wanted, rel=1e-6)


def test_numbers_to_learn_keep_their_digits_where_deepspeed_trains_in_16_bits() -> None:
    trainer = object.__new__(ExactTrainer)  # DeepSpeed computes in 16 bits on a GPU only
    trainer._task = SimpleNamespace(task_type=REGRESSION)
    trainer.args, trainer.is_deepspeed_enabled = SimpleNamespace(device="cpu"), True
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(dtype=lambda: torch.bfloat16))
    trainer.accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    batch = {"labels": torch.tensor([3.14159]), "pixels": torch.tensor([3.14159])}
    prepared = trainer._prepare_inputs(batch)
    assert prepared["pixels"].dtype == torch.bfloat16
    assert torch.equal(prepared["labels"], batch["labels"])


@pytest.mark.parametrize(
    ("given", "has", "threshold"),
    [
        # F1 by how many of the highest are taken: 2/3, 1/2, 4/5, 2/3
        ([0.9, 0.8, 0.4, 0.2], [1, 0, 1, 0], (0.4 + 0.2) / 2),
        # 2/3, 1/2, 2/5, 2/3: between 0.95 and 0.7, or below 0.2, and the former is nearer to 0.5
        ([0.95, 0.7, 0.55, 0.2], [1, 0, 0, 1], (0.95 + 0.7) / 2),
        ([0.4, 0.4, 0.1], [1, 0, 0], (0.4 + 0.1) / 2),
        ([0.3, 0.2], [1, 1], 0.2 / 2),
        ([0.9, 0.1], [0, 0], 0.5),
        ([], [], 0.5),
        ([np.nextafter(0.5, 1), 0.5], [1, 0], np.nextafter(0.5, 1)),
    ],
)
def test_a_threshold_is_the_middle_between_the_neighbours_where_f1_is_best(
    given: list[float], has: list[int], threshold: float
) -> None:
    assert best_threshold(np.array(given), np.array(has, bool)) == threshold


def test_labels_predicted_by_a_champion_are_matched_by_name_with_its_own_thresholds() -> None:
    """The champion has labels a, gone and b; the recipe has b, new and a."""
    given = np.array([[0.6, 0.9, 0.3], [0.4, 0.1, 0.8]])
    logits = np.log(given / (1 - given)).astype(np.float32)
    model = SimpleNamespace(config=SimpleNamespace(thresholds=[0.5, 0.5, 0.2]))
    answers = pa.Table.from_batches([MANY.predictions(model, {"logits": torch.from_numpy(logits)}, {})])
    assert answers["prediction"].to_pylist() == [[0, 1, 2], [2]]
    labelled = answers.add_column(0, "label", pa.array([[0, 1], []], pa.list_(pa.int64())))
    remapped = MANY.remap_labels(labelled, ["a", "gone", "b"], ["b", "new", "a"])
    assert remapped["label"] == labelled["label"] and remapped["prediction"].to_pylist() == [[0, 2], [0]]
    found = MANY.metric_inputs(remapped, ["b", "new", "a"])
    assert found.thresholds.tolist() == [0.2, 0.5, 0.5] and found.predictions.tolist() == [[1, 0, 1], [1, 0, 0]]
    np.testing.assert_allclose(found.probabilities, [[0.3, 0, 0.6], [0.8, 0, 0.4]], atol=1e-7)
    assert found.correct.tolist() == [False, False]
    assert found.describe_row(0, {})["label"] == "b, new" and found.describe_row(0, {})["prediction"] == "b, a"


def test_thresholds_of_a_champion_that_training_starts_from_are_not_taken_over(
    world: Path, fitted: dict[str, Path]
) -> None:
    exported = fitted["many"] / "output/model"
    again = load_for_training(MANY, exported, ["b", "a"], load_tokenizer(exported), seed=1)
    assert again.config.thresholds == [0.5, 0.5]


def test_a_champion_of_the_same_class_that_was_trained_for_another_task_is_reported(fitted: dict[str, Path]) -> None:
    exported = fitted["many"] / "output/model"
    require_task(MANY, "multi-label-classification", exported, "small/1")
    with pytest.raises(UserError, match="small/1 was trained for multi_label_classification, and a champion of reg"):
        require_task(REGRESSION, "regression", exported, "small/1")
