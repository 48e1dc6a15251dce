"""Search for nearly equal texts in two splits, by MinHash and LSH (Broder, 1997; Indyk and Motwani, 1998) of the
package rensa, which the extra near-duplicates installs; training/data/checks.py reports them.

Texts are compared by their shingles: all strings of SHINGLE_BYTES bytes of UTF-8, without case and with single spaces.
That is six letters of English and two characters of Chinese, so scripts without spaces are compared too. Two texts are
nearly equal if their shingles have a Jaccard index of at least LEAST_SIMILARITY. LSH finds the candidates, of which it
misses about two in a hundred at that similarity and hardly any above 0.7; then their shingles are compared.

Memory: the texts and some 500 bytes of each row of the later split, and a block of rows of the earlier one.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from training.data.duplicates import DuplicateTexts, NamedRow
from training.data.row_problems import shorten
from training.problems import UserError

SHINGLE_BYTES = 6
LEAST_SIMILARITY = 0.6
MOST_CHARACTERS = 100_000  # of a row that are compared
_PERMUTATIONS, _BANDS = 120, 30
_SEED = 1
_ESTIMATE_ERROR = 0.15  # more than three standard errors


@dataclass(frozen=True)
class NearDuplicates:
    """The number of rows of the later split that are nearly equal to one of the earlier split, and the first of
    them."""

    count: int
    rows: tuple[NamedRow, NamedRow]
    """The later row, and the earlier one."""
    alike: str
    """How much they are alike, in words."""


def require_package() -> None:
    """Raises UserError if the package is not installed."""
    if find_spec("rensa") is None:
        message = (
            "needs the package rensa, which is not installed here: install the extra, "
            "`pip install 'finetune-flows[near-duplicates]'`, or set it to ignore."
        )
        raise UserError.of("recipe", "data.checks.near_duplicates", message)


def find_near_duplicates(rows: DuplicateTexts, earlier: str, later: str) -> NearDuplicates | None:
    """Returns the rows of the later split that are nearly equal to a row of the earlier one, without those that are
    equal to one."""
    from rensa import RMinHashLSH

    index, sketches, texts = RMinHashLSH(LEAST_SIMILARITY, _PERMUTATIONS, _BANDS), [], []
    for position, text in enumerate(_texts(rows, later)):
        texts.append(text)
        sketches.append(_sketch(shingles(text)))
        index.insert(position, sketches[-1])
    shingles_at = lru_cache(maxsize=1000)(lambda position: shingles(texts[position]))
    found: dict[int, tuple[int, float]] = {}
    equal: set[int] = set()
    for earlier_position, text in enumerate(_texts(rows, earlier)):
        own = shingles(text)
        sketch = _sketch(own)
        for position in index.query(sketch):
            if position in equal or (position in found and text != texts[position]):
                continue
            if text == texts[position]:
                equal.add(position)
            elif sketch.jaccard(sketches[position]) >= LEAST_SIMILARITY - _ESTIMATE_ERROR:
                other = shingles_at(position)
                similarity = len(own & other) / len(own | other)
                if similarity >= LEAST_SIMILARITY:
                    found[position] = earlier_position, similarity
    near = found.keys() - equal
    if not near:
        return None
    first = min(near)
    other_position, similarity = found[first]
    places = rows.place(later, first), rows.place(earlier, other_position)
    shown = shorten(texts[first]), shorten(_text_at(rows, earlier, other_position))
    return NearDuplicates(len(near), places, f"{similarity:.0%} alike: {shown[0]} and {shown[1]}")


def find_like(texts: Sequence[str], others: Iterable[str]) -> npt.NDArray[np.bool_]:
    """(N,) whether each text is nearly equal, or equal, to one of the others."""
    from rensa import RMinHashLSH

    index, sketches = RMinHashLSH(LEAST_SIMILARITY, _PERMUTATIONS, _BANDS), []
    for position, text in enumerate(texts):
        sketches.append(_sketch(shingles(text)))
        index.insert(position, sketches[-1])
    found = np.zeros(len(texts), np.bool_)
    for text in others:
        own = shingles(text)
        sketch = _sketch(own)
        for position in index.query(sketch):
            if not found[position] and sketch.jaccard(sketches[position]) >= LEAST_SIMILARITY - _ESTIMATE_ERROR:
                other = shingles(texts[position])
                found[position] = len(own & other) >= LEAST_SIMILARITY * len(own | other)
    return found


def shingles(text: str) -> set[bytes]:
    """Returns the shingles of a text; a shorter text is its only one."""
    spelt = " ".join(unicodedata.normalize("NFKC", text[:MOST_CHARACTERS]).casefold().split()).encode()
    return {spelt[start : start + SHINGLE_BYTES] for start in range(max(1, len(spelt) - SHINGLE_BYTES + 1))}


def _sketch(found: set[bytes]) -> Any:
    from rensa import RMinHash

    sketch = RMinHash(num_perm=_PERMUTATIONS, seed=_SEED)
    sketch.update(list(found))
    return sketch


def _texts(rows: DuplicateTexts, split: str) -> Iterator[str]:
    """Yields the text of each row: its inputs, of conversations the messages without those of the system, which many
    rows share."""
    for values in rows.inputs_of(split):
        yield " ".join(map(_plain_text, values))


def _text_at(rows: DuplicateTexts, split: str, position: int) -> str:
    return next(text for place, text in enumerate(_texts(rows, split)) if place == position)


def _plain_text(value: Any) -> str:
    if isinstance(value, str) and value[:1] in ("[", "{", '"'):
        try:
            return _plain_text(json.loads(value))
        except (ValueError, RecursionError):  # a text that only begins as JSON does, or with a thousand brackets
            return value
    if isinstance(value, dict):
        parts = value.values() if "content" not in value else [value["content"]]
        return "" if value.get("role") == "system" else " ".join(map(_plain_text, parts))
    if isinstance(value, list):
        return " ".join(map(_plain_text, value))
    return value if isinstance(value, str) else json.dumps(value)
