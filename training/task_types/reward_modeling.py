"""Reward models: a number for a text, higher for the chosen of two answers to a prompt.

A row of the data set        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 22"}, or messages in their place, and
                             perhaps "margin": 1.0, by how much the chosen answer is better
token features               training/batching/causal_batches.py
the model's output           logits (2B, 1), the rewards of the texts, which are the prompt with either answer

A pair that loses all tokens of an answer to tokens.max_length is not trained on. B pairs of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from training.data.row_problems import masks_by_reason
from training.evaluation.preferences import Preferences
from training.recipe.tables.metrics import ANSWER_METRICS
from training.task_types.answer_pairs import AnswerPairs
from training.task_types.task_type import Column, TaskType
from training.tokenization.chat_templates import find_problem, find_tool_problem
from training.tokenization.preference_rows import ANSWER_TOKENS, count_repeated, encode_rows, pair_features, parse_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, TokenRows
    from training.batching.causal_batches import PadPairTexts
    from training.recipe import Training
    from training.recipe.column_types import Mask
    from training.task_types.task_type import Loss
    from training.tokenization.encoder import Encoder
    from training.tokenization.features import Features


class RewardModeling(AnswerPairs):
    """A reward for a prompt with an answer."""

    class Options(TaskType.Options):
        """The options of reward-modeling, under TRL's names."""

        append_eos: bool = True
        """Whether the tokenizer's eos token, if any, is added to an answer. The chat template ends messages."""
        center_rewards_coefficient: float = Field(default=0.0, ge=0)
        """The weight of a term that keeps the two rewards of a pair near 0, such as 0.01; 0 for none."""
        disable_dropout: bool = True
        """Whether the model trains without dropout."""

    options: Options
    option_stages: ClassVar = {
        "load_data": (),
        "tokenize": ("append_eos",),
        "fit": ("center_rewards_coefficient", "disable_dropout"),
        **dict.fromkeys(("evaluate", "predict", "score", "compare"), ()),
    }
    auto_class = "AutoModelForSequenceClassification"
    hub_task = "text-classification"
    pipeline = False  # that of transformers returns probabilities
    card_sentence = "Gives an answer to a prompt a reward"
    libraries: ClassVar[Sequence[str]] = ("transformers", "jinja2")
    generates_text = True
    metrics: ClassVar[Sequence[str]] = tuple(name for name in AnswerPairs.metrics if name not in ANSWER_METRICS)
    columns: ClassVar[Mapping[str, Column]] = {
        **AnswerPairs.columns,
        "margin": Column("number", optional=True, target=True),
    }

    def row_problems_on_request(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask, str]]:
        """Values that are no messages, and tools that are none."""
        problems = [
            find_tool_problem(row.tools)
            or (None if isinstance(row.prompt, str) else find_problem(row.prompt, answered=False))
            for row in parse_rows(rows)
        ]
        for mask, reason in masks_by_reason(problems):
            yield "prompt", f"has neither a text nor a conversation ({reason})", mask, ""

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        """The columns of training.batching.causal_batches, and the margins. A prompt alone is a whole text, with
        its answer. Raises UserError if a chat template is needed and missing."""
        encoded = encode_rows(encoder, rows, append_eos=self.options.append_eos, answered=True)
        features = pair_features(encoded, encoder.max_length, count_repeated(rows))
        if "margin" not in rows.schema.names:
            return features
        return replace(features, rows=features.rows.append_column("margin", rows.column("margin")))

    # Training

    def config_fields(self, labels: Sequence[str]) -> dict[str, Any]:
        return {"num_labels": 1}

    def prepare(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Turns the cache off, and dropout."""
        from training.batching.causal_batches import disable_cache
        from training.models.layers import disable_dropout

        disable_cache(model)
        if self.options.disable_dropout:
            disable_dropout(model)

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadPairTexts:
        from training.batching.causal_batches import PadPairTexts

        return PadPairTexts(tokenizer, multiple)

    def forward(self, model: PreTrainedModel, batch: Batch) -> ModelOutput:
        """`logits` are the rewards of the chosen and the rejected texts, (B, 2)."""
        from transformers.utils import ModelOutput

        rewards = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])["logits"]  # (2B, 1)
        return ModelOutput(logits=rewards.view(2, -1).T)

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss | None:
        from training.task_types.losses.bradley_terry import BradleyTerry

        return BradleyTerry(self.options.center_rewards_coefficient)

    # Predictions

    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """`chosen_reward` and `rejected_reward` (float64), and the numbers of tokens of the answers."""
        rewards, tokens = outputs["logits"].double().cpu().numpy(), batch["labels"].cpu().numpy().astype(np.int64)
        columns = {"chosen_reward": rewards[:, 0], "rejected_reward": rewards[:, 1]}
        return pa.RecordBatch.from_pydict(columns | dict(zip(ANSWER_TOKENS, tokens.T, strict=False)))

    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> Preferences:
        tokens = [predictions[name].to_numpy() for name in ANSWER_TOKENS]
        has_answers = np.logical_and(*(count > 0 for count in tokens))
        rewards = (predictions[name].to_numpy() for name in ("chosen_reward", "rejected_reward"))
        return Preferences(*(np.where(has_answers, reward, 0.0) for reward in rewards), *tokens)

    # Records

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        """`reward`, of the prompt with the chosen answer, or of the whole text that is given; and `rejected_reward`,
        null without a rejected answer."""
        return {"reward": pa.float64(), "rejected_reward": pa.float64()}

    def to_records(self, predictions: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        return [
            {
                "reward": row["chosen_reward"],
                "rejected_reward": row["rejected_reward"] if row["rejected_tokens"] else None,
            }
            for row in predictions.to_pylist()
        ]

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """The tolerance is relative to the stored rewards."""
        size = max(1.0, abs(stored["reward"]), abs(stored["rejected_reward"] or 0.0))
        return super().same_prediction(given, stored, tolerance * size)

    def same_records(
        self, served: Sequence[Mapping[str, Any]], stored: Sequence[Mapping[str, Any]], tolerance: float
    ) -> bool:
        """Only whether each row has a finite reward: served rows are the prompts without their answers."""
        return len(served) == len(stored) and all(math.isfinite(record["reward"]) for record in served)
