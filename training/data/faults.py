"""Faults of single rows: how readers and checks report them, and the problems that users see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from training.problems import Problem, UserError
from training.recipe.source_columns import SourceColumns
from training.recipe.tables.checks import LEVELS, Level

HEADER_READ = "has the names of the columns, and is read as a row because of data.header"
REPEATED_HEADER = "repeats the header"
"""Faults of the check `header_row` with advice of their own."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with one row, worded to follow "row 7"."""

    row: int
    check: str
    """The check that it falls under, as `data.checks` names it."""
    description: str
    value: str = ""
    """What the row holds, told of the first row with this fault; follows `what`."""


ROWS_NAMED = 3  # of the rows with the same fault, as many are named in its message
FIXES = {"encoding": "set data.encoding to what the file is written in, "}
"""What mends all rows of a file at once, by check."""
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
    "header_row": (
        "if the table has no header, name its columns in data.header; if these are names, data.checks.header_row: "
        "ignore."
    ),
    HEADER_READ: (
        "if it is a header, remove data.header, and name columns anew in data.rename; if it is a row of data, "
        "data.checks.header_row: ignore."
    ),
    REPEATED_HEADER: "if it is no row of data, remove it from the file; if it is one, data.checks.header_row: ignore.",
}
"""The next step for rows that are kept, by check, or by fault where one check has several."""


@dataclass(frozen=True)
class _Sort:
    """One sort of fault in one file."""

    where: str
    check: str
    description: str


class Faults:
    """Faulty rows, by file and fault: how many there are, and the numbers of the first of them."""

    def __init__(self) -> None:
        self._counts: Counter[_Sort] = Counter()
        self._first: dict[_Sort, list[int]] = {}
        self._value: dict[_Sort, str] = {}

    def add(self, where: str, check: str, description: str, rows: Sequence[int], value: str = "") -> None:
        """Adds rows with the same fault."""
        if rows:
            sort = _Sort(where, check, description)
            named = self._first.setdefault(sort, [])
            named += rows[: ROWS_NAMED - len(named)]
            self._counts[sort] += len(rows)
            self._value.setdefault(sort, value)

    def told(self) -> Iterator[tuple[_Sort, str, str, str]]:
        """Each sort of fault in each file: where its first row is, what is wrong with that one, and how many are like
        it; and whether to speak of `it` or `them`."""
        for sort, total in self._counts.items():
            rows = self._first[sort]
            more = ", …" if total > len(rows) else ""
            like = f" ({total:,} rows like this: {', '.join(map(str, rows))}{more})" if total > 1 else ""
            description = f"{sort.description}{self._value[sort]}{like}"
            yield sort, f"{sort.where} row {rows[0]}", description, "them" if total > 1 else "it"

    def problems(self, wanted: SourceColumns) -> Iterator[Problem]:
        """One problem for each sort of fault in each file, none for what the recipe ignores."""
        for sort, where, description, them in self.told():
            level = level_of(sort.check, wanted)
            if level == "ignore":
                continue
            if advice := ADVICE.get(sort.description) or ADVICE.get(sort.check):
                yield Problem(
                    kind="data", where=where, message=f"{description}: {advice}", check=sort.check, level=level
                )
                continue
            mend = FIXES.get(sort.check, "") if wanted.data.source in ("csv", "json") else ""
            end = f"{mend}correct or remove {them}, or leave {them} out: data.checks.{sort.check}: warning."
            if level == "warning":
                end = "left out."
            yield Problem(kind="data", where=where, message=f"{description}: {end}", check=sort.check, level=level)


def level_of(check: str, wanted: SourceColumns) -> Level:
    """What becomes of what the check finds."""
    known = {**LEVELS, **wanted.task_type.checks}
    if check not in known:
        message = f"`faults` of {type(wanted.task_type).__name__} tells of a check {check!r}: name it in its `checks`."
        raise UserError([Problem(kind="recipe", where="task", message=message)])
    return wanted.data.checks.get(check) or known[check]


def shortened(value: object) -> str:
    """A value in a message, cut to what fits there."""
    try:
        text = repr(value)
    except Exception:  # of the user's own class
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}…{text[0] if text[0] in chr(34) + chr(39) else ''}"
