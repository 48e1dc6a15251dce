"""Encoders: texts to the token ids of AutoTokenizer, with the `tokenizers` library alone where possible."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from training.models.repository_files import (
    blame_tokenizer,
    chat_template,
    read_json,
    require_bounded,
    special_tokens,
    text_prompts,
)
from training.problems import UserError
from training.tokenization.special_tokens import MARK

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

Chat = tuple[str, Mapping[str, str]]
"""A chat template and the special tokens, by name, that it may use."""
_fails_on_texts = partial(blame_tokenizer, "tokenizer.json", "it fails on texts of the rows")
_BATCH_TEXTS = 1000
"""The texts that are counted together. More need more memory and are not faster."""


@dataclass(frozen=True)
class Encoded:
    """The tokens of N rows; T tokens of all rows together."""

    lengths: npt.NDArray[np.int32]  # (N,) tokens of each row
    ids: npt.NDArray[np.int32]  # (T,)
    types: npt.NDArray[np.int8] | None  # (T,) token_type_ids; None for single texts
    lost: npt.NDArray[np.int64]  # (N,) truncated tokens of each row
    words: npt.NDArray[np.int32] | None = None  # (T,) the word of its row, -1 for none; only of `encode_words`
    # Only of `encode_located`: (T,) the first character, and the one after the last; -1 for none
    starts: npt.NDArray[np.int32] | None = None
    stops: npt.NDArray[np.int32] | None = None


class Encoder(ABC):
    """A tokenizer that truncates and never pads."""

    max_length: int
    eos: int | None
    """The tokenizer's eos token, if it has one."""
    unk: int | None
    """The token for what the tokenizer cannot write, unless it is the eos token too."""
    chat: Chat | None
    """The chat template, if the tokenizer has one."""
    prompts: Mapping[str, str] = {}
    """The prompts of sentence-transformers, which are put before texts, by name."""

    @property
    @abstractmethod
    def added_tokens(self) -> Set[int]:
        """The tokens that are found in a text before it is split, such as special tokens."""

    @property
    @abstractmethod
    def special_texts(self) -> Sequence[str]:
        """The special tokens that a text can spell; none if they are encoded as text."""

    @abstractmethod
    def special_tokens(self, pairs: bool) -> int:
        """The number of special tokens that are added to every text, or pair of texts."""

    @abstractmethod
    def encode(self, texts: list[str], pairs: list[str] | None) -> Encoded:
        """The tokens of these texts, or of pairs of them."""

    @abstractmethod
    def encode_whole(self, texts: list[str]) -> Encoded:
        """All tokens of these texts, without truncation."""

    @abstractmethod
    def encode_targets(self, texts: list[str], max_length: int) -> Encoded:
        """The tokens of target texts, which some tokenizers encode differently, truncated to `max_length`.

        Raises UserError if the tokenizer has no target language.
        """

    # These map tokens to the text. They raise UserError if the tokenizer cannot.

    @abstractmethod
    def encode_words(self, rows: list[list[str]]) -> Encoded:
        """The tokens of lists of words, each word split on its own, with `words`."""

    @abstractmethod
    def encode_located(self, texts: list[str], *, special: bool) -> Encoded:
        """All tokens of these texts with `starts` and `stops`, and with special tokens if `special`. A special token
        behind a MARK of `special_tokens` is encoded as text."""

    @abstractmethod
    def words_of(self, texts: list[str]) -> npt.NDArray[np.int32]:
        """(T,) the word of each token of `encode`, -1 for special tokens."""


class FastEncoder(Encoder):
    """A tokenizer of the `tokenizers` library, which encodes in its own threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_length: int,
        *,
        side: str,
        split_special_tokens: bool,
        eos: int | None,
        unk: int | None = None,
        chat: Chat | None = None,
    ) -> None:
        """Truncates on this `side`. With `split_special_tokens`, special tokens in a text are encoded as text."""
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = split_special_tokens
        self.max_length, self.eos, self.chat = max_length, eos, chat
        self.unk = None if unk == eos else unk
        self.tokenizer = tokenizer
        self._side = side
        self._truncate()

    def _truncate(self) -> None:
        self.tokenizer.enable_truncation(self.max_length, strategy="longest_first", direction=self._side)

    @contextmanager
    def truncation(self, max_length: int | None, **settings: Any) -> Iterator[None]:
        """Inside, texts are truncated to `max_length`, or not at all if it is None."""
        if max_length is None:
            self.tokenizer.no_truncation()
        else:
            self.tokenizer.enable_truncation(max_length, **settings)
        try:
            yield
        finally:
            self._truncate()

    @cached_property
    def _added(self) -> Mapping[int, Any]:
        return self.tokenizer.get_added_tokens_decoder()

    @property
    def added_tokens(self) -> Set[int]:
        return self._added.keys()

    @cached_property
    def special_texts(self) -> Sequence[str]:
        if self.tokenizer.encode_special_tokens:
            return []
        return [token.content for token in self._added.values() if token.special]

    def special_tokens(self, pairs: bool) -> int:
        return self.tokenizer.num_special_tokens_to_add(pairs)

    def encode(self, texts: list[str], pairs: list[str] | None) -> Encoded:
        rows: list[Any] = texts if pairs is None else list(zip(texts, pairs, strict=True))
        with _fails_on_texts():
            encodings = self.tokenizer.encode_batch_fast(rows)  # faster because it computes no offsets
        lengths, ids = _concatenate_ids(encodings)
        if pairs is None:
            return Encoded(lengths, ids, None, self._count_lost(encodings, lengths))
        types = np.fromiter(chain.from_iterable(encoding.type_ids for encoding in encodings), np.int8, len(ids))
        lost = np.zeros(len(encodings), np.int64)
        if len(full := np.flatnonzero(lengths >= self.max_length)):
            # Encoded again: `overflowing` of a pair combines parts of each text with all parts of the other.
            with self.truncation(None), _fails_on_texts():
                untruncated = self.tokenizer.encode_batch_fast([rows[row] for row in full.tolist()])
            lost[full] = np.array([*map(len, untruncated)]) - lengths[full]
        return Encoded(lengths, ids, types, lost)

    def _count_lost(self, encodings: list[Encoding], lengths: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """(N,) the truncated tokens of each text."""
        lost = np.zeros(len(encodings), np.int64)
        if self.tokenizer.truncation is None:
            return lost
        special = self.special_tokens(pairs=False)  # in each part of the rest, too
        # Only a full row can be truncated, and `overflowing` is slow.
        for row in np.flatnonzero(lengths >= self.tokenizer.truncation["max_length"]).tolist():
            lost[row] = sum(len(part) - special for part in encodings[row].overflowing)
        return lost

    def encode_whole(self, texts: list[str]) -> Encoded:
        with self.truncation(None):
            return self.encode(texts, None)

    def encode_targets(self, texts: list[str], max_length: int) -> Encoded:
        with self.truncation(max_length, direction=self._side):
            return self.encode(texts, None)

    def encode_words(self, rows: list[list[str]]) -> Encoded:
        """The ids of AutoTokenizer with `is_split_into_words`. Byte pairs get a space before each word, as in a text
        and with `add_prefix_space`."""
        if self._needs_spaces:
            rows = [[word if word.startswith(" ") else f" {word}" for word in row] for row in rows]
        with _fails_on_texts():
            encodings = self.tokenizer.encode_batch(rows, is_pretokenized=True)  # encode_batch_fast gives no words
        lengths, ids = _concatenate_ids(encodings)
        return Encoded(lengths, ids, None, self._count_lost(encodings, lengths), _word_ids(encodings))

    @cached_property
    def _needs_spaces(self) -> bool:
        """Whether a word without a space before it is the rest of a word, as for byte pairs without add_prefix_space:
        they write the space as \u0120."""
        before = self.tokenizer.pre_tokenizer
        if before is None:
            return False
        (alone, _), *_ = before.pre_tokenize_str("a")
        (spaced, _), *_ = before.pre_tokenize_str(" a")
        return (alone, spaced) == ("a", "\u0120a")

    def encode_located(self, texts: list[str], *, special: bool) -> Encoded:
        if any(MARK in text for text in texts):
            return self._encode_marked(texts, special=special)
        with self.truncation(None), _fails_on_texts():
            encodings = self.tokenizer.encode_batch(texts, add_special_tokens=special)
        lengths, ids = _concatenate_ids(encodings)
        # If the tokenizer trims spaces from offsets, a token of one space has an empty span after the space.
        places = (
            place
            for encoding in encodings
            for (start, stop), added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True)
            for place in ((-1, -1) if added else (max(0, start - (start == stop)), stop))
        )
        starts, stops = np.fromiter(places, np.int32, 2 * len(ids)).reshape(-1, 2).T
        return Encoded(lengths, ids, None, np.zeros(len(texts), np.int64), starts=starts, stops=stops)

    def _encode_marked(self, texts: list[str], *, special: bool) -> Encoded:
        """`encode_located` of texts with marks: the tokens are those of the texts without them, except that each marked
        special token becomes the tokens of its spelling."""
        encoded = self.encode_located([text.replace(MARK, "") for text in texts], special=special)
        assert encoded.starts is not None and encoded.stops is not None
        ends = np.cumsum(encoded.lengths)[:-1]
        is_special = np.isin(encoded.ids, [id for id, token in self._added.items() if token.special])
        columns = (encoded.ids, encoded.starts, encoded.stops, is_special)
        rows = []
        for text, *of_row in zip(texts, *(np.split(column, ends) for column in columns), strict=True):
            marks = np.array([place for place, character in enumerate(text) if character == MARK], np.int64)
            marks -= np.arange(len(marks))  # places in the text without marks
            plain, tokens = text.replace(MARK, ""), []
            for id, start, stop, could_be_text in zip(*(column.tolist() for column in of_row), strict=True):
                if could_be_text and ((start <= marks) & (marks < stop)).any():
                    tokens += [
                        (one, start + first, start + last) for one, first, last in self._spell(plain[start:stop])
                    ]
                else:
                    tokens.append((id, start, stop))
            ids, starts, stops = np.array(tokens, np.int32).reshape(-1, 3).T
            # Back to places in the text with marks; -1 stays.
            starts = starts + np.searchsorted(marks, starts, side="right").astype(np.int32)
            stops = stops + np.searchsorted(marks, stops, side="left").astype(np.int32)
            rows.append((ids, starts, stops))
        lengths = np.array([len(ids) for ids, *_ in rows], np.int32)
        ids, starts, stops = map(np.concatenate, zip(*rows, strict=True))
        return Encoded(lengths, ids, None, np.zeros(len(texts), np.int64), starts=starts, stops=stops)

    def _spell(self, text: str) -> list[tuple[int, int, int]]:
        """The tokens of a text in which special tokens are text, each with its first character and the one after."""
        split, self.tokenizer.encode_special_tokens = self.tokenizer.encode_special_tokens, True
        try:
            encoding = self.tokenizer.encode(text, add_special_tokens=False)
        finally:
            self.tokenizer.encode_special_tokens = split
        return [(id, start, stop) for id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)]

    def words_of(self, texts: list[str]) -> npt.NDArray[np.int32]:
        with _fails_on_texts():
            return _word_ids(self.tokenizer.encode_batch(texts))


def _concatenate_ids(encodings: list[Encoding]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(N,) the number of tokens of each encoding, and (T,) the ids of all."""
    lengths = np.fromiter(map(len, encodings), np.int32, len(encodings))
    ids = chain.from_iterable(encoding.ids for encoding in encodings)
    return lengths, np.fromiter(ids, np.int32, int(lengths.sum()))


def _word_ids(encodings: list[Encoding]) -> npt.NDArray[np.int32]:
    """(T,) the word of each token, -1 for special tokens."""
    words = chain.from_iterable(encoding.word_ids for encoding in encodings)
    return np.fromiter((-1 if word is None else word for word in words), np.int32)


def load_fast_encoder(folder: Path, max_length: int) -> FastEncoder:
    """The encoder of a folder's tokenizer.json, for folders of which `repository_files.uses_tokenizer_json` is true.

    Raises UserError if the file cannot be read.
    """
    from tokenizers import AddedToken, Tokenizer, processors

    path = folder / "tokenizer.json"
    with blame_tokenizer(str(path), "tokenizer.json is not readable"):
        tokenizer = Tokenizer.from_file(str(path))
    require_bounded(tokenizer, path)
    settings = read_json(folder / "tokenizer_config.json")
    # As in transformers: special tokens that the file lacks are added, and the texts of a pair get different types.
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    special = special_tokens(settings)
    tokenizer.add_tokens(
        [AddedToken(token, special=True) for token in dict.fromkeys(special.values()) if token not in known]
    )
    if tokenizer.post_processor is None:
        tokenizer.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1")
    # The settings of older repositories, such as BERT's, leave out the names that their class has.
    unknown = special.get("unk_token", getattr(tokenizer.model, "unk_token", None))
    eos, unk = (
        None if token is None else tokenizer.token_to_id(token) for token in (special.get("eos_token"), unknown)
    )
    side = settings.get("truncation_side") or (tokenizer.truncation or {}).get("direction", "right")
    if side not in ("left", "right"):
        message = f"truncation_side {side!r} is neither 'left' nor 'right': correct it, or save the tokenizer again."
        raise UserError.of("tokens", str(folder / "tokenizer_config.json"), message)
    encoder = FastEncoder(
        tokenizer,
        max_length,
        side=side,
        split_special_tokens=bool(settings.get("split_special_tokens", False)),
        eos=eos,
        unk=unk,
        chat=chat_template(folder),
    )
    encoder.prompts = text_prompts(folder)
    return encoder


@dataclass(frozen=True)
class Windows:
    """The windows of pairs of texts, in order; each pair has at least one, and no token is lost. W windows of all,
    T tokens of all windows."""

    pair: npt.NDArray[np.int64]  # (W,) the number of its pair
    lengths: npt.NDArray[np.int32]  # (W,) the number of its tokens
    ids: npt.NDArray[np.int32]  # (T,)
    types: npt.NDArray[np.int8]  # (T,) the token_type_ids
    second: npt.NDArray[np.bool_]  # (T,) whether the token is of the second text
    offsets: npt.NDArray[np.int32]  # (T, 2) its first character, and the one after its last; 0, 0 for special tokens

    def iterate_offsets(self) -> Iterator[npt.NDArray[np.int32]]:
        """(length, 2) for each window, the offsets of tokens of the second text; -1 and -1 for others."""
        yield from np.split(np.where(self.second[:, None], self.offsets, -1), np.cumsum(self.lengths)[:-1])


def encode_windows(
    encoder: Encoder, firsts: list[str], seconds: list[str], stride: int
) -> tuple[Windows, npt.NDArray[np.int64]]:
    """Windows of `max_length` tokens, with the whole first text and a part of the second, which starts with the last
    `stride` tokens of the window before; and (N,) the tokens of the first text of each pair that are lost.

    For max_length 9, stride 2, the question [q1 q2] and the context [c1 c2 c3 c4 c5 c6]

        [CLS] q1 q2 [SEP] c1 c2 c3 c4 [SEP]     pair 0
        [CLS] q1 q2 [SEP] c3 c4 c5 c6 [SEP]     pair 0

    A first text that leaves no room for more than `stride` tokens is cut to half of the tokens beside these.

    Raises UserError if there is no room for such a text either, or if the tokenizer cannot map tokens to characters.
    """
    if not isinstance(encoder, FastEncoder):
        message = "encodes in Python and does not map tokens to characters: choose a model with a tokenizer.json that "
        message += "AutoTokenizer uses unchanged."
        raise UserError.of("tokens", "the model's tokenizer", message)
    special = encoder.special_tokens(pairs=True)
    room = encoder.max_length - special - stride
    if room < 2:
        message = (
            f"{encoder.max_length} leaves no room for a window with {special} special tokens and the {stride} that "
        )
        message += "windows have in common: choose more, or less as options.stride."
        raise UserError.of("tokens", "tokens.max_length", message)
    tokens = encoder.encode_whole(firsts).lengths.astype(np.int64) - encoder.special_tokens(pairs=False)
    lost = np.where(tokens >= room, tokens - room // 2, 0)
    firsts = [_first_tokens(encoder, text, room // 2) if cut else text for text, cut in zip(firsts, lost, strict=True)]
    with encoder.truncation(encoder.max_length, stride=stride, strategy="only_second"):
        pairs = encoder.tokenizer.encode_batch(list(zip(firsts, seconds, strict=True)))  # the fast one has no offsets
    windows = [window for pair in pairs for window in (pair, *pair.overflowing)]
    lengths, ids = _concatenate_ids(windows)
    texts = chain.from_iterable(window.sequence_ids for window in windows)
    offsets = chain.from_iterable(chain.from_iterable(window.offsets for window in windows))
    cut = Windows(
        np.repeat(np.arange(len(pairs)), [1 + len(pair.overflowing) for pair in pairs]),
        lengths,
        ids,
        np.fromiter(chain.from_iterable(window.type_ids for window in windows), np.int8, len(ids)),
        np.fromiter((text == 1 for text in texts), np.bool_, len(ids)),
        np.fromiter(offsets, np.int32, 2 * len(ids)).reshape(-1, 2),
    )
    return cut, lost


def _first_tokens(encoder: FastEncoder, text: str, tokens: int) -> str:
    """The text of the first tokens of a text."""
    encoding = encoder.tokenizer.encode(text, add_special_tokens=False)
    return text[: encoding.offsets[tokens - 1][1]]


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
    tokenizer = load_fast_encoder(folder, max_length=1).tokenizer
    tokenizer.no_truncation()

    def count(texts: list[str]) -> int:
        batches = (texts[start : start + _BATCH_TEXTS] for start in range(0, len(texts), _BATCH_TEXTS))
        encoded = (tokenizer.encode_batch_fast(batch, add_special_tokens=False) for batch in batches)
        with _fails_on_texts():
            return sum(len(encoding) for encodings in encoded for encoding in encodings)

    return count
