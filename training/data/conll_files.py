"""Rows of CoNLL files: a word a line with its tags, and a blank line between sentences.

Each column of a file is a list a sentence. Without data.header, .conllu files have the columns of CoNLL-U
(https://universaldependencies.org/format.html), and others have `tokens`, the first, and `tags`, the last.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from training.data.decoding import LONGEST_ROW_BYTES, open_text
from training.data.file_systems import display_name
from training.data.readers import Block
from training.data.row_dicts import from_mappings
from training.data.row_problems import RowProblem
from training.data.sources import is_conllu

if TYPE_CHECKING:
    from training.data.readers import ExtraColumns
    from training.recipe import Data
    from training.recipe.source_columns import SourceColumns

CONLLU = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
_ID = re.compile(r"\d+([-.]\d+)?")
"""The number of a word in CoNLL-U, of a range of words such as 1-2, or of an empty node such as 1.1."""
_SENTENCE_WORDS = 100_000
"""The words of a sentence that suggest that no blank line separates sentences."""


def read_conll(wanted: SourceColumns, split: str, pinned: Mapping[str, Any], slices: ExtraColumns) -> Iterator[Block]:
    """CoNLL: a word a line, its columns between tabs or white space, a blank line between sentences. Comments and
    -DOCSTART- lines are skipped. Tags in IOB1 are read as IOB2."""
    for file in pinned[split]:
        where = display_name(file)
        labels = wanted.source_names[wanted.labels.source_name] if wanted.labels else None
        in_iob1 = labels is not None and _is_in_iob1(file, wanted.data, labels)
        comments = _Comments()

        def rows(
            file: str = file, labels: str | None = labels, in_iob1: bool = in_iob1, comments: _Comments = comments
        ) -> Iterator[tuple[int, Any]]:
            for number, row in read_sentences(file, wanted.data):
                if labels is not None and not isinstance(row, RowProblem) and labels in row:
                    comments.add(number, next(iter(row.values())), row[labels])
                    row[labels] = _to_iob2(row[labels]) if in_iob1 else row[labels]
                yield number, row

        last: Block | None = None
        for block in from_mappings(rows(), wanted, where, slices):
            if last is not None:
                yield last
            remarks = []
            if in_iob1 and len(block.numbers):
                remarks = [RowProblem(int(block.numbers[0]), "iob1", "is in a file with tags in IOB1, read as IOB2")]
                in_iob1 = False
            last = replace(block, remarks=tuple(remarks))
        if last is not None:
            yield replace(last, remarks=(*last.remarks, *comments.remarks()))


@dataclass
class _Comments:
    """Sentences that begin with a line such as `# doc 7`, by the tag that it gives to the word `#`. Whether it is a
    comment shows only at the end of the file: no word has such a tag."""

    beginnings: dict[str, list[int]] = field(default_factory=dict)
    """The first lines, by tag."""
    tags: set[str] = field(default_factory=set)
    """The tags of other words."""

    def add(self, number: int, words: list[str], tags: list[str]) -> None:
        if len(words) > 1 and words[0] == "#" and tags[0] != "#":
            self.beginnings.setdefault(tags[0], []).append(number)
            tags = tags[1:]
        self.tags.update(tags)

    def remarks(self) -> Iterator[RowProblem]:
        for tag, numbers in self.beginnings.items():
            if tag not in self.tags:
                description = "begins with a line like a comment, which is read as the word '#' with a tag of its own"
                yield from (RowProblem(number, "comment_lines", description, f", {tag!r}") for number in numbers)


def read_sentences(file: str, data: Data) -> Iterator[tuple[int, Any]]:
    """Yields the columns of each sentence with the number of its first line, or a RowProblem."""
    names = data.header or (CONLLU if is_conllu(file) else None)
    width = None if names is None else len(names)
    for number, lines in _split_sentences(file, data):
        try:
            words = [line.decode() for line in lines]
        except UnicodeDecodeError as error:
            yield (
                number,
                RowProblem(number, "encoding", "is not UTF-8 text", f" (byte 0x{error.object[error.start]:02x})"),
            )
            continue
        fields = [_split_fields(word, data) for word in words]
        # A comment at the start of a sentence, such as "# source", has not the columns of words.
        while len(fields) > 1 and words[0].startswith("#") and len(fields[0]) != len(fields[-1]):
            del words[0], fields[0]
        is_comment = fields[0][0] == "#" if width is None else words[0].startswith("#") and len(fields[0]) != width
        if len(fields) == 1 and is_comment:
            continue
        width = width or len(fields[0])
        uneven = next((place for place, one in enumerate(fields) if len(one) != width), None)
        if uneven is not None:
            expected = f"where {'data.header names' if data.header else 'other words have'} {width}"
            description = f"has a word with {len(fields[uneven])} columns {expected}"
            yield number, RowProblem(number, "ragged", description, f": {words[uneven]!r}")
            continue
        if width == len(CONLLU) and all(_ID.fullmatch(one[0]) for one in fields):
            fields = [one for one in fields if one[0].isdecimal()] or fields  # without ranges and empty nodes
        columns = [list(column) for column in zip(*fields, strict=True)]
        if names is not None:
            yield number, dict(zip(names, columns, strict=True))
        else:
            yield number, {"tokens": columns[0]} | ({"tags": columns[-1]} if width > 1 else {})


def _split_sentences(file: str, data: Data) -> Iterator[tuple[int, list[bytes]]]:
    """Yields the lines of each sentence, with the number of the first."""
    lines: list[bytes] = []
    start, number, has_comments = 0, 0, is_conllu(file)
    with open_text(file, data) as raw:
        while line := raw.readline(LONGEST_ROW_BYTES):
            number += 1
            is_blank = not (line if line.isascii() else line.decode("utf-8", "replace")).strip()
            is_comment = line.startswith(b"-DOCSTART-") or (has_comments and line.startswith(b"#"))
            if not is_blank and not is_comment:
                start = start if lines else number
                lines.append(line.rstrip(b"\r\n"))
            if lines and (is_blank or len(lines) >= _SENTENCE_WORDS):
                yield start, lines
                lines = []
    if lines:
        yield start, lines


def _split_fields(line: str, data: Data) -> list[str]:
    delimiter = data.delimiter or ("\t" if "\t" in line else None)
    return line.split(delimiter)


def _is_in_iob1(file: str, data: Data, column: str) -> bool:
    """Whether spans begin with I-X, and with B-X only directly after another span of X (Ramshaw and Marcus, 1995)."""
    found = False
    for _, row in read_sentences(file, data):
        before = "O"
        for tag in () if isinstance(row, RowProblem) else row.get(column, ()):
            begins = before == "O" or before[2:] != tag[2:]
            if tag.startswith("B-") and begins:
                return False
            found |= tag.startswith("I-") and begins
            before = tag
    return found


def _to_iob2(tags: list[str]) -> list[str]:
    before = ["O", *tags]
    return [
        f"B-{tag[2:]}" if tag.startswith("I-") and (last == "O" or last[2:] != tag[2:]) else tag
        for last, tag in zip(before, tags, strict=False)
    ]
