"""Tuning of a causal model by what people prefer: the base of the task types preference and kto.

Answers are texts, or one message of an assistant (training/tokenization/preference_rows.py). Rows to predict are
prompts alone, which the model answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from training.data.row_problems import masks_by_reason
from training.recipe.tables.metrics import ANSWER_METRICS
from training.task_types.causal_lm import CausalLM
from training.task_types.generation import Generation
from training.task_types.sft import SupervisedFineTuning
from training.task_types.task_type import AnswersPrompts, BaseReference
from training.tokenization.preference_rows import (
    MESSAGES,
    PROMPT,
    TOOLS,
    answer_names,
    encode_rows,
    find_refused_rows,
    find_row_problem,
    parse_rows,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from training.recipe.column_types import Mask
    from training.tokenization.answer_tokens import AnswerTokens
    from training.tokenization.chat_templates import ChatTemplate
    from training.tokenization.encoder import Encoder

    Ids = npt.NDArray[np.int32]


class PreferenceTuning(SupervisedFineTuning, BaseReference, AnswersPrompts):
    """The base of task types that compare answers with those of a reference model."""

    class Options(SupervisedFineTuning.Options):
        """The options of these task types, under TRL's names and with its defaults."""

        packing: ClassVar[bool] = False  # type: ignore[misc]
        beta: float = Field(default=0.1, gt=0)
        """The scale of rewards: larger values keep the model closer to the reference."""
        disable_dropout: bool = True
        """Whether the model trains without dropout, so that its log-probabilities are comparable with those of the
        reference. Dropout of adapters (training.lora.lora_dropout) stays."""

        answered_prompts: int = Field(default=32, ge=1)
        """The prompts of each evaluated split that the trained model, its base model and the champion answer, evenly
        spaced, for the metrics generated_length and base_generated_length and for evaluation.judge."""

    options: Options
    answer_metrics: ClassVar[Sequence[str]] = ANSWER_METRICS
    answers = "prompts"
    answer_options: ClassVar[Sequence[str]] = (*Generation.model_fields, "answered_prompts")
    """The options of answers."""
    first_text: ClassVar[str]
    """The column of token rows with the number of tokens of the first text, which begins with the prompt."""
    chat_template_columns: ClassVar[Sequence[str]] = ()
    target_form = None
    teacher_outputs = None
    teacher_writes = False

    # Rows

    def refused_rows(self, template: ChatTemplate, rows: pa.RecordBatch) -> Iterator[tuple[str, Mask]]:
        return find_refused_rows(template, rows)

    def row_problems_on_request(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask, str]]:
        """Prompts that are neither a text nor messages to answer."""
        names = answer_names(rows)
        role = MESSAGES if MESSAGES in rows.schema.names else PROMPT
        for mask, reason in masks_by_reason([find_row_problem(row, names) for row in parse_rows(rows)]):
            yield role, f"has no prompt to answer ({reason})", mask, ""

    def is_rendered(self, rows: pa.RecordBatch) -> Mask:
        """Rows with messages, or with tools."""
        return np.array([not row.is_text for row in parse_rows(rows)], bool)

    def prompts(self, encoder: Encoder, rows: pa.RecordBatch, settings: GenerationConfig) -> list[AnswerTokens]:
        """The tokens of each row's prompt."""
        alone = rows.select([name for name in rows.schema.names if name in (PROMPT, MESSAGES, TOOLS)])
        return [prompt for (prompt,) in encode_rows(encoder, alone, append_eos=False)]

    def prompt_of(self, row: Mapping[str, Any]) -> Ids:
        """The tokens of the prompt of a token row."""
        of_answer = row["of_answer"][: row[self.first_text]]
        return row["input_ids"][: of_answer.argmax() if of_answer.any() else len(of_answer)]

    # Training

    def prepare(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Also disables dropout."""
        from training.models.layers import disable_dropout

        super().prepare(model, tokenizer)
        if self.options.disable_dropout:
            disable_dropout(model)

    # Records

    def lines(self, record: Mapping[str, Any]) -> list[str]:
        """The log-probabilities of the row's answers; if it has none, the generated answer."""
        if record["targets"]:
            return CausalLM.lines(self, record)
        return super().lines(record)
