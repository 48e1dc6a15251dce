"""Training of a classifier from a few rows of each label: a contrastive loss of embeddings, and the fit of the head to
them.

The loss makes the embeddings of rows with the same label similar (supervised contrastive loss, Khosla et al.,
arXiv:2004.11362): every pair of an optimizer step counts, so few rows give many pairs. After training, a logistic
regression on the embeddings of the training rows becomes the head (SetFit, Tunstall et al., arXiv:2209.11055).

R rows of an optimizer step, N rows of train, L labels, H dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class SupervisedContrast:
    """The loss, (), of embeddings (R, H) and labels (R,) or (R, 1): the mean over the rows of which another row has the
    label. A loss that `forward` has computed, (), is returned unchanged."""

    temperature: float

    def __call__(self, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not embeddings.dim():
            return embeddings
        with torch.autocast(embeddings.device.type, enabled=False):
            directions = torch.nn.functional.normalize(embeddings.float(), dim=1)
            own = torch.eye(len(directions), dtype=torch.bool, device=directions.device)
            same = (labels.reshape(-1, 1) == labels.reshape(1, -1)) & ~own
            # A large negative number, because -inf times 0 is nan.
            scores = (directions @ directions.T / self.temperature).masked_fill(own, -1e9)
            log_shares = scores - scores.logsumexp(dim=1, keepdim=True)  # (R, R)
            partners = same.sum(dim=1)
            losses = -(log_shares * same).sum(dim=1) / partners.clamp(min=1)
            return losses.sum() / (partners > 0).sum().clamp(min=1)


def logistic_regression(
    inputs: npt.NDArray[np.floating[Any]], labels: npt.NDArray[np.int64], count: int, *, with_bias: bool
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(L, H) weights and (L,) biases of `count` labels, for (N, H) inputs and (N,) labels. Rows are scaled to a mean
    length of 1, and the sum of cross entropies is penalized by half the squared weights, as in scikit-learn with C=1.
    Deterministic."""
    from scipy.optimize import minimize
    from scipy.special import log_softmax

    scale = np.linalg.norm(inputs.astype(np.float64), axis=1).mean() or 1.0
    columns = np.column_stack([inputs.astype(np.float64) / scale, np.full(len(inputs), float(with_bias))])
    penalized = np.append(np.ones(inputs.shape[1]), 0.0)
    truths = np.eye(count)[labels]  # (N, L)

    def objective(flat: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        weights = flat.reshape(count, -1)
        log_probabilities = log_softmax(columns @ weights.T, axis=1)
        loss = -(truths * log_probabilities).sum() + (penalized * weights**2).sum() / 2
        gradient = (np.exp(log_probabilities) - truths).T @ columns + penalized * weights
        return float(loss), gradient.ravel()

    start = np.zeros(count * columns.shape[1])
    found = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": 1000, "ftol": 1e-14})
    weights = found.x.reshape(count, -1)
    return weights[:, :-1] / scale, weights[:, -1]
