"""Masks of masked language models: a pure function of the seed, the epoch and the row, independent of batch and rank.

A share of each row's tokens is chosen, without special tokens, rounded, at least one. 80 % of the chosen tokens become
the mask token, 10 % a random token, and 10 % stay (Devlin et al., BERT, 2019). The model predicts the original tokens.

In training, a row's random generator is seeded with (seed, epoch, row); in evaluations with its tokens, so a text
always has the same mask. B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.batching.batches import IGNORED, PadToLongest
from training.batching.random_states import SeededBatch
from training.problems import UserError

if TYPE_CHECKING:
    from training.tokenization.encoder import Encoder

WORDS = "words"
"""The column with the word of each token, -1 for special tokens; only with options.whole_words."""
MASK_SHARE, RANDOM_SHARE = 0.8, 0.1

Ids = npt.NDArray[np.int32]


def count_masked(maskable: npt.NDArray[np.integer[Any]] | int, probability: float) -> npt.NDArray[np.int32]:
    """The number of tokens to mask of `maskable` ones, at least one if there are any."""
    return np.minimum(maskable, np.maximum(1, np.rint(np.multiply(maskable, probability)))).astype(np.int32)


class MaskedTokens(PadToLongest):
    """The batches of PadToLongest, masked, with labels (B, T): the ids of the chosen tokens, IGNORED for others. Raises
    UserError if the tokenizer has no mask token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, multiple: int, probability: float) -> None:
        super().__init__(tokenizer, multiple)
        if tokenizer.mask_token_id is None:
            message = "mask_token=null in tokenizer_config.json, and masked-lm needs one: choose a masked language "
            message += "model, or task: causal-lm."
            raise UserError.of("model", "tokenizer", message)
        self.mask_id, self.vocabulary, self.probability = tokenizer.mask_token_id, len(tokenizer), probability
        self.special = sorted({*tokenizer.all_special_ids} - {tokenizer.unk_token_id})

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if isinstance(rows, SeededBatch):
            seed, epoch, *_ = rows.seeds
            draws = (np.random.default_rng([seed, epoch, number]) for number in rows.rows)
            masked = [self._mask(row, draw) for row, draw in zip(rows, draws, strict=True)]
        else:
            masked = [self.mask_for_evaluation(row) for row in rows]
        batch = super().__call__([{**row, "input_ids": ids} for row, (ids, _) in zip(rows, masked, strict=True)])
        width = batch["input_ids"].shape[1]
        batch["labels"] = torch.from_numpy(self.padded([labels for _, labels in masked], width, IGNORED))
        return batch

    def mask_for_evaluation(self, row: dict[str, Any]) -> tuple[Ids, Ids]:
        """The masked ids of a row, and its labels, in every evaluation."""
        return self._mask(row, np.random.default_rng(row["input_ids"].astype(np.uint32)))

    def _mask(self, row: dict[str, Any], draw: np.random.Generator) -> tuple[Ids, Ids]:
        ids = row["input_ids"].copy()
        words = row[WORDS] if WORDS in row else np.where(np.isin(ids, self.special), -1, np.arange(len(ids)))
        places = _choose(words, int(count_masked(int((words >= 0).sum()), self.probability)), draw)
        labels = np.full_like(ids, IGNORED)
        labels[places] = ids[places]
        uniform, random_ids = draw.random(len(places)), draw.integers(self.vocabulary, size=len(places))
        is_replaced = uniform < MASK_SHARE + RANDOM_SHARE
        ids[places[is_replaced]] = random_ids[is_replaced]
        ids[places[uniform < MASK_SHARE]] = self.mask_id
        return ids, labels


def fill_masks(
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
        unseen = [mask] * (len(others) - len(words))  # in the truncated part of the text
        words = unseen + words if tokenizer.truncation_side == "left" else words + unseen
        texts_filled.append(first + "".join(chain.from_iterable(zip(words, others, strict=True))))
    return texts_filled


def _choose(words: npt.NDArray[Any], tokens: int, draw: np.random.Generator) -> npt.NDArray[np.int64]:
    """The positions of the chosen tokens: words in random order, each that still fits; if none fits, the first of the
    shortest."""
    maskable = np.flatnonzero(words >= 0)
    _, word, sizes = np.unique(words[maskable], return_inverse=True, return_counts=True)
    order, chosen = draw.permutation(len(sizes)), []
    for candidate in order.tolist():
        if sizes[candidate] <= tokens:
            chosen.append(candidate)
            tokens -= sizes[candidate]
        if not tokens:
            break
    if not chosen and len(order):
        chosen = [order[np.argmin(sizes[order])]]
    return maskable[np.isin(word, chosen)]
