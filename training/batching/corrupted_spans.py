"""Missing spans of texts, T5's objective: a pure function of the seed, the epoch and the row, independent of batch and
rank.

A share of each text's tokens, without those at its ends, is taken away in spans, and a sentinel stands for each. The
target names each sentinel and then the tokens of its span (Raffel et al., arXiv:1910.10683):

    tokens     Thank you for inviting me to your party last week </s>
    input      Thank you <extra_id_0> me to your party <extra_id_1> week </s>
    target     <extra_id_0> for inviting <extra_id_1> last </s>

Numbers of tokens and spans are those of `random_spans_noise_mask` of T5. Its texts begin with a part that stays and end
with a missing one, so that a short text would always lack its end; here all places of the spans are equally likely.

In training, a row's random generator is seeded with (seed, epoch, row); in evaluations with its tokens, so a text
always lacks the same spans. N texts, B rows of a batch, T tokens of the longest input, S of the longest target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from training.batching.batches import PadSourceAndTarget
from training.batching.random_states import SeededBatch
from training.problems import UserError
from training.tokenization.special_tokens import SENTINELS, sentinel

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Corruption:
    """How much of a text is taken away."""

    density: float
    """The share of its tokens."""
    mean_span: float
    """The mean tokens of a span."""

    def count(self, tokens: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The tokens that are taken away from texts of (N,) tokens, and their spans; at least one if there are any."""
        missing = np.clip(np.rint(tokens * self.density), np.minimum(tokens, 1), np.maximum(tokens - 1, 1))
        missing = np.minimum(missing, tokens).astype(np.int64)
        most = np.minimum(np.minimum(missing, tokens - missing + 1), SENTINELS)
        return missing, np.clip(np.rint(missing / self.mean_span), np.minimum(missing, 1), most).astype(np.int64)


def find_sentinels(tokenizer: PreTrainedTokenizerBase) -> Ids:
    """The sentinel of each span. Raises UserError if the tokenizer has none.

    ByT5's are its last bytes, from id 258 down, as in T5's code, which takes the end of the vocabulary (Xue et al.,
    arXiv:2105.13626). The token `<extra_id_0>` that transformers adds behind them was never trained. The first 11
    sentinels are bytes that no text in UTF-8 has.
    """
    from transformers import ByT5Tokenizer

    if isinstance(tokenizer, ByT5Tokenizer):
        size = tokenizer.vocab_size + tokenizer.offset
        return np.arange(size - 1, size - 1 - SENTINELS, -1, dtype=np.int32)
    vocabulary = tokenizer.get_vocab()
    names = [sentinel(number) for number in range(SENTINELS)]
    found = [vocabulary.get(name, vocabulary.get(f"▁{name}")) for name in names]  # mT5's stand in its vocabulary
    if lacking := [name for name, token in zip(names, found, strict=True) if token is None]:
        message = f"it has no token {lacking[0]}, and span-corruption needs {names[0]} to {names[-1]}: choose a T5, "
        message += "mT5, UL2 or ByT5, or model.source: scratch."
        raise UserError.of("model", "tokenizer", message)
    return np.array(found, np.int32)


class CorruptedSpans(PadSourceAndTarget):
    """The batches of PadSourceAndTarget: input_ids (B, T) without some spans, and labels (B, S). Raises UserError if
    the tokenizer has no sentinels."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, multiple: int, corruption: Corruption) -> None:
        super().__init__(tokenizer, multiple)
        self.sentinels, self.corruption = find_sentinels(tokenizer), corruption
        named = tokenizer.convert_tokens_to_ids([sentinel(number) for number in range(SENTINELS)])
        self.special = sorted({*tokenizer.all_special_ids} - {tokenizer.unk_token_id, *named, *self.sentinels})

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if isinstance(rows, SeededBatch):
            seed, epoch, *_ = rows.seeds
            draws = (np.random.default_rng([seed, epoch, number]) for number in rows.rows)
            corrupted = [self._corrupt(row["input_ids"], draw) for row, draw in zip(rows, draws, strict=True)]
        else:
            corrupted = [self.corrupt_for_evaluation(row["input_ids"]) for row in rows]
        return super().__call__([{"input_ids": given, "label": wanted} for given, wanted in corrupted])

    def corrupt_for_evaluation(self, ids: Ids) -> tuple[Ids, Ids]:
        """The input and the target of a row, in every evaluation."""
        return self._corrupt(ids, np.random.default_rng(ids.astype(np.uint32)))

    def _corrupt(self, ids: Ids, draw: np.random.Generator) -> tuple[Ids, Ids]:
        inner = np.flatnonzero(~np.isin(ids, self.special))
        first, end = (inner[0], inner[-1] + 1) if len(inner) else (len(ids), len(ids))
        begin, text, ends = ids[:first], ids[first:end], ids[end:]
        if not len(text):
            return ids, np.empty(0, np.int32)
        missing, spans = map(int, self.corruption.count(np.array(len(text))))
        around = _divide(len(text) - missing + 2, spans + 1, draw)  # what stays; first and last may be empty
        around[[0, -1]] -= 1
        lengths = np.empty(2 * spans + 1, np.int64)
        lengths[0::2], lengths[1::2] = around, _divide(missing, spans, draw)
        parts = np.split(text, lengths.cumsum()[:-1])
        marks = self.sentinels[:spans, None]
        given = [part for pair in zip(parts[0:-1:2], marks, strict=True) for part in pair]
        wanted = [part for pair in zip(marks, parts[1::2], strict=True) for part in pair]
        return np.concatenate([begin, *given, parts[-1], ends]), np.concatenate([begin, *wanted, ends])


def _divide(total: int, parts: int, draw: np.random.Generator) -> npt.NDArray[np.int64]:
    """The lengths of so many parts of a whole, none of them 0, all divisions equally likely."""
    cuts = np.sort(draw.choice(max(total - 1, 0), parts - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)
