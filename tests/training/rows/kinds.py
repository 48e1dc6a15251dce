"""Kinds of task for tests of rows: that of sequence classification, and some with columns of other forms."""

from __future__ import annotations

from training.kinds.sequence_classification import SequenceClassification

CLASSIFICATION = SequenceClassification()
