"""The table of the project's task types. It is no stage's input, so a new task type leaves all artifacts valid."""

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
    "preference": "training.task_types.preference:Preference",
    "kto": "training.task_types.kto:Kto",
    "embedding": "training.task_types.embedding:Embedding",
    "sentence-similarity": "training.task_types.sentence_similarity:SentenceSimilarity",
    "reward-modeling": "training.task_types.reward_modeling:RewardModeling",
    "image-classification": "training.task_types.image_classification:ImageClassification",
    "image-multi-label-classification": (
        "training.task_types.image_multi_label_classification:ImageMultiLabelClassification"
    ),
    "image-regression": "training.task_types.image_regression:ImageRegression",
    "reranking": "training.task_types.reranking:Reranking",
}
"""The task types' names in the recipe and their classes. `task_types.load` imports only the module that it needs, so an
edit to one task type's code leaves the artifacts of others valid."""
