"""Calibrated probabilities: logits are scaled so that of the rows with a probability of 0.9 about 90 % are right.

one label       A single temperature T for all logits, softmax(z / T), with the highest likelihood of the validation
                rows (Guo et al., On Calibration of Modern Neural Networks, 2017). It changes no prediction.
many labels     For each label sigmoid(a z + b), a > 0 (Platt, Probabilistic Outputs for Support Vector Machines, 1999),
                if validation has FEWEST_OF_EACH rows with the label and as many without it. The other labels share a
                temperature. The order of the rows stays, so a threshold for the label is scaled like its logits.

Both have a weak prior around the logits as they are, worth about one row: on rows without an error, the likeliest
temperature would be 0. Isotonic regression is not used: it makes ties of rows that the model distinguishes, and with
hundreds of rows it fits noise.

N rows, L labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from training.evaluation.predictions import Floats, Mask, Rows

Logits = npt.NDArray[np.floating[Any]]

FEWEST_OF_EACH = 20
"""Validation rows with a label, and without it, for a scale and an offset of its own."""
BINS = 15
"""Equally wide bins of the calibration error."""
LARGEST_LOG_SCALE = 5.0
"""A temperature is between exp(-5) and exp(5)."""


@dataclass(frozen=True)
class Scaling:
    """Logits z become scale * z + offset."""

    scale: Floats  # (L,) one value for all labels if a row has one label
    offset: Floats  # (L,) 0 if a row has one label

    def apply(self, logits: Logits) -> Floats:
        """(N, L)"""
        return logits.astype(np.float64) * self.scale + self.offset


def fit_one_label(logits: Logits, labels: Rows) -> Scaling:
    """The temperature for (N, L) logits of rows with these (N,) labels."""
    given, rows = logits.astype(np.float64), np.arange(len(labels))

    def loss(log_scale: float) -> float:
        return float(-log_softmax(given * np.exp(log_scale))[rows, labels].sum())

    scale, width = np.exp(_minimize(loss)), given.shape[1]
    return Scaling(np.full(width, scale), np.zeros(width))


def fit_many_labels(logits: Logits, has: Mask) -> Scaling:
    """A scale and an offset for each label, from (N, L) logits and whether the row has the label."""
    given, signs = logits.astype(np.float64), np.where(has, -1.0, 1.0)
    shared = np.exp(_minimize(lambda log_scale: float(_softplus(np.exp(log_scale) * given * signs).sum())))
    scale, offset = np.full(given.shape[1], shared), np.zeros(given.shape[1])
    rows = np.minimum(has.sum(axis=0), (~has).sum(axis=0))
    for label in np.flatnonzero(rows >= FEWEST_OF_EACH):
        scale[label], offset[label] = _fit_platt(given[:, label], has[:, label])
    return Scaling(scale, offset)


def calibration_error(probabilities: Floats, right: Mask) -> float:
    """The expected calibration error of (N,) probabilities of what is right or not, in BINS bins."""
    gaps = np.bincount(bins_of(probabilities), weights=right - probabilities, minlength=BINS)
    return float(np.abs(gaps).sum() / len(right))


def bins_of(probabilities: Floats) -> Rows:
    """(N,) the bin of each probability. A bin contains its upper end."""
    return np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], probabilities, side="left")


def log_softmax(logits: Floats) -> Floats:
    """(N, L)"""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def _minimize(loss: Any) -> float:
    """The logarithm of the best scale, with a prior of mean 0 and variance 1."""
    from scipy.optimize import minimize_scalar

    bounds = (-LARGEST_LOG_SCALE, LARGEST_LOG_SCALE)
    found = minimize_scalar(lambda log_scale: loss(log_scale) + log_scale**2 / 2, bounds=bounds, method="bounded")
    return float(found.x)


def _fit_platt(logits: Floats, has: Mask) -> tuple[float, float]:
    """The scale and the offset of a label. Its rows count as with it to a share a little below 1, and the others a
    little above 0, as Platt proposes."""
    from scipy.optimize import minimize

    truths = np.where(has, (has.sum() + 1) / (has.sum() + 2), 1 / ((~has).sum() + 2))

    def loss(parameters: Floats) -> tuple[float, Floats]:
        scale = np.exp(parameters[0])
        scaled = scale * logits + parameters[1]
        gap = 1 / (1 + np.exp(-np.clip(scaled, -500, 500))) - truths
        slope = np.array([(gap * logits).sum() * scale + parameters[0], gap.sum() + parameters[1] / 100])
        prior = parameters[0] ** 2 / 2 + parameters[1] ** 2 / 200
        return float((_softplus(scaled) - truths * scaled).sum() + prior), slope

    bounds = [(-LARGEST_LOG_SCALE, LARGEST_LOG_SCALE), (None, None)]
    log_scale, offset = minimize(loss, np.zeros(2), jac=True, method="L-BFGS-B", bounds=bounds).x
    return float(np.exp(log_scale)), float(offset)


def _softplus(values: Floats) -> Floats:
    return np.asarray(np.logaddexp(0.0, values))
