"""Embeddings by a formula, for which the losses and gradients of sentence-transformers are kept.

The figures in sentence_transformers_figures.json come from `python -m tests.training.task_types.embedding_losses`, in
an environment that has sentence-transformers beside this project's packages.

R rows, D dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

FIGURES = Path(__file__).with_name("sentence_transformers_figures.json")
ROWS, DIMENSIONS = 6, 8
OF_LABELS = ("batch_all_triplet", "batch_hard_triplet", "batch_semi_hard_triplet")
LABELS, ALONE = [0.0, 1.0, 0.0, 2.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
SCORES, SAME = [0.1, 0.9, 0.5, 0.5, 0.3, 0.7], [1.0, 0.0, 1.0, 1.0, 0.0, 0.0]
PAIRS: dict[str, Any] = {"loss": "multiple_negatives_ranking"}
SIZES = {"matryoshka_dims": [8, 4, 2], "matryoshka_weights": [1.0, 0.5, 0.25]}
CASES: dict[str, tuple[Mapping[str, Any], int, list[float] | None]] = {
    "pairs": (PAIRS, 2, None),
    "pairs, scale 50": (PAIRS | {"scale": 50.0}, 2, None),
    "two negatives": (PAIRS, 4, None),
    "symmetric": (PAIRS | {"symmetric": True}, 3, None),
    "pairs, shortened": (PAIRS | SIZES, 3, None),
    **{
        f"triplet, {name}": ({"loss": "triplet", "distance_metric": name, "margin": 2.0}, 3, None)
        for name in ("cosine", "euclidean", "manhattan")
    },
    "triplet, shortened": ({"loss": "triplet", "distance_metric": "euclidean", "margin": 1.0, **SIZES}, 3, None),
    "cosent": ({"loss": "cosent"}, 2, SCORES),
    "cosent, shortened": ({"loss": "cosent", **SIZES}, 2, SCORES),
    "cosine": ({"loss": "cosine_similarity"}, 2, SCORES),
    "cosine, shortened": ({"loss": "cosine_similarity", **SIZES}, 2, SCORES),
    **{
        f"contrastive, {name}": ({"loss": "contrastive", "distance_metric": name, "margin": 0.5}, 2, SAME)
        for name in ("cosine", "euclidean", "manhattan")
    },
    "contrastive, shortened": ({"loss": "contrastive", "margin": 0.5, **SIZES}, 2, SAME),
    **{
        f"{loss}, {name}": ({"loss": loss, "distance_metric": name, "margin": margin}, 1, LABELS)
        for loss in OF_LABELS
        for name, margin in (("cosine", 0.3), ("euclidean", 0.5))
    },
    **{
        f"batch_hard_soft_margin_triplet, {name}": (
            {"loss": "batch_hard_soft_margin_triplet", "distance_metric": name},
            1,
            LABELS,
        )
        for name in ("cosine", "euclidean")
    },
    **{
        f"{loss}, a label alone": ({"loss": loss, "distance_metric": "euclidean"}, 1, ALONE)
        for loss in (*OF_LABELS, "batch_hard_soft_margin_triplet")
    },
    "batch_all_triplet, shortened": ({"loss": "batch_all_triplet", "distance_metric": "euclidean", **SIZES}, 1, LABELS),
}
"""The options of a loss, the texts of a row, and the rows' scores or labels."""


def embeddings(texts: int) -> torch.Tensor:
    """(R, texts, D) numbers that look random."""
    places = torch.arange(ROWS * texts * DIMENSIONS, dtype=torch.float64)
    return torch.sin(places * places * 0.7 + 0.3).float().reshape(ROWS, texts, DIMENSIONS)


class Given(torch.nn.Module):
    """A model of sentence-transformers whose embeddings are those that it is given."""

    def get_embedding_dimension(self) -> int:
        return DIMENSIONS

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sentence_embedding": features["given"]}


def figures(options: Mapping[str, Any], texts: int, scores: list[float] | None) -> dict[str, Any]:
    """The loss of sentence-transformers, and its gradient."""
    from sentence_transformers.sentence_transformer import losses

    columns = [column.clone().requires_grad_() for column in embeddings(texts).unbind(1)]
    model, metric = Given(), str(options.get("distance_metric", "cosine")).upper()
    if options["loss"] == "multiple_negatives_ranking":
        both: dict[str, Any] = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
        both = both if options.get("symmetric") else {}
        loss = losses.MultipleNegativesRankingLoss(model, scale=options.get("scale", 20.0), **both)
    elif options["loss"] == "triplet":
        distance = getattr(losses.TripletDistanceMetric, metric)
        loss = losses.TripletLoss(model, distance_metric=distance, triplet_margin=options["margin"])
    elif options["loss"].startswith("batch_"):
        distance = getattr(losses.BatchHardTripletLossDistanceFunction, f"{metric.lower()}_distance")
        kind = "".join(part.capitalize() for part in options["loss"].split("_"))
        margin = {} if "soft" in options["loss"] else {"margin": options.get("margin", 5)}
        loss = getattr(losses, f"{kind}Loss")(model, distance_metric=distance, **margin)
    elif options["loss"] == "contrastive":
        distance = getattr(losses.SiameseDistanceMetric, f"{metric}_DISTANCE" if metric == "COSINE" else metric)
        loss = losses.ContrastiveLoss(model, distance_metric=distance, margin=options["margin"])
    else:
        loss = {"cosent": losses.CoSENTLoss, "cosine_similarity": losses.CosineSimilarityLoss}[options["loss"]](model)
    if sizes := options.get("matryoshka_dims"):
        loss = losses.MatryoshkaLoss(model, loss, sizes, options["matryoshka_weights"])
    found = loss([{"given": column} for column in columns], None if scores is None else torch.tensor(scores))
    found.backward()
    gradient = torch.stack([column.grad for column in columns], dim=1)
    return {"loss": found.item(), "gradient": gradient.tolist()}


def teacher_figures() -> dict[str, Any]:
    """The loss of sentence-transformers by a teacher's vectors of single texts, and its gradient."""
    from sentence_transformers.sentence_transformer import losses

    own, vectors = (column.clone() for column in embeddings(2).unbind(1))
    found = losses.MSELoss(Given())([{"given": own.requires_grad_()}], vectors)
    found.backward()
    assert own.grad is not None
    return {"loss": found.item(), "gradient": own.grad.tolist()}


def main() -> None:
    """Writes the figures of all losses with the version of sentence-transformers."""
    import sentence_transformers

    found = {name: figures(*case) for name, case in CASES.items()}
    content = {
        "sentence_transformers": sentence_transformers.__version__,
        "losses": found,
        "teacher": teacher_figures(),
    }
    FIGURES.write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
