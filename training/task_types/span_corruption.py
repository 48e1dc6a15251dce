"""Span corruption, T5's objective: some spans of a text are missing, and are written from the rest of it.

A row of the data set        {"text": "Thank you for inviting me to your party last week"}
token features               {"input_ids": [1562, 25, 21, ..., 1], "length": 11, "targets": 7}
a batch                      {"input_ids": (B, T), "attention_mask": (B, T), "labels": (B, S)}, labels padded with -100
the model's output           logits (B, S, V), summed up to a loss for each row

training/batching/corrupted_spans.py chooses the spans. A text longer than tokens.max_length is truncated.

B rows of a batch, T tokens of the longest input, S of the longest target, V vocabulary, N rows of a split.
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
from training.task_types.seq2seq import set_target_tokens
from training.tokenization.features import Features, encode_texts
from training.tokenization.special_tokens import SENTINELS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch
    from training.batching.corrupted_spans import CorruptedSpans, Corruption
    from training.tokenization.encoder import Encoder


class SpanCorruption(LanguageModeling):
    """The missing spans of a text."""

    class Options(LanguageModeling.Options):
        """The options of span-corruption."""

        noise_density: float = Field(default=0.15, gt=0, lt=1)
        """The share of a text's tokens that are missing, rounded, at least one token a text."""
        mean_noise_span_length: float = Field(default=3.0, ge=1)
        """The mean number of tokens of a missing span; ByT5, whose tokens are bytes, was trained with 20. A text
        lacks at most 100 spans."""

    options: Options
    option_stages: ClassVar = {"load_data": ()}
    auto_class = "AutoModelForSeq2SeqLM"
    hub_task = "text2text-generation"
    pipeline = False  # transformers has none any more
    card_sentence = "Writes the missing spans of a {text}"
    causal = False
    sentinels = SENTINELS

    @property
    def generated_column(self) -> str:
        return ""

    @property
    def _corruption(self) -> Corruption:
        from training.batching.corrupted_spans import Corruption

        return Corruption(self.options.noise_density, self.options.mean_noise_span_length)

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        """The tokens and `targets`, the number of tokens of the target."""
        found = encode_texts(encoder, rows)
        ends = encoder.special_tokens(pairs=False)
        texts = (found.rows.column("length").to_numpy().astype(np.int64) - ends).clip(min=0)
        missing, spans = self._corruption.count(texts)
        targets = np.where(texts > 0, missing + spans + ends, 0).astype(np.int32)
        return Features(found.rows.append_column("targets", pa.array(targets)), found.lost)

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> CorruptedSpans:
        from training.batching.corrupted_spans import CorruptedSpans

        return CorruptedSpans(tokenizer, multiple, self._corruption)

    def prepare(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Sets the first and last token of a target. Raises UserError if targets have no end token."""
        set_target_tokens(model, tokenizer)

    def forward(self, model: PreTrainedModel, batch: Batch) -> ModelOutput:
        """The logits (B, S, V). The model makes its decoder's input from the labels."""
        outputs: ModelOutput = model(**batch)
        return outputs

    def target_tokens(self, file: Path, model: Path) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
        """The targets of an evaluation, also for training rows."""
        from training.batching.batches import TokenRows
        from training.models.loading import load_tokenizer

        rows, collate = TokenRows(file), self.collator(load_tokenizer(model), 1)
        for start in range(0, len(rows), BLOCK_ROWS):
            numbers = range(start, min(start + BLOCK_ROWS, len(rows)))
            targets = [collate.corrupt_for_evaluation(rows[number]["input_ids"])[1] for number in numbers]
            yield np.concatenate(targets), np.repeat(numbers, [len(of_row) for of_row in targets])
