"""Windows of pairs of texts whose second text may be too long: each window has the whole first text.

For max_length 9, stride 2, the question [q1 q2] and the context [c1 c2 c3 c4 c5 c6]

    [CLS] q1 q2 [SEP] c1 c2 c3 c4 [SEP]     pair 0
    [CLS] q1 q2 [SEP] c3 c4 c5 c6 [SEP]     pair 0

W windows of all pairs, T tokens of all windows together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from training.problems import Problem, UserError
from training.tokenization.encoder import Encoder, FastEncoder, concatenate_ids


@dataclass(frozen=True)
class Windows:
    """The windows of some pairs, in their order; each pair has at least one, and no token is lost."""

    pair: npt.NDArray[np.int64]  # (W,) the number of its pair
    lengths: npt.NDArray[np.int32]  # (W,) the number of its tokens
    ids: npt.NDArray[np.int32]  # (T,)
    types: npt.NDArray[np.int8]  # (T,) the token_type_ids
    second: npt.NDArray[np.bool_]  # (T,) whether the token is of the second text
    offsets: npt.NDArray[np.int32]  # (T, 2) its first character, and the one after its last; 0, 0 for special tokens

    def iterate_offsets(self) -> Iterator[npt.NDArray[np.int32]]:
        """(length, 2) for each window, the offsets of tokens of the second text; -1 and -1 for others."""
        yield from np.split(np.where(self.second[:, None], self.offsets, -1), np.cumsum(self.lengths)[:-1])


def encode_windows(encoder: Encoder, firsts: list[str], seconds: list[str], stride: int) -> Windows:
    """The pairs in windows of the encoder's `max_length`, each of which begins with the last `stride` tokens of the one
    before.

    Raises UserError if a first text leaves no room for more than `stride` tokens, or if the tokenizer cannot map tokens
    to characters.
    """
    if not isinstance(encoder, FastEncoder):
        message = "encodes in Python and does not map tokens to characters: choose a model with a tokenizer.json that "
        message += "AutoTokenizer uses unchanged."
        raise UserError([Problem(kind="tokens", where="the model's tokenizer", message=message)])
    special = encoder.special_tokens(pairs=True)
    for first, length in zip(firsts, encoder.encode_whole(firsts).lengths.tolist(), strict=True):
        tokens = length - encoder.special_tokens(pairs=False)
        if encoder.max_length - special - tokens <= stride:
            message = (
                f"{encoder.max_length} leaves no room for a window with the {special} special tokens, the {tokens} of "
                f"{first!r:.60}, and the {stride} that windows have in common: choose more."
            )
            raise UserError([Problem(kind="tokens", where="tokens.max_length", message=message)])
    with encoder.truncation(encoder.max_length, stride=stride, strategy="only_second"):
        pairs = encoder.tokenizer.encode_batch(list(zip(firsts, seconds, strict=True)))  # the fast one has no offsets
    windows = [window for pair in pairs for window in (pair, *pair.overflowing)]
    lengths, ids = concatenate_ids(windows)
    texts = chain.from_iterable(window.sequence_ids for window in windows)
    offsets = chain.from_iterable(chain.from_iterable(window.offsets for window in windows))
    return Windows(
        np.repeat(np.arange(len(pairs)), [1 + len(pair.overflowing) for pair in pairs]),
        lengths,
        ids,
        np.fromiter(chain.from_iterable(window.type_ids for window in windows), np.int8, len(ids)),
        np.fromiter((text == 1 for text in texts), np.bool_, len(ids)),
        np.fromiter(offsets, np.int32, 2 * len(ids)).reshape(-1, 2),
    )
