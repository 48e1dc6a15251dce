"""Tuning of a causal model by what people prefer: the base of the task types preference and kto.

Answers are texts, or one message of an assistant (training/tokenization/preference_rows.py). Rows to predict are
prompts alone, which the model answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from training.task_types.sft import SupervisedFineTuning

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from training.recipe.column_types import Mask
    from training.tokenization.encoder import Encoder

    Ids = npt.NDArray[np.int32]


class PreferenceTuning(SupervisedFineTuning):
    """The base of task types that compare answers with those of a reference model."""

    class Options(SupervisedFineTuning.Options):
        """The options of these task types, under TRL's names and with its defaults."""

        packing: ClassVar[bool] = False  # type: ignore[misc]
        beta: float = Field(default=0.1, gt=0)
        """The scale of rewards: larger values keep the model closer to the reference."""
        disable_dropout: bool = True
        """Whether the model trains without dropout, so that its log-probabilities are comparable with those of the
        reference. Dropout of adapters (training.lora.lora_dropout) stays."""

    options: Options
    chat_template_columns: ClassVar[Sequence[str]] = ()
    loss_fields: ClassVar[Sequence[str]] = ()

    # Rows

    def column_sets(self) -> Sequence[Mapping[str, Any]]:
        return (self.columns,)

    def faults_on_request(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask, str]]:
        """Prompts that are neither a text nor messages to answer."""
        from training.data.faults import masks_by_reason
        from training.tokenization.preference_rows import answer_names, find_row_fault, parse_rows

        names = answer_names(rows)
        for mask, reason in masks_by_reason([find_row_fault(values, names) for values in parse_rows(rows)]):
            yield "prompt", f"has no prompt to answer ({reason})", mask, ""

    def prompts(self, encoder: Encoder, rows: pa.RecordBatch, settings: GenerationConfig) -> list[Ids]:
        """The tokens of each row's prompt."""
        from training.tokenization.preference_rows import encode_rows

        alone = encode_rows(encoder, rows.select(["prompt"]), append_eos=False)
        return [ids for ((ids, _),) in alone]

    # Training

    def prepare(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Also disables dropout."""
        from training.models.dropout import disable_dropout

        super().prepare(model, tokenizer)
        if self.options.disable_dropout:
            disable_dropout(model)

    def share_reference(self, predictions: pa.Table, others: pa.Table) -> pa.Table:
        """The predictions with the reference of other predictions of the same rows: rewards of two models are
        comparable only from one reference."""
        for name in others.column_names:
            if name.startswith("reference_") and name not in predictions.column_names:
                predictions = predictions.append_column(name, others[name])
        return predictions

    # Records

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        """The log-probabilities of the row's answers; if it has none, the generated answer."""
        if record["targets"]:
            return [f"{name}: {value}" for name, value in record.items()]
        return super().lines(record)
