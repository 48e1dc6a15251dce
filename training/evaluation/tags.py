"""Tags of words, and the spans of words that they mean.

In IOB2 a span's first word is tagged B-X, X its type, its others I-X, and words in no span O. Where no tag has such a
prefix, as parts of speech have none, each word is a span of its own, of its tag's type.

N rows, W words of all of them together, S spans, L tags, T types of spans.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]

OUTSIDE = "O"
_IOB2 = re.compile(r"O|[BI](-.*)?", re.DOTALL)


def is_iob2(tags: Iterable[str]) -> bool:
    """Whether all of the tags are O, B-X or I-X; B and I alone are of a type without a name."""
    return all(_IOB2.fullmatch(tag) for tag in tags)


def type_of(tag: str) -> str:
    """X of B-X and I-X."""
    return tag[2:]


@dataclass(frozen=True)
class Spans:
    """Spans of words, in the words' order; no two of them share a word."""

    rows: Places  # (S,) the row of each
    starts: Places  # (S,) its first word
    ends: Places  # (S,) the word behind its last
    types: Places  # (S,) its type, a place among all types


def types_of(tags: Sequence[str]) -> list[str]:
    """All types of spans that these tags can mean, sorted."""
    return sorted({found for found in _types(tags) if found is not None})


def spans(tags: Sequence[str], given: Places, rows: Places) -> Spans:
    """The spans of words with a tag each, its place in `tags` (W,), -1 for a word without; `rows` (W,) is the row that
    a word is of, falling nowhere.

    As seqeval and conlleval read tags that a model gave: an I-X that follows no B-X or I-X begins a span, too.
    """
    types, of_tag = types_of(tags), _types(tags)
    places = np.array([-1 if found is None else types.index(found) for found in of_tag] + [-1], np.int64)
    iob2 = is_iob2(tags)
    begins = np.array([not (iob2 and tag.startswith("I")) for tag in tags] + [False])
    of_word = places[given]  # (W,) the last of each for -1
    new_row = np.diff(rows, prepend=-1) != 0
    other = np.diff(of_word, prepend=-1) != 0
    starting = (of_word >= 0) & (begins[given] | new_row | other)
    starts = np.flatnonzero(starting)
    over = np.append(np.flatnonzero(starting | new_row | (of_word < 0)), len(given))  # where no span goes on
    ends = over[np.searchsorted(over, starts, side="right")] if len(starts) else starts
    return Spans(rows[starts], starts, ends, of_word[starts])


def of_row(tags: Sequence[str], given: Sequence[int | None]) -> list[tuple[str, int, int]]:
    """The spans of one row whose words have these tags, None where a word has none: type, first word, and the word
    behind the last."""
    places = np.array([-1 if place is None else place for place in given], np.int64)
    found, types = spans(tags, places, np.zeros(len(places), np.int64)), types_of(tags)
    ends = zip(found.types.tolist(), found.starts.tolist(), found.ends.tolist(), strict=True)
    return [(types[kind], start, end) for kind, start, end in ends]


def agreement(
    tags: Sequence[str], references: Places, predictions: Places, rows: Places, number: int
) -> npt.NDArray[np.float64]:
    """(N, T, 3) the spans of each type in each of `number` rows: those that are there, those predicted, and those that
    are both, from their first word to their last. The words as `spans` takes them."""
    true, predicted = (spans(tags, given, rows) for given in (references, predictions))
    both = np.isin(_codes(predicted, len(rows)), _codes(true, len(rows)))
    types = len(types_of(tags))
    of_each = [found.rows * types + found.types for found in (true, predicted)]
    counts = [np.bincount(chosen, minlength=number * types) for chosen in (*of_each, of_each[1][both])]
    return np.stack(counts, axis=1).reshape(number, types, 3).astype(np.float64)


def _codes(found: Spans, words: int) -> Places:
    """A number for each span, the same for the same words and type."""
    return (found.types * words + found.starts) * (words + 1) + found.ends


def _types(tags: Sequence[str]) -> list[str | None]:
    """The type of span that a word with the tag is of; None for none."""
    if is_iob2(tags):
        return [None if tag == OUTSIDE else type_of(tag) for tag in tags]
    return list(tags)


def flattened(rows: Iterable[Sequence[Any]]) -> tuple[list[Any], Places]:
    """What all rows have one after another, (W,), and the row of each."""
    held = list(rows)
    lengths = np.fromiter(map(len, held), np.int64, len(held))
    return [one for row in held for one in row], np.repeat(np.arange(len(held)), lengths)
