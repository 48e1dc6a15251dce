"""Words, characters and scripts of texts in any language, and statistics of rows that need no model.

"Don't, Äpfel: naïve_x2"   don t äpfel naïve x2        words: runs of letters, their marks and digits, in lower case
"हिन्दी में"                   हिन्दी में
"我喜欢 tea"                我 喜 欢 tea               characters, where a script has no spaces between words

N rows.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import regex

Floats = npt.NDArray[np.float64]
_NOT_CHINESE = r"\p{Hiragana}\p{Katakana}\u30fc\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_SPACELESS = rf"\p{{Han}}{_NOT_CHINESE}"
_CHARACTER = regex.compile(f"[{_SPACELESS}]")
_JAPANESE_OR_THAI = regex.compile(f"[{_NOT_CHINESE}]")
_WORD = regex.compile(rf"[{_SPACELESS}]\p{{M}}*|(?:(?![{_SPACELESS}])[\p{{L}}\p{{N}}][\p{{M}}\u200c\u200d]*)+")
_ASCII = re.compile("[a-z0-9]+")  # the same of ASCII, and much faster


def split_words(text: str) -> list[str]:
    """The words of a text, in lower case and Unicode's composed form."""
    text = text.lower()
    if text.isascii():
        return _ASCII.findall(text)
    return list(_WORD.findall(unicodedata.normalize("NFC", text)))


def find_spaceless_script(text: str) -> Literal["", "chinese", "other"]:
    """The script of a text most of whose words are characters of scripts without spaces between words: `other` for
    Japanese or Thai, for example; empty for all other texts."""
    if text.isascii():
        return ""
    words = split_words(text)
    if 2 * sum(_CHARACTER.match(word) is not None for word in words) <= len(words):
        return ""
    return "other" if _JAPANESE_OR_THAI.search(text) else "chinese"


FIELD = "field."
"""Prefix of the columns of predictions in the output of training.programs.observe."""
NO_SCRIPT = "none"
CHARACTER_CLASSES = ("upper_case", "letters_beyond_ascii", "digits", "punctuation")
"""The classes whose share of a text's characters is compared. White space belongs to none."""


def join_texts(values: Sequence[Any]) -> str:
    """All texts of a row's values, such as both texts of a pair or all messages of a conversation, a line each."""
    return "\n".join(filter(None, map(_flatten, values)))


def _flatten(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return join_texts([*value.values()])
    return join_texts(value) if isinstance(value, Sequence) else ""


def count_characters(texts: Sequence[str]) -> dict[str, Floats]:
    """By character class, (N,) the share of each text's characters; 0 for an empty text."""
    shares = np.zeros((len(texts), len(CHARACTER_CLASSES)))
    for row, text in enumerate(texts):
        counts = [0] * len(CHARACTER_CLASSES)
        for character, count in Counter(text).items():
            for place in _classes(character):
                counts[place] += count
        shares[row] = counts
    shares /= np.maximum(1, [len(text) for text in texts])[:, None]
    return dict(zip(CHARACTER_CLASSES, shares.T, strict=True))


def find_scripts(texts: Sequence[str]) -> list[str]:
    """(N,) the script of most of a text's letters, such as LATIN, CYRILLIC or CJK; `none` without letters."""
    found = []
    for text in texts:
        counts: Counter[str] = Counter()
        for character, count in Counter(text).items():
            if script := _script(character):
                counts[script] += count
        found.append(counts.most_common(1)[0][0] if counts else NO_SCRIPT)
    return found


def find_empty(texts: Sequence[str]) -> npt.NDArray[np.bool_]:
    """(N,) whether a text has nothing but white space."""
    return np.array([not text.strip() for text in texts], bool)


def find_repeated(texts: Sequence[str]) -> npt.NDArray[np.bool_]:
    """(N,) whether an earlier row has the same text. The share grows with N: compare samples of equal size."""
    seen: set[str] = set()
    repeated = []
    for text in texts:
        repeated.append(text in seen)
        seen.add(text)
    return np.array(repeated, bool)


@lru_cache(maxsize=65_536)
def _classes(character: str) -> tuple[int, ...]:
    category = unicodedata.category(character)
    members = {
        "upper_case": category in ("Lu", "Lt"),
        "letters_beyond_ascii": category[0] == "L" and not character.isascii(),
        "digits": category[0] == "N",
        "punctuation": category[0] in "PS",
    }
    return tuple(place for place, name in enumerate(CHARACTER_CLASSES) if members[name])


@lru_cache(maxsize=65_536)
def _script(character: str) -> str | None:
    """The first word of a letter's Unicode name, which is its script."""
    return unicodedata.name(character, "").partition(" ")[0] if character.isalpha() else None
