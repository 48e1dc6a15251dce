"""Pairs of texts whose second may be longer than a model takes: as windows of it, each behind the whole first text.

For max_length 9, stride 2, the question [q1 q2] and the context [c1 c2 c3 c4 c5 c6]

    [CLS] q1 q2 [SEP] c1 c2 c3 c4 [SEP]     pair 0
    [CLS] q1 q2 [SEP] c3 c4 c5 c6 [SEP]     pair 0

N pairs, W windows of all of them, T tokens of all windows together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from training.problems import Problem, UserError
from training.tokenization.encoder import Encoder, FastEncoder, ids_of

if TYPE_CHECKING:
    from tokenizers import Encoding


@dataclass(frozen=True)
class Windows:
    """The windows of some pairs, in their order; each pair has at least one, and no token is lost."""

    pair: npt.NDArray[np.int64]
    """(W,) the number of the pair that each is of."""
    lengths: npt.NDArray[np.int32]
    """(W,) the tokens of each."""
    ids: npt.NDArray[np.int32]
    """(T,)"""
    types: npt.NDArray[np.int8]
    """(T,) the token_type_ids."""
    second: npt.NDArray[np.bool_]
    """(T,) which tokens are of the second text."""
    offsets: npt.NDArray[np.int32]
    """(T, 2) the characters of its text that a token begins with and ends before; 0 and 0 for those that the tokenizer
    adds."""

    def of_each(self) -> Iterator[npt.NDArray[np.int32]]:
        """(length, 2) for each window, the offsets of those of its tokens that are of the second text; -1 and -1 for
        the others."""
        yield from np.split(np.where(self.second[:, None], self.offsets, -1), np.cumsum(self.lengths)[:-1])


def windows(encoder: Encoder, firsts: list[str], seconds: list[str], stride: int) -> Windows:
    """All tokens of the second texts, behind those of the first, in windows of the encoder's `max_length`, each of
    which begins with the last `stride` tokens of the one before.

    Raises UserError where a first text leaves no room for more than that, and where the tokenizer does not tell which
    characters a token is of.
    """
    if not isinstance(encoder, FastEncoder):
        message = "encodes in Python and does not tell which characters a token is of: choose a model with a "
        message += "tokenizer.json that AutoTokenizer takes as it is."
        raise UserError([Problem(kind="tokens", where="the model's tokenizer", message=message)])
    _need_room(encoder, firsts, stride)
    tokenizer = encoder.tokenizer
    before = tokenizer.truncation
    tokenizer.enable_truncation(encoder.max_length, stride=stride, strategy="only_second")
    try:
        pairs = tokenizer.encode_batch(list(zip(firsts, seconds, strict=True)))  # the fast one gives no offsets
    finally:
        tokenizer.no_truncation() if before is None else tokenizer.enable_truncation(**before)
    cut = [[pair, *pair.overflowing] for pair in pairs]
    every = [*chain.from_iterable(cut)]
    lengths, ids = ids_of(every)
    types = np.fromiter(chain.from_iterable(window.type_ids for window in every), np.int8, len(ids))
    pair = np.repeat(np.arange(len(cut)), [*map(len, cut)])
    return Windows(pair, lengths, ids, types, _of_second(every, len(ids)), offsets_of(every, len(ids)))


def offsets_of(encodings: list[Encoding], tokens: int) -> npt.NDArray[np.int32]:
    """(T, 2) the characters of its text that each of T tokens begins with and ends before; 0 and 0 for those that the
    tokenizer adds. Not of `encode_batch_fast`, which gives none."""
    both = chain.from_iterable(chain.from_iterable(encoding.offsets for encoding in encodings))
    return np.fromiter(both, np.int32, 2 * tokens).reshape(tokens, 2)


def _of_second(every: list[Encoding], tokens: int) -> npt.NDArray[np.bool_]:
    texts = chain.from_iterable(window.sequence_ids for window in every)
    return np.fromiter((text == 1 for text in texts), np.bool_, tokens)


def _need_room(encoder: FastEncoder, firsts: list[str], stride: int) -> None:
    if not firsts:
        return
    special = encoder.special_tokens(pairs=True)
    lengths = encoder.encode_whole(firsts).lengths - encoder.special_tokens(pairs=False)
    longest = int(lengths.argmax())
    if encoder.max_length - special - lengths[longest] <= stride:
        message = (
            f"{encoder.max_length} leaves no room for a window beside the {special} special tokens, the "
            f"{lengths[longest]} of {firsts[longest]!r:.60}, and the {stride} that windows have in common: choose more."
        )
        raise UserError([Problem(kind="tokens", where="tokens.max_length", message=message)])
