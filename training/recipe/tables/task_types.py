"""The names of the project's own task types, apart from what counts as code that shapes bytes: a task type more changes
nothing of the others."""

from __future__ import annotations

TASK_TYPES: dict[str, str] = {
    "sequence-classification": "training.task_types.sequence_classification:SequenceClassification",
    "multi-label-classification": "training.task_types.multi_label_classification:MultiLabelClassification",
    "regression": "training.task_types.regression:Regression",
    "token-classification": "training.task_types.token_classification:TokenClassification",
    "causal-lm": "training.task_types.causal_lm:CausalLM",
    "masked-lm": "training.task_types.masked_lm:MaskedLM",
    "seq2seq": "training.task_types.seq2seq:Seq2Seq",
    "sft": "training.task_types.sft:SupervisedFineTuning",
}
"""A task type's name in the recipe and its class. The modules are imported by `load` only, so that a process pays for
one task type and a change to one task type's code leaves the artifacts of others valid."""
