"""Texts to the token ids of AutoTokenizer, by the `tokenizers` library alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from training.models.repository_files import SPECIAL_TOKENS, chat_template, read_json
from training.problems import Problem, UserError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


Chat = tuple[str, Mapping[str, str]]
"""A chat template and the special tokens, by name, that it may use."""


@dataclass(frozen=True)
class Encoded:
    """The tokens of some rows: N rows, T tokens of all of them together."""

    lengths: npt.NDArray[np.int32]  # (N,) tokens a row
    ids: npt.NDArray[np.int32]  # (T,)
    types: npt.NDArray[np.int8] | None  # (T,) which text of a pair a token is of; None for single texts
    lost: npt.NDArray[np.int64]  # (N,) tokens a row that did not fit
    words: npt.NDArray[np.int32] | None = None  # (T,) which word of its row a token is of, -1 for none; None for texts
    starts: npt.NDArray[np.int32] | None = None  # (T,) with which character of its text a token begins, -1 for none


class Encoder(Protocol):
    """A tokenizer that truncates and never pads."""

    max_length: int
    eos: int | None
    """The token that ends a text, if the tokenizer has one."""
    chat: Chat | None
    """The chat template, if the tokenizer has one."""

    def special_tokens(self, pairs: bool) -> int:
        """The number of special tokens that are added to every row, or pair."""

    def encode(self, texts: list[str], pairs: list[str] | None) -> Encoded:
        """The tokens of these texts, or of these pairs of them."""

    def encode_words(self, rows: list[list[str]]) -> Encoded:
        """The tokens of lists of words, each word split on its own. Raises UserError if the tokenizer cannot map tokens
        to words."""

    def encode_whole(self, texts: list[str]) -> Encoded:
        """All tokens of these texts, without truncation."""

    def encode_located(self, texts: list[str], *, special: bool) -> Encoded:
        """All tokens of these texts with `starts`, and with special tokens if `special`. Raises UserError if the
        tokenizer cannot map tokens to characters."""

    def words_of(self, texts: list[str]) -> npt.NDArray[np.int32]:
        """(T,) the word of each token of `encode`, -1 for special tokens. Raises UserError if the tokenizer cannot map
        tokens to words."""

    def encode_targets(self, texts: list[str], max_length: int) -> Encoded:
        """The tokens of target texts, which some tokenizers encode differently, truncated to `max_length`.

        Raises UserError if the tokenizer has no target language.
        """


class FastEncoder:
    """A tokenizer of the `tokenizers` library, in its own threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_length: int,
        *,
        side: str,
        split_special_tokens: bool,
        eos: int | None,
        chat: Chat | None = None,
    ) -> None:
        """Sets the tokenizer to cut at `max_length` on this `side`, and never to pad, whatever it did before;
        `split_special_tokens` says whether a special token that stands in a text is a text like any other."""
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = split_special_tokens
        self.max_length, self.eos, self.chat = max_length, eos, chat
        self.tokenizer = tokenizer
        self._side = side
        self._limit()

    def special_tokens(self, pairs: bool) -> int:
        return self.tokenizer.num_special_tokens_to_add(pairs)

    def encode(self, texts: list[str], pairs: list[str] | None) -> Encoded:
        rows: list[Any] = texts if pairs is None else list(zip(texts, pairs, strict=True))
        # It is faster because it computes no offsets.
        encodings = self.tokenizer.encode_batch_fast(rows)
        lengths, ids = ids_of(encodings)
        if pairs is None:
            return Encoded(lengths, ids, None, self._lost(encodings, lengths))
        types = np.fromiter(chain.from_iterable(encoding.type_ids for encoding in encodings), np.int8, len(ids))
        lost = np.zeros(len(encodings), np.int64)
        if len(full := np.flatnonzero(lengths >= self.max_length)):
            lost[full] = self._uncut_lengths([rows[row] for row in full.tolist()]) - lengths[full]
        return Encoded(lengths, ids, types, lost)

    def encode_words(self, rows: list[list[str]]) -> Encoded:
        """With the ids that AutoTokenizer gives for `is_split_into_words`, and the words in it that of `word_ids`; byte
        pairs with a space before each word, as in a text and as with `add_prefix_space`."""
        if self._glues_words:
            rows = [[word if word.startswith(" ") else f" {word}" for word in row] for row in rows]
        encodings = self.tokenizer.encode_batch(rows, is_pretokenized=True)  # the fast one loses which word is whose
        lengths, ids = ids_of(encodings)
        of_tokens = chain.from_iterable(encoding.word_ids for encoding in encodings)
        words = np.fromiter((-1 if word is None else word for word in of_tokens), np.int32, len(ids))
        return Encoded(lengths, ids, None, self._lost(encodings, lengths), words)

    @cached_property
    def _glues_words(self) -> bool:
        """Whether a word alone is to the tokenizer the rest of a word, as it is to byte pairs, unless told otherwise:
        they write the space before a word as \u0120."""
        before = self.tokenizer.pre_tokenizer
        if before is None:
            return False
        (alone, _), *_ = before.pre_tokenize_str("a")
        (spaced, _), *_ = before.pre_tokenize_str(" a")
        return (alone, spaced) == ("a", "\u0120a")

    def _lost(self, encodings: list[Encoding], lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        lost = np.zeros(len(encodings), np.int64)
        if self.tokenizer.truncation is None:
            return lost
        # Only a full row can be truncated, and `overflowing` is slow.
        for row in np.flatnonzero(lengths >= self.max_length).tolist():
            lost[row] = self._rest(encodings[row].overflowing)
        return lost

    def encode_whole(self, texts: list[str]) -> Encoded:
        self.tokenizer.no_truncation()
        whole = self.encode(texts, None)
        self._limit()
        return whole

    def encode_located(self, texts: list[str], *, special: bool) -> Encoded:
        self.tokenizer.no_truncation()
        encodings = self.tokenizer.encode_batch(texts, add_special_tokens=special)  # the fast one does not tell
        self._limit()
        lengths, ids = ids_of(encodings)
        # Where spaces are trimmed off what a token spans, one of them alone spans nothing, just behind its place.
        starts = (
            -1 if added else max(0, start - (start == end))
            for encoding in encodings
            for (start, end), added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True)
        )
        lost = np.zeros(len(texts), np.int64)
        return Encoded(lengths, ids, None, lost, starts=np.fromiter(starts, np.int32, len(ids)))

    def words_of(self, texts: list[str]) -> npt.NDArray[np.int32]:
        encodings = self.tokenizer.encode_batch(texts)  # the fast one does not tell
        words = chain.from_iterable(encoding.word_ids for encoding in encodings)
        return np.fromiter((-1 if word is None else word for word in words), np.int32)

    def encode_targets(self, texts: list[str], max_length: int) -> Encoded:
        before, self.max_length = self.max_length, max_length
        self._limit()
        try:
            return self.encode(texts, None)
        finally:
            self.max_length = before
            self._limit()

    def _rest(self, parts: list[Encoding]) -> int:
        """The tokens of the rest of a text, which comes in parts with special tokens of their own."""
        return sum(map(len, parts)) - len(parts) * self.special_tokens(pairs=False)

    def _uncut_lengths(self, rows: list[tuple[str, str]]) -> npt.NDArray[np.int64]:
        """The tokens of whole pairs: the parts of a pair that is cut would be those of each text with all of the
        other's."""
        self.tokenizer.no_truncation()
        whole = [len(encoding) for encoding in self.tokenizer.encode_batch_fast(rows)]
        self._limit()
        return np.array(whole, np.int64)

    def _limit(self) -> None:
        self.tokenizer.enable_truncation(self.max_length, strategy="longest_first", direction=self._side)


def ids_of(encodings: list[Encoding]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(N,) the tokens of each, and (T,) their ids."""
    lengths = np.fromiter(map(len, encodings), np.int32, len(encodings))
    ids = chain.from_iterable(encoding.ids for encoding in encodings)
    return lengths, np.fromiter(ids, np.int32, int(lengths.sum()))


def load_encoder(folder: Path, max_length: int) -> FastEncoder:
    """The folder's tokenizer.json, with the ids of AutoTokenizer where `snapshot.as_the_file_says` that it has them.

    Raises UserError where it is missing or not understood.
    """
    from tokenizers import AddedToken, Tokenizer, processors

    path = folder / "tokenizer.json"
    if not path.is_file():
        have = ", ".join(sorted(file.name for file in folder.glob("*"))) or "nothing"
        message = f"there is no tokenizer.json: there is {have}. Save the tokenizer with save_pretrained()."
        raise UserError([Problem(kind="tokens", where=str(folder), message=message)])
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for whatever it cannot read
        message = f"tokenizer.json is not readable: {error}. Save the tokenizer again."
        raise UserError([Problem(kind="tokens", where=str(path), message=message)]) from error
    settings = read_json(folder / "tokenizer_config.json")
    # As transformers does: special tokens that the file does not know are added, and the texts of a pair are numbered.
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    named = dict.fromkeys(token for name in SPECIAL_TOKENS if isinstance(token := settings.get(name), str))
    tokenizer.add_tokens([AddedToken(token, special=True) for token in named if token not in known])
    if tokenizer.post_processor is None:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1")
    # What the file itself says of lengths is of some earlier use, except for the side.
    side = settings.get("truncation_side") or (tokenizer.truncation or {}).get("direction", "right")
    split = bool(settings.get("split_special_tokens", False))
    eos = settings.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos  # as older files have it
    eos = None if eos is None else tokenizer.token_to_id(eos)
    chat = chat_template(folder)
    return FastEncoder(tokenizer, max_length, side=side, split_special_tokens=split, eos=eos, chat=chat)
