"""Problems of single rows: as readers and checks report them, and as users see them, joined by file and check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from training.problems import Problem, UserError
from training.recipe.source_columns import SourceColumns
from training.recipe.tables.row_checks import LEVELS, Level

if TYPE_CHECKING:
    from training.recipe.column_types import Mask

HEADER_READ = "has the names of the columns, and is read as a row because of data.header"
REPEATED_HEADER = "repeats the header"
OTHER_FILE = "begins with a byte order mark, as the first row of another file"
OTHER_ORDER = "is a header with the columns in another order, so the rows behind it have wrong columns"
"""Descriptions of the check `header_row` with advice of their own."""


@dataclass(frozen=True)
class RowProblem:
    """The problem of one row."""

    row: int
    check: str
    """The check that it belongs to, as in `data.checks`."""
    description: str
    """Words that follow "row 7", the same for all rows with this problem."""
    value: str = ""
    """The row's value, shown for the first row with this problem; follows `description`."""

    def __str__(self) -> str:
        return self.description + self.value


ROWS_NAMED = 3  # row numbers in a message about several rows with the same problem
FIXES = {"encoding": "set data.encoding to what the file is written in, "}
"""Settings that fix all rows of a file at once, by check."""
ADVICE = {
    "stray_quotes": "if they do, set data.quoting: none; if not, data.checks.stray_quotes: ignore.",
    "line_breaks": (
        "if its quotation mark belongs to the text and swallows other rows, set data.quoting: none; if the text has "
        "these lines, data.checks.line_breaks: ignore."
    ),
    "merged_rows": (
        "correct the quotation mark, or, where such marks belong to the text, set data.quoting: none; if all of this "
        "is one text, data.checks.merged_rows: ignore."
    ),
    "thousands": (
        "if the point separates thousands, remove it in the source; if it is a decimal point, set "
        "data.checks.thousands: ignore."
    ),
    "iob1": "if that is wrong, correct the tags: in IOB2, a span begins with B-.",
    "comment_lines": (
        "if such lines are comments, remove them; if they are words, set data.checks.comment_lines: ignore."
    ),
    "missing_group": (
        "each is a group of its own, by its text; fill it in, or, if that is right, set data.checks.missing_group: "
        "ignore."
    ),
    "garbled_text": (
        "write these rows anew from their source, or repair them, such as by the package ftfy; if they are meant so, "
        "set data.checks.garbled_text: ignore."
    ),
    "converted_image": (
        "the model gets the converted image, as transformers' pipelines do; if that is right, set "
        "data.checks.converted_image: ignore."
    ),
    "header_row": (
        "if the table has no header, name its columns in data.header; if these are names, data.checks.header_row: "
        "ignore."
    ),
    HEADER_READ: (
        "if it is a header, remove data.header, and name columns anew in data.rename; if it is a row of data, "
        "data.checks.header_row: ignore."
    ),
    REPEATED_HEADER: "left out; if it is a row of data, set data.checks.header_row: ignore.",
    OTHER_FILE: (
        "if it is a header with other names, split the file before it; if it is a row of data, set "
        "data.checks.header_row: ignore."
    ),
    OTHER_ORDER: (
        "split the file before it, and give both parts one order of columns; if it is a row of data, set "
        "data.checks.header_row: ignore."
    ),
}
"""The next step for rows that are kept, by check, or by description if a check has several."""


MAX_REASONS = 8
"""The largest number of reasons that are reported separately for a block of rows."""


@dataclass(frozen=True)
class _Sort:
    """A kind of problem in one file."""

    where: str
    check: str
    description: str


class RowProblems:
    """The rows of each kind of problem in a file: their count and the numbers of the first ones."""

    def __init__(self) -> None:
        self._counts: Counter[_Sort] = Counter()
        self._first: dict[_Sort, list[int]] = {}
        self._value: dict[_Sort, str] = {}

    def add(self, where: str, check: str, description: str, rows: Sequence[int], value: str = "") -> None:
        """Adds rows with the same problem."""
        if rows:
            sort = _Sort(where, check, description)
            named = self._first.setdefault(sort, [])
            named += rows[: ROWS_NAMED - len(named)]
            self._counts[sort] += len(rows)
            self._value.setdefault(sort, value)

    def forget(self, files: Collection[str], checks: Collection[str]) -> None:
        """Removes the problems that these checks found in these files."""
        self._counts = Counter(
            {sort: count for sort, count in self._counts.items() if not (sort.where in files and sort.check in checks)}
        )

    def summaries(self) -> Iterator[tuple[_Sort, str, str, str]]:
        """Yields each kind, its first row, the description with the count, and "it" or "them" for the rows."""
        for sort, total in self._counts.items():
            rows = self._first[sort]
            more = ", …" if total > len(rows) else ""
            like = f" ({total:,} rows like this: {', '.join(map(str, rows))}{more})" if total > 1 else ""
            description = f"{sort.description}{self._value[sort]}{like}"
            yield sort, f"{sort.where} row {rows[0]}", description, "them" if total > 1 else "it"

    def problems(self, wanted: SourceColumns) -> Iterator[Problem]:
        """Yields one problem of the user for each kind in each file, but for ignored checks."""
        for sort, where, description, them in self.summaries():
            level = level_of(sort.check, wanted)
            if level == "ignore":
                continue
            if advice := ADVICE.get(sort.description) or ADVICE.get(sort.check):
                yield Problem(
                    kind="data", where=where, message=f"{description}: {advice}", check=sort.check, level=level
                )
                continue
            mend = FIXES.get(sort.check, "") if wanted.data.source in ("csv", "json", "textfolder") else ""
            end = f"{mend}correct or remove {them}, or leave {them} out: data.checks.{sort.check}: warning."
            if level == "warning":
                end = "left out."
            yield Problem(kind="data", where=where, message=f"{description}: {end}", check=sort.check, level=level)


def level_of(check: str, wanted: SourceColumns) -> Level:
    """Returns the level of a check in this recipe."""
    known = {**LEVELS, **wanted.task_type.checks}
    if check not in known:
        owner = type(wanted.task_type).__name__
        message = f"`row_problems` of {owner} yields an unknown check {check!r}: add it to its `checks`."
        raise UserError.of("recipe", "task", message)
    return wanted.data.checks.get(check) or known[check]


def shorten(value: object) -> str:
    """Returns a value as messages show it: its repr, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…{text[0] if text[0] in chr(34) + chr(39) else ''}"


def masks_by_reason(problems: Sequence[str | None]) -> Iterator[tuple[Mask, str]]:
    """Yields the mask of rows by the problem of each row, None for rows without one; rarer problems share one mask."""
    frequent = [problem for problem, _ in Counter(filter(None, problems)).most_common(MAX_REASONS)]
    for reason in frequent:
        yield np.array([problem == reason for problem in problems]), reason
    rare = np.array([problem is not None and problem not in frequent for problem in problems], bool)
    if rare.any():
        yield rare, "for less frequent reasons"
