"""Problems, and what the splits of a data set hold, as text for a terminal or a log."""

from __future__ import annotations

import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tasks.cache.refs import Verdict
from tasks.tracking.reports import format_count, format_score, make_printable, tabulate_checks, tabulate_comparison

WIDTH = 100  # characters, where no terminal says how wide it is
MOST_CHECKS = 20  # bounds: those of all rows, then those of groups that are missed, then the others
MOST_LABELS = 30  # the most frequent ones; the others share a line
LONGEST_NAME = 24
BAR = 10  # characters, at most
EIGHTHS = " ▏▎▍▌▋▊▉"
NARROWEST = 40  # below as many characters, wrapped messages are harder to read than long lines


def terminal_width() -> int:
    """How many characters a line may have."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH


def problem_line(problem: Mapping[str, Any]) -> str:
    """`where: message`, and before that what it is where it ends nothing."""
    mark = "warning: " if problem.get("level") == "warning" else ""
    return f"{mark}{problem['where']}: {problem['message']}"


def problem_lines(problems: Iterable[Mapping[str, Any]], width: int | None) -> list[str]:
    """A line a problem, errors first: level, check, `where: message`.

    Args:
        width: what lines are wrapped to, in characters; None leaves each problem on one line, for `grep`.
    """
    found = sorted(problems, key=lambda problem: problem["level"] != "error")
    checks = max((len(problem["check"] or "") for problem in found), default=0)
    lines = []
    for problem in found:
        before = f"{problem['level']:<9}" + (f"{problem['check'] or '':<{checks + 2}}" if checks else "")
        line = f"{before}{problem['where']}: {problem['message']}"
        if width is None or width - len(before) < NARROWEST:
            lines.append(line)
        else:
            after = " " * len(before)
            lines += textwrap.wrap(line, width, subsequent_indent=after, break_long_words=False, break_on_hyphens=False)
    return lines


def summary(problems: Sequence[Mapping[str, Any]]) -> str:
    """The last line: how many there are."""
    number = {level: sum(problem["level"] == level for problem in problems) for level in ("error", "warning")}
    said = [format_count(count, level) for level, count in number.items() if count]
    return f"{', '.join(said)}." if said else "No problems."


def split_lines(report: Mapping[str, Any], tokens: Mapping[str, Any] | None) -> list[str]:
    """A line a split: its rows, what became of others, and how long the texts are.

    Args:
        report: of `training.data.load_rows.load`.
        tokens: of `training.tokenization.token_files.tokenize`; None where it is not known.
    """
    columns: dict[str, list[str]] = {"split": list(report["rows"])}
    columns["rows"] = [f"{count:,}" for count in report["rows"].values()]
    shares = report["held_out"]
    columns["held out"] = [f"{shares[split]:.0%}" if split in shares else "" for split in report["rows"]]
    for name, counts in (("filtered", report["filtered"]), ("left out", report["left_out"])):
        columns[name] = [f"{counts[split]:,}" if counts.get(split) else "" for split in report["rows"]]
    columns["characters"] = _spans(report["characters"], report["rows"])
    if tokens:
        columns["tokens"] = _spans(tokens["length"], report["rows"])
        cut = tokens["truncated"]
        columns["rows cut"] = [
            f"{cut[split]:,} ({cut[split] / count:.1%})" if cut.get(split) else ""
            for split, count in report["rows"].items()
        ]
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    return aligned([list(shown), *map(list, zip(*shown.values(), strict=True))])


def metric_lines(metrics: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """A line a split: each figure with its interval."""
    return [
        f"{split}: {', '.join(f'{name} {format_score(score)}' for name, score in scores.items())}"
        for split, scores in metrics.items()
    ]


def verdict_lines(verdict: Verdict) -> list[str]:
    """The decision; below it its reason, each bound, the comparison with the champion, and warnings."""
    lines = [f"Verdict: {verdict.decision}", f"  {verdict.reason}"]
    for table in (tabulate_checks(verdict), tabulate_comparison(verdict)):
        if table:
            shown = aligned([list(table[0]), *(list(row.values()) for row in table[:MOST_CHECKS])])
            shown += [f"… and {len(table) - MOST_CHECKS:,} more"] if len(table) > MOST_CHECKS else []
            lines += [f"  {line}" for line in shown]
    return [make_printable(line) for line in (*lines, *(f"  warning: {warning}" for warning in verdict.warnings))]


def label_lines(labels: Mapping[str, Mapping[str, int]], width: int) -> list[str]:
    """A line a label: for each split its rows, its share, and that as a bar; the rarest labels share a line. None where
    there are no labels."""
    names = list(dict.fromkeys(name for counts in labels.values() for name in counts))
    if not names:
        return []
    total = {name: sum(counts.get(name, 0) for counts in labels.values()) for name in names}
    kept = set(sorted(names, key=lambda name: -total[name])[:MOST_LABELS])
    table = {_shown(name): [counts.get(name, 0) for counts in labels.values()] for name in names if name in kept}
    if others := len(names) - len(kept):
        rest = [name for name in names if name not in kept]
        table[f"{others:,} others"] = [sum(counts.get(name, 0) for name in rest) for counts in labels.values()]
    rows = [sum(counts.values()) or 1 for counts in labels.values()]
    widest = max(map(_cells, ("label", *table)))
    room = (width - widest) // max(1, len(labels)) - len(f"  {max(rows):,}  100.0%  ")
    lines = [["label", *(part for split in labels for part in (split, "", ""))]]
    for name, counts in table.items():
        line = [name]
        for count, of in zip(counts, rows, strict=True):
            line += [f"{count:,}", f"{count / of:.1%}", _bar(count / of, min(BAR, room))]
        lines.append(line)
    return aligned(lines)


def _spans(lengths: Mapping[str, Mapping[str, int]], splits: Iterable[str]) -> list[str]:
    """`3 to 635, median 89`"""
    found = (lengths.get(split, {}) for split in splits)
    return [f"{one['min']:,} to {one['max']:,}, median {one['median']:,}" if "min" in one else "" for one in found]


def _bar(share: float, width: int) -> str:
    eighths = round(8 * max(0, width) * share)
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8]).rstrip()


def _shown(name: str) -> str:
    """A label as one cell: of the user's file, so it may hold anything."""
    name = make_printable(name)
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def _cells(text: str) -> int:
    """How wide a terminal draws it."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns of one width; numbers stand to the right, as does the head above them."""
    columns = list(zip(*table, strict=True))
    widths = [max(map(_cells, column)) for column in columns]
    right = [any(cell[:1].isdigit() for cell in column[1:]) and " " not in "".join(column[1:]) for column in columns]
    lines = []
    for line in table:
        cells = (
            " " * (width - _cells(cell)) + cell if to_right else cell + " " * (width - _cells(cell))
            for cell, width, to_right in zip(line, widths, right, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return lines
