"""What the kinds of language models have in common: rows are texts alone, and answers tell how likely each one's tokens
were to the model. The logits of a vocabulary are summed up batch by batch, and never kept."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from training.models.repository_files import read_json
from training.recipe.tables.metrics import TOKENS, metrics_for
from training.task_types.task_type import Column, TaskType

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, TokenRows
    from training.evaluation.constant_predictions import Baseline
    from training.evaluation.predictions import Likelihoods
    from training.recipe import Training
    from training.task_types.losses import Loss


class LanguageModeling(TaskType):
    """A model of texts, which tells tokens of a text from others."""

    columns: ClassVar = {"text": Column("text")}
    prediction_type: ClassVar = TOKENS
    metrics: ClassVar = metrics_for(TOKENS)
    loss_fields: ClassVar = ("label_smoothing_factor",)
    causal: ClassVar[bool]
    """Whether what it gives at a token is for the next one."""

    @property
    @abstractmethod
    def generated_column(self) -> str:
        """What the text is called that it writes when it is `predictions_on_request`; empty where it writes none."""

    def config_fields(self, labels: Sequence[str]) -> dict[str, Any]:
        """None: there are no labels."""
        return {}

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss | None:
        """Cross entropy, outside of the model: what models compute inside is no number where there are no targets."""
        from training.task_types.losses.token_likelihood import TokenLoss

        return TokenLoss(self.causal, training.label_smoothing_factor)

    def target_count(self, batch: Batch) -> int:
        """The tokens of the batch that the model shall tell."""
        from training.batching.batches import IGNORED

        return int((self._labels(batch) != IGNORED).sum())

    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """`loss`, `targets` and `hits`, as training.task_types.losses.token_likelihood has them."""
        from training.task_types.losses.token_likelihood import sums_by_row

        return sums_by_row(outputs["logits"], self._labels(batch))

    def metric_inputs(self, answers: pa.Table, labels: Sequence[str]) -> Likelihoods:
        from training.evaluation.predictions import Likelihoods

        names = ("loss", "targets", "hits", *(["tokens"] if "tokens" in answers.column_names else []))
        return Likelihoods(*(answers[name].to_numpy() for name in names))

    def empty_predictions(self, labels: Sequence[str]) -> Likelihoods:
        import numpy as np

        from training.evaluation.predictions import Likelihoods

        return Likelihoods(np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64))

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline:
        """The unigram distribution of the training tokens that are targets, with one added to the count of each token
        of the vocabulary (Laplace): every target is predicted alike, whatever its context."""
        import numpy as np

        from training.evaluation.constant_predictions import Baseline, Constant, smoothed
        from training.evaluation.predictions import Likelihoods

        counts = np.zeros(_vocabulary(read_json(model / "config.json")), np.int64)
        for ids, _ in self.target_tokens(tokens / "train.arrow", model):
            counts += np.bincount(ids, minlength=len(counts))
        losses, likeliest = -np.log(smoothed(counts)), int(counts.argmax())

        def answered(rows: Likelihoods, split: str) -> Likelihoods:
            loss, targets, hits = np.zeros((3, len(rows)))
            for ids, row in self.target_tokens(tokens / f"{split}.arrow", model):
                loss += np.bincount(row, losses[ids], len(rows))
                targets += np.bincount(row, minlength=len(rows))
                hits += np.bincount(row, ids == likeliest, len(rows))
            return Likelihoods(loss, targets.astype(np.int64), hits.astype(np.int64), rows.tokens)

        return Baseline([Constant("of the training tokens' frequencies", answered)])

    @abstractmethod
    def target_tokens(self, file: Path, model: Path) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
        """The (T,) ids of the tokens of a split's token features that the model is asked for, and the (T,) row of each,
        block by block. `model` is the folder of a model with its tokenizer."""

    def labels_of(self, config: PreTrainedConfig) -> list[str]:
        return []

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        """`loss`, the mean over `targets` tokens of minus the logarithm of each one's probability, and `perplexity`, e
        to the power of that; null where there are no targets. And the text that it writes."""
        import pyarrow as pa

        types = {"loss": pa.float64(), "targets": pa.int64(), "perplexity": pa.float64()}
        return types | ({self.generated_column: pa.string()} if self.generated_column else {})

    def to_records(self, answers: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        told = []
        for row in answers.select(["loss", "targets"]).to_pylist():
            mean = row["loss"] / row["targets"] if row["targets"] else None
            perplexity = None if mean is None else math.exp(min(mean, 700.0))  # more is no float
            told.append({"loss": mean, "targets": row["targets"], "perplexity": perplexity})
        if self.generated_column in answers.column_names:  # an evaluation asks for no text
            for row, text in zip(told, answers[self.generated_column].to_pylist(), strict=True):
                row[self.generated_column] = text
        return told

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """By the mean loss alone: the perplexity multiplies its rounding. That of few tokens is further off: each one's
        logits are rounded, and large ones coarsely, as those of GPT-2 near -100 to halves in bf16."""
        each = 20 * tolerance / math.sqrt(max(stored["targets"], 1))
        return super().same_prediction({"loss": given["loss"]}, {"loss": stored["loss"]}, tolerance + each)

    def _labels(self, batch: Batch) -> Any:
        """(B, T) what the model's logits are for."""
        from training.task_types.losses.token_likelihood import shift_labels

        return shift_labels(batch["labels"]) if self.causal else batch["labels"]


def _vocabulary(config: Mapping[str, Any]) -> int:
    """The number of tokens that a model of this config knows."""
    size: int = config["vocab_size"] if "vocab_size" in config else config["text_config"]["vocab_size"]
    return size
