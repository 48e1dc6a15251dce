"""Pairs of a chosen and a rejected answer to a prompt: the rows, figures and baseline of the task types that learn from
them.

B pairs of a batch, N pairs of a split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa

from training.data.row_problems import masks_by_reason
from training.evaluation.preferences import Preferences, baseline_by_length
from training.recipe.column_types import BESIDE_CONVERSATIONS
from training.recipe.tables.metrics import PAIRS, metrics_for
from training.task_types.task_type import Column, TaskType
from training.tokenization.preference_rows import (
    answer_names,
    find_refused_rows,
    find_row_problem,
    parse_rows,
    same_answers,
)

if TYPE_CHECKING:
    from training.batching.batches import Batch, TokenRows
    from training.evaluation.constant_predictions import Baseline
    from training.recipe.column_types import Mask
    from training.tokenization.chat_templates import ChatTemplate


class AnswerPairs(TaskType):
    """The base of task types that learn from pairs of answers."""

    columns: ClassVar[Mapping[str, Column]] = {
        "prompt": Column(
            "content",
            advice="If both answers begin with the prompt, write what they have in common into a column of its own: it "
            "is taken off the answers.",
        ),
        "chosen": Column("content", target=True),
        "rejected": Column("content", target=True),
        "tools": Column("value", optional=True, may_be_empty=True),
    }
    checks: ClassVar = {"pairs": "error", "equal_answers": "warning"}
    unread_columns: ClassVar = BESIDE_CONVERSATIONS
    prediction_type: ClassVar = PAIRS
    metrics: ClassVar[Sequence[str]] = metrics_for(PAIRS)

    def column_sets(self) -> Sequence[Mapping[str, Column]]:
        return (self.columns,)

    def row_problems(self, rows: pa.RecordBatch) -> Iterator[tuple[str, str, Mask]]:
        """Rows that are no prompt with two answers, and rows whose answers are equal."""
        names = answer_names(rows)
        found = [(find_row_problem(row, names), row) for row in parse_rows(rows)]
        for mask, reason in masks_by_reason([problem for problem, _ in found]):
            yield "pairs", f"has no prompt with two answers ({reason})", mask
        equal = [problem is None and same_answers(row) for problem, row in found]
        yield "equal_answers", "has two equal answers", np.array(equal, bool)

    def refused_rows(self, template: ChatTemplate, rows: pa.RecordBatch) -> Iterator[tuple[str, Mask]]:
        return find_refused_rows(template, rows)

    def target_count(self, batch: Batch) -> int:
        return int((batch["labels"][:, :2] > 0).all(dim=1).sum())

    def join_labels(self, predictions: pa.Table, rows: TokenRows) -> pa.Table:
        """The predictions unchanged: each pair has one feature row, and no label."""
        return predictions

    def empty_predictions(self, labels: Sequence[str]) -> Preferences:
        return Preferences(*np.empty((2, 0)), *np.empty((2, 0), np.int64))

    def baseline(self, data: Path, tokens: Path, model: Path, labels: Sequence[str]) -> Baseline:
        """The longer answer, or the shorter one."""
        return baseline_by_length(tokens / "train.arrow")
