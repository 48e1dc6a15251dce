"""Sequence classification from a few rows of each label: contrastive training of embeddings, then a fitted head.

The loss makes the embeddings of rows with the same label similar (supervised contrastive loss, Khosla et al.,
arXiv:2004.11362): every pair of an optimizer step counts, so few rows give many pairs. After training, a logistic
regression on the embeddings of the training rows becomes the head (SetFit, Tunstall et al., arXiv:2209.11055). The
exported model is an ordinary classifier.

token features      those of sequence-classification
the model's output  in training, logits (B, H): the input of the head, which is taken away; of a micro-batch of a step,
                    the loss of the step ()

B rows of a batch, R rows of an optimizer step, N rows of train, L labels, H dimensions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.utils import ModelOutput

from training.batching.batches import Batch, TokenRows
from training.distributed import ranks
from training.models.classifier_inputs import read_embedding, take_head
from training.problems import UserError
from training.task_types.losses.embedding_loss import ADDED, cache_gradients, is_prepared, step_loss
from training.task_types.sequence_classification import SequenceClassification
from training.task_types.task_type import FittedHead, WholeStep

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.recipe import Training


_FEWEST_ROWS = 4


class ContrastiveClassification(SequenceClassification, WholeStep, FittedHead):
    """Sequence classification with options.contrastive, during training."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self.loss_only_reason = "the head is fitted after training: evaluations before give only the contrastive loss."

    def prepare(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        read_embedding(model)
        take_head(model)

    def forward(self, model: PreTrainedModel, batch: Batch) -> ModelOutput:
        if is_prepared(batch):
            return ModelOutput(logits=step_loss(self._embed, self._contrast, model, batch))
        return super().forward(model, batch)

    def _embed(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """(B, H)"""
        inputs = {name: tensor for name, tensor in batch.items() if name not in ADDED}
        embeddings: torch.Tensor = super().forward(model, inputs)["logits"]
        return embeddings

    @property
    def _contrast(self) -> SupervisedContrast:
        return SupervisedContrast(self.options.temperature)

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> SupervisedContrast:
        """The contrastive loss. Raises UserError if there are no pairs of rows with the same label."""
        rows = training.per_device_train_batch_size * training.gradient_accumulation_steps * ranks.world_size()
        if rows < _FEWEST_ROWS:
            message = f"{rows} rows a step are too few to compare, and options.contrastive needs {_FEWEST_ROWS}: raise "
            message += "it, or gradient_accumulation_steps; 32 rows a step are usual."
            raise UserError.of("training", "training.per_device_train_batch_size", message)
        single = [labels[label] for label, count in Counter(train.labels.tolist()).items() if count < 2]
        if single:
            message = f"the train split has one row of {', '.join(map(repr, single[:5]))}, and options.contrastive "
            raise UserError.of("recipe", "data", f"{message}needs two of each label: add rows, or leave it out.")
        return self._contrast

    def partners(self, rows: TokenRows) -> npt.NDArray[np.int64]:
        return rows.labels

    def prepare_step(
        self, model: PreTrainedModel, batches: Sequence[Batch], gather: Callable[[Any], list[Any]]
    ) -> list[Batch]:
        return cache_gradients(self._embed, self._contrast, model, batches, gather)

    def fit_head(
        self, embeddings: npt.NDArray[np.float32], labels: npt.NDArray[np.int64], count: int, *, with_bias: bool
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        return logistic_regression(embeddings, labels, count, with_bias=with_bias)


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
