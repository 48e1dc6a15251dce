"""Mojibake: UTF-8 text that was read in another encoding, such as `CafÃ©` for `Café`.

Text in a single-byte encoding is hardly ever valid UTF-8 as well: `é` would have to follow `Ã`. So a text is garbled if
its bytes in that encoding are UTF-8 beyond ASCII.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from functools import cache

import pyarrow as pa
import pyarrow.compute as pc

_ENCODINGS = ("cp1252", "cp1251")
"""The encodings in which programs of Western Europe and of Russia garble UTF-8."""
# First bytes of two and three bytes that stand for Latin, Greek, Cyrillic, Hebrew, Arabic, punctuation and East Asian
# characters and for emoji. Other pairs, such as `ß»`, are more probable as they are.
_LEADS = bytes([*range(0xC2, 0xC6), 0xCE, 0xCF, 0xD0, 0xD1, *range(0xD7, 0xDA), *range(0xE2, 0xEA), 0xEF, 0xF0])
_DAMAGED = "\N{REPLACEMENT CHARACTER}"
_MARK = "\N{ZERO WIDTH NO-BREAK SPACE}"
_C1 = "training.data.mojibake.c1"


def _keep_c1(error: UnicodeError) -> tuple[bytes, int]:
    """Encodes the control characters U+0080 to U+009F, which some decoders write for bytes without a character."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    if max(text) > "\x9f":
        raise error
    return text.encode("latin-1"), error.end


codecs.register_error(_C1, _keep_c1)


@cache
def is_single_byte(encoding: str) -> bool:
    """Whether bytes beyond ASCII are characters by themselves, so that nearly any file can be read in the encoding."""
    alone = (bytes([byte]).decode(encoding, "ignore") for byte in range(0xA0, 0x100))
    return sum(map(bool, alone)) > 64


def misread(text: str, encoding: str) -> str | None:
    """Returns the text that was meant if all of it is UTF-8 read in a single-byte encoding; else None."""
    try:
        meant = text.encode(encoding, _C1).decode()
    except UnicodeError:
        return None
    return meant if meant != text else None


def misread_texts(texts: pa.Array, encoding: str) -> dict[int, str]:
    """Returns the positions of texts that are UTF-8 read in a single-byte encoding, with what was meant."""
    places = pc.indices_nonzero(pc.invert(pc.string_is_ascii(texts))).to_pylist()
    return {place: meant for place in places if (meant := misread(texts[place].as_py(), encoding))}


def garbled_texts(texts: pa.Array) -> Iterator[tuple[int, str, str]]:
    """Yields the position of each text with a garbled word, damaged character or byte order mark; words that follow
    "row 7"; and an example."""
    for place in pc.indices_nonzero(pc.match_substring_regex(texts, _SUSPICIOUS)).to_pylist():
        text = texts[place].as_py()
        if _DAMAGED in text:
            yield place, "has characters that an earlier program could not read (U+FFFD)", ""
        elif _MARK in text:
            yield place, "has a byte order mark (U+FEFF) within the text", ""
        for encoding in _ENCODINGS:
            words = ((word, misread(word, encoding)) for word in re.split(r"[ \t\r\n]+", text) if not word.isascii())
            if found := next(((word, meant) for word, meant in words if meant), None):
                yield place, f"has UTF-8 text that was read as {encoding}", f": {found[0]!r} for {found[1]!r}"
                break


def _pair(encoding: str) -> str:
    """Returns the pattern of a first byte and another byte of a character of UTF-8, as the encoding reads them."""
    following = bytes(range(0x80, 0xC0))
    classes = (_LEADS.decode(encoding), following.decode(encoding, "ignore") + following.decode("latin-1"))
    return "".join("[" + "".join(f"\\x{{{ord(character):x}}}" for character in one) + "]" for one in classes)


_SUSPICIOUS = "|".join([*map(_pair, _ENCODINGS), _DAMAGED, _MARK])
