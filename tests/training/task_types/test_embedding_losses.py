"""Losses of embeddings: those of sentence-transformers, and which texts are no negatives."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.training.task_types.embedding_losses import CASES, DIMENSIONS, FIGURES, ROWS, embeddings
from training.task_types.losses import embedding_loss
from training.task_types.losses.embedding_loss import OF_WHOLE_STEP, EmbeddingLoss

KEPT = json.loads(FIGURES.read_text())
NAN = float("nan")


def facts(ids: list[list[int]], values: list[float] | None = None) -> torch.Tensor:
    """The facts of rows with these numbers of their texts."""
    width = max(map(len, ids))
    values = values or [NAN] * len(ids)
    rows = [[value, *row, *[-1] * (width - len(row))] for value, row in zip(values, ids, strict=True)]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_sentence_transformers(case: str) -> None:
    check_figures(case)


@pytest.mark.parametrize("case", [case for case, (options, *_) in CASES.items() if options["loss"] in OF_WHOLE_STEP])
def test_in_blocks_of_anchors_a_loss_is_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_loss, "MAX_SCORES", 24)  # of 6 rows, 1 to 4 anchors a block
    check_figures(case)


def check_figures(case: str) -> None:
    options, texts, scores = CASES[case]
    given = embeddings(texts).reshape(-1, DIMENSIONS).requires_grad_()
    ids = torch.arange(ROWS * texts).view(ROWS, texts).tolist()
    loss = EmbeddingLoss(**options)(given, facts(ids, scores))
    loss.backward()
    expected = KEPT["losses"][case]
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-5)
    assert given.grad is not None
    torch.testing.assert_close(
        given.grad.view(ROWS, texts, -1), torch.tensor(expected["gradient"]), atol=1e-5, rtol=1e-5
    )


VECTORS = torch.sin(torch.arange(40 * DIMENSIONS).reshape(40, DIMENSIONS) ** 2 * 0.3)


def ranking(ids: list[list[int]], **options: Any) -> float:
    """The loss of rows of these texts."""
    given = VECTORS[[number for row in ids for number in row]]
    return EmbeddingLoss("multiple_negatives_ranking", **options)(given, facts(ids)).item()


def spelt_out(ids: list[list[int]]) -> float:
    """The same, candidate by candidate."""
    belongs = {(row[0], row[1]) for row in ids}
    losses = []
    for number, (anchor, positive, *_) in enumerate(ids):
        candidates = [
            text for other, row in enumerate(ids) for place, text in enumerate(row[1:]) if (other, place) != (number, 0)
        ]
        negatives = [text for text in candidates if (anchor, text) not in belongs and text not in (anchor, positive)]
        scores = 20 * torch.cosine_similarity(VECTORS[anchor][None], VECTORS[[positive, *negatives]])
        losses.append(scores.logsumexp(0) - scores[0])
    return torch.stack(losses).mean().item()


@pytest.mark.parametrize(
    "ids",
    [
        [[1, 11, 21], [2, 12], [3, 13, 22, 23]],
        [[1, 11], [2, 11], [3, 13]],  # one positive of two anchors
        [[1, 11], [1, 12], [3, 13, 12]],  # two positives of one anchor, and one of them elsewhere as a negative
        [[1, 11, 12], [2, 12, 11], [1, 13, 2]],  # a negative that is the positive of another row
        [[1, 2], [2, 3], [3, 1]],  # an anchor that is the positive of another row
    ],
)
@pytest.mark.parametrize("scores", [2**24, 1])
def test_texts_that_belong_to_an_anchor_are_not_its_negatives(
    ids: list[list[int]], scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_loss, "MAX_SCORES", scores)
    assert ranking(ids) == pytest.approx(spelt_out(ids), rel=1e-5)


def test_without_negatives_nothing_is_to_learn() -> None:
    for pair in ([[1, 11], [2, 11]], [[1, 11], [1, 12]]):
        assert ranking(pair) == ranking(pair, symmetric=True) == pytest.approx(0.0, abs=1e-6)
