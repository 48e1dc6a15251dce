"""Tokens of texts with answers, and the mask of the tokens that belong to answers.

A token belongs to an answer if its first character does. The first token of a text never does, because it has no
context. T tokens of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from training.recipe.column_types import Mask
    from training.tokenization.chat_templates import Spans
    from training.tokenization.encoder import Encoder

Ids = npt.NDArray[np.int32]


def encode_answers(
    encoder: Encoder, texts: Sequence[str], spans: Sequence[Spans], *, is_text: bool, append_eos: bool
) -> list[tuple[Ids, Mask]]:
    """The tokens of each text, (T,), without truncation, and the mask of its answers, (T,).

    Args:
        texts: conversations by a chat template, or prompts with their completions.
        spans: the answers of each text; empty for a prompt alone.
        is_text: whether the texts come from no template. They get the tokenizer's special tokens, which belong to the
            completion if they follow it; those behind a prompt alone are left out.
        append_eos: whether a completion ends with the tokenizer's eos token, if it has one.
    """
    encoded = encoder.encode_located(list(texts), special=is_text)
    assert encoded.starts is not None
    ends = np.cumsum(encoded.lengths)[:-1]
    tokens = []
    for ids, starts, answers in zip(np.split(encoded.ids, ends), np.split(encoded.starts, ends), spans, strict=True):
        of_answer = np.searchsorted(np.ravel(answers), starts, side="right") % 2 == 1
        if is_text:
            eos = encoder.eos if append_eos else None
            ids, of_answer = _add_end(eos, ids, starts, of_answer, has_completion=bool(answers))
        of_answer[:1] = False
        tokens.append((ids, of_answer))
    return tokens


def _add_end(eos: int | None, ids: Ids, starts: Ids, of_answer: Mask, *, has_completion: bool) -> tuple[Ids, Mask]:
    """The tokens of a prompt without special tokens behind it; or of a prompt and its completion with special tokens
    and eos behind them, as targets. `starts` are the tokens' first characters, -1 for special tokens."""
    end = int(np.flatnonzero(starts >= 0).max(initial=-1)) + 1  # of the text
    if not has_completion:
        return ids[:end], of_answer[:end]
    of_answer[end:] = True
    if eos is not None and eos not in ids[-1:]:
        return np.append(ids, np.int32(eos)), np.append(of_answer, True)
    return ids, of_answer
