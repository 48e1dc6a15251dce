"""Metrics of language models: (N,) sums over the tokens of each row that the model was asked for, its targets."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from datasets import Value

from training.evaluation.metrics.definition import SumMetric

Floats = npt.NDArray[np.float64]


class Perplexity(SumMetric):
    """e to the power of the mean loss of all targets, a loss being minus the logarithm of a token's probability: as
    uncertain as a choice between so many tokens. From 1 up; it has no value without targets."""

    _given: ClassVar[dict[str, Any]] = {"loss": Value("float64"), "targets": Value("int64")}

    def statistics(self, **inputs: Any) -> Floats:
        return np.stack([inputs["loss"], inputs["targets"]], axis=1).astype(np.float64)

    def of_sums(self, sums: Floats) -> Floats:
        with np.errstate(over="ignore"):
            return np.asarray(np.exp(_mean(sums)))


class TokenAccuracy(SumMetric):
    """The share of targets that the model found likelier than any other token. From 0 to 1; it has no value without
    targets."""

    _given: ClassVar[dict[str, Any]] = {"hits": Value("int64"), "targets": Value("int64")}

    def statistics(self, **inputs: Any) -> Floats:
        return np.stack([inputs["hits"], inputs["targets"]], axis=1).astype(np.float64)

    def of_sums(self, sums: Floats) -> Floats:
        return _mean(sums)


def _mean(sums: Floats) -> Floats:
    whole = sums[:, 1]
    return np.divide(sums[:, 0], whole, out=np.full(len(sums), np.nan), where=whole > 0)
