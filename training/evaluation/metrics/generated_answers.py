"""Metrics of generated answers: (N,) their tokens, nan for rows without an answer."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from datasets import Value

from training.evaluation.confusion import Floats
from training.evaluation.metrics.definition import SumMetric


class GeneratedLength(SumMetric):
    """The mean number of tokens of the answers that the trained model generates to options.answered_prompts prompts,
    end tokens included. It has no value without answers, as during training. From 0 up."""

    name = "generated_length"
    _given: ClassVar[dict[str, Any]] = {"generated_tokens": Value("float64")}

    def statistics(self, *_: Any, **inputs: Any) -> Floats:
        (feature,) = self._given
        tokens = np.asarray(inputs[feature], np.float64)
        return np.stack([np.nan_to_num(tokens), np.isfinite(tokens).astype(np.float64)], axis=1)

    def of_sums(self, sums: Floats) -> Floats:
        return np.divide(sums[:, 0], sums[:, 1], out=np.full(len(sums), np.nan), where=sums[:, 1] > 0)


class BaseGeneratedLength(GeneratedLength):
    """The same of the base model, which training began with. From 0 up."""

    name = "base_generated_length"
    _given: ClassVar[dict[str, Any]] = {"base_generated_tokens": Value("float64")}
