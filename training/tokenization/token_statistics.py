"""Tokenization statistics: row, token and truncation counts of each split, and their problems."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from training.data.arrow_files import Spread
from training.problems import Problem
from training.tokenization.features import Features

CHECK = "truncated"


@dataclass
class TokenStatistics:
    """The statistics of a split."""

    rows: int = 0
    tokens: int = 0
    truncated: int = 0
    lost: int = 0
    """Truncated tokens."""
    longest: int = 0
    """Tokens of the longest row before truncation."""
    lengths: Spread = field(default_factory=Spread)
    targets: TokenStatistics | None = None
    """The statistics of target texts, if rows have such."""
    emptied: int = 0
    """Truncated rows without targets left."""

    def add(self, features: Features, rows: int) -> None:
        self._count(features.rows.column("length").to_numpy(), features.lost, rows)
        if "targets" in features.rows.schema.names:
            targets = features.rows.column("targets").to_numpy()
            self.emptied += int(np.count_nonzero((targets == 0) & (features.lost > 0)))
            if features.lost_of_targets is not None:
                self.targets = self.targets or TokenStatistics()
                self.targets._count(targets, features.lost_of_targets, rows)

    def _count(self, lengths: npt.NDArray[np.int32], lost: npt.NDArray[np.int64], rows: int) -> None:
        self.rows += rows
        self.tokens += int(lengths.sum())
        self.truncated += int(np.count_nonzero(lost))
        self.lost += int(lost.sum())
        self.longest = max(self.longest, int((lengths + lost).max(initial=0)))
        self.lengths.add(lengths)


def truncation_problems(
    by_split: Mapping[str, TokenStatistics], max_length: int, level: Literal["error", "warning"]
) -> Iterator[Problem]:
    """The problems of truncated rows, of truncated targets, and of rows whose targets are all cut off, by split."""

    def problem(where: str, message: str) -> Problem:
        return Problem(kind="tokens", where=where, message=message, check=CHECK, level=level)

    truncated = [(split, "rows", "tokens.max_length", found) for split, found in by_split.items()]
    truncated += [(split, "targets", "options.max_target_length", found) for split, found in _targets(by_split).items()]
    for split, units, where, found in truncated:
        if found.truncated:
            total = found.tokens + found.lost
            yield problem(
                where,
                f"{found.lengths.summary()['max']} cuts {found.truncated:,} of {found.rows:,} {units} of {split} "
                f"({found.truncated / found.rows:.1%}) and loses {found.lost:,} of {total:,} tokens "
                f"({found.lost / total:.1%}): {found.longest:,} would keep all, if the model takes as many. "
                f"If the cut is intended, set data.checks.{CHECK} to ignore.",
            )
    for split, found in by_split.items():
        if found.emptied:
            yield problem(
                "tokens.max_length",
                f"{max_length} cuts off all targets in {found.emptied:,} of {found.rows:,} rows "
                f"of {split}: they train nothing and count in no metric. Raise it, or remove these rows.",
            )


def _targets(by_split: Mapping[str, TokenStatistics]) -> dict[str, TokenStatistics]:
    return {split: statistics.targets for split, statistics in by_split.items() if statistics.targets}


def write_report(path: Path, by_split: Mapping[str, TokenStatistics], problems: list[Problem]) -> None:
    """Writes the statistics of each split and the warnings."""
    path.parent.mkdir(exist_ok=True)
    targets = _targets(by_split)
    report = {
        **_as_json(by_split),
        **({"targets": _as_json(targets)} if targets else {}),
        "problems": [problem.model_dump() for problem in problems],
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _as_json(by_split: Mapping[str, TokenStatistics]) -> dict[str, Any]:
    counts = {
        name: {split: getattr(statistics, name) for split, statistics in by_split.items()}
        for name in ("rows", "tokens", "truncated", "lost")
    }
    lengths = {split: statistics.lengths for split, statistics in by_split.items()}
    return counts | {
        "length": {split: {**spread.summary(), "histogram": spread.histogram()} for split, spread in lengths.items()}
    }
