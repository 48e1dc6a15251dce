"""Tokenizers by their class in transformers: those that exist only in Python, and those whose class builds another
tokenizer than tokenizer.json holds."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from training.models.repository_files import chat_of
from training.problems import Problem, UserError
from training.tokenization.encoder import Encoded, Encoder, FastEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_encoder(tokenizer: Path, model: Path, max_length: int) -> Encoder:
    """What AutoTokenizer makes of the folder. Raises UserError where it can make nothing of it."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    from training.models.loading import load_tokenizer

    try:
        loaded = load_tokenizer(tokenizer, model)
    except Exception as error:  # whatever a class makes of files that it does not expect
        message = f"AutoTokenizer cannot load it: {error}. Save the tokenizer again with save_pretrained()."
        raise UserError([Problem(kind="tokens", where=str(tokenizer), message=message)]) from error
    kind = type(loaded)
    if (
        isinstance(loaded, PreTrainedTokenizerFast)
        and kind.__call__ is PreTrainedTokenizerBase.__call__
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
    ):
        return _ByItsClass(
            loaded,
            max_length,
            side=loaded.truncation_side,
            split_special_tokens=loaded.split_special_tokens,
            eos=loaded.eos_token_id,
            chat=chat_of(loaded),
        )
    return PythonEncoder(loaded, max_length)


class _ByItsClass(FastEncoder):
    """A tokenizer of the `tokenizers` library that its class in transformers has built, and sets up for targets."""

    def __init__(self, loaded: PreTrainedTokenizerBase, *settings: Any, **named: Any) -> None:
        super().__init__(loaded.backend_tokenizer, *settings, **named)
        self._loaded = loaded

    def encode_targets(self, texts: list[str], max_length: int) -> Encoded:
        if not hasattr(self._loaded, "_switch_to_target_mode"):
            return super().encode_targets(texts, max_length)
        _need_target_language(self._loaded)
        self._loaded._switch_to_target_mode()
        try:
            return super().encode_targets(texts, max_length)
        finally:
            self._loaded._switch_to_input_mode()


def _need_target_language(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError for a tokenizer of many languages that does not know which one it is to write: left alone, it
    takes the source's."""
    if getattr(tokenizer, "tgt_lang", "") is None:
        message = (
            "names no tgt_lang: load the tokenizer with src_lang and tgt_lang, and save it with save_pretrained()."
        )
        where = f"{tokenizer.name_or_path}/tokenizer_config.json"
        raise UserError([Problem(kind="tokens", where=where, message=message)])


class PythonEncoder:
    """A tokenizer that has a way of its own to encode, in Python."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self.max_length, self.eos, self.chat = max_length, tokenizer.eos_token_id, chat_of(tokenizer)
        self._tokenizer = tokenizer

    def special_tokens(self, pairs: bool) -> int:
        return int(self._tokenizer.num_special_tokens_to_add(pair=pairs))

    def encode_whole(self, texts: list[str]) -> Encoded:
        rows = self._tokenizer(texts, truncation=False, verbose=False)["input_ids"]
        lengths = np.fromiter(map(len, rows), np.int32, len(texts))
        ids = np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum()))
        return Encoded(lengths, ids, None, np.zeros(len(texts), np.int64))

    def encode_located(self, texts: list[str], *, special: bool) -> Encoded:
        """Raises UserError: Python's tokenizers do not tell where a token begins."""
        message = (
            f"{type(self._tokenizer).__name__} encodes in Python and does not tell where in a text a token begins: "
            "choose a model with a tokenizer.json that AutoTokenizer takes as it is."
        )
        raise UserError([Problem(kind="tokens", where=str(self._tokenizer.name_or_path), message=message)])

    def words_of(self, texts: list[str]) -> np.ndarray[Any, np.dtype[np.int32]]:
        message = (
            f"{type(self._tokenizer).__name__} does not tell which word a token is of: set it to false, or choose "
        )
        message += "a model whose tokenizer is one of the tokenizers library."
        raise UserError([Problem(kind="tokens", where="options.whole_words", message=message)])

    def encode(self, texts: list[str], pairs: list[str] | None) -> Encoded:
        given = {"text": texts} | ({} if pairs is None else {"text_pair": pairs})
        return self._encoded(given, self.max_length)

    def encode_words(self, rows: list[list[str]]) -> Encoded:
        """Raises UserError: Python's tokenizers do not tell which word a token is of."""
        message = (
            f"{type(self._tokenizer).__name__} encodes in Python and does not tell which word a token is of: choose a "
            "model with a tokenizer.json that AutoTokenizer takes as it is."
        )
        raise UserError([Problem(kind="tokens", where=str(self._tokenizer.name_or_path), message=message)])

    def encode_targets(self, texts: list[str], max_length: int) -> Encoded:
        _need_target_language(self._tokenizer)
        return self._encoded({"text_target": texts}, max_length)

    def _encoded(self, given: dict[str, list[str]], max_length: int) -> Encoded:
        """By the names that a tokenizer has for columns of texts."""
        pairs = "text_pair" in given
        rows = self._tokenizer(**given, truncation=True, max_length=max_length, return_token_type_ids=pairs)
        lengths = np.fromiter(map(len, rows["input_ids"]), np.int32, len(rows["input_ids"]))
        lost = np.zeros(len(lengths), np.int64)
        if len(full := np.flatnonzero(lengths >= max_length)):
            cut = {name: [column[row] for row in full.tolist()] for name, column in given.items()}
            whole = self._tokenizer(**cut, truncation=False, verbose=False)["input_ids"]
            lost[full] = np.fromiter(map(len, whole), np.int64, len(full)) - lengths[full]
        total = int(lengths.sum())
        types = np.fromiter(chain.from_iterable(rows["token_type_ids"]), np.int8, total) if pairs else None
        return Encoded(lengths, np.fromiter(chain.from_iterable(rows["input_ids"]), np.int32, total), types, lost)
