"""Masked language models: some tokens of a text are masked and predicted from the others.

A row of the data set        {"text": "Now is the winter"}
token features               {"input_ids": [2, 14, 7, 3, 98, 3], "length": 6, "targets": 1}
a training batch             {"input_ids": [2, 14, 7, 4, 98, 3], "attention_mask": (B, T),
                              "labels": [-100, -100, -100, 3, -100, -100]}
the model's output           logits (B, T, V), summed up to a loss for each row

training/batching/masked_tokens.py chooses the masked tokens. A text longer than tokens.max_length is truncated.

B rows of a batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from training.data.ipc_files import BLOCK_ROWS
from training.task_types.language_modeling import LanguageModeling
from training.tokenization.features import Features, encode_texts, list_column

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.batching.masked_tokens import MaskedTokens
    from training.tokenization.encoder import Encoder


class MaskedLM(LanguageModeling):
    """The masked tokens of a text."""

    class Options(LanguageModeling.Options):
        """The options of masked-lm."""

        mlm_probability: float = Field(default=0.15, gt=0, lt=1)
        """The share of a text's tokens that are masked, rounded, at least one token a text."""
        whole_words: bool = False
        """Whether whole words are masked, which is harder than parts of words, as many as fit into the share. If they
        do not fit exactly, the number of masked tokens differs a little from the one that a training step is weighted
        by; in texts of thirty words that evens out."""

    options: Options
    option_stages: ClassVar = {"load_data": ()}
    auto_class = "AutoModelForMaskedLM"
    hub_task = "fill-mask"
    pipeline = False  # the pipeline of transformers accepts only texts with mask tokens
    card_sentence = "Predicts the masked tokens of a {text}"
    causal = False

    @property
    def generated_column(self) -> str:
        return "filled_text"

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        """The tokens and `targets`, the number of masked tokens, approximate for texts that spell special tokens."""
        from training.batching.masked_tokens import WORDS, count_masked

        found = encode_texts(encoder, rows)
        features, lengths = found.rows, found.rows.column("length").to_numpy()
        if self.options.whole_words:
            words = encoder.words_of(rows.column("text").to_pylist())
            features = features.append_column(WORDS, list_column(words, lengths))
        maskable = (lengths - encoder.special_tokens(pairs=False)).clip(min=0)
        return Features(
            features.append_column("targets", count_masked(maskable, self.options.mlm_probability)), found.lost
        )

    def target_tokens(self, file: Path, model: Path) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
        """The tokens that an evaluation masks, also for training rows."""
        from training.batching.batches import IGNORED, TokenRows
        from training.models.loading import load_tokenizer

        rows, collate = TokenRows(file), self.collator(load_tokenizer(model), 1)
        for start in range(0, len(rows), BLOCK_ROWS):
            numbers = range(start, min(start + BLOCK_ROWS, len(rows)))
            labels = [collate.mask_for_evaluation(rows[number])[1] for number in numbers]
            targets = [of_row[of_row != IGNORED] for of_row in labels]
            yield np.concatenate(targets), np.repeat(numbers, [len(of_row) for of_row in targets])

    def predictions_on_request(
        self,
        predictions: pa.Table,
        rows: pa.RecordBatch,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        encoder: Encoder,
    ) -> pa.Table:
        """Adds `filled_text`, for texts that contain the mask token."""
        from training.batching.masked_tokens import fill_masks

        texts = fill_masks(model, tokenizer, encoder, rows.column("text").to_pylist())
        return predictions.append_column(self.generated_column, pa.array(texts, pa.string()))

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> MaskedTokens:
        from training.batching.masked_tokens import MaskedTokens

        return MaskedTokens(tokenizer, multiple, self.options.mlm_probability)
