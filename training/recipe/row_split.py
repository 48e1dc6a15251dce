"""The section `data.split` of a recipe: which rows of train are held out, and its times and durations."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Discriminator, Field, Tag

from training.recipe.field_types import NUMBER, WORD, Section, Text

Kind = Literal["number", "time", "zoned time"]
"""The kinds of times in a column: numbers, times without a zone, and times with one."""
_TIME = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:?\d\d)?)?")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
MICROSECONDS = 1_000_000

# YAML reads a bare date as one.
_AsText = BeforeValidator(lambda value: value.isoformat() if isinstance(value, date) else value)
TextOrNumber = Annotated[
    Annotated[Text, Tag(WORD)] | Annotated[float, Tag(NUMBER)],
    Discriminator(lambda value: WORD if isinstance(value, str) else NUMBER),
]


class RowSplit(Section):
    """The rows of train that are held out for splits which the source lacks."""

    by: Literal["rows", "group", "time"]
    """rows: a hash of the text chooses the rows. group: a hash of the value in `column` chooses them, so all rows of a
    customer, ticket or document are in one split, and stay there when rows are added. time: the newest rows by `column`
    are test, and the newest before them validation; both move on when rows are added."""
    column: Text | None = None
    """The column with the group or the time of each row, after `data.rename` (null: only for `by: rows`). Equal groups
    may differ in type: 3, 3.0 and "3". A row without a group is a group of its own, by its text. Times are those of
    Arrow or texts of ISO 8601, all with a zone or all without; or numbers."""
    validation_from: Annotated[TextOrNumber, _AsText] | None = None
    """By time: the first time of validation, such as 2026-05-01 or 2026-05-01T12:00+02:00; without a zone it is in UTC
    if the rows have zones (null: the newest rows before test, as many as `data.validation_size`)."""
    test_from: Annotated[TextOrNumber, _AsText] | None = None
    """By time: the first time of test (null: the newest rows, as many as `data.test_size`)."""
    gap: Annotated[TextOrNumber | None, Field()] = None
    """By time: rows less than this before validation or test are in no split, such as 7d; units are s, m, h, d and w,
    and a column of numbers has a number (null: no gap)."""


class Time(NamedTuple):
    """A time, as microseconds since 1970 (UTC if it has a zone), or a number."""

    value: float
    kind: Kind


def parse_time(written: Any) -> Time:
    """Returns the time that a recipe writes. Raises ValueError for anything else."""
    if isinstance(written, date):
        written = written.isoformat()
    if isinstance(written, int | float):
        return Time(float(written), "number")
    if not _TIME.fullmatch(written):
        raise ValueError(
            f"{written!r} is no time: write one such as 2026-05-01 or 2026-05-01T12:00+02:00, or a number."
        )
    try:
        found = datetime.fromisoformat(written)
    except ValueError as error:
        raise ValueError(f"{written!r} is no time: {error}.") from None
    utc = found.replace(tzinfo=UTC) if found.tzinfo is None else found
    return Time(_microseconds(utc), "time" if found.tzinfo is None else "zoned time")


def _microseconds(time: datetime) -> float:
    since = time - datetime(1970, 1, 1, tzinfo=UTC)
    return float((since.days * 86_400 + since.seconds) * MICROSECONDS + since.microseconds)


def parse_gap(written: Any) -> Time:
    """Returns the duration that a recipe writes, in microseconds, or the number. Raises ValueError for anything
    else."""
    if isinstance(written, int | float):
        if written < 0:
            raise ValueError(f"{written:g} is out of range: it must be at least 0.")
        return Time(float(written), "number")
    if not (match := _DURATION.fullmatch(written)):
        raise ValueError(
            f"{written!r} is no duration: write one such as 7d or 12h (units: s, m, h, d, w), or a number."
        )
    return Time(float(match[1]) * _SECONDS[match[2]] * MICROSECONDS, "time")
