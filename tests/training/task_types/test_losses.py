"""Losses by name and by dotted path, and weights of labels."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.raised import raised_problems
from tests.training import own, tiny
from tests.training.forks import curve, finish
from training.recipe import Training
from training.task_types.losses import classification as losses

LABELS = ["a", "b", "c"]
TRAIN = np.array([0] * 6 + [1] * 3 + [2])
LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 0.0], [0.0, 1.0, 3.0], [4.0, 0.0, 0.0]])
ROWS = torch.tensor([0, 1, 2, 1])


def made(**training: Any) -> losses.Loss | None:
    return losses.make_loss(Training(**training), LABELS, TRAIN, outside=False)


def loss_of(**training: Any) -> float:
    loss = made(**training)
    assert loss is not None
    return float(loss(LOGITS, ROWS))


def refusal(**training: Any) -> tuple[str, str]:
    (problem,) = raised_problems(loss_of, **training)
    return problem.where, problem.message


def test_the_default_is_the_models_own_loss() -> None:
    assert made() is None


def test_focal_loss_is_cross_entropy_with_little_weight_on_what_is_right_already() -> None:
    p = torch.softmax(LOGITS, -1)[torch.arange(4), ROWS]
    assert loss_of(loss="focal") == pytest.approx(float(((1 - p) ** 2 * -p.log()).mean()), rel=1e-6)
    plain = torch.nn.functional.cross_entropy(LOGITS, ROWS)
    assert loss_of(loss="focal", focal_gamma=0.0) == pytest.approx(float(plain), rel=1e-6)


def test_focal_loss_of_a_row_that_is_surely_right_has_a_finite_gradient() -> None:
    logits = torch.tensor([[100.0, 0.0, 0.0]], requires_grad=True)
    loss = made(loss="focal", focal_gamma=0.5)
    assert loss is not None
    loss(logits, torch.tensor([0])).backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_balanced_weights_make_all_labels_count_alike_and_the_average_row_one() -> None:
    weights = losses.class_weights("balanced", LABELS, TRAIN)
    assert weights.tolist() == pytest.approx([10 / 18, 10 / 9, 10 / 3])
    assert weights[TRAIN].mean() == pytest.approx(1.0)


def test_balanced_weights_give_a_label_without_training_rows_that_of_the_average_row() -> None:
    weights = losses.class_weights("balanced", [*LABELS, "unseen"], TRAIN)
    assert weights[:3] == pytest.approx(losses.class_weights("balanced", LABELS, TRAIN))
    assert weights[3] == pytest.approx(1.0)  # its rows of validation would choose the checkpoint alone


def test_only_the_ratios_of_weights_matter_and_labels_left_out_weigh_one() -> None:
    weights = losses.class_weights({"b": 4.0}, LABELS, TRAIN)
    assert weights / weights[0] == pytest.approx(np.array([1.0, 4.0, 1.0]))
    assert losses.class_weights({"a": 2.0, "b": 8.0, "c": 2.0}, LABELS, TRAIN) == pytest.approx(weights)


def test_weights_multiply_the_rows_of_any_loss_smoothing_included() -> None:
    weights = torch.from_numpy(losses.class_weights({"c": 3.0}, LABELS, TRAIN))[ROWS]
    for given, rows in (
        ({"loss": "tests.training.own:hinge"}, own.hinge(LOGITS, ROWS)),
        ({"label_smoothing_factor": 0.1}, losses.cross_entropy(LOGITS, ROWS, smoothing=0.1)),
    ):
        assert loss_of(class_weights={"c": 3.0}, **given) == pytest.approx(float((weights * rows).mean()), rel=1e-6)


def test_a_loss_may_give_each_rows_or_their_mean() -> None:
    one, other = (loss_of(loss=f"tests.training.own:{name}") for name in ("hinge", "mean_hinge"))
    assert one == other


def test_an_unknown_loss_or_label_is_reported() -> None:
    assert refusal(loss="tests.training.own:hing") == (
        "training.loss",
        "'tests.training.own' has no 'hing': it has hinge, mean_hinge, for_each_logit, twice. Did you mean 'hinge'?",
    )
    where, message = refusal(loss="tests.training.own:one_number")
    assert message.endswith("it must be a function of logits (B, L) and labels (B,).")
    where, message = refusal(loss="tests.training.own:for_each_logit")
    assert (
        where == "training.loss"
        and "a tensor of shape (4, 3) for 4 rows: it must return a loss for each row, or their mean." in message
    )
    where, message = refusal(loss="tests.training.own:mean_hinge", class_weights="balanced")
    assert message.endswith(
        "for 4 rows: it must return a loss for each row, because training.class_weights weights rows."
    )
    assert refusal(class_weights={"aa": 1.0}) == (
        "training.class_weights.aa",
        "the data has no such label: choose from a, b, c. Did you mean 'a'?",
    )


def test_weighted_focal_loss_learns_the_same_from_micro_batches_and_ranks_as_from_whole_steps(
    world: Path, tmp_path: Path
) -> None:
    """Without dropout; 150 rows by 12 leave a last step of unequal shares, and labels are spread as they fall."""
    base = world / "base-without-dropout"
    shutil.copytree(world / "base", base)
    config = json.loads((base / "model/config.json").read_text())
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (base / "model/config.json").write_text(json.dumps(config | quiet))
    found = []
    for processes, batch, accumulation in ((1, 12, 1), (1, 5, 3), (2, 2, 3)):
        settings = {"loss": "focal", "class_weights": {"tool": 5.0}, "num_train_epochs": 1, "logging_steps": 1}
        settings |= {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        if batch == 5:  # the same steps, cut unevenly, as when memory is short
            settings |= {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1}
        job_dir = tiny.fit_job(
            world,
            tmp_path / f"{processes}-{batch}",
            base=base.name,
            processes=processes,
            division=3 if batch == 5 else 1,
            **settings,
        )
        assert finish(job_dir).state == "finished"
        found.append({step: point.get("train_loss") for step, point in curve(job_dir).items()})
    assert len(found[0]) == 13 and found[0].keys() == found[1].keys() == found[2].keys()
    for other in found[1:]:
        assert list(other.values()) == pytest.approx(list(found[0].values()), rel=1e-4)
