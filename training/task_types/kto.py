"""KTO: completions that are labelled desirable or undesirable, one by one, become likelier or less likely.

A row of the data set        {"prompt": "2 + 2 =", "completion": " 4", "label": true}, or messages in their place, or
                             {"messages": […, {"role": "assistant", "content": "4"}], "label": true}
token features               training/tokenization/completion_rows.py
the model's output           logits (2B, T, V), summed up to the log-probability of each text's completion
the reference                the same of the base model, which the stage reference_logprobs adds to the token rows

The reward of a completion is beta times its log-probability less that under the reference. The loss compares it with
the KL divergence of the model from the reference, which the mismatched completions estimate: losses/kto_loss.py. Texts
longer than tokens.max_length are truncated on the right; a row that loses its completion is not trained on.

B rows of a batch, T tokens of the longest text, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from training.data.row_problems import masks_by_reason
from training.evaluation.preferences import UnpairedPreferences, baseline_by_rating, lengths_of
from training.recipe.tables.metrics import ANSWER_METRICS, UNPAIRED, metrics_for
from training.task_types.preference_tuning import PreferenceTuning
from training.task_types.task_type import Column, WholeStep
from training.tokenization.chat_templates import find_problem
from training.tokenization.completion_rows import (
    COMPLETION_TOKENS,
    FACTS,
    REFERENCE,
    TEXT_LENGTH,
    add_mismatched,
    completion_features,
)
from training.tokenization.preference_rows import (
    MESSAGES,
    answer_names,
    count_repeated,
    encode_rows,
    find_row_problem,
    parse_rows,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils import ModelOutput

    from training.batching.batches import Batch, TokenRows
    from training.batching.causal_batches import PadTwoTexts
    from training.evaluation.constant_predictions import Baseline
    from training.recipe import Training
    from training.recipe.column_types import Mask
    from training.task_types.task_type import Loss
    from training.tokenization.encoder import Encoder
    from training.tokenization.features import Features


class Kto(PreferenceTuning, WholeStep):
    """Completions that are desirable or not."""

    class Options(PreferenceTuning.Options):
        """The options of kto, under TRL's names and with its defaults."""

        desirable_weight: float = Field(default=1.0, gt=0)
        """The weight of desirable rows in the loss. With fewer desirable than undesirable rows, its paper raises it
        until both sides weigh the same, or up to a third more."""
        undesirable_weight: float = Field(default=1.0, gt=0)
        """The weight of undesirable rows in the loss."""

    options: Options
    option_stages: ClassVar = {
        "load_data": (),
        "tokenize": ("append_eos",),
        "reference_logprobs": (),
        "fit": ("beta", "desirable_weight", "undesirable_weight", "disable_dropout"),
        **dict.fromkeys(("evaluate", "predict"), ()),
        **dict.fromkeys(("score", "compare"), ("beta",)),
        "answers": PreferenceTuning.answer_options,
    }
    card_sentence = "Answers as people find desirable"
    usual_metrics = ("roc_auc", "margin", *ANSWER_METRICS)
    first_text = "text_length"
    columns: ClassVar[Mapping[str, Column]] = {
        "prompt": Column("content"),
        "completion": Column("content", target=True),
        "messages": Column("value"),
        "label": Column("boolean"),
        "tools": Column("value", optional=True, may_be_empty=True),
    }
    checks: ClassVar = {"completions": "error"}
    prediction_type: ClassVar = UNPAIRED
    metrics: ClassVar[Sequence[str]] = metrics_for(UNPAIRED)

    @property
    def needs_reference(self) -> bool:
        return True

    # Rows

    def column_sets(self) -> Sequence[Mapping[str, Column]]:
        sets = (("prompt", "completion", "label", "tools"), ("messages", "label", "tools"))
        return [{name: self.columns[name] for name in names} for names in sets]

    def row_problems(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask]]:
        """Rows that are no prompt with a completion."""
        names = answer_names(rows)
        talks = rows.column(MESSAGES).to_pylist() if MESSAGES in rows.schema.names else [None] * rows.num_rows
        problems = [
            (talk and find_problem(json.loads(talk), answered=True)) or find_row_problem(row, names)
            for talk, row in zip(talks, parse_rows(rows), strict=True)
        ]
        for mask, reason in masks_by_reason(problems):
            yield "completions", f"has no prompt with a completion ({reason})", mask

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features:
        """The columns of training.tokenization.completion_rows, without mismatched completions and the reference;
        prompts alone become texts without a completion. Raises UserError if a chat template is needed and missing."""
        texts = [text for (text,) in encode_rows(encoder, rows, append_eos=self.options.append_eos)]
        labels = rows.column("label") if "label" in rows.schema.names else None
        return completion_features(texts, labels, encoder.max_length, count_repeated(rows))

    def token_rows(self, split: str, max_length: int, features: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """With the mismatched completions; rows to predict need none."""
        first = next(features)
        features = chain([first], features)
        yield from add_mismatched(features, max_length) if "label" in first.schema.names else features

    # Training

    def collator(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> PadTwoTexts:
        from training.batching.causal_batches import PadTwoTexts

        return PadTwoTexts(tokenizer, multiple, TEXT_LENGTH, FACTS)

    def target_count(self, batch: Batch) -> int:
        return int((batch["labels"][:, 0] > 0).sum())

    def forward(self, model: PreTrainedModel, batch: Batch) -> ModelOutput:
        """`logits` are the log-probabilities of the completions and of the mismatched ones, (B, 2); of a batch of
        `prepare_step` those of the completions alone, (B, 1)."""
        from transformers.utils import ModelOutput

        from training.task_types.losses.token_likelihood import log_probabilities

        scores = log_probabilities(model(input_ids=batch["input_ids"])["logits"], batch["targets"])
        return ModelOutput(logits=scores.view(-1, len(batch["labels"])).T)

    def prepare_step(
        self, model: PreTrainedModel, batches: Sequence[Batch], gather: Callable[[Any], list[Any]]
    ) -> list[Batch]:
        """The KL divergence of the whole step becomes the last column of `labels`; the mismatched texts are left out.

        It is of passes in evaluation mode, which draw no random numbers.
        """
        import torch

        from training.task_types.losses.kto_loss import divergence

        was_training = model.training
        with torch.no_grad():
            own = torch.stack([self._divergence_sums(model.eval(), batch).cpu() for batch in batches]).sum(dim=0)
        model.train(was_training)
        kl = divergence(torch.tensor(gather(own.tolist()), dtype=torch.float64).sum(dim=0))
        return [self._with_divergence(batch, kl) for batch in batches]

    def _divergence_sums(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        from training.task_types.losses.kto_loss import divergence_sums
        from training.task_types.losses.token_likelihood import log_probabilities

        ids, targets = (batch[name][len(batch["labels"]) :] for name in ("input_ids", "targets"))
        return divergence_sums(log_probabilities(model(input_ids=ids)["logits"], targets), batch["labels"])

    def _with_divergence(self, batch: Batch, kl: torch.Tensor) -> Batch:
        import torch

        labels = batch["labels"]
        own = {name: batch[name][: len(labels)] for name in ("input_ids", "targets")}
        column = kl.to(labels.device).expand(len(labels), 1)
        return {**batch, **own, "labels": torch.cat([labels, column], dim=1)}

    def loss(self, training: Training, labels: Sequence[str], train: TokenRows, *, outside: bool) -> Loss | None:
        from training.task_types.losses.kto_loss import KtoLoss

        return KtoLoss(self.options.beta, self.options.desirable_weight, self.options.undesirable_weight)

    # Predictions

    def predictions(self, model: PreTrainedModel, outputs: ModelOutput, batch: Batch) -> pa.RecordBatch:
        """`logp` and `mismatched_logp` (float64), the log-probabilities of the completions; `completion_tokens`; and
        with a reference its log-probabilities. Prompts alone have only the first and the third."""
        scores = outputs["logits"].double().cpu().numpy()
        facts = dict(zip(FACTS, batch["labels"].cpu().numpy().T, strict=False))
        columns: dict[str, Any] = dict(zip(("logp", "mismatched_logp"), scores.T, strict=False))
        columns[COMPLETION_TOKENS] = facts[COMPLETION_TOKENS].astype(np.int64)
        return pa.RecordBatch.from_pydict(columns | {name: facts[name] for name in REFERENCE if name in facts})

    def join_labels(self, predictions: pa.Table, rows: TokenRows) -> pa.Table:
        """With the column `label`."""
        return rows.with_labels(predictions)

    def reference_columns(self, predictions: pa.Table) -> dict[str, pa.ChunkedArray]:
        """The log-probabilities of both completions under the model that made the predictions (float32)."""
        values = (predictions[name].cast("float32") for name in ("logp", "mismatched_logp"))
        return dict(zip(REFERENCE, values, strict=True))

    def metric_inputs(self, predictions: pa.Table, labels: Sequence[str]) -> UnpairedPreferences:
        tokens = predictions[COMPLETION_TOKENS].to_numpy()
        ratios = [
            np.where(tokens > 0, predictions[name].to_numpy() - predictions[reference].to_numpy().astype(np.float64), 0)
            for name, reference in zip(("logp", "mismatched_logp"), REFERENCE, strict=True)
        ]
        desirable = predictions["label"].to_numpy() == 1
        rewards = self.options.beta * ratios[0]
        return UnpairedPreferences(rewards, desirable, tokens, ratios[1], **lengths_of(predictions))

    def empty_predictions(self, labels: Sequence[str]) -> UnpairedPreferences:
        return UnpairedPreferences(np.empty(0), np.empty(0, np.bool_), np.empty(0, np.int64), np.empty(0))

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline:
        """All completions are desirable, or none is."""
        return baseline_by_rating(tokens / "train.arrow")

    # Records

    def record_types(self, labels: Sequence[str]) -> Mapping[str, pa.DataType]:
        """`logp`, the log-probability of the completion, null without one; `targets`, the number of its tokens; and the
        columns of the generated answer."""
        types = {"logp": pa.float64(), "targets": pa.int64()}
        return {**types, **self.generated_types()}

    def to_records(self, predictions: pa.Table, labels: Sequence[str]) -> list[dict[str, Any]]:
        records = []
        for row, generated in zip(predictions.to_pylist(), self.generated_values(predictions), strict=True):
            targets = row["completion_tokens"]
            records.append({"logp": row["logp"] if targets else None, "targets": targets, **generated})
        return records

    def same_prediction(self, given: Mapping[str, Any], stored: Mapping[str, Any], tolerance: float) -> bool:
        """Compares the log-probabilities as means over the completion's tokens; rows without one as those of sft."""
        if not given["targets"]:
            return super().same_prediction(given, stored, tolerance)
        if given["targets"] != stored["targets"]:
            return False
        own, theirs = ({"loss": -one["logp"] / one["targets"], "targets": one["targets"]} for one in (given, stored))
        return super().same_prediction(own, theirs, tolerance)
