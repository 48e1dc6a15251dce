"""Check this machine and its servers, and print how to solve each problem. Leaves nothing behind."""

from __future__ import annotations

import argparse

from flows.cli.shared import COMPLETED, FAILED
from flows.reports.tables import terminal_width, wrap
from tasks.reports.formatting import format_count
from tasks.services.doctor import Finding, run_checks

LEVEL = len("warning")
MIN_TEXT_WIDTH = 40


def execute(arguments: argparse.Namespace) -> int:
    """Prints each finding with its next step; returns FAILED if there is a problem."""
    findings = run_checks()
    subject_width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(*_format_finding(finding, subject_width), sep="\n")
    levels = [finding.level for finding in findings]
    counts = [format_count(levels.count(level), level) for level in ("problem", "warning") if level in levels]
    print(", ".join(counts) or "All is well.")
    return FAILED if "problem" in levels else COMPLETED


def _format_finding(finding: Finding, subject_width: int) -> list[str]:
    """Formats `problem  home  finding`, wrapped, and below it the next step behind an arrow."""
    start = f"{finding.level:<{LEVEL}}  {finding.subject:<{subject_width}}  "
    width, indent = max(terminal_width(), len(start) + MIN_TEXT_WIDTH), " " * len(start)
    return wrap(finding.found, width, start, indent) + wrap(finding.next_step, width, f"{indent}→ ", f"{indent}  ")
