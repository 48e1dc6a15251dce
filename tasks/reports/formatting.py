"""Numbers, tables and Markdown as people read them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from training.problems import visible

TABLE_ROWS = 200  # Prefect's page draws all rows at once
TEXT_LENGTH = 500  # characters of a cell


def format_count(number: int, noun: str) -> str:
    """`1 warning`, `2 warnings`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def format_size(size_bytes: int) -> str:
    """`1.2 GB`"""
    size, unit = float(size_bytes), "B"
    for larger in ("kB", "MB", "GB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.1f} {unit}"


def format_value(value: float | None) -> str:
    """A metric's value; `-` if there is none."""
    return "-" if value is None or math.isnan(value) else f"{value:.4f}"


def format_score(score: Mapping[str, Any]) -> str:
    """`0.8312 (0.813 to 0.848; baseline 0.523)`: a metric's value, its interval, and the value of the best constant
    prediction, as training.programs.score writes them."""
    low, high, baseline = score.get("low"), score.get("high"), score.get("baseline")
    details = [] if low is None or high is None else [f"{low:.3f} to {high:.3f}"]
    details += [] if baseline is None else [f"baseline {baseline:.3f}"]
    return format_value(score["value"]) + (f" ({'; '.join(details)})" if details else "")


def first_line(error: BaseException) -> str:
    """The first line of an error's message; without one, the error's type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def shorten(text: str, length: int = TEXT_LENGTH) -> str:
    """The beginning of a text, for a cell of a table."""
    return text if len(text) <= length else text[: length - 1] + "…"


def limit_rows(table: list[dict[str, str]], column: str, file: str) -> list[dict[str, str]]:
    """The first rows of a table; if there are more, a last row names the file that has all."""
    more = len(table) - TABLE_ROWS
    return [*table[:TABLE_ROWS], *([{column: f"… and {more:,} more: see {file}."}] if more > 0 else [])]


def make_printable(text: str) -> str:
    """The text with a placeholder for each character that a terminal cannot show."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


class Markdown(str):
    """A text that is Markdown on purpose: `escape_markdown` leaves it as it is."""


def escape_markdown(text: str) -> str:
    """The text as Markdown that shows it. Rows, labels and names may contain anything, such as links that run code."""
    if isinstance(text, Markdown):
        return text
    escaped = _BEGINS_BLOCK.sub(r"\1\\\2", _MARKUP.sub(r"\\\g<0>", visible(" ".join(text.splitlines()))))
    return _ADDRESS.sub(r"\1\\\2", escaped)


def format_code(text: str) -> str:
    """The text as inline code, on one line. The fence has more backticks than any sequence in the text: labels of the
    user's rows may contain anything."""
    text = visible(" ".join(text.splitlines()))
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}{text}{fence}" if "`" not in text else f"{fence} {text} {fence}"


_MARKUP = re.compile(r"[\\`*\[\]<>|~&!]|(?<!\w)_|_(?!\w)")
_BEGINS_BLOCK = re.compile(r"^(\s*)([#+\-=](?=\s|[=#-]{2}))")
_ADDRESS = re.compile(r"(?i)(\b(?:https?|ftp|mailto|xmpp|www))([:.])")


def format_markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table of rows with the same columns; at least one row."""
    return format_table(list(rows[0]), (list(row.values()) for row in rows))


def format_table(head: list[str], lines: Iterable[list[str]]) -> str:
    """A Markdown table."""
    names, *cells = ([escape_markdown(cell) for cell in line] for line in [head, *lines])
    return "\n".join(f"| {' | '.join(line)} |" for line in [names, ["---"] * len(head), *cells])
