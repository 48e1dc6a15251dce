"""Token features of completions that are labelled desirable or undesirable, each with a mismatched completion.

token features of a row      {"input_ids": [5, 9, 4, 2, 5, 9, 8, 6, 2], "of_answer": [0, 0, 1, 1, 0, 0, 1, 1, 1],
                              "text_length": 4, "completion_tokens": 2, "label": 1, "length": 9, "targets": 1}

`input_ids` are the row's text, which is its prompt with its completion, and then the mismatched text: the same prompt
with the completion of the row before, and for the first row with the last one of its block. Its log-probabilities
estimate how far the model is from its reference. The pairing depends on the rows alone, so the reference model is
needed once, before training. N rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from training.tokenization.answer_tokens import AnswerTokens, Ids
from training.tokenization.features import Features, list_column
from training.tokenization.packing import OF_ANSWER, flatten

if TYPE_CHECKING:
    from training.recipe.column_types import Mask

TEXT_LENGTH, COMPLETION_TOKENS, LABEL = "text_length", "completion_tokens", "label"
"""The columns with the number of tokens of a text, that of its completion, and 1 for a desirable completion, else 0."""
REFERENCE = ("reference_logp", "reference_mismatched_logp")
"""The columns with the log-probabilities of the completion and of the mismatched one under the reference model
(float32)."""
FACTS = (COMPLETION_TOKENS, LABEL, *REFERENCE)
"""The columns of `labels` in a batch."""

Text = tuple[Ids, "Mask"]
"""The tokens of a prompt with a completion, and the mask of the completion's."""


def completion_features(
    texts: Sequence[AnswerTokens], labels: pa.Array | None, max_length: int, remarks: Mapping[str, int]
) -> Features:
    """The token features of N texts, truncated on the right, without mismatched ones; of prompts alone without labels.
    `remarks` are those of preference_rows.count_repeated."""
    cut = [(text.ids[:max_length], text.of_answer[:max_length]) for text in texts]
    untruncated = np.array([len(text.ids) for text in texts], np.int64)
    rows = _to_rows(cut, [(ids[:0], mask[:0]) for ids, mask in cut])
    if labels is not None:
        rows = rows.append_column(LABEL, labels.cast(pa.int64()))
    remarks = {**remarks, "joined": sum(text.joined for text in texts)}
    return Features(rows, untruncated - rows.column("length").to_numpy(), remarks=remarks)


def add_mismatched(blocks: Iterator[pa.RecordBatch], max_length: int) -> Iterator[pa.RecordBatch]:
    """The blocks of `completion_features` with mismatched texts. A row without tokens of its completion gets none and
    gives none."""
    last: Text | None = None
    for block in blocks:
        texts = _texts(block)
        completions = [_after_prompt(text) for text in texts if text[1].any()]
        last = last or (completions[-1] if completions else None)
        mismatched = []
        for ids, mask in texts:
            if last is None or not mask.any():
                mismatched.append((ids[:0], mask[:0]))
                continue
            start = int(mask.argmax())
            joined = (np.concatenate([ids[:start], last[0]]), np.concatenate([np.zeros(start, np.bool_), last[1]]))
            mismatched.append((joined[0][:max_length], joined[1][:max_length]))
            last = _after_prompt((ids, mask))
        yield _to_rows(texts, mismatched).append_column(LABEL, block.column(LABEL))


def _to_rows(texts: Sequence[Text], mismatched: Sequence[Text]) -> pa.RecordBatch:
    both = [text for pair in zip(texts, mismatched, strict=True) for text in pair]
    lengths = np.array([len(ids) for ids, _ in both], np.int32).reshape(-1, 2)  # (N, 2)
    tokens = np.array([mask.sum() for _, mask in texts], np.int32)
    total = lengths.sum(axis=1, dtype=np.int32)
    columns = {
        "input_ids": list_column(np.concatenate([ids for ids, _ in both]), total),
        OF_ANSWER: list_column(np.concatenate([mask for _, mask in both]).astype(np.int8), total),
        TEXT_LENGTH: lengths[:, 0],
        COMPLETION_TOKENS: tokens,
        "length": total,
        "targets": (tokens > 0).astype(np.int32),
    }
    return pa.RecordBatch.from_pydict(columns)


def _texts(block: pa.RecordBatch) -> list[Text]:
    ends = np.cumsum(block.column("length").to_numpy())[:-1]
    ids, masks = flatten(block.column("input_ids")), flatten(block.column(OF_ANSWER)) == 1
    return list(zip(np.split(ids, ends), np.split(masks, ends), strict=True))


def _after_prompt(text: Text) -> Text:
    ids, mask = text
    start = int(mask.argmax())
    return ids[start:], mask[start:]
