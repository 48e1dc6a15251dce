"""The best constant answer, which a first model must be better than."""

from __future__ import annotations

import csv
import json
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn import metrics as sklearn_metrics

from tasks.cache.results import Comparison
from tests import task_types as tiny_tasks
from tests.arrow import write_arrow
from tests.training import tiny
from tests.training.programs_here import COMPARE, folders, run
from training import task_types
from training.evaluation import baseline
from training.evaluation.constant_predictions import Baseline, is_constant, nearly_constant
from training.evaluation.generated_texts import Generated
from training.evaluation.metrics import LabelMetric, compute
from training.evaluation.predictions import Likelihoods, ManyLabels, Numbers, OneLabel, Predictions
from training.evaluation.tagged_words import Tagged
from training.evaluation.tool_use import with_turns
from training.programs import compare
from training.recipe.tables.metrics import more_is_better
from training.task_types import multi_label_classification
from training.task_types.task_type import AnswersTurns

NOWHERE = Path("nowhere")


class Shy(LabelMetric):
    """Refuses predictions that are all alike."""

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        if len(set(predictions.tolist())) == 1:
            raise ValueError("all alike")
        return {"shy": 1.0}


def write(file: Path, table: pa.Table) -> Path:
    """The folder of the file, which holds these rows."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_arrow(file, table)
    return file.parent


def offered(task: str, folder: Path, labels: list[str], **columns: Any) -> Baseline:
    """The constants of a task type for these training rows."""
    data = write(folder / "train.arrow", pa.table(columns))
    found = task_types.load(task).baseline(data, NOWHERE, NOWHERE, labels)
    assert found is not None
    return found


def best_figure(found: Baseline, metric: str, rows: Predictions) -> float:
    return baseline.compute_values([metric], baseline.choose_rival(found, metric).predict(rows, "test"))[metric]


def test_the_metric_decides_which_label_is_the_best_constant(tmp_path: Path) -> None:
    found = offered("sequence-classification", tmp_path, ["ham", "spam"], label=[0] * 7 + [1] * 3)
    assert (
        baseline.choose_rival(found, "accuracy").name == "'ham'" and baseline.choose_rival(found, "f1").name == "'spam'"
    )
    rows = OneLabel(np.array([0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 1]), np.eye(2)[[0, 0, 1, 1, 1]], ["ham", "spam"])
    assert best_figure(found, "accuracy", rows) == 0.4  # of the training rows' majority, not of these rows'
    assert best_figure(found, "f1", rows) == pytest.approx(2 * 3 / (5 + 3))
    assert best_figure(found, "roc_auc", rows) == 0.5 and best_figure(found, "matthews_correlation", rows) == 0
    shares = np.tile([8 / 12, 4 / 12], (5, 1))
    assert best_figure(found, "log_loss", rows) == pytest.approx(sklearn_metrics.log_loss(rows.references, shares))
    shy = "tests.training.evaluation.test_baseline:Shy"
    assert baseline.compute_values([shy], found.rivals[0].predict(rows, "test")) == {}


@pytest.mark.parametrize("metric", task_types.class_of("sequence-classification").metrics)
def test_no_other_label_is_a_better_constant_on_the_training_rows(tmp_path: Path, metric: str) -> None:
    places = np.repeat([0, 1, 2, 3], [5, 9, 2, 4])
    found = offered("sequence-classification", tmp_path, labels := ["5", "1", "2", "4"], label=places)
    sign = 1 if more_is_better(metric) else -1
    every = [
        OneLabel(places, np.full(20, place), np.tile((np.bincount(places) + 1) / 24, (20, 1)), labels)
        for place in range(4)
    ]
    values = [sign * baseline.compute_values([metric], answer)[metric] for answer in every]
    assert sign * best_figure(found, metric, every[0]) == pytest.approx(max(values), abs=1e-12)


@pytest.mark.parametrize(
    "metric", ["f1_micro", "f1_macro", "f1_weighted", "accuracy", "hamming_loss", "precision_macro"]
)
def test_no_other_set_of_labels_is_a_better_constant_on_the_training_rows(tmp_path: Path, metric: str) -> None:
    rows = [[0], [0], [0, 1], [1], [0, 2], [3], [], [0, 1], [1, 0], [2]]
    found = offered("multi-label-classification", tmp_path, labels := [*"abcd"], label=rows)
    truth = np.array([[place in row for place in range(4)] for row in rows])
    sign = 1 if more_is_better(metric) else -1
    sets = chain.from_iterable(combinations(range(4), size) for size in range(5))
    values = [
        sign
        * compute([metric], ManyLabels(truth, np.ones((10, 4)), np.where(np.isin(range(4), one), 0, 2), labels))[metric]
        for one in sets
    ]
    every = ManyLabels(truth, truth.astype(float), np.full(4, 0.5), labels)
    assert sign * best_figure(found, metric, every) == pytest.approx(max(values), abs=1e-12)


def test_a_number_is_the_mean_or_the_median_and_correlates_with_nothing(tmp_path: Path) -> None:
    found = offered("regression", tmp_path, [], label=[0.0, 0.0, 0.0, 1.0, 9.0])
    assert [constant.name for constant in found.rivals] == ["2 (the mean)", "0 (the median)"]
    assert {metric: baseline.choose_rival(found, metric).name[0] for metric in ("mse", "rmse", "r2", "mae")} == {
        **dict.fromkeys(("mse", "rmse", "r2"), "2"),
        "mae": "0",
    }
    rows = Numbers(np.array([1.0, 3.0, 2.0]), np.zeros(3))
    assert best_figure(found, "mse", rows) == pytest.approx(2 / 3) and best_figure(found, "mae", rows) == 2
    assert best_figure(found, "pearson", rows) == best_figure(found, "spearman", rows) == 0


def test_a_word_gets_the_most_frequent_tag_and_no_span_is_found(tmp_path: Path) -> None:
    tags = pa.array([[0, 0, 1, 2], [0, 0, 0], [1, 0]], pa.list_(pa.int64()))
    found = offered("token-classification", tmp_path, labels := ["O", "B-PER", "I-PER"], label=tags)
    words = np.array([0, 1, 2, 0])
    rows = Tagged(words, words, np.ones(4), np.array([0, 3, 4]), labels)
    assert best_figure(found, "accuracy", rows) == 0.5 and found.rivals[0].name == "'O'"
    assert baseline.compute_values(["f1"], found.rivals[0].predict(rows, "test")) == {"f1": 0.0}


def test_a_text_is_the_frequent_target_that_is_nearest_to_the_others(tmp_path: Path) -> None:
    found = offered("seq2seq", tmp_path, [], target=["yes"] * 3 + ["no"] * 2)
    rows = Generated(np.array(["yes", "no"], np.object_), np.array(["", ""], np.object_))
    assert (
        best_figure(found, "exact_match", rows) == 0.5 and baseline.choose_rival(found, "exact_match").name == "'yes'"
    )
    assert baseline.choose_rival(found, "chrf").name == "'yes'"


@pytest.mark.parametrize("task", ["causal-lm", "masked-lm", "sft"])
def test_tokens_are_predicted_by_how_often_the_training_targets_are_they(task: str, tmp_path: Path) -> None:
    from training.batching.batches import IGNORED, TokenRows
    from training.models.loading import load_tokenizer

    world = tiny_tasks.make_world(task, tmp_path / "world")
    folder = tmp_path / "model"
    folder.mkdir()
    for part in ("model", "tokenizer"):
        for file in (world / "base/output" / part).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    made = task_types.load(task, tiny_tasks.TINY[task].options)
    found = made.baseline(world / "data", world / "tokens", folder, [])
    assert found is not None
    collate = made.collator(load_tokenizer(folder), 1)

    def targets(split: str) -> list[list[int]]:
        """The target tokens of each row, as the batches have them."""
        rows = TokenRows(world / "tokens" / f"{split}.arrow")
        of_rows = (collate([rows[row]])["labels"][0] for row in range(len(rows)))
        return [row[row != IGNORED].tolist() for row in of_rows]

    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    counts = 1 + np.bincount(list(chain.from_iterable(targets("train"))), minlength=size)
    losses, expected = -np.log(counts / counts.sum()), targets("validation")
    rows = Likelihoods(np.zeros(len(expected)), np.zeros(len(expected), np.int64), np.zeros(len(expected), np.int64))
    if isinstance(made, AnswersTurns):  # its predictions have the turns of each row, here of none
        rows = with_turns(rows, [()] * len(expected))
    answered = baseline.choose_rival(found, "perplexity").predict(rows, "validation")
    assert isinstance(answered, Likelihoods)
    assert answered.targets.tolist() == [len(row) for row in expected] and sum(answered.targets) > 50
    assert answered.loss == pytest.approx([losses[row].sum() for row in expected])
    assert answered.hits.tolist() == [row.count(int(counts.argmax())) for row in expected]


LABELS = [f"label {number}" for number in range(28)]


def compared(home: Path, task: str, figure: str, labels: list[str], model: Any, train: Any, truth: Any) -> Comparison:
    """A model without a champion, compared on rows with these true labels."""
    write(home / "data/train.arrow", pa.table({"text": [""] * len(train), "label": train}))
    write(home / "data/test.arrow", pa.table({"text": [f"text {row}" for row in range(len(truth))], "label": truth}))
    (home / "data/labels.json").write_text(json.dumps(labels))
    model(home / "predictions/test.parquet")
    settings = COMPARE | {"champion": None, "metrics": [figure], "figure": figure}
    inputs = folders(home, "predictions", "data", "tokens", "model")
    return Comparison.model_validate(run(compare, home / "job", inputs, task=task, **settings))


@pytest.mark.parametrize(("figure", "value"), [("f1_micro", None), ("roc_auc", 0.5), ("hamming_loss", None)])
def test_a_model_that_gives_every_row_all_labels_is_not_better_than_the_baseline(
    tmp_path: Path, figure: str, value: float | None
) -> None:
    draw = np.random.default_rng(0)
    rows = [[int(place)] for place in draw.choice(28, 600)]

    def model(file: Path) -> None:
        """All 28 labels for every row, with probabilities that tell nothing."""
        file.parent.mkdir()
        logits = np.full((300, 28), 3.0, np.float32)
        answers = multi_label_classification._table(logits, [0.5] * 28)
        table = pa.table({"label": rows[300:], **{name: answers[name] for name in answers.schema.names}})
        table = table.replace_schema_metadata(answers.schema.metadata)
        pq.write_table(table, file)

    found = compared(tmp_path, "multi-label-classification", figure, LABELS, model, rows[:300], rows[300:])
    assert found.baseline and not found.better and found.champion.startswith("the constant answer ")
    assert found.warnings == ["this model predicts the same for every row of test, as a constant does."]
    assert value is None or found.value == found.champion_value == value


def test_a_first_model_that_correlates_is_better_than_a_constant_number(tmp_path: Path) -> None:
    truth = np.random.default_rng(0).normal(size=60)

    def model(file: Path) -> None:
        file.parent.mkdir()
        pq.write_table(pa.table({"label": truth, "prediction": truth + 0.1}), file)

    found = compared(tmp_path, "regression", "pearson", [], model, truth, truth)
    assert found.better and (found.value, found.champion_value) == (pytest.approx(1), 0)


def test_a_metric_that_refuses_constant_predictions_promotes_no_first_model_and_ends_no_run(tmp_path: Path) -> None:
    truth = np.arange(40) % 2

    def model(file: Path) -> None:
        file.parent.mkdir()
        tiny.write_predictions(file, truth, np.eye(2, dtype=np.float32)[truth], np.full(40, 4, np.int32))

    own = "tests.training.evaluation.test_baseline:Shy"
    found = compared(tmp_path, "sequence-classification", own, ["neg", "pos"], model, [1, 1, 0], truth)
    assert (found.metric, found.value, found.better) == ("shy", 1, False) and np.isnan(found.champion_value)


def test_a_first_model_that_has_learnt_is_better_than_the_baseline_and_the_rows_that_differ_are_shown(
    tmp_path: Path,
) -> None:
    truth = np.arange(40) % 2
    predicted = np.where(np.arange(40) < 3, 1 - truth, truth)

    def model(file: Path) -> None:
        file.parent.mkdir()
        tiny.write_predictions(file, truth, np.eye(2, dtype=np.float32)[predicted] * 3, np.full(40, 4, np.int32))

    found = compared(tmp_path, "sequence-classification", "accuracy", ["neg", "pos"], model, [1, 1, 0], truth)
    assert found.better and (found.value, found.champion_value) == (37 / 40, 0.5)
    assert (found.champion, found.gained, found.lost) == ("the constant answer 'pos'", 18, 1)
    with open(tmp_path / "job/output/log/disagreements.csv", newline="", encoding="utf-8") as file:
        shown = list(csv.DictReader(file))
    assert {row["champion"] for row in shown} == {"pos"} and len(shown) == 19


def test_predictions_that_are_nearly_all_the_same_are_noticed_unless_the_labels_are_too() -> None:
    def one_label(truth: list[int], given: list[int]) -> OneLabel:
        return OneLabel(np.array(truth), np.array(given), np.eye(2)[given], ["no", "yes"])

    half = [0, 1] * 50
    assert nearly_constant(one_label(half, [0] * 96 + [1] * 4)) and not nearly_constant(
        one_label(half, [0] * 90 + [1] * 10)
    )
    assert is_constant(one_label(half, [1] * 100)) and not is_constant(one_label(half, half))
    rare = [0] * 990 + [1] * 10
    assert nearly_constant(one_label(rare, [0] * 1000)) and not nearly_constant(one_label(rare, [0] * 999 + [1]))
    assert not nearly_constant(one_label([1] * 9, [1] * 9))  # there is nothing to tell apart
    numbers = np.linspace(0, 10, 50)
    assert nearly_constant(Numbers(numbers, 5 + numbers / 100)) and not nearly_constant(
        Numbers(numbers, 5 + numbers / 5)
    )
    has = np.eye(3, dtype=bool)[np.arange(30) % 3]
    assert nearly_constant(ManyLabels(has, np.full((30, 3), 0.6), np.full(3, 0.5), [*"abc"]))
    assert not nearly_constant(ManyLabels(has, has.astype(float), np.full(3, 0.5), [*"abc"]))
    assert not nearly_constant(Likelihoods(np.ones(3), np.ones(3, np.int64), np.ones(3, np.int64)))
