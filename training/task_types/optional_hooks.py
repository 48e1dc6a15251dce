"""Hooks of a task type that most task types leave at their defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from training.evaluation.constant_predictions import Baseline
    from training.evaluation.predictions import Predictions
    from training.recipe.column_types import Column, Mask
    from training.tokenization.encoder import Encoder


class OptionalHooks:
    """The hooks, in the order of the steps."""

    columns: ClassVar[Mapping[str, Column]]

    # Training

    libraries: ClassVar[Sequence[str]] = ()
    """Distributions whose versions change the token features, besides tokenizers and pyarrow."""

    def token_rows(self, split: str, max_length: int, features: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The stored form of a split's token features, at least one block. The default stores them unchanged.

        A row may have several stored rows: a column `row` (int64) then has its number from 0, in order. Or one stored
        row holds several rows (packing): such a split can only be trained on.
        """
        return features

    def prepare(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Prepares a loaded model for training, such as config fields that depend on the tokenizer. Raises UserError if
        the model cannot be trained for this task."""

    # Evaluation

    def decode(self, predictions: pa.Table, tokenizer: PreTrainedTokenizerBase) -> pa.Table:
        """The predictions as they are stored, with texts in place of token ids."""
        return predictions

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline | None:
        """Constant predictions, learned from the training rows; a first model must beat the best of them. None, the
        default, if there are none.

        `data` and `tokens` hold SPLIT.arrow as load_data and tokenize store it; `model` is the trained model's folder,
        used for its vocabulary and tokenizer.
        """
        return None

    def calibrate(self, predictions: Predictions) -> dict[str, Any]:
        """Fields of the model's config that are fitted to predictions, such as thresholds; by default none.

        `predictions` are those of the exported weights for the validation split; before training they are empty.
        """
        return {}

    def remap_labels(self, predictions: pa.Table, theirs: Sequence[str], labels: Sequence[str]) -> pa.Table:
        """The predictions (with the column `label`) of a model with the labels `theirs`, for the labels `labels`."""
        return predictions

    learned_options: ClassVar[Sequence[str]] = ()
    """Options that a model is trained with, such as a prefix of its inputs: a champion is evaluated with its own."""

    def labels_of(self, config: PreTrainedConfig) -> list[str]:
        """The names of a trained model's labels in the order of its outputs; empty without a column of labels."""
        if not any(column.form in ("label", "labels") for column in self.columns.values()):
            return []
        return [config.id2label[place] for place in range(config.num_labels)]

    # Requests: `finetune predict` and MLflow's server

    def faults_on_request(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask, str]]:
        """The problems of rows to predict, found before a model is loaded.

        Each is one of `columns`; words that follow "row 7", such as "has no conversation"; a mask of the rows; and
        words on the first of them, which follow the others.
        """
        return iter(())

    def predictions_on_request(
        self,
        predictions: pa.Table,
        rows: pa.RecordBatch,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        encoder: Encoder,
    ) -> pa.Table:
        """The predictions for rows outside of an evaluation, with additional columns such as generated text."""
        return predictions

    def published_files(self, folder: Path) -> dict[str, str]:
        """Text files, by name, that are published with the exported model in `folder` or replace its files. They hold
        settings of its use, not learned values."""
        return {}
