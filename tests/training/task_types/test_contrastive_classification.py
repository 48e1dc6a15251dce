"""Classification from a few rows of each label: an ordinary classifier whose head is fitted to trained embeddings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import layer_norm

from tests import fork_server
from tests.arrow import read_arrow, write_arrow
from tests.raised import Says, raised_problems
from tests.training import tiny
from tests.training.forks import assert_same, curve, finish, kill_when, within_a_step
from training import task_types
from training.models.classifier_inputs import read_embedding, take_head
from training.recipe import parse
from training.task_types.losses.contrastive_loss import SupervisedContrast, logistic_regression

OPTIONS: dict[str, Any] = {"contrastive": True}
# SGD does not enlarge differences of small gradients, as Adam does.
ONE_EPOCH: dict[str, Any] = {"num_train_epochs": 1, "optim": "sgd", "learning_rate": 0.05, "logging_steps": 1}
RECIPE: dict[str, Any] = {
    "name": "few",
    "task": "sequence-classification",
    "options": OPTIONS,
    "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label"},
    "model": {"source": "folder", "path": "model"},
    "evaluation": {"splits": ["test"], "metrics": ["accuracy"]},
}


@pytest.fixture(scope="module")
def still(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world with a model that drops nothing; `world` sets the number of threads."""
    home = tmp_path_factory.mktemp("still")
    fork_server.call(_make_still, home)
    return home


def _make_still(home: Path) -> None:
    tiny.make_world(home, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def trained(world: Path, job_dir: Path, batch: int, accumulation: int, **settings: Any) -> Path:
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
    job = tiny.fit_job(world, job_dir, settings={"options": OPTIONS}, **{**sizes, **settings})
    outcome = finish(job)
    assert outcome.state == "finished", outcome
    return job


def test_the_loss_is_the_mean_over_the_rows_that_have_a_partner() -> None:
    embeddings = torch.randn(6, 8, dtype=torch.float64).float()
    labels = torch.tensor([0, 1, 0, 2, 1, 0])
    directions = embeddings / embeddings.norm(dim=1, keepdim=True)
    losses = []
    for row in (0, 1, 2, 4, 5):
        others = [other for other in range(6) if other != row]
        scores = {other: float(directions[row] @ directions[other]) / 0.2 for other in others}
        total = np.log(sum(np.exp(score) for score in scores.values()))
        partners = [other for other in others if labels[other] == labels[row]]
        losses.append(-np.mean([scores[other] - total for other in partners]))
    assert float(SupervisedContrast(0.2)(embeddings, labels)) == pytest.approx(np.mean(losses), rel=1e-5)
    assert float(SupervisedContrast(0.2)(embeddings[:2], labels[:2])) == 0.0


@pytest.mark.parametrize("with_bias", [True, False])
def test_the_head_is_that_of_scikit_learn(with_bias: bool) -> None:
    from sklearn.linear_model import LogisticRegression

    draw = np.random.default_rng(0)
    labels = draw.integers(0, 3, 40)
    inputs = draw.normal(size=(40, 5)) + np.eye(5)[labels] * 2
    weights, biases = logistic_regression(inputs, labels, 3, with_bias=with_bias)
    scale = np.linalg.norm(inputs, axis=1).mean()
    theirs = LogisticRegression(fit_intercept=with_bias, tol=1e-10, max_iter=10_000).fit(inputs / scale, labels)
    np.testing.assert_allclose(weights * scale, theirs.coef_, atol=1e-4)
    np.testing.assert_allclose(biases - biases.mean(), theirs.intercept_ - theirs.intercept_.mean(), atol=1e-4)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "modernbert"])
def test_the_classifier_reads_the_mean_of_the_tokens(model_type: str) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    sizes = {**tiny.CONFIG, "num_labels": 3, "model_type": model_type, "pad_token_id": 0}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**sizes)).eval()
    ids, mask = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]]), torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
        means = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        read_embedding(model)
        read_embedding(model)  # as a model that has been trained so before
        take_head(model)
        given = model(input_ids=ids, attention_mask=mask).logits
    if model_type == "modernbert":
        assert model.config.classifier_pooling == "mean"
        return
    expected = layer_norm(means, means.shape[1:])
    assert float((torch.atanh(given) * 10 - expected).abs().max()) < 0.1
    assert model.config.num_hidden_layers == len(model.base_model.encoder.layer) == 3


@pytest.mark.slow
def test_the_exported_model_is_a_plain_classifier(world: Path, tmp_path: Path) -> None:
    """As transformers alone loads it."""
    from transformers import AutoModelForSequenceClassification

    last = {"num_train_epochs": 12, "eval_strategy": "no", "load_best_model_at_end": False}
    job = trained(world, tmp_path / "job", 32, 1, **last)
    folder = job / "output/model"
    assert {file.suffix for file in folder.iterdir()} == {".json", ".safetensors"}
    model, found = AutoModelForSequenceClassification.from_pretrained(
        folder, trust_remote_code=False, output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"]
    rows = read_arrow(world / "tokens/validation.arrow").to_pylist()
    with torch.no_grad():
        given = [int(model.eval()(torch.tensor([row["input_ids"]])).logits.argmax()) for row in rows]
    assert np.mean([guess == row["label"] for guess, row in zip(given, rows, strict=True)]) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "batch", "accumulation", "processes"),
    [("trainer", 10, 3, 1), ("trainer", 15, 1, 2), ("accelerate", 5, 3, 2)],
)
def test_micro_batches_and_processes_change_neither_loss_nor_weights(
    still: Path, tmp_path: Path, engine: str, batch: int, accumulation: int, processes: int
) -> None:
    undivided = trained(still, tmp_path / "undivided", 30, 1, **ONE_EPOCH)
    divided = trained(still, tmp_path / "divided", batch, accumulation, processes=processes, engine=engine, **ONE_EPOCH)
    ours, theirs = (load_file(job / "output/model/model.safetensors") for job in (divided, undivided))
    assert max(float((weight - theirs[name]).abs().max()) for name, weight in ours.items()) < 1e-5
    losses = [[curve(job)[step]["train_loss"] for step in range(1, 6)] for job in (divided, undivided)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_killed_between_micro_batches_it_ends_with_the_same_bytes(world: Path, tmp_path: Path) -> None:
    """With dropout, which both passes of a micro-batch draw alike; the head included."""
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
    settings = {"options": OPTIONS}
    undisturbed = tiny.fit_job(world, tmp_path / "undisturbed", settings=settings, **sizes)
    assert finish(undisturbed).state == "finished"
    killed = tiny.fit_job(world, tmp_path / "killed", settings=settings, checkpoint_interval_s=1e-9, **sizes)
    assert kill_when(killed, lambda: within_a_step(killed, 5))
    assert finish(killed).state == "finished"
    assert_same(killed, undisturbed)


def test_steps_and_labels_without_pairs_are_refused(world: Path, tmp_path: Path) -> None:
    job = tiny.fit_job(world, tmp_path / "job", settings={"options": OPTIONS}, per_device_train_batch_size=2)
    (problem,) = raised_problems(tiny.task_of, job)
    assert (problem.where, problem.message) == ("training.per_device_train_batch_size", Says("2 rows a step are too f"))
    tokens = read_arrow(world / "tokens/train.arrow")
    labels = tokens["label"].to_numpy()
    kept = np.flatnonzero(labels != 1).tolist() + np.flatnonzero(labels == 1)[:1].tolist()
    write_arrow(tmp_path / "single/train.arrow", tokens.take(kept))
    shutil.copy(world / "tokens/validation.arrow", tmp_path / "single")
    job = tiny.fit_job(world, tmp_path / "other", tokens=str(tmp_path / "single"), settings={"options": OPTIONS})
    (problem,) = raised_problems(tiny.task_of, job)
    assert (problem.where, problem.message) == ("data", Says("the train split has one row of 'tool'"))


@pytest.mark.parametrize(
    ("changes", "where", "message"),
    [
        (
            {"training.label_smoothing_factor": 0.1},
            "training.label_smoothing_factor",
            "does nothing with options.contr",
        ),
        (
            {"training.teacher": {"source": "folder", "path": "big"}},
            "training.teacher",
            "does nothing with options.con",
        ),
        ({"training.lora": {"r": 2}}, "training.lora", "does nothing with options.contrastive, which trains all"),
        (
            {"training.metric_for_best_model": "accuracy"},
            "training.metric_for_best_model",
            "'accuracy' is not computed",
        ),
        ({"options": {"temperature": 0.5}}, "options.temperature", "does nothing without options.contrastive"),
        ({"task": "multi-label-classification"}, "options", "task multi-label-classification has no options"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(changes: dict[str, Any], where: str, message: str) -> None:
    (problem,) = raised_problems(parse, RECIPE, changes)
    assert (problem.where, problem.message) == (where, Says(message))


def test_only_a_contrastive_training_has_the_options_in_its_key() -> None:
    ordinary, contrastive = (task_types.load("sequence-classification", given) for given in ({}, OPTIONS))
    assert ordinary.options_of("fit") == {}
    assert contrastive.options_of("fit") == {"contrastive": True, "temperature": 0.1}
    assert contrastive.options_of("tokenize") == contrastive.options_of("predict") == {}
