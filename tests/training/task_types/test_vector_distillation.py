"""The loss of embeddings that learn from a teacher's vectors: that of sentence-transformers, each row alike."""

from __future__ import annotations

import json

import pytest
import torch

from tests.training.task_types.embedding_losses import DIMENSIONS, FIGURES, ROWS, embeddings
from training.task_types.losses.distillation_loss import VectorDistillationLoss
from training.task_types.losses.embedding_loss import EmbeddingLoss

PAIRS = EmbeddingLoss("multiple_negatives_ranking")


def facts(counts: list[int]) -> torch.Tensor:
    """The facts of rows with so many texts, all of them distinct."""
    numbers = iter(range(sum(counts)))
    rows = [[float("nan"), *[next(numbers) for _ in range(count)], *[-1] * (max(counts) - count)] for count in counts]
    return torch.tensor(rows, dtype=torch.float64)


def test_loss_and_gradient_are_those_of_sentence_transformers() -> None:
    kept = json.loads(FIGURES.read_text())["teacher"]
    own, vectors = (column.clone() for column in embeddings(2).unbind(1))
    own.requires_grad_()
    loss = VectorDistillationLoss(PAIRS, DIMENSIONS, 1.0)(torch.cat([own, vectors], dim=1), facts([1] * ROWS))
    loss.backward()
    assert own.grad is not None
    assert loss.item() == pytest.approx(kept["loss"], rel=1e-5)
    torch.testing.assert_close(own.grad, torch.tensor(kept["gradient"]), atol=1e-5, rtol=1e-5)


def test_each_row_counts_alike_and_the_labels_have_the_rest() -> None:
    of_rows = facts([2, 4])
    own, vectors = torch.sin(torch.arange(6.0 * DIMENSIONS) ** 2).view(6, -1), torch.zeros(6, DIMENSIONS)
    squares = own.square().mean(dim=1)
    of_teacher = (squares[:2].mean() + squares[2:].mean()) / 2
    found = VectorDistillationLoss(PAIRS, DIMENSIONS, 0.3)(torch.cat([own, vectors], dim=1), of_rows)
    assert found.item() == pytest.approx((0.3 * of_teacher + 0.7 * PAIRS(own, of_rows)).item(), rel=1e-6)


def test_embeddings_of_an_evaluation_have_the_ordinary_loss() -> None:
    given, of_rows = embeddings(2).reshape(-1, DIMENSIONS), facts([2] * ROWS)
    assert VectorDistillationLoss(PAIRS, DIMENSIONS, 0.9)(given, of_rows) == PAIRS(given, of_rows)
