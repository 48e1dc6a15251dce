"""Words of texts in any script.

"Don't, Äpfel: naïve_x2"   don t äpfel naïve x2        runs of letters, their marks and digits, in lower case
"हिन्दी में"                   हिन्दी में
"我喜欢 tea"                我 喜 欢 tea               characters, where a script has no spaces between words
"""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

import regex

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
