"""Losses: functions of logits and labels, one family a module."""

from typing import Literal, TypeAlias

LossOfLabels: TypeAlias = Literal[
    "batch_all_triplet", "batch_hard_triplet", "batch_hard_soft_margin_triplet", "batch_semi_hard_triplet"
]
"""The losses of texts with labels, by which embeddings are learned."""
TEACHER = "teacher"
"""The column with the outputs of a teacher: a list of numbers for each row, of a row of words those of each word, one
after another."""
