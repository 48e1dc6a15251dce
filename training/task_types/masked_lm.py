"""Masked language models: some of a text's tokens are hidden, and told from all others.

A row of the data set        {"text": "Now is the winter"}
becomes token features       {"input_ids": [2, 14, 7, 3, 98, 3], "length": 6, "targets": 1}
and, in a batch of training, {"input_ids": [2, 14, 7, 4, 98, 3], "attention_mask": (B, T),
                              "labels": [-100, -100, -100, 3, -100, -100]}
the model answers with       logits (B, T, V), summed up to a loss a row.

Which tokens are hidden: training/batching/masked_tokens.py. A text longer than tokens.max_length is cut.

B rows of a batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from training.task_types.language_modeling import LanguageModeling

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.batching.masked_tokens import MaskedTokens
    from training.tokenization.encoder import Encoder
    from training.tokenization.features import Features


class MaskedLM(LanguageModeling):
    """The hidden tokens of a text."""

    class Options(LanguageModeling.Options):
        """What may be set for it."""

        mlm_probability: float = Field(default=0.15, gt=0, lt=1)
        """The share of a text's tokens that are hidden: of each text so many, rounded, and at least one."""
        whole_words: bool = False
        """Whether words are hidden as a whole, as many as fit into that share: harder to tell than parts of a word.
        Where none fits exactly, somewhat fewer tokens are hidden than a training step counts, or more; in texts of
        thirty words that evens out."""

    options: Options
    option_stages: ClassVar = {"score": (), "compare": ()}
    auto_class = "AutoModelForMaskedLM"
    hub_task = "fill-mask"
    pipeline = False  # that of transformers takes only texts with mask tokens in them
    card_sentence = "Tells the hidden tokens of a {text}"
    causal = False

    @property
    def generated_column(self) -> str:
        return "filled_text"

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        """Those of the texts, and how many tokens of each are hidden, but for texts that spell special tokens."""
        from training.batching.masked_tokens import WORDS, chosen_of
        from training.tokenization.features import Features, of_lengths, of_texts

        found = of_texts(encoder, rows)
        features, lengths = found.rows, found.rows.column("length").to_numpy()
        if self.options.whole_words:
            words = encoder.words_of(rows.column("text").to_pylist())
            features = features.append_column(WORDS, of_lengths(words, lengths))
        maskable = (lengths - encoder.special_tokens(pairs=False)).clip(min=0)
        return Features(
            features.append_column("targets", chosen_of(maskable, self.options.mlm_probability)), found.lost
        )

    def target_tokens(self, file: Path, model: Path) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
        """Those that an evaluation hides; of training rows, too."""
        from training.batching.batches import TokenRows
        from training.batching.masked_tokens import hidden
        from training.models.loading import load_tokenizer

        yield from hidden(TokenRows(file), self.collator(load_tokenizer(model), 1))

    def predictions_on_request(
        self,
        answers: pa.Table,
        rows: pa.RecordBatch,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        encoder: Encoder,
    ) -> pa.Table:
        """Beside them `filled_text`, for texts in which the mask token is written."""
        import pyarrow as pa

        from training.batching.masked_tokens import filled

        told = filled(model, tokenizer, encoder, rows.column("text").to_pylist())
        return answers.append_column(self.generated_column, pa.array(told, pa.string()))

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> MaskedTokens:
        from training.batching.masked_tokens import MaskedTokens

        return MaskedTokens(tokenizer, multiple, self.options.mlm_probability)
