"""Embeddings that are learned from pairs of texts with a score, higher for pairs of similar texts.

A row of the data set        {"sentence1": "A dog runs.", "sentence2": "A dog is running.", "score": 0.9}

The prediction for a pair is the cosine similarity of its embeddings. Token features, batches and embeddings:
training/task_types/text_embedding.py.

N rows of a split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import NonNegativeFloat

from training.evaluation.constant_predictions import constant_numbers
from training.evaluation.predictions import Numbers
from training.models.repository_files import DEFAULT_PROMPT
from training.recipe.tables.metrics import NUMBERS, metrics_for
from training.task_types.task_type import Column
from training.task_types.text_embedding import Embeddings, TextEmbedding, normalize

if TYPE_CHECKING:
    from training.evaluation.constant_predictions import Baseline

TEXTS = ("sentence1", "sentence2")


class SentenceSimilarity(TextEmbedding):
    """Embeddings of texts, from pairs with a score."""

    class Options(TextEmbedding.Options):
        """The options of sentence-similarity, under the names of sentence-transformers and with its defaults."""

        loss: Literal["cosent", "cosine_similarity", "contrastive"] = "cosent"
        """cosent: pairs with a higher score become more similar than pairs with a lower one. cosine_similarity: the
        similarity becomes the score, from -1 to 1. contrastive: for the scores 1 and 0, pairs become near, or as far
        apart as `margin`."""
        margin: NonNegativeFloat = 0.5
        """For contrastive: the distance from which pairs of score 0 are far enough apart."""
        distance_metric: Literal["cosine", "euclidean", "manhattan"] = "cosine"
        """For contrastive: the distance of embeddings."""
        prompts: dict[Literal["sentence1", "sentence2"], str] | None = None
        """A text before those of a column. null: the base model's default prompt."""
        predicted_prompt: Literal["sentence1", "sentence2"] | None = None
        """The column whose prompt is put before texts to predict. null: sentence1."""

    options: Options
    option_stages: ClassVar = {
        "load_data": (),
        "tokenize": ("prompts",),
        "fit": (
            "prompts",
            *("loss", "scale", "margin", "distance_metric", "matryoshka_dims", "matryoshka_weights"),
            *("pooling", "normalize"),
        ),
        **dict.fromkeys(("evaluate", "predict", "score", "compare"), ()),
    }
    card_sentence = "Gives a text an embedding: similar texts have similar embeddings"
    columns: ClassVar[Mapping[str, Column]] = {
        "sentence1": Column("text"),
        "sentence2": Column("text", target=True),
        "score": Column("number", target=True),
    }
    own_prompts: ClassVar = dict.fromkeys(TEXTS, (DEFAULT_PROMPT,))
    prediction_type: ClassVar = NUMBERS
    metrics: ClassVar = metrics_for(NUMBERS)
    usual_metrics: ClassVar = ("spearman",)

    def texts(self, rows: pa.RecordBatch) -> list[list[tuple[str, str]]]:
        names = [name for name in TEXTS if name in rows.schema.names]
        return [
            [*zip(names, row, strict=True)] for row in zip(*(rows[name].to_pylist() for name in names), strict=True)
        ]

    def label_column(self, rows: pa.RecordBatch) -> dict[str, Any]:
        return {"label": rows.column("score")} if "score" in rows.schema.names else {}

    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> Numbers:
        found = Embeddings.of(predictions)
        vectors = normalize(found.vectors.astype(np.float64))
        similarities = (vectors[found.starts] * vectors[found.starts + 1]).sum(axis=1)
        return Numbers(predictions["label"].to_numpy(), similarities)

    def empty_predictions(self, labels: Sequence[str]) -> Numbers:
        return Numbers(np.empty(0), np.empty(0))

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline:
        """The mean of the training scores, or their median."""
        return constant_numbers(data / "train.arrow", "score")
