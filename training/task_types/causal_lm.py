"""Causal language models: each token of a text is predicted from the tokens before it.

A row of the data set        {"text": "Now is the winter"}
its document                 [14, 7, 3, 98, 0]: the tokenizer's tokens and its eos token
a packed row for training    {"input_ids": [51, 0, 14, 7, 3, 98, 0, 22], "starts": [0, 2, 7], "length": 8, "targets": 5}
a padded batch               {"input_ids": (B, T), "position_ids": [0, 1, 0, 1, 2, 3, 4, 0],
                              "labels": [-100, 0, -100, 7, 3, 98, 0, -100]}
windows for evaluation       {"input_ids": [14, 7, 3, 98], "row": 0, "length": 4, "targets": 3}
                             {"input_ids": [0], "row": 0, "length": 1, "targets": 0}
the model's output           logits (B, T, V), summed up to a loss for each row

Packed rows are concatenated documents, cut into rows of tokens.max_length (training/tokenization/packing.py).
Attention does not cross documents, positions restart with each document, and the first token of a document is no
target. Special tokens are those that the tokenizer adds by default, as in transformers' run_clm.py: `<s>` for Llama,
none for GPT-2, [CLS] and [SEP] for the tokenizer of a model from scratch.

B rows of a batch, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from training.data.ipc_files import ipc_reader
from training.task_types.generation import (
    Generation,
    drop_end_tokens,
    drop_spaces,
    generate_answers,
    set_special_tokens,
)
from training.task_types.language_modeling import LanguageModeling
from training.tokenization.answer_tokens import AnswerTokens, encode_answers
from training.tokenization.encoder import FastEncoder
from training.tokenization.features import Features, count_lost, list_column
from training.tokenization.packing import OF_ANSWER, STARTS, flatten, pack_documents, split_documents

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from training.batching.batches import TokenRows
    from training.batching.causal_batches import PadDocuments
    from training.tokenization.encoder import Encoder


class CausalLM(LanguageModeling):
    """The next token after each token of a text."""

    class Options(Generation, LanguageModeling.Options):
        """The options of causal-lm."""

        max_new_tokens: int = Field(default=64, ge=0)
        """The most tokens that `finetune predict` generates after a text; 0 generates nothing."""
        packing: bool = True
        """Whether training rows are filled with documents up to tokens.max_length, without padding. If not, each
        document is a row, or several rows if it is longer."""
        append_eos: bool = True
        """Whether the tokenizer's eos token, if any, is added to each document, so that a model learns to stop."""

    options: Options
    option_stages: ClassVar = {
        "tokenize": ("packing", "append_eos"),
        "fit": ("packing",),
        **dict.fromkeys(("evaluate", "predict", "score", "compare"), ()),
    }
    auto_class = "AutoModelForCausalLM"
    hub_task = "text-generation"
    pipeline = False  # the pipeline of transformers returns no likelihoods
    card_sentence = "Continues a {text}"
    generates_text = True
    teacher_outputs: ClassVar[Literal["tokens"] | None] = "tokens"
    causal = True

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        """The tokens of documents, without truncation."""
        texts = rows.column("text").to_pylist()
        encoded = encoder.encode_whole(texts)
        ids, lengths = encoded.ids, encoded.lengths
        if self.options.append_eos and encoder.eos is not None:
            ends = np.cumsum(lengths)
            last = np.insert(ids, 0, -1)[ends]
            unended = (lengths == 0) | (last != encoder.eos)
            ids = np.insert(ids, ends[unended], encoder.eos)
            lengths = lengths + unended.astype(np.int32)
        documents = pa.RecordBatch.from_pydict({"input_ids": list_column(ids, lengths), "length": lengths})
        return Features(documents, encoded.lost, remarks=count_lost(encoder.encode_whole, texts))

    def token_rows(self, split: str, max_length: int, features: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Packed documents for training; windows of each document for other splits."""
        if split == "train" and self.options.packing:
            for rows in pack_documents(features, max_length):
                targets = rows.column("length").to_numpy() - pc.list_value_length(rows.column(STARTS)).to_numpy()
                yield rows.append_column("targets", targets.astype(np.int32))
        else:
            for rows in split_documents(features, max_length):
                yield rows.append_column("targets", np.maximum(rows.column("length").to_numpy() - 1, 0))

    def join_labels(self, predictions: pa.Table, rows: TokenRows) -> pa.Table:
        """The sums over the windows of each row."""
        row = rows.table["row"].to_numpy()
        sums = {name: np.bincount(row, weights=predictions[name].to_numpy()) for name in predictions.column_names}
        return pa.table(sums).cast(predictions.schema)

    def target_tokens(self, file: Path, model: Path) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
        """All tokens but the first of each document or window; of conversations only those of answers."""
        rows_before = 0
        with ipc_reader(file) as reader:
            for block in map(reader.get_batch, range(reader.num_record_batches)):
                lengths, names = block.column("length").to_numpy().astype(np.int64), block.schema.names
                first = np.cumsum(lengths) - lengths
                is_target = np.ones(lengths.sum(), np.bool_)
                if OF_ANSWER in names:
                    is_target = flatten(block.column(OF_ANSWER)) == 1
                if STARTS in names:
                    starts = block.column(STARTS)
                    first = np.repeat(first, starts.value_lengths().to_numpy()) + flatten(starts)
                is_target[first[first < len(is_target)]] = False
                rows = block.column("row").to_numpy() if "row" in names else rows_before + np.arange(len(lengths))
                yield flatten(block.column("input_ids"))[is_target], np.repeat(rows, lengths)[is_target]
                rows_before += len(lengths)

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadDocuments:
        from training.batching.causal_batches import PadDocuments

        return PadDocuments(tokenizer, multiple)

    def prepare(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Sets the special tokens and turns the cache off. Raises UserError for a model that is not causal, or whose
        attention crosses packed documents."""
        from training.batching.causal_batches import disable_cache, require_causal, require_separate_documents

        self.set_end_tokens(model, tokenizer)
        disable_cache(model)
        require_causal(model)
        if self.options.packing:
            require_separate_documents(model)

    def set_end_tokens(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Sets the model's special tokens; the end tokens are those at which it stops generating."""
        set_special_tokens(model, tokenizer)

    def train_only_reason(self, split: str) -> str | None:
        if split != "train" or not self.options.packing:
            return None
        return "holds packed rows, which have no separate predictions: leave it out, or set options.packing to false"

    def predictions_on_request(
        self,
        predictions: pa.Table,
        rows: pa.RecordBatch,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        encoder: Encoder,
    ) -> pa.Table:
        """Adds the columns of `generated_types`, for the continuation of each row."""
        if not self.options.max_new_tokens:
            return predictions

        settings = self.options.settings_for(model)
        prompts = self.prompts(encoder, rows, settings)
        answers = generate_answers(model, tokenizer, [one.ids for one in prompts], settings, encoder.max_length)
        texts = (drop_spaces(one.text, prompt.spaces) for one, prompt in zip(answers, prompts, strict=True))
        facts = ((one.prompt_tokens, one.tokens, one.finish_reason) for one in answers)
        values = (list(texts), *zip(*facts, strict=True))
        for (name, kind), column in zip(self.generated_types().items(), values, strict=True):
            predictions = predictions.append_column(name, pa.array(column, kind))
        return predictions

    def prompts(self, encoder: Encoder, rows: pa.RecordBatch, settings: GenerationConfig) -> list[AnswerTokens]:
        """The tokens of each row that the model continues, without those at its end that the continuation may
        change."""
        texts = rows.column("text").to_pylist()
        if isinstance(encoder, FastEncoder):
            found = encode_answers(encoder, texts, [[]] * len(texts), is_text=True, append_eos=False)
        else:
            encoded = encoder.encode_whole(texts)
            found = [
                AnswerTokens(ids, np.zeros(len(ids), np.bool_))
                for ids in np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])
            ]
        return [one._replace(ids=drop_end_tokens(one.ids, settings)) for one in found]

    @property
    def generated_column(self) -> str:
        return "generated_text" if self.options.max_new_tokens else ""

    def generated_types(self) -> Mapping[str, pa.DataType]:
        """The text; the tokens of the prompt that the model read, and of the text; and why the text ends: `stop` if the
        model ended it, `length` if it has max_new_tokens."""
        counts = {"prompt_tokens": pa.int64(), "generated_tokens": pa.int64(), "finish_reason": pa.string()}
        return {self.generated_column: pa.string(), **counts} if self.generated_column else {}

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        """Without the counts of tokens."""
        hidden = self.generated_types().keys() - {self.generated_column}
        return super().lines({name: value for name, value in record.items() if name not in hidden})

    def published_files(self, folder: Path, max_length: int) -> dict[str, str]:
        return self.options.published_files(folder) if self.options.max_new_tokens else {}
