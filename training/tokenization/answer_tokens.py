"""Tokens of texts with answers, and the mask of the tokens that belong to answers.

The spaces before an answer belong to it, because most tokenizers join a space with the word that follows it. A token
belongs to an answer if it holds a part of it. The first token of a text never does, because it has no context.

    prompt "Answer: ", completion "Paris"     Answer   :   ␣Paris   </s>
    is part of the answer                     0        0   1        1
    the prompt alone, to be answered          Answer   :

A prompt alone has the tokens that it has before an answer: one that ends in white space is encoded with a letter behind
it, and loses the tokens of this letter and of the spaces before it. A row whose answer begins within a token of the
prompt, such as "Ans" and "wer", is `joined`: its prompt alone has other tokens.

T tokens of a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from training.recipe.column_types import Mask
    from training.tokenization.chat_templates import Spans
    from training.tokenization.encoder import Encoder

Ids = npt.NDArray[np.int32]

_LETTER = "a"


class AnswerTokens(NamedTuple):
    """The tokens of a text, without truncation."""

    ids: Ids  # (T,)
    of_answer: Mask  # (T,)
    joined: bool = False
    """Whether a token holds the end of a prompt and the beginning of its answer."""
    spaces: str = ""
    """The spaces at the end of a prompt alone, which are not among its tokens: an answer begins with them."""


def encode_answers(
    encoder: Encoder, texts: Sequence[str], spans: Sequence[Spans], *, is_text: bool, append_eos: bool
) -> list[AnswerTokens]:
    """The tokens of each text with the mask of its answers.

    Args:
        texts: conversations by a chat template, or prompts with their completions.
        spans: the answers of each text; empty for a prompt alone.
        is_text: whether the texts come from no template. They get the tokenizer's special tokens, which belong to the
            completion if they follow it; those behind a prompt alone are left out.
        append_eos: whether a completion ends with the tokenizer's eos token, if it has one.
    """
    given = [
        text if answers or not text[-1:].isspace() else text + _LETTER
        for text, answers in zip(texts, spans, strict=True)
    ]
    encoded = encoder.encode_located(given, special=is_text)
    assert encoded.starts is not None and encoded.stops is not None
    ends = np.cumsum(encoded.lengths)[:-1]
    columns = (np.split(column, ends) for column in (encoded.ids, encoded.starts, encoded.stops))
    tokens = []
    for text, answers, ids, starts, stops in zip(texts, spans, *columns, strict=True):
        if not answers:
            edge = _before_spaces(text, len(text))
            behind = stops > edge  # the letter, and the spaces before it
            kept = int(behind.argmax()) if behind.any() else _end(starts) if is_text else len(ids)
            tokens.append(AnswerTokens(ids[:kept], np.zeros(kept, np.bool_), spaces=text[edge:]))
            continue
        edges = np.array([(_before_spaces(text, start), stop) for start, stop in answers])  # (A, 2)
        answer = np.searchsorted(edges[:, 0], stops, side="left") - 1  # (T,) the last that begins before the token ends
        first, last = edges[answer].T
        of_answer = (answer >= 0) & (starts < last)
        joined = bool((of_answer & (starts < first)).any())
        if is_text:
            end = _end(starts)
            of_answer[end:] = True
            if append_eos and encoder.eos is not None and encoder.eos not in ids[-1:]:
                ids, of_answer = np.append(ids, np.int32(encoder.eos)), np.append(of_answer, True)
        of_answer[:1] = False
        tokens.append(AnswerTokens(ids, of_answer, joined))
    return tokens


def _before_spaces(text: str, place: int) -> int:
    """The place before the white space that ends at `place`, line breaks excepted: no tokenizer joins them with the
    word that follows."""
    while place and text[place - 1].isspace() and text[place - 1] not in "\r\n":
        place -= 1
    return place


def _end(starts: Ids) -> int:
    """The number of tokens without special tokens behind the text. `starts` are the tokens' first characters, -1 for
    special tokens."""
    return int(np.flatnonzero(starts >= 0).max(initial=-1)) + 1
