"""Token counts of texts, for the weights of a mixture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from training.problems import UserError
from training.tokenization.encoder import load_encoder

BATCH_TEXTS = 1000
"""The texts that are encoded together. More need more memory and are not faster."""


def token_counter(folder: Path) -> Callable[[list[str]], int]:
    """Returns a function that counts the tokens of texts by the folder's tokenizer.json: whole texts, without special
    tokens around them.

    Raises UserError if the folder has no such file, or one that cannot be read.
    """
    if not (folder / "tokenizer.json").is_file():
        message = (
            "'tokens' are counted by tokenizer.json, which the model's tokenizer does not have: choose characters, "
        )
        message += "which are close, or rows; or save the tokenizer again with its fast class of transformers."
        raise UserError.of("data", "data.weight_by", message)
    tokenizer = load_encoder(folder, max_length=1).tokenizer
    tokenizer.no_truncation()

    def count(texts: list[str]) -> int:
        batches = (texts[start : start + BATCH_TEXTS] for start in range(0, len(texts), BATCH_TEXTS))
        encoded = (tokenizer.encode_batch_fast(batch, add_special_tokens=False) for batch in batches)
        return sum(len(encoding) for encodings in encoded for encoding in encodings)

    return count
