"""Problems, splits, labels, metrics and verdicts as text for a terminal or a log."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size

from tasks.cache.results import CalibrateResult, ComparedExport, Verdict
from tasks.reports.formatting import format_count, format_score, make_printable
from tasks.reports.model_reports import (
    summarize_calibration,
    tabulate_answered,
    tabulate_answers,
    tabulate_checks,
    tabulate_comparison,
    tabulate_exports,
    tabulate_flips,
    tabulate_wrong,
)
from tasks.reports.row_reports import tabulate_mixture
from training.problems import visible

WIDTH = 100  # columns of a file or pipe
MIN_MESSAGE_WIDTH = 40  # narrower messages are not wrapped
MAX_CHECKS = 20  # bounds of all rows first, then missed bounds of groups, then the others
MAX_LABELS = 30  # the rest shares a line
MAX_NAME_LENGTH = 24
BAR_WIDTH = 10  # columns
EIGHTHS = " ▏▎▍▌▋▊▉"


def terminal_width() -> int:
    """Returns the number of columns of stdout."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH


def fit_to_terminal(lines: list[str]) -> list[str]:
    """Cuts lines to the width of a terminal. Files and pipes get whole lines."""
    if not sys.stdout.isatty():
        return lines
    width = terminal_width()
    return [line if cell_len(line) <= width else f"{set_cell_size(line, width - 1)}…" for line in lines]


def align(table: Sequence[Sequence[str]]) -> list[str]:
    """Formats rows as lines with aligned columns. Columns of numbers are aligned to the right, like their heads."""
    table = [[visible(cell) for cell in row] for row in table]
    columns = list(zip(*table, strict=True))
    widths = [max(map(cell_len, column)) for column in columns]
    numeric = [any(cell[:1].isdigit() for cell in column[1:]) and " " not in "".join(column[1:]) for column in columns]
    lines = []
    for row in table:
        spaces = (" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        cells = (
            space + cell if right else cell + space for cell, space, right in zip(row, spaces, numeric, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return lines


def align_records(table: Sequence[Mapping[str, str]]) -> list[str]:
    """Formats rows by column name as lines with aligned columns, the names first. Empty without rows."""
    return align([list(table[0]), *(list(row.values()) for row in table)]) if table else []


def wrap(text: str, width: int, start: str, indent: str) -> list[str]:
    """Wraps text without breaking words, because paths and names are copied."""
    text = visible(text)
    return textwrap.wrap(
        text, width, initial_indent=start, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def problem_line(problem: Mapping[str, Any]) -> str:
    """`where: message`, behind `warning: ` if it is one."""
    mark = "warning: " if problem.get("level") == "warning" else ""
    return f"{mark}{problem['where']}: {problem['message']}"


def problem_lines(problems: Iterable[Mapping[str, Any]], width: int | None) -> list[str]:
    """Formats each problem as `level  check  where: message`, errors first.

    Args:
        width: Columns to wrap lines to; None leaves each problem on one line, for `grep`.
    """
    sorted_problems = sorted(problems, key=lambda problem: problem["level"] != "error")
    check_width = max((len(problem["check"] or "") + 2 for problem in sorted_problems if problem["check"]), default=0)
    lines = []
    for problem in sorted_problems:
        start = f"{problem['level']:<9}{problem['check'] or '':<{check_width}}"
        text = f"{problem['where']}: {problem['message']}"
        if width is None or width - len(start) < MIN_MESSAGE_WIDTH:
            lines.append(start + text)
        else:
            lines += wrap(text, width, start, " " * len(start))
    return lines


def count_line(problems: Sequence[Mapping[str, Any]]) -> str:
    """`2 errors, 1 warning.`"""
    counts = {level: sum(problem["level"] == level for problem in problems) for level in ("error", "warning")}
    parts = [format_count(count, level) for level, count in counts.items() if count]
    return f"{', '.join(parts) or 'No problems'}."


def split_lines(report: Mapping[str, Any], tokens: Mapping[str, Any] | None) -> list[str]:
    """Formats a line for each split: rows, rows that were dropped, and text lengths.

    Args:
        report: The report of `training.data.load_rows.load`.
        tokens: The report of `training.tokenization.token_files.tokenize` if it is known.
    """
    rows, shares = report["rows"], report["held_out"]
    columns: dict[str, list[str]] = {"split": list(rows)}
    columns["rows"] = [f"{count:,}" for count in rows.values()]
    columns["held out"] = [f"{shares[split]:.0%}" if split in shares else "" for split in rows]
    for name, counts in (("filtered", report["filtered"]), ("left out", report["left_out"])):
        columns[name] = [f"{counts[split]:,}" if counts.get(split) else "" for split in rows]
    in_gap, times = (report.get("split", {}).get(name, {}) for name in ("in_gap", "times"))
    columns["in gap"] = [f"{in_gap[split]:,}" if in_gap.get(split) else "" for split in rows]
    columns["times"] = [" to ".join(times.get(split, ())) for split in rows]
    columns["groups"] = [f"{count:,}" for count in report.get("split", {}).get("groups", {}).values()]
    columns["characters"] = _length_cells(report["characters"], rows)
    if tokens:
        columns["tokens"] = _length_cells(tokens["length"], rows)
        cut = tokens["truncated"]
        columns["rows cut"] = [
            f"{cut[split]:,} ({cut[split] / count:.1%})" if cut.get(split) else "" for split, count in rows.items()
        ]
    used = {name: cells for name, cells in columns.items() if any(cells)}
    return align([list(used), *map(list, zip(*used.values(), strict=True))])


def mixture_lines(report: Mapping[str, Any]) -> list[str]:
    """Formats a line for each set of a mixture: its rows, and the rows that training sees in an epoch. Empty without a
    mixture.

    Args:
        report: As for `split_lines`.
    """
    return align_records(tabulate_mixture(report.get("mixture", ())))


def _length_cells(lengths: Mapping[str, Mapping[str, int]], splits: Iterable[str]) -> list[str]:
    """`3 to 635, median 89`"""
    spans = (lengths.get(split, {}) for split in splits)
    return [f"{span['min']:,} to {span['max']:,}, median {span['median']:,}" if "min" in span else "" for span in spans]


def metric_lines(metrics: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Formats a line for each split: metrics with their intervals."""
    return [
        f"{split}: {', '.join(f'{name} {format_score(score)}' for name, score in scores.items())}"
        for split, scores in metrics.items()
    ]


def verdict_lines(verdict: Verdict, head: str = "Verdict") -> list[str]:
    """Formats the decision behind `head`, its reason, the bounds, the comparison with the champion, and warnings."""
    lines = [f"{head}: {verdict.decision}", f"  {verdict.reason}"]
    compared = (tabulate_comparison(verdict), tabulate_answers(verdict), tabulate_flips(verdict))
    for table in (tabulate_checks(verdict), *compared, tabulate_wrong(verdict)):
        rows = align_records(table[:MAX_CHECKS])
        rows += [f"… and {len(table) - MAX_CHECKS:,} more"] if len(table) > MAX_CHECKS else []
        lines += [f"  {row}" for row in rows]
    return [make_printable(line) for line in (*lines, *(f"  warning: {warning}" for warning in verdict.warnings))]


def calibration_lines(calibration: Mapping[str, Any] | None) -> list[str]:
    """Formats the calibration of a model and its thresholds; empty without one."""
    if calibration is None:
        return []
    result = CalibrateResult.model_validate(calibration)
    rows = [f"  {row}" for row in align_records(tabulate_answered(result))]
    return [make_printable(line) for line in (f"Confidence: {summarize_calibration(result)}", *rows)]


def export_lines(exports: Mapping[str, Any]) -> list[str]:
    """Formats the exports of a model as a table; empty if there are none."""
    compared = {name: ComparedExport.model_validate(one) for name, one in exports.items()}
    rows = [f"  {row}" for row in align_records(tabulate_exports(compared))]
    return ["Exports:", *rows] if rows else []


def label_lines(labels: Mapping[str, Mapping[str, int]], width: int) -> list[str]:
    """Formats a line for each label: rows, share and bar in each split. The rarest labels share a line.

    Args:
        labels: Rows by label by split; without labels, there are no lines.
        width: Columns of a line.
    """
    totals: dict[str, int] = {}
    for counts in labels.values():
        for name, count in counts.items():
            totals[name] = totals.get(name, 0) + count
    if not totals:
        return []
    shown = set(sorted(totals, key=lambda name: -totals[name])[:MAX_LABELS])
    # Cut names may be equal.
    table = [
        (_format_label(name), [counts.get(name, 0) for counts in labels.values()]) for name in totals if name in shown
    ]
    if rare := [name for name in totals if name not in shown]:
        table += [(f"{len(rare):,} others", [sum(counts.get(name, 0) for name in rare) for counts in labels.values()])]
    rows = [sum(counts.values()) or 1 for counts in labels.values()]
    name_width = max(map(cell_len, ("label", *(name for name, _ in table))))
    bar_width = min(BAR_WIDTH, (width - name_width) // len(labels) - len(f"  {max(rows):,}  100.0%  "))
    lines = [["label", *(part for split in labels for part in (split, "", ""))]]
    for name, label_counts in table:
        line = [name]
        for count, total in zip(label_counts, rows, strict=True):
            line += [f"{count:,}", f"{count / total:.1%}", _format_bar(count / total, bar_width)]
        lines.append(line)
    return align(lines)


def _format_bar(share: float, width: int) -> str:
    eighths = round(8 * max(0, width) * share)
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8]).rstrip()


def _format_label(name: str) -> str:
    """Formats a label as one cell without control characters."""
    name = make_printable(name)
    return name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 1]}…"
