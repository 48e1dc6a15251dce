"""Queries with documents, for which the losses and gradients of sentence-transformers' cross-encoders are kept.

The figures in cross_encoder_figures.json come from sentence-transformers: `python -m
tests.training.task_types.cross_encoder`, in an environment that has it beside this project's packages.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2ForSequenceClassification

from tests.training.task_types import preference_model

FIGURES = Path(__file__).with_name("cross_encoder_figures.json")
LISTS = [
    {"query": "a b", "documents": ["c d e", "f", "g h"], "labels": [1.0, 0.0, 0.0]},
    {"query": "p", "documents": ["o n m l k j"], "labels": [1.0]},
    {"query": "c d", "documents": ["a", "b a", "e f g h i", "p o", "d c"], "labels": [0.25, 1.0, 0.0, 0.5, 1.0]},
    {"query": "g e", "documents": ["k", "l m"], "labels": [0.0, 0.0]},
]
SETTINGS: dict[str, dict[str, Any]] = {
    "binary_cross_entropy": {},
    "binary_cross_entropy, weighted": {"pos_weight": 2.5},
    "mse": {},
    "list_net": {},
    "lambda": {},
}
"""The options of each loss beside its name."""


def make_model() -> GPT2ForSequenceClassification:
    """A model whose weights are those of a formula."""
    made = preference_model.model(0.0, GPT2ForSequenceClassification)
    assert isinstance(made, GPT2ForSequenceClassification)
    return made


def kept_figures(name: str, folder: Path) -> dict[str, Any]:
    """The loss and the gradients of sentence-transformers on all lists as one batch, or on all pairs."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder import losses

    model = CrossEncoder(str(folder), device="cpu")
    loss = {
        "binary_cross_entropy": losses.BinaryCrossEntropyLoss,
        "mse": losses.MSELoss,
        "list_net": losses.ListNetLoss,
        "lambda": losses.LambdaLoss,
    }[name.partition(",")[0]](model, **{key: torch.tensor(value) for key, value in SETTINGS[name].items()})
    if name in ("list_net", "lambda"):
        inputs = [[row[column] for row in LISTS] for column in ("query", "documents")]
        found = loss(inputs, [torch.tensor(row["labels"]) for row in LISTS])
    else:
        pairs = [(row["query"], document) for row in LISTS for document in row["documents"]]
        labels = [label for row in LISTS for label in row["labels"]]
        found = loss([list(column) for column in zip(*pairs, strict=True)], torch.tensor(labels))
    found.backward()
    return {"loss": float(found), "gradients": preference_model.gradients(model.model)}


def main() -> None:
    """Writes the figures of all losses with the version of sentence-transformers."""
    import sentence_transformers

    with tempfile.TemporaryDirectory() as scratch:
        folder = preference_model.tokenizer(Path(scratch))
        make_model().save_pretrained(folder)
        figures = {name: kept_figures(name, folder) for name in SETTINGS}
    version = {"sentence-transformers": sentence_transformers.__version__}
    FIGURES.write_text(json.dumps({**version, "losses": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
