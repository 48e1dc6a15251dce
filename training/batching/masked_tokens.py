"""Masks of masked language models: a pure function of the seed, the epoch and the row, whatever batch or rank it is in.

Of a row's tokens, those that the tokenizer adds aside, as many are chosen as the probability says, rounded, and at
least one. Of the chosen tokens 80 % become the mask token, 10 % a random token, and 10 % stay (Devlin et al., BERT,
2019). The model predicts the original tokens.

In training, a row's random numbers are drawn from (seed, epoch, row). In evaluations they are drawn from its tokens, so
a text has the same mask in every evaluation and every batch. B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.batching.batches import IGNORED, PadToLongest
from training.batching.random_states import Numbered
from training.problems import Problem, UserError

if TYPE_CHECKING:
    from training.batching.batches import TokenRows
    from training.tokenization.encoder import Encoder

WORDS = "words"
"""The column with the word of each token, -1 for special tokens; only with options.whole_words."""
BLOCK_ROWS = 10_000
BECOME_MASK, BECOME_ANY = 0.8, 0.1

Ids = npt.NDArray[np.int32]


def chosen_of(maskable: npt.NDArray[np.integer[Any]] | int, probability: float) -> npt.NDArray[np.int32]:
    """The number of tokens to choose of `maskable` ones, at least one of a row with any."""
    return np.minimum(maskable, np.maximum(1, np.rint(np.multiply(maskable, probability)))).astype(np.int32)


class MaskedTokens(PadToLongest):
    """Token features of B rows as PadToLongest has them, masked, with labels (B, T): the ids of the chosen tokens, and
    IGNORED for all others. Raises UserError where the tokenizer has no mask token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, multiple: int, probability: float) -> None:
        super().__init__(tokenizer, multiple)
        if tokenizer.mask_token_id is None:
            message = "mask_token=null in tokenizer_config.json, and masked-lm needs one: choose a model that was made "
            message += "to fill masks, or task: causal-lm."
            raise UserError([Problem(kind="model", where="tokenizer", message=message)])
        self.mask, self.vocabulary, self.probability = tokenizer.mask_token_id, len(tokenizer), probability
        self.special = sorted({*tokenizer.all_special_ids} - {tokenizer.unk_token_id})

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        found = [self._masked(row, draw) for row, draw in zip(rows, _generators(rows), strict=True)]
        batch = super().__call__([{**row, "input_ids": ids} for row, (ids, _) in zip(rows, found, strict=True)])
        width = batch["input_ids"].shape[1]
        batch["labels"] = torch.from_numpy(self.padded([labels for _, labels in found], width, IGNORED))
        return batch

    def labels_of(self, row: dict[str, Any]) -> Ids:
        """The labels of a row in an evaluation."""
        (draw,) = _generators([row])
        return self._masked(row, draw)[1]

    def _masked(self, row: dict[str, Any], draw: np.random.Generator) -> tuple[Ids, Ids]:
        """The masked ids of a row, and its labels."""
        ids = row["input_ids"].copy()
        words = row[WORDS] if WORDS in row else np.where(np.isin(ids, self.special), -1, np.arange(len(ids)))
        places = _chosen(words, int(chosen_of(int((words >= 0).sum()), self.probability)), draw)
        labels = np.full_like(ids, IGNORED)
        labels[places] = ids[places]
        become, anything = draw.random(len(places)), draw.integers(self.vocabulary, size=len(places))
        ids[places[become < BECOME_MASK + BECOME_ANY]] = anything[become < BECOME_MASK + BECOME_ANY]
        ids[places[become < BECOME_MASK]] = self.mask
        return ids, labels


def hidden(rows: TokenRows, collate: MaskedTokens) -> Iterator[tuple[Ids, npt.NDArray[np.int64]]]:
    """The ids of the tokens that an evaluation masks, and the row of each, BLOCK_ROWS rows at a time."""
    for start in range(0, len(rows), BLOCK_ROWS):
        places = range(start, min(start + BLOCK_ROWS, len(rows)))
        labels = [collate.labels_of(rows[place]) for place in places]
        there = [one[one != IGNORED] for one in labels]
        yield np.concatenate(there), np.repeat(places, [len(one) for one in there])


def filled(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, encoder: Encoder, texts: Sequence[str]
) -> list[str | None]:
    """Each text with the likeliest token in place of each mask token; None for a text without mask tokens."""
    texts_filled: list[str | None] = []
    for text in texts:
        ids = torch.from_numpy(encoder.encode([text], None).ids.astype(np.int64)).to(model.device)
        places = (ids == tokenizer.mask_token_id).nonzero()[:, 0]
        if not len(places):
            texts_filled.append(None)
            continue
        with torch.inference_mode():
            likeliest = model(input_ids=ids[None]).logits[0, places].argmax(dim=-1)
        words = [str(tokenizer.decode([token])).strip() for token in likeliest.tolist()]
        first, *others = text.split(mask := str(tokenizer.mask_token))
        unseen = [mask] * (len(others) - len(words))  # where the text was cut
        words = unseen + words if tokenizer.truncation_side == "left" else words + unseen
        texts_filled.append(first + "".join(chain.from_iterable(zip(words, others, strict=True))))
    return texts_filled


def _generators(rows: Sequence[dict[str, Any]]) -> Iterator[np.random.Generator]:
    """The random generator of each row."""
    if isinstance(rows, Numbered):
        seed, epoch, *_ = rows.draws_from
        yield from (np.random.default_rng([seed, epoch, row]) for row in rows.rows)
    else:
        yield from (np.random.default_rng(row["input_ids"].astype(np.uint32)) for row in rows)


def _chosen(words: npt.NDArray[Any], tokens: int, draw: np.random.Generator) -> npt.NDArray[np.int64]:
    """The places of the chosen tokens: words in random order, each that still fits as a whole; if none fits, the first
    of the shortest."""
    maskable = np.flatnonzero(words >= 0)
    _, word, sizes = np.unique(words[maskable], return_inverse=True, return_counts=True)
    order, taken = draw.permutation(len(sizes)), []
    for one in order.tolist():
        if sizes[one] <= tokens:
            taken.append(one)
            tokens -= sizes[one]
        if not tokens:
            break
    if not taken and len(order):
        taken = [order[np.argmin(sizes[order])]]
    return maskable[np.isin(word, taken)]
