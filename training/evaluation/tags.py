"""Tags of words, and the spans of words that they mark.

In IOB2, a span's first word is tagged B-X, where X is its type, its other words I-X, and words outside spans O. If no
tag has such a prefix, as with parts of speech, each word is a span whose type is its tag.

N rows, W words of all rows, S spans, L tags, T types of spans.
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
_MARKED = re.compile(r"([bi])[-_.:/ ](.+)|(.+)[-_.:/ ]([bi])", re.DOTALL | re.IGNORECASE)


def is_iob2(tags: Iterable[str]) -> bool:
    """Whether all tags are O, B-X or I-X; B and I alone have the empty type."""
    return all(_IOB2.fullmatch(tag) for tag in tags)


def respelt_iob2(tags: Iterable[str]) -> dict[str, str]:
    """The tags of IOB2 that are written in another way, such as `B_PER`, `b-per` or `PER-B`, with their spelling in
    IOB2. Tags that only look so, such as `hepatitis-B`, have no second one of the same type."""
    found = dict[str, str]()
    for tag in tags:
        if not is_iob2([tag]) and (parts := _MARKED.fullmatch(tag)):
            found[tag] = f"{(parts[1] or parts[4]).upper()}-{parts[2] or parts[3]}"
    types = [{type_of(spelt) for spelt in found.values() if spelt[0] == mark} for mark in "BI"]
    return {tag: spelt for tag, spelt in found.items() if all(type_of(spelt) in one for one in types)}


def type_of(tag: str) -> str:
    """X of B-X and I-X."""
    return tag[2:]


@dataclass(frozen=True)
class Spans:
    """Spans of words, in the words' order; no two of them share a word."""

    rows: Places  # (S,) the row of each
    starts: Places  # (S,) its first word
    ends: Places  # (S,) the word after its last
    types: Places  # (S,) its type, an index of all types


def types_of(tags: Sequence[str]) -> list[str]:
    """All types of spans that these tags can mark, sorted."""
    return sorted({found for found in _types(tags) if found is not None})


def find_spans(tags: Sequence[str], given: Places, rows: Places) -> Spans:
    """The spans of words, from the index in `tags` of each word's tag (W,), -1 for none, and the ascending row (W,) of
    each word.

    As in seqeval and conlleval, an I-X that does not follow B-X or I-X begins a span, too.
    """
    types, of_tag = types_of(tags), _types(tags)
    places = np.array([-1 if found is None else types.index(found) for found in of_tag] + [-1], np.int64)
    iob2 = is_iob2(tags)
    begins = np.array([not (iob2 and tag.startswith("I")) for tag in tags] + [False])
    of_word = places[given]  # (W,) -1 selects the last entry
    new_row = np.diff(rows, prepend=-1) != 0
    other = np.diff(of_word, prepend=-1) != 0
    starting = (of_word >= 0) & (begins[given] | new_row | other)
    starts = np.flatnonzero(starting)
    over = np.append(np.flatnonzero(starting | new_row | (of_word < 0)), len(given))  # where no span continues
    ends = over[np.searchsorted(over, starts, side="right")] if len(starts) else starts
    return Spans(rows[starts], starts, ends, of_word[starts])


def find_row_spans(tags: Sequence[str], given: Sequence[int | None]) -> list[tuple[str, int, int]]:
    """The spans of one row, from the index of each word's tag, None for none: type, first word, word after the last."""
    places = np.array([-1 if place is None else place for place in given], np.int64)
    found, types = find_spans(tags, places, np.zeros(len(places), np.int64)), types_of(tags)
    ends = zip(found.types.tolist(), found.starts.tolist(), found.ends.tolist(), strict=True)
    return [(types[kind], start, end) for kind, start, end in ends]


def count_matches(
    tags: Sequence[str], references: Places, predictions: Places, rows: Places, number: int
) -> npt.NDArray[np.float64]:
    """(N, T, 3) the numbers of true, predicted and exactly matching spans of each type in each of `number` rows. The
    words are as in `find_spans`."""
    true, predicted = (find_spans(tags, given, rows) for given in (references, predictions))
    both = np.isin(_codes(predicted, len(rows)), _codes(true, len(rows)))
    types = len(types_of(tags))
    of_each = [found.rows * types + found.types for found in (true, predicted)]
    counts = [np.bincount(chosen, minlength=number * types) for chosen in (*of_each, of_each[1][both])]
    return np.stack(counts, axis=1).reshape(number, types, 3).astype(np.float64)


def _codes(found: Spans, words: int) -> Places:
    """A number for each span, equal for equal words and type."""
    return (found.types * words + found.starts) * (words + 1) + found.ends


def _types(tags: Sequence[str]) -> list[str | None]:
    """The type of span that each tag marks; None for none."""
    if is_iob2(tags):
        return [None if tag == OUTSIDE else type_of(tag) for tag in tags]
    return list(tags)


def flatten(rows: Iterable[Sequence[Any]]) -> tuple[list[Any], Places]:
    """The items of all rows in order, (W,), and the row of each."""
    lists = list(rows)
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    return [item for row in lists for item in row], np.repeat(np.arange(len(lists)), lengths)
