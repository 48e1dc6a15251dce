"""The names of the project's own kinds of task, apart from what counts as code that shapes bytes: a kind more changes
nothing of the others."""

from __future__ import annotations

KINDS: dict[str, str] = {
    "sequence-classification": "training.kinds.sequence_classification:SequenceClassification",
    "multi-label-classification": "training.kinds.multi_label_classification:MultiLabelClassification",
    "regression": "training.kinds.regression:Regression",
    "token-classification": "training.kinds.token_classification:TokenClassification",
    "causal-lm": "training.kinds.causal_lm:CausalLM",
    "masked-lm": "training.kinds.masked_lm:MaskedLM",
    "seq2seq": "training.kinds.seq2seq:Seq2Seq",
    "sft": "training.kinds.sft:SupervisedFineTuning",
}
"""A kind's name in the recipe and its class. The modules are imported by `load` only, so that a process pays for one
kind and a change to one kind's code leaves the artifacts of others valid."""
