"""Suspicious quotation marks of CSV files, by row number.

A CSV reader removes the quotation marks of a quoted field, and treats line breaks within it as text. If the marks
belong to the text, this alters it; a mark that is never closed swallows the rows that follow.
"""

from __future__ import annotations

import re
from collections import deque
from typing import IO

from training.data.row_problems import RowProblem, shorten

MIN_MERGED_LINES = 5
"""The lines within one field that suggest merged rows: at least this many, and nearly all with a row's delimiters."""
MERGED_SHARE = 0.9
_BREAK = re.compile(rb"\r\n|\r|\n")


class QuotedFields:
    """A file object that returns the bytes of a CSV file and inspects its quoted fields as they are read.

    Quoted fields are as pyarrow reads them: they begin with a quotation mark, marks within them are doubled, and text
    behind the closing mark belongs to them. Rows are numbered from 1, blank lines and the header included.
    """

    def __init__(
        self, file: IO[bytes], delimiter: str, columns: int, first_row: int, *, has_header: bool = True
    ) -> None:
        """`columns` is the number of fields of a row, `first_row` the number of the first row of data."""
        self._file, self._delimiter = file, delimiter.encode()
        self._columns, self._first_row, self._has_header = columns, first_row, has_header
        starts = re.escape(delimiter.encode())
        self._opening = re.compile(rb'"(?<=[' + starts + rb'\r\n]")')
        self._field = re.compile(rb'"([^"]*+(?:""[^"]*+)*+)"([^' + starts + rb"\r\n]*+)")
        # Skips all unsuspicious fields in one match: fast for files in which every field is quoted.
        ends = rb"[" + starts + rb"\r\n]"
        plain = rb"(?<=" + ends + rb')"[^"\r\n]*+(?:""[^"\r\n]*+)*+"(?=' + ends + rb")"
        self._unsuspicious = re.compile(rb'(?:[^"]++|' + plain + rb"|(?<!" + ends + rb')")*+')
        self._pending = b"\n"  # the last byte that was inspected, and bytes that need more data
        self._row = 1
        self._lines = 0
        self._longest_field = (0, 0)
        self._program_quotes = False  # as the header shows, or without one the first row
        self._quoted_in_first_row = 0
        self._last_reported: dict[str, int] = {}  # row by check: each row is reported once
        self._problems: deque[RowProblem] = deque()  # pyarrow reads in another thread
        self.unclear_rows: set[int] = set()
        """Rows with text behind the closing quotation mark of a field: no program writes such a row."""

    def read(self, size: int = -1) -> bytes:
        """The next bytes of the file."""
        piece = self._file.read(size)
        if size:
            self._inspect(self._pending + piece, end=not piece)
        return piece

    def close(self) -> None:
        """Closes the file beneath."""
        self._file.close()

    @property
    def closed(self) -> bool:
        """Whether the file beneath is closed."""
        return self._file.closed

    def take_row_problems(self, last: int | None = None) -> tuple[RowProblem, ...]:
        """Returns the problems found since the last call, in rows up to `last` (None: all)."""
        problems = []
        while self._problems and (last is None or self._problems[0].row <= last):
            problems.append(self._problems.popleft())
        return tuple(problems)

    def check_line_count(self) -> tuple[RowProblem, ...]:
        """Returns a problem if the file, read to its end, has far fewer rows than lines."""
        rows = self._row - 1
        lines, row = self._longest_field
        if self._lines <= 2 * rows:
            return ()
        description = f"spans {lines:,} lines; the file has {self._lines:,} lines, and only {rows:,} rows"
        return (RowProblem(row, "line_breaks", description),)

    def _inspect(self, data: bytes, end: bool) -> None:
        """Inspects all complete fields; the first byte of `data` was inspected before."""
        done = 1
        while True:
            skipped = done
            if not self._quoting_is_unusual():
                skipped = self._unsuspicious.match(data, done).end()  # type: ignore[union-attr]  # it may match an empty text
            opening = self._opening.search(data, skipped)
            if opening is None:
                break
            start = opening.start()
            self._count_rows(data, done, start)
            field = self._field.match(data, start)
            # A field at the end of the data may continue in the next read.
            if field is None or (field.end() == len(data) and not end):
                if not end:
                    self._pending = data[start - 1 :]
                    return
                self._report_unclosed(data[start:])
                return
            self._check_field(field[1], field[2], field[0])
            done = field.end()
        stop = len(data) - (data.endswith(b"\r") and not end)  # it may be half of a line break
        self._count_rows(data, done, max(done, stop))
        self._pending = data[max(done, stop) - 1 :]
        if end and not self._pending.endswith((b"\n", b"\r")):
            self._row += 1  # the last row has no line break
            self._lines += 1
            self._pending = b"\n"

    def _count_rows(self, data: bytes, start: int, stop: int) -> None:
        """Counts rows outside of quoted fields."""
        breaks = data.count(b"\n", start, stop) + data.count(b"\r", start, stop) - data.count(b"\r\n", start, stop)
        self._row += breaks
        self._lines += breaks

    def _check_field(self, body: bytes, rest: bytes, field: bytes) -> None:
        breaks = len(_BREAK.findall(body)) if b"\n" in body or b"\r" in body else 0
        self._lines += breaks
        if self._row < self._first_row:
            self._program_quotes |= self._has_header
            return
        if breaks:
            self._longest_field = max(self._longest_field, (breaks + 1, self._row))
            # Each line of a quoted letter may have a comma, so a second sign is needed before they count as rows.
            if (rest or self._quoting_is_unusual()) and self._holds_rows(body):
                self._add_problem("merged_rows", "has a quoted field with lines that look like rows", field, breaks)
                return
            self._add_problem("line_breaks", "has line breaks within a quoted field", field, breaks)
        needs_quotes = breaks or b'""' in body or self._delimiter in body
        if rest:
            self.unclear_rows.add(self._row)
        if rest or (not needs_quotes and self._quoting_is_unusual()):
            self._add_problem("stray_quotes", "has a quoted field whose quotation marks may belong to the text", field)
        if self._row == self._first_row and not self._has_header and not rest:
            self._quoted_in_first_row += 1
            if self._quoted_in_first_row == self._columns:
                self._program_quotes = True
                # pyarrow has not seen the whole first row yet, so its problems were not taken.
                self._problems = deque(problem for problem in self._problems if problem.check != "stray_quotes")

    def _quoting_is_unusual(self) -> bool:
        return self._delimiter == b"\t" and not self._program_quotes

    def _holds_rows(self, body: bytes) -> bool:
        """Whether the complete lines within a field look like rows of the file."""
        lines = _BREAK.split(body)[1:-1]
        like_rows = sum(line.count(self._delimiter) == self._columns - 1 for line in lines)
        return self._columns > 1 and like_rows >= max(MIN_MERGED_LINES, MERGED_SHARE * len(lines))

    def _report_unclosed(self, field: bytes) -> None:
        """Counts the rest of the file as one row."""
        self._add_problem(
            "merged_rows", "has a quotation mark that is never closed", field, len(_BREAK.findall(field.rstrip()))
        )
        self._row += 1
        self._pending = b"\n"

    def _add_problem(self, check: str, description: str, field: bytes, breaks: int = 0) -> None:
        if self._last_reported.get(check) == self._row:
            return
        self._last_reported[check] = self._row
        lines = f"{breaks + 1:,} lines, " if breaks else ""
        value = f": {lines}{shorten(field[:200].decode(errors='replace'))}"
        self._problems.append(RowProblem(self._row, check, description, value))
