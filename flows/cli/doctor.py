"""`finetune doctor`: looks at what runs depend on, and says what is wrong and what to do. Nothing is changed."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

from flows.cli.codes import COMPLETED, FAILED
from flows.reports.tables import terminal_width
from tasks.services.doctor import Finding, examine
from tasks.tracking.reports import format_count

LEVEL = len("warning")
NARROWEST = 40


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The subcommand's arguments."""
    parser: argparse.ArgumentParser
    parser = commands.add_parser("doctor", help="look for what is wrong with this machine", description=__doc__)
    return parser


def act(arguments: argparse.Namespace) -> int:
    """Prints a line a finding, and what to do below it; gives FAILED where there is a problem."""
    findings = examine()
    widest = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(*_lines(finding, widest), sep="\n")
    levels = [finding.level for finding in findings]
    counts = [format_count(levels.count(level), level) for level in ("problem", "warning") if level in levels]
    print(", ".join(counts) or "All is well.")
    return FAILED if "problem" in levels else COMPLETED


def _lines(finding: Finding, widest: int) -> list[str]:
    """`problem  home  what was found`, wrapped; below it, behind an arrow, the next step."""
    before = f"{finding.level:<{LEVEL}}  {finding.subject:<{widest}}  "
    width, after = max(terminal_width(), len(before) + NARROWEST), " " * len(before)
    lines = []
    for first, text, indent in ((before, finding.found, after), (f"{after}→ ", finding.next_step, f"{after}  ")):
        lines += textwrap.wrap(
            text, width, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    return lines
