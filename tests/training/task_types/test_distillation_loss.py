"""The loss of a student: by hand, row by row, with its gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from training.batching.batches import IGNORED
from training.batching.random_states import SeededBatch
from training.recipe import Training
from training.task_types import load
from training.task_types.losses import TEACHER
from training.task_types.losses.distillation_loss import AddTeacher, DistillationLoss, add_outputs

DRAW = torch.Generator().manual_seed(3)
LOGITS = torch.randn((5, 3), generator=DRAW)
OUTPUTS = torch.randn((5, 3), generator=DRAW) * 3
CLASSES = torch.tensor([0, 2, 1, 1, 0])
T, W = 2.5, 0.3


def made(task: str, weight: float = W, **training: Any) -> DistillationLoss:
    task_type = load(task)
    train: Any = type("Rows", (), {"labels": CLASSES.numpy()})
    ordinary = task_type.loss(Training(**training), ["a", "b", "c"], train, outside=True)
    assert ordinary is not None and task_type.teacher_outputs is not None
    return DistillationLoss(ordinary, task_type.teacher_outputs, T, weight)


def rows_of(outputs: torch.Tensor) -> list[dict[str, Any]]:
    return [{TEACHER: row.numpy()} for row in outputs]


def softmax(row: list[float]) -> list[float]:
    total = sum(map(math.exp, row))
    return [math.exp(value) / total for value in row]


def with_gradient(loss: Any, logits: torch.Tensor, labels: torch.Tensor) -> tuple[float, torch.Tensor]:
    given = logits.clone().requires_grad_()
    found = loss(given, labels)
    (gradient,) = torch.autograd.grad(found, given)
    return float(found.detach()), gradient


def numeric_gradient(loss: Any, logits: torch.Tensor) -> torch.Tensor:
    """Of a function of lists of numbers, by differences."""
    found, step = torch.zeros_like(logits, dtype=torch.float64), 1e-6
    for place in np.ndindex(*logits.shape):
        values = []
        for sign in (1, -1):
            moved = logits.double().clone()
            moved[place] += sign * step
            values.append(loss(moved.tolist()))
        found[place] = (values[0] - values[1]) / (2 * step)
    return found


def classes_by_hand(logits: list[list[float]]) -> float:
    total = 0.0
    for row, outputs, label in zip(logits, OUTPUTS.double().tolist(), CLASSES.tolist(), strict=True):
        cooled = softmax([value / T for value in row])
        soft = -sum(p * math.log(q) for p, q in zip(softmax([one / T for one in outputs]), cooled, strict=True))
        total += (1 - W) * -math.log(softmax(row)[label]) + W * T**2 * soft
    return total / len(logits)


def binary(p: float, logit: float) -> float:
    q = 1 / (1 + math.exp(-logit))
    return -p * math.log(q) - (1 - p) * math.log(1 - q)


def labels_by_hand(logits: list[list[float]]) -> float:
    truths = [[1, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1], [0, 0, 1]]
    total = 0.0
    for row, outputs, truth in zip(logits, OUTPUTS.double().tolist(), truths, strict=True):
        for logit, output, has in zip(row, outputs, truth, strict=True):
            soft = binary(1 / (1 + math.exp(-output / T)), logit / T)
            total += ((1 - W) * binary(has, logit) + W * T**2 * soft) / 3
    return total / len(logits)


MANY = torch.tensor([[0, 2, -1], [-1, -1, -1], [1, -1, -1], [0, 1, 2], [2, -1, -1]])


@pytest.mark.parametrize(
    ("task", "labels", "by_hand"),
    [
        ("sequence-classification", CLASSES, classes_by_hand),
        ("multi-label-classification", MANY, labels_by_hand),
    ],
)
def test_loss_and_gradient_are_those_of_the_sum_by_hand(task: str, labels: torch.Tensor, by_hand: Any) -> None:
    found, gradient = with_gradient(made(task), LOGITS, add_outputs(labels, rows_of(OUTPUTS)))
    assert found == pytest.approx(by_hand(LOGITS.double().tolist()), abs=1e-5)
    assert torch.allclose(gradient.double(), numeric_gradient(by_hand, LOGITS), atol=1e-5)


def test_numbers_are_compared_by_their_squared_difference() -> None:
    logits, outputs = LOGITS[:, :1], OUTPUTS[:, :1]
    labels = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.5])
    found, _ = with_gradient(made("regression"), logits, add_outputs(labels, rows_of(outputs)))
    expected = (1 - W) * (logits[:, 0] - labels).square().mean() + W * (logits - outputs).square().mean()
    assert found == pytest.approx(float(expected), abs=1e-6)


def test_each_word_with_a_token_counts_as_a_row() -> None:
    """Two rows of words, the second with a word without a token, and one that the teacher has cut off."""
    logits = torch.randn((2, 4, 3), generator=DRAW)
    labels = torch.full((2, 4), IGNORED)
    labels[0, 1], labels[0, 2], labels[1, 1], labels[1, 3] = 0, 2, 1, 1
    outputs = torch.randn((5, 3), generator=DRAW)
    outputs[4] = math.nan  # of the last word
    rows = [
        {"first": np.array([1, 2]), TEACHER: outputs[:2].reshape(-1).numpy()},
        {"first": np.array([1, -1, 3]), TEACHER: outputs[2:].reshape(-1).numpy()},
    ]
    task_type, loss = load("token-classification"), made("sequence-classification")
    packed = add_outputs(labels, rows)
    assert task_type.target_count({"labels": packed}) == 4
    words = torch.stack([logits[0, 1], logits[0, 2], logits[1, 1]])
    with_teacher = loss(words, add_outputs(torch.tensor([0, 2, 1]), rows_of(outputs[[0, 1, 2]])))
    alone = torch.nn.functional.cross_entropy(logits[1, 3:], torch.tensor([1]))
    assert float(loss(logits, packed)) == pytest.approx(float(3 * with_teacher + alone) / 4, abs=1e-6)


def test_a_row_without_a_label_has_the_teachers_part_alone() -> None:
    labels = add_outputs(CLASSES, rows_of(OUTPUTS))
    labels[1, 0] = math.nan
    loss, only = made("sequence-classification"), made("sequence-classification", weight=1.0)
    labelled = [0, 2, 3, 4]
    expected = 4 * loss(LOGITS[labelled], labels[labelled]) + W * only(LOGITS[1:2], labels[1:2])
    assert float(loss(LOGITS, labels)) == pytest.approx(float(expected) / 5, abs=1e-6)


def test_weight_zero_is_the_ordinary_loss_and_evaluated_rows_always_have_it() -> None:
    plain = torch.nn.functional.cross_entropy(LOGITS, CLASSES)
    labels = add_outputs(CLASSES, rows_of(OUTPUTS))
    assert float(made("sequence-classification", weight=0.0)(LOGITS, labels)) == pytest.approx(float(plain), abs=1e-6)
    assert torch.equal(made("sequence-classification")(LOGITS, CLASSES), plain)
    loss, several = made("multi-label-classification"), MANY[:, :2]
    assert torch.equal(loss(LOGITS, several), loss.ordinary(LOGITS, several))


def test_the_labels_part_keeps_its_weights() -> None:
    loss = made("sequence-classification", class_weights={"a": 3.0}, loss="focal")
    half = DistillationLoss(loss.ordinary, "classes", T, 0.0)
    labels = add_outputs(CLASSES, rows_of(OUTPUTS))
    assert float(half(LOGITS, labels)) == pytest.approx(float(loss.ordinary(LOGITS, CLASSES)), abs=1e-6)


def test_evaluated_batches_stay_as_they_are_and_training_batches_need_the_teachers_outputs() -> None:
    batch = {"labels": CLASSES}
    assert AddTeacher(lambda rows: batch)([{"label": 0}])["labels"] is CLASSES
    with pytest.raises(RuntimeError, match="no outputs of the teacher, but label"):
        AddTeacher(lambda rows: batch)(SeededBatch([{"label": 0}], [1]))
    with pytest.raises(ValueError, match="no place for a teacher's 3 outputs"):
        made("sequence-classification")(LOGITS, OUTPUTS.double())


@pytest.mark.parametrize("labelled", [[False, False], [True, True], [True, False]])
def test_batches_in_which_no_row_has_one_of_several_labels(labelled: list[bool]) -> None:
    """Rows without a label have the teacher's part alone; an empty list adds the ordinary loss of no label."""
    rows = [{TEACHER: OUTPUTS[row].numpy(), "labelled": int(has)} for row, has in enumerate(labelled)]
    packed = add_outputs(torch.empty((2, 0), dtype=torch.int64), rows)
    total = 0.0
    for logits, outputs, has in zip(LOGITS.double().tolist(), OUTPUTS.double().tolist(), labelled, strict=False):
        for logit, output in zip(logits, outputs, strict=True):
            soft = binary(1 / (1 + math.exp(-output / T)), logit / T)
            total += (has * (1 - W) * binary(0.0, logit) + W * T**2 * soft) / 3
    assert float(made("multi-label-classification")(LOGITS[:2], packed)) == pytest.approx(total / 2, abs=1e-5)


def test_a_batch_without_a_word_with_a_token_has_no_loss() -> None:
    packed = add_outputs(torch.full((1, 4), IGNORED), [{"first": np.array([-1]), TEACHER: np.zeros(3, np.float32)}])
    loss, gradient = with_gradient(made("sequence-classification"), LOGITS[None, :4], packed)
    assert loss == 0 and not gradient.any() and load("token-classification").target_count({"labels": packed}) == 0
