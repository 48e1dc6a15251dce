"""Decisions of people about labels: data.corrections, a CSV file with a line for each row that was looked at.

A row is recognised by its name, a hash of its inputs (`row_names`), wherever it is in the source. So a decision holds
for all rows with the same inputs, and still holds after the rows have moved or somebody has corrected the source.

Only rows of train are changed, after the splits are drawn: no row changes its split. The rows of validation and test
stay as they are, because a list that a model makes names only rows that it has wrong. Corrected, a test split would
flatter that model, and every later one that is like it.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from training.data.arrow_columns import as_json, flat_values
from training.data.csv_files import FORMULA
from training.data.duplicates import Hashes
from training.data.file_systems import as_user_error, display_name, is_url, read_pieces
from training.data.label_indices import whole_number
from training.data.readers import Block
from training.data.row_problems import shorten
from training.local_files import read_local
from training.problems import Problem, UserError, nearest, on_one_line, relocated
from training.recipe.source_columns import SourceColumns

if TYPE_CHECKING:
    from training.recipe.column_types import Form, Mask

COLUMNS = ("row", "text", "label", "suggestion", "decision")
"""The columns of a list of labels to review. Only the first and the last are needed."""
NEEDED = ("row", "decision")
DROP, KEEP = "drop", "keep"
"""Decisions other than labels."""
_WORDS = {DROP: DROP, KEEP: KEEP, f"({DROP})": DROP, f"({KEEP})": KEEP}
"""Their spellings in small letters. Those in brackets are never taken for labels."""
FIELD = "data.corrections"
_ROW = re.compile(r"r[0-9a-f]{16}")
_OR = f"or {DROP}, {KEEP} or nothing"
_MOST_NAMED = 5
"""The rows of a file that one message names."""


def row_names(hashes: Hashes) -> list[str]:
    """Returns the names of rows by the hashes of their inputs. They begin with a letter: a spreadsheet would take some
    of the hashes for numbers, and round them."""
    return [f"r{value:016x}" for value in hashes.tolist()]


@dataclass(frozen=True)
class Decision:
    """What becomes of the rows of one name."""

    line: int
    """Its row in the file; the header is row 1."""
    word: str
    """The decision as written, without blanks around it."""
    listed: str
    """The label that the row had when it was listed, as written; empty if the file does not tell."""


@dataclass
class Corrections:
    """The decisions of a file, and what they did to the rows that were read."""

    wanted: SourceColumns
    file: str = ""
    """Its name in messages."""
    decisions: dict[int, Decision] = field(default_factory=dict)
    """By the hash of the inputs."""
    undecided: int = 0
    """Lines without a decision."""
    problems: list[Problem] = field(default_factory=list)
    """Of the file itself, and of decisions that no row can take."""

    def __post_init__(self) -> None:
        self._hashes = np.array(sorted(self.decisions), np.uint64)
        self._counts: Counter[str] = Counter()
        self._found: dict[str, set[int]] = {"train": set(), "held out": set()}
        self._written: set[str] = set()
        """The labels that rows of the source have."""
        self._changed: Counter[tuple[str, str]] = Counter()
        """Rows by the label that they have and that they had when they were listed, if these differ."""
        self._labels: dict[str, Decision] = {}
        """The labels that were given to rows, with the first decision for each."""

    @classmethod
    def read(cls, file: str, wanted: SourceColumns) -> Corrections:
        """Reads a file. Problems are collected, not raised."""
        shown = display_name(file)
        try:
            lines = read_lines(file)
        except UserError as error:
            return cls(wanted, shown, problems=list(error.problems))
        given: dict[str, list[Decision]] = {}
        undecided, unknown = 0, list[tuple[int, str]]()
        for number, cells in lines:
            if not cells["decision"]:
                undecided += 1
            elif not _ROW.fullmatch(cells["row"]):
                unknown.append((number, cells["row"]))
            else:
                decision = Decision(number, _unescape(cells["decision"]), _unescape(cells["label"]))
                given.setdefault(cells["row"], []).append(decision)
        problems = []
        if unknown:
            message = f"names no row by {shorten(unknown[0][1])}{_others([one for one, _ in unknown])}: copy the name "
            message += "from the list, `r` and 16 characters, or leave the decision empty."
            problems.append(Problem(kind="data", where=f"{shown} row {unknown[0][0]}", message=message))
        for row, of_row in given.items():
            if len({one.word for one in of_row}) > 1:
                both = " and ".join(f"{shorten(one.word)} in row {one.line}" for one in of_row[:_MOST_NAMED])
                message = f"{row} has several decisions, {both}: leave one."
                problems.append(Problem(kind="data", where=f"{shown} row {of_row[0].line}", message=message))
        return cls(wanted, shown, {int(row[1:], 16): of_row[0] for row, of_row in given.items()}, undecided, problems)

    def apply(self, split: str, block: Block, hashes: Hashes) -> tuple[Block, Mask]:
        """Returns the rows of a split as they are decided, and the mask of those that stay; those of other splits as
        they are."""
        column = self.wanted.correctable
        assert column is not None, "the recipe is refused"
        if column.form != "number":
            self._written.update(flat_values(block.rows.column(column.name)).unique().to_pylist())
        decided = np.flatnonzero(np.isin(hashes, self._hashes))
        self._found["train" if split == "train" else "held out"].update(hashes[decided].tolist())
        keeps = np.ones(len(hashes), bool)
        if split != "train" or not len(decided):
            return block, keeps
        labels = block.rows.column(column.name).to_pylist()
        for place in decided.tolist():
            decision = self.decisions[int(hashes[place])]
            if word := _WORDS.get(decision.word.casefold()):
                keeps[place] = word == KEEP
                self._counts["kept" if keeps[place] else "dropped"] += 1
                self._note_changed(labels[place], decision)
                continue
            label = self._parse(decision, labels[place], column.form)
            if label is not None and not _same(label, labels[place]):
                self._counts["corrected"] += 1
                self._note_changed(labels[place], decision)
                labels[place] = label
            elif label is not None:
                self._counts["already_right"] += 1
        rows = block.rows.set_column(
            block.rows.schema.names.index(column.name),
            block.rows.schema.field(column.name),
            pa.array(labels, block.rows.column(column.name).type),
        )
        corrected = replace(block, rows=rows)
        return (corrected if keeps.all() else corrected.filter(keeps)), keeps

    def _parse(self, decision: Decision, before: Any, form: Form) -> Any:
        """Returns the label that is decided, in the form of the rows' labels; None, and adds a problem, if it is none
        for this row."""
        word, number, listed = decision.word, _as_number(decision.word), _as_list(decision.word)
        if form == "number":
            if number is None:
                self._add_problem(decision, f"is no finite number: write one, {_OR}.")
            return number
        if form == "label":
            word = listed[0] if listed is not None and len(listed) == 1 else word
            self._labels.setdefault(word, decision)
            return word
        if listed is None:
            separator = self.wanted.data.label_separator
            listed = [one.strip() for one in word.split(separator)] if separator else [word]
        if self.wanted.inputs[0].form == "texts" and len(listed) != len(before):
            tags = f"{len(listed)} tags for {len(before)} words"
            self._add_problem(decision, f"has {tags}: write a JSON list of {len(before)}, {_OR}.")
            return None
        for one in listed:
            self._labels.setdefault(one, decision)
        return listed

    def _add_problem(self, decision: Decision, reason: str) -> None:
        message = f"decision {shorten(decision.word)} {reason}"
        self.problems.append(Problem(kind="data", where=f"{self.file} row {decision.line}", message=message))

    def _note_changed(self, label: Any, decision: Decision) -> None:
        if not decision.listed:
            return
        if isinstance(label, str):
            self._changed[label, decision.listed] += 1
        elif not _same(label, _as_list(decision.listed) if isinstance(label, list) else _as_number(decision.listed)):
            self._changed["", decision.listed] += 1

    def of_source(self, labels: Iterable[str]) -> list[str]:
        """Returns those of the labels that rows of the source have, and not only corrected ones."""
        return [label for label in labels if label in self._written]

    def with_names(self, names: Sequence[str], places: Mapping[str, int]) -> dict[str, int]:
        """Returns `places` with the labels of the decisions too: the index of each label as rows spell it. Adds a
        problem for each label that is unknown, or is also the word of a decision."""
        if not names:  # a task type whose labels are numbers
            return dict(places)
        by_name = {name: place for place, name in enumerate(names)}
        found = by_name | dict(places)
        spelt: defaultdict[str, set[int]] = defaultdict(set)
        for name, place in found.items():
            spelt[_spelling(name)].add(place)
        for label, decision in self._labels.items():
            if label in by_name and found[label] != by_name[label]:
                self._add_problem(decision, "is a label's name, and rows spell another label so: change the source.")
            if label in found:
                continue
            # A spreadsheet may have made TRUE of true, and 1 of 1.0 or 001.
            like = spelt[_spelling(label)]
            found[label] = min(like, default=0)  # of any index, so that the rows have no problem, too
            if len(like) != 1:
                some = ", ".join(map(repr, names[:20])) + (", …" if len(names) > 20 else "")
                self._add_problem(decision, f"is no label: choose from {some}, {_OR}.{nearest(label, names)}")
        alike = {name.casefold(): name for name in found}
        for word, decision in {one.word.casefold(): one for one in self.decisions.values()}.items():
            if word in (DROP, KEEP) and word in alike:
                message = f'may be the label {alike[word]!r}, too: write ["{alike[word]}"] for it, or ({word}).'
                self._add_problem(decision, message)
        return found

    def remarks(self, places: Mapping[str, int]) -> Iterator[str]:
        """Yields sentences on the decisions that have changed nothing, and on rows that were decided with another
        label. `places` are those of `with_names`."""
        report = self.report(places)
        if count := report["unmatched"]:
            them = _lines(self._lines_of(self.decisions.keys() - self._found["train"] - self._found["held out"]))
            rows = "1 decision is about a row" if count == 1 else f"{count:,} decisions are about rows"
            yield f"{rows} that the source does not have, because it has gone or its text has changed ({them})."
        if count := report["held_out"]:
            them = _lines(self._lines_of(self._found["held out"] - self._found["train"]))
            rows = "1 decision is about a row" if count == 1 else f"{count:,} decisions are about rows"
            yield f"{rows} of validation or test ({them}), which stay as they are: correct them in the source."
        if count := report["changed"]:
            rows = "1 row has" if count == 1 else f"{count:,} rows have"
            yield f"{rows} another label now than when they were listed: the decision counts. List the labels anew."

    def _lines_of(self, hashes: Iterable[int]) -> list[int]:
        return sorted(self.decisions[value].line for value in hashes)

    def report(self, places: Mapping[str, int]) -> dict[str, int]:
        """Returns the numbers of rows that were `corrected`, `dropped`, `kept` or `already_right`, and those that have
        `changed` since they were listed; and of lines: `unmatched`, `held_out` and `undecided`."""
        changed = sum(
            count
            for (now, then), count in self._changed.items()
            if not now or (now != then and places.get(now, -1) != places.get(then, places.get(_spelling(then), -2)))
        )
        train, held_out = self._found["train"], self._found["held out"]
        return {
            **{name: self._counts[name] for name in ("corrected", "dropped", "kept", "already_right")},
            "changed": changed,
            "unmatched": len(self.decisions.keys() - train - held_out),
            "held_out": len(held_out - train),
            "undecided": self.undecided,
        }


def spell_label(label: Any) -> str:
    """Returns a row's label as a cell: a list as JSON, and a number in as few digits as give it back."""
    return label if isinstance(label, str) else as_json(label)


def read_lines(file: str) -> list[tuple[int, dict[str, str]]]:
    """Returns the lines of a file, as `parse_lines`. Raises UserError if it cannot be read, or lacks a column."""
    with relocated(FIELD), as_user_error(file):
        content = b"".join(read_pieces(file)) if is_url(file) else read_local(file)
    return parse_lines(content, display_name(file))


def parse_lines(content: bytes, name: str) -> list[tuple[int, dict[str, str]]]:
    """Returns the lines of a file as a spreadsheet saves it, each with its number and its cells by COLUMNS: with
    commas, semicolons or tabs, in any order of columns, with a byte order mark or without. The header is line 1. Raises
    UserError if the file, which messages call `name`, lacks a column."""
    names, lines = _read_table(_decode(content))
    if missing := [one for one in NEEDED if one not in names]:
        there = ", ".join(map(on_one_line, filter(None, names))) or "none"
        message = f"{name} has no column {' and no column '.join(map(repr, missing))}; it has {there}: "
        message += f"give a file that `finetune labels` wrote, with the columns {', '.join(COLUMNS)}."
        raise UserError.of("data", FIELD, message)
    places = {name: names.index(name) for name in COLUMNS if name in names}
    empty = dict.fromkeys(COLUMNS, "")
    return [
        (number, empty | {name: cells[place].strip() for name, place in places.items() if place < len(cells)})
        for number, cells in lines
    ]


def read_decided(file: str) -> dict[str, dict[str, str]]:
    """Returns the lines of a file that have a decision, by the name of their row. Raises UserError as `read_lines`."""
    return {cells["row"]: cells for _, cells in read_lines(file) if cells["decision"] and _ROW.fullmatch(cells["row"])}


def write_review(lines: Iterable[Sequence[str]], file: Path) -> None:
    """Writes lines with a cell for each of COLUMNS, so that a spreadsheet takes no cell for a formula."""
    # With a byte order mark, spreadsheets read it as UTF-8.
    with open(file, "w", newline="", encoding="utf-8-sig") as out:
        writer = csv.writer(out)
        writer.writerow(COLUMNS)
        writer.writerows([f"'{cell}" if cell.startswith(FORMULA) else cell for cell in line] for line in lines)


def _unescape(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(FORMULA) else cell


def _decode(content: bytes) -> str:
    for encoding in ("utf-16",) if content[:2] in (b"\xff\xfe", b"\xfe\xff") else ("utf-8-sig", "cp1252"):
        try:
            return content.decode(encoding)
        except UnicodeDecodeError:
            continue
    return content.decode("latin-1")


def _read_table(text: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Returns the names of the columns, and each line that is not blank with its number and its cells, which may be
    fewer."""
    first = text.partition("\n")[0].strip()
    declared = first[4:5] if first.lower().startswith("sep=") else None
    csv.field_size_limit(2**31 - 1)
    best = list[list[str]]()
    for delimiter in [declared] if declared else [",", ";", "\t"]:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter))
        rows = rows[1:] if declared else rows
        names = [name.strip().casefold() for name in rows[0]] if rows else []
        if not best or sum(name in COLUMNS for name in names) > sum(name in COLUMNS for name in best[0]):
            best = [names, *rows[1:]]
    names, *rows = best or [[]]
    return names, [(number, cells) for number, cells in enumerate(rows, 2) if any(cells)]


def _as_number(cell: str) -> float | None:
    """Returns a finite number, whose decimal mark may be a comma; None for other texts."""
    try:
        number = float(cell.replace(",", ".") if cell.count(",") == 1 and "." not in cell else cell)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _as_list(cell: str) -> list[str] | None:
    """Returns the texts of a JSON list; None for another cell."""
    try:
        found = json.loads(cell) if cell.startswith("[") else None
    except (ValueError, RecursionError):  # the last for brackets in brackets
        return None
    return [str(one) for one in found] if isinstance(found, list) else None


def _same(label: Any, other: Any) -> bool:
    if isinstance(label, str) and isinstance(other, str):
        return (whole_number(label) or label) == (whole_number(other) or other)
    return bool(label == other)


def _spelling(label: str) -> str:
    number = label.lstrip("0") or "0"
    return whole_number(number) or label.casefold()


def _lines(lines: Sequence[int]) -> str:
    more = ", …" if len(lines) > _MOST_NAMED else ""
    return f"row{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines[:_MOST_NAMED]))}{more} of the file"


def _others(lines: Sequence[int]) -> str:
    return f" ({len(lines):,} rows like this: {', '.join(map(str, lines[:_MOST_NAMED]))})" if len(lines) > 1 else ""
