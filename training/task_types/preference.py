"""Preference tuning: of two answers to a prompt, the chosen one becomes likelier than the rejected one.

A row of the data set        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 22"}, or messages in their place
token features               training/batching/causal_batches.py
the model's output           logits (2B, T, V), summed up to the log-probability of each answer
the reference                the same of the base model, which the stage reference_logprobs adds to the token rows

The reward of an answer is beta times its log-probability less that under the reference. Losses without a reference take
the mean log-probability of an answer's tokens instead. Texts longer than tokens.max_length are truncated on the right;
a pair that loses all tokens of an answer is not trained on.

B pairs of a batch, T tokens of the longest text, V vocabulary. N pairs of a split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from training.evaluation.preferences import Preferences, lengths_of
from training.recipe.tables.metrics import ANSWER_METRICS
from training.task_types.answer_pairs import AnswerPairs
from training.task_types.preference_tuning import PreferenceTuning
from training.tokenization.preference_rows import (
    ANSWER_TOKENS,
    CHOSEN_LENGTH,
    FACTS,
    REFERENCE,
    count_repeated,
    encode_rows,
    pair_features,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, TokenRows
    from training.batching.causal_batches import PadTwoTexts
    from training.recipe import Training
    from training.task_types.task_type import Loss
    from training.tokenization.encoder import Encoder
    from training.tokenization.features import Features

WITH_REFERENCE = ("dpo", "ipo", "robust")
"""The losses that compare with a reference model."""


class Preference(AnswerPairs, PreferenceTuning):
    """The better of two answers to a prompt."""

    class Options(PreferenceTuning.Options):
        """The options of preference, under TRL's names and with its defaults."""

        loss: Literal["dpo", "ipo", "robust", "orpo", "simpo"] = "dpo"
        """The loss. dpo, ipo and robust compare with the base model; orpo and simpo need no reference. robust is dpo
        for pairs of which a known share is flipped."""
        beta: float = Field(default=0.1, gt=0)
        """The scale of rewards: with dpo, larger values keep the model closer to the reference. For simpo, its paper
        takes 2 and more. In orpo the weight of the odds ratio, in ipo the strength of regularization."""
        label_smoothing: float = Field(default=0.0, ge=0, lt=0.5, validate_default=True)
        """For robust: the share of pairs whose answers are flipped by mistake."""
        simpo_gamma: float = Field(default=0.5, ge=0)
        """For simpo: the reward by which the chosen answer should be ahead."""

        @field_validator("label_smoothing")
        @classmethod
        def _is_for_robust(cls, share: float, others: ValidationInfo) -> float:
            if others.data.get("loss") == "robust" and not share:
                message = "makes robust the same as dpo: give the share of flipped pairs, such as 0.1, or choose dpo"
                raise PydanticCustomError("smoothing", message)
            return _only_with("robust", share, 0.0, others)

        @field_validator("simpo_gamma")
        @classmethod
        def _is_for_simpo(cls, gamma: float, others: ValidationInfo) -> float:
            return _only_with("simpo", gamma, 0.5, others)

    options: Options
    option_stages: ClassVar = {
        "load_data": (),
        "tokenize": ("append_eos",),
        "reference_logprobs": (),
        "fit": ("loss", "beta", "label_smoothing", "simpo_gamma", "disable_dropout"),
        "evaluate": (),
        "predict": ("loss",),  # it decides whether rows have a reference
        **dict.fromkeys(("score", "compare"), ("loss", "beta")),
        "answers": PreferenceTuning.answer_options,
    }
    card_sentence = "Answers as people prefer"
    usual_metrics = ("accuracy", "margin", *ANSWER_METRICS)
    first_text = "chosen_length"

    @property
    def needs_reference(self) -> bool:
        return self.options.loss in WITH_REFERENCE

    # Rows

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        """The columns of training.batching.causal_batches, without the reference. Prompts alone become chosen texts
        without answers. Raises UserError if a chat template is needed and missing."""
        encoded = encode_rows(encoder, rows, append_eos=self.options.append_eos)
        return pair_features(encoded, encoder.max_length, count_repeated(rows))

    # Training

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadTwoTexts:
        from training.batching.causal_batches import PadTwoTexts

        return PadTwoTexts(tokenizer, multiple, CHOSEN_LENGTH, FACTS)

    def forward(self, model: PreTrainedModel, batch: Batch) -> ModelOutput:
        """`logits` are the scores of losses.preference_loss.answer_scores, (B, 2), or (B, 3) for orpo."""
        from transformers.utils import ModelOutput

        from training.task_types.losses.preference_loss import answer_scores

        logits = model(input_ids=batch["input_ids"])["logits"]
        inputs = (batch[name] for name in ("input_ids", "targets", "labels"))
        return ModelOutput(logits=answer_scores(logits, *inputs, chosen_text=self.options.loss == "orpo"))

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss | None:
        from training.task_types.losses.preference_loss import PreferenceLoss

        options = self.options
        return PreferenceLoss(options.loss, options.beta, options.label_smoothing, options.simpo_gamma)

    # Predictions

    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """`chosen_logp` and `rejected_logp` (float64), the log-probabilities of the answers; the numbers of their
        tokens; and with a reference its log-probabilities."""
        scores = outputs["logits"].double().cpu().numpy()
        facts = dict(zip(FACTS, batch["labels"].cpu().numpy().T, strict=False))
        columns: dict[str, Any] = {"chosen_logp": scores[:, 0], "rejected_logp": scores[:, 1]}
        columns |= {name: facts[name].astype(np.int64) for name in ANSWER_TOKENS}
        return pa.RecordBatch.from_pydict(columns | {name: facts[name] for name in FACTS[3:] if name in facts})

    def reference_columns(self, predictions: pa.Table) -> dict[str, pa.ChunkedArray]:
        """The log-probabilities of the answers under the model that made the predictions (float32)."""
        values = (predictions[name].cast("float32") for name in ("chosen_logp", "rejected_logp"))
        return dict(zip(REFERENCE, values, strict=True))

    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> Preferences:
        tokens = [predictions[name].to_numpy() for name in ANSWER_TOKENS]
        has_answers = np.logical_and(*(count > 0 for count in tokens))
        rewards = []
        for logp, reference, count in zip(("chosen_logp", "rejected_logp"), REFERENCE, tokens, strict=True):
            values = predictions[logp].to_numpy()
            if self.needs_reference:
                values = values - predictions[reference].to_numpy().astype(np.float64)
            else:
                values = values / np.maximum(count, 1)
            rewards.append(np.where(has_answers, self.options.beta * values, 0.0))
        return Preferences(rewards[0], rewards[1], tokens[0], tokens[1], **lengths_of(predictions))

    # Records

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        """`chosen_logp` and `rejected_logp`, the log-probabilities of the answers, null without answers; `targets`, the
        number of tokens of both; and the columns of the generated answer."""
        types = {"chosen_logp": pa.float64(), "rejected_logp": pa.float64(), "targets": pa.int64()}
        return {**types, **self.generated_types()}

    def to_records(self, predictions: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        records = []
        for row, generated in zip(predictions.to_pylist(), self.generated_values(predictions), strict=True):
            targets = row["chosen_tokens"] + row["rejected_tokens"]
            logps = {name: row[name] if targets else None for name in ("chosen_logp", "rejected_logp")}
            records.append({**logps, "targets": targets, **generated})
        return records

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """Compares the log-probabilities as means over the tokens of both answers; rows without answers as those of
        sft."""
        if not given["targets"]:
            return super().same_prediction(given, stored, tolerance)
        if given["targets"] != stored["targets"]:
            return False
        own, theirs = (
            {"loss": -(one["chosen_logp"] + one["rejected_logp"]) / one["targets"], "targets": one["targets"]}
            for one in (given, stored)
        )
        return super().same_prediction(own, theirs, tolerance)


def _only_with(loss: str, value: float, default: float, others: ValidationInfo) -> float:
    """Raises PydanticCustomError for an option that the loss does not read."""
    chosen = others.data.get("loss")
    if chosen not in (None, loss) and value != default:
        message = f"does nothing with `loss: {chosen}`: leave it out, or choose {loss}"
        raise PydanticCustomError("loss", message)
    return value
