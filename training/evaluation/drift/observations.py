"""Observations as training.programs.observe stores them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from training.evaluation.drift.report import Observations

FIELD = "field."
"""Prefix of the columns of predictions in the output of training.programs.observe."""
LABEL, PROBABILITY = "label", "probability"
"""The fields of a record with one label, which the estimate of accuracy needs."""
DIGITS = 2
"""Of compared probabilities: in a model that is always sure, every row's third digit may change and mean nothing."""


def read_observations(folder: Path) -> Observations:
    """Reads observations.parquet. The row statistics are those of rows with a prediction."""
    table = pq.read_table(folder / "observations.parquet")
    texts = table["text"].to_pylist()
    if "tokens" not in table.column_names:  # no row has a prediction
        return Observations(texts)
    predicted = table.filter(table["tokens"].is_valid())
    fields = {
        name.removeprefix(FIELD): [value for value in predicted[name].to_pylist() if value is not None]
        for name in predicted.column_names
        if name.startswith(FIELD)
    }
    tokens = predicted["tokens"].to_numpy().astype(np.float64)
    words = np.maximum(1, [len(text.split()) for text in predicted["text"].to_pylist()])
    confidence = correct = None
    has_label = len(fields.get(LABEL, ())) == len(fields.get(PROBABILITY, ())) == len(predicted) > 0
    if has_label and not isinstance(fields[LABEL][0], float):
        confidence = np.array(fields[PROBABILITY], np.float64)
        fields[PROBABILITY] = confidence.round(DIGITS).tolist()
        if "label" in predicted.column_names:
            correct = np.array(fields[LABEL], object) == np.array(predicted["label"].to_pylist(), object)
    unknown = predicted["unknown"].to_numpy() if "unknown" in predicted.column_names else None
    embeddings = np.stack(predicted["embedding"].to_pylist()).astype(np.float64) if len(predicted) else None
    return Observations(texts, fields, tokens, tokens / words, unknown, embeddings, confidence, correct)
