"""Encoders by their class in transformers: tokenizers that exist only in Python, and those whose class builds another
tokenizer than tokenizer.json holds."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from training.models.repository_files import chat_of, text_prompts
from training.problems import UserError
from training.tokenization.encoder import Encoded, Encoder, FastEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Preprocessing(Protocol):
    """The part of a task type that may replace the tokenizer: see training.task_types.task_type."""

    def preprocessor(self, folder: Path) -> Any | None: ...


def load_encoder(tokenizer: Path, model: Path, max_length: int) -> Encoder:
    """The encoder for AutoTokenizer's tokenizer of a folder. Raises UserError if AutoTokenizer cannot load it."""
    from training.models.loading import load_tokenizer

    try:
        loaded = load_tokenizer(tokenizer, model)
    except UserError:
        raise
    except Exception as error:  # classes fail in many ways on files that they do not expect
        message = f"AutoTokenizer cannot load it: {error}. Save the tokenizer again with save_pretrained()."
        raise UserError.of("tokens", str(tokenizer), message) from error
    encoder = _encoder_of(loaded, max_length)
    encoder.prompts = text_prompts(tokenizer)
    return encoder


def load_encoder_of(task_type: Preprocessing, tokenizer: Path, model: Path, max_length: int) -> Encoder:
    """What a task type makes features with: its own preprocessor of the folder, or else as `load_encoder`."""
    own: Encoder | None = task_type.preprocessor(tokenizer)
    return load_encoder(tokenizer, model, max_length) if own is None else own


def _encoder_of(loaded: PreTrainedTokenizerBase, max_length: int) -> Encoder:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    cls = type(loaded)
    if (
        isinstance(loaded, PreTrainedTokenizerFast)
        and cls.__call__ is PreTrainedTokenizerBase.__call__
        and cls._encode_plus is PreTrainedTokenizerFast._encode_plus
    ):
        return _ClassEncoder(
            loaded,
            max_length,
            side=loaded.truncation_side,
            split_special_tokens=loaded.split_special_tokens,
            eos=loaded.eos_token_id,
            unk=loaded.unk_token_id,
            chat=chat_of(loaded),
        )
    return PythonEncoder(loaded, max_length)


class _ClassEncoder(FastEncoder):
    """A tokenizer of the `tokenizers` library that its class has built and switches to targets."""

    def __init__(self, loaded: PreTrainedTokenizerBase, *settings: Any, **named: Any) -> None:
        super().__init__(loaded.backend_tokenizer, *settings, **named)
        self._loaded = loaded

    def encode_targets(self, texts: list[str], max_length: int) -> Encoded:
        if not hasattr(self._loaded, "_switch_to_target_mode"):
            return super().encode_targets(texts, max_length)
        _require_target_language(self._loaded)
        self._loaded._switch_to_target_mode()
        try:
            return super().encode_targets(texts, max_length)
        finally:
            self._loaded._switch_to_input_mode()


def _require_target_language(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises UserError if a multilingual tokenizer has no target language: it would silently use the source's."""
    if getattr(tokenizer, "tgt_lang", "") is None:
        message = (
            "names no tgt_lang: load the tokenizer with src_lang and tgt_lang, and save it with save_pretrained()."
        )
        where = f"{tokenizer.name_or_path}/tokenizer_config.json"
        raise UserError.of("tokens", where, message)


class PythonEncoder(Encoder):
    """A tokenizer that encodes in Python, and cannot map tokens to words or characters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self.max_length, self.eos, self.chat = max_length, tokenizer.eos_token_id, chat_of(tokenizer)
        self.unk = None if tokenizer.unk_token_id == self.eos else tokenizer.unk_token_id
        self._tokenizer = tokenizer

    @property
    def added_tokens(self) -> Set[int]:
        return self._tokenizer.added_tokens_decoder.keys()

    @property
    def special_texts(self) -> Sequence[str]:
        return [] if self._tokenizer.split_special_tokens else list(self._tokenizer.all_special_tokens)

    def special_tokens(self, pairs: bool) -> int:
        return int(self._tokenizer.num_special_tokens_to_add(pair=pairs))

    def encode(self, texts: list[str], pairs: list[str] | None) -> Encoded:
        return self._encode({"text": texts} | ({} if pairs is None else {"text_pair": pairs}), self.max_length)

    def encode_whole(self, texts: list[str]) -> Encoded:
        return self._encode({"text": texts}, None)

    def encode_targets(self, texts: list[str], max_length: int) -> Encoded:
        _require_target_language(self._tokenizer)
        return self._encode({"text_target": texts}, max_length)

    def encode_words(self, rows: list[list[str]]) -> Encoded:
        raise self._no_offsets("words")

    def encode_located(self, texts: list[str], *, special: bool) -> Encoded:
        raise self._no_offsets("characters")

    def words_of(self, texts: list[str]) -> npt.NDArray[np.int32]:
        message = f"{type(self._tokenizer).__name__} does not map tokens to words: set it to false, or choose a model "
        message += "whose tokenizer is one of the tokenizers library."
        raise UserError.of("tokens", "options.whole_words", message)

    def _no_offsets(self, units: str) -> UserError:
        message = f"{type(self._tokenizer).__name__} encodes in Python and does not map tokens to {units}: choose a "
        message += "model with a tokenizer.json that AutoTokenizer uses unchanged."
        return UserError.of("tokens", str(self._tokenizer.name_or_path), message)

    def _encode(self, columns: dict[str, list[str]], max_length: int | None) -> Encoded:
        """Encodes the tokenizer's arguments `text`, `text_pair` and `text_target`; with None, without truncation."""
        pairs, cut = "text_pair" in columns, max_length is not None
        rows = self._tokenizer(
            **columns, truncation=cut, max_length=max_length, return_token_type_ids=pairs, verbose=cut
        )
        lengths = np.fromiter(map(len, rows["input_ids"]), np.int32, len(rows["input_ids"]))
        ids = np.fromiter(chain.from_iterable(rows["input_ids"]), np.int32, int(lengths.sum()))
        lost = np.zeros(len(lengths), np.int64)
        if max_length is not None and len(full := np.flatnonzero(lengths >= max_length)):
            truncated = {name: [column[row] for row in full.tolist()] for name, column in columns.items()}
            lost[full] = self._encode(truncated, None).lengths - lengths[full]
        types = np.fromiter(chain.from_iterable(rows["token_type_ids"]), np.int8, len(ids)) if pairs else None
        return Encoded(lengths, ids, types, lost)
