"""What became of rows when their texts were made into tokens: counted, told and written down."""

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
class Tally:
    """What became of the rows of a split."""

    rows: int = 0
    tokens: int = 0
    truncated: int = 0
    lost: int = 0
    """Tokens that rows would have had without a limit."""
    longest: int = 0
    """Tokens of the longest row without a limit."""
    lengths: Spread = field(default_factory=Spread)
    targets: Tally | None = None
    """The same of the texts that the model shall write, where there are any."""
    emptied: int = 0
    """Rows that are cut and have no targets left."""

    def add(self, features: Features, rows: int) -> None:
        self._count(features.rows.column("length").to_numpy(), features.lost, rows)
        if "targets" in features.rows.schema.names:
            without = features.rows.column("targets").to_numpy() == 0
            self.emptied += int(np.count_nonzero(without & (features.lost > 0)))
        if features.lost_of_targets is not None:
            self.targets = self.targets or Tally()
            self.targets._count(features.rows.column("targets").to_numpy(), features.lost_of_targets, rows)

    def _count(self, lengths: npt.NDArray[np.int32], lost: npt.NDArray[np.int64], rows: int) -> None:
        self.rows += rows
        self.tokens += int(lengths.sum())
        self.truncated += int(np.count_nonzero(lost))
        self.lost += int(lost.sum())
        self.longest = max(self.longest, int((lengths + lost).max(initial=0)))
        self.lengths.add(lengths)


def problems_of(tallies: Mapping[str, Tally], max_length: int, level: Literal["error", "warning"]) -> Iterator[Problem]:
    """What is wrong with rows that are longer than `max_length` tokens, and with targets that are longer than
    allowed."""
    yield from _cut(tallies, "rows", "tokens.max_length", level)
    yield from _cut(_targets(tallies), "targets", "options.max_target_length", level)
    yield from _emptied(tallies, max_length, level)


def _targets(tallies: Mapping[str, Tally]) -> dict[str, Tally]:
    return {split: tally.targets for split, tally in tallies.items() if tally.targets}


def _cut(tallies: Mapping[str, Tally], what: str, where: str, level: Literal["error", "warning"]) -> Iterator[Problem]:
    """A problem for each split with rows that are longer than allowed, or with targets that are."""
    for split, tally in tallies.items():
        if tally.truncated:
            whole = tally.tokens + tally.lost
            message = (
                f"{tally.lengths.summary()['max']} cuts {tally.truncated:,} of {tally.rows:,} {what} of {split} "
                f"({tally.truncated / tally.rows:.1%}) and loses {tally.lost:,} of {whole:,} tokens "
                f"({tally.lost / whole:.1%}): {tally.longest:,} would keep all, if the model takes as many. "
                f"Where the cut is meant, set data.checks.{CHECK} to ignore."
            )
            yield Problem(kind="tokens", where=where, message=message, check=CHECK, level=level)


def _emptied(tallies: Mapping[str, Tally], max_length: int, level: Literal["error", "warning"]) -> Iterator[Problem]:
    """A problem for each split with rows of which nothing is left that the model shall say."""
    for split, tally in tallies.items():
        if tally.emptied:
            message = (
                f"{max_length} leaves nothing of what the model shall say in {tally.emptied:,} of {tally.rows:,} rows "
                f"of {split}: nothing is learnt of these, and they count in no figure. Raise it, or take them out."
            )
            yield Problem(kind="tokens", where="tokens.max_length", message=message, check=CHECK, level=level)


def write_report(path: Path, tallies: Mapping[str, Tally], problems: list[Problem]) -> None:
    """Writes what became of each split, and the problems that are warnings."""
    path.parent.mkdir(exist_ok=True)
    targets = _targets(tallies)
    report = {
        **_counted(tallies),
        **({"targets": _counted(targets)} if targets else {}),
        "problems": [problem.model_dump() for problem in problems],
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _counted(tallies: Mapping[str, Tally]) -> dict[str, Any]:
    return {
        "rows": {split: tally.rows for split, tally in tallies.items()},
        "tokens": {split: tally.tokens for split, tally in tallies.items()},
        "truncated": {split: tally.truncated for split, tally in tallies.items()},
        "lost": {split: tally.lost for split, tally in tallies.items()},
        "length": {
            split: {**tally.lengths.summary(), "histogram": tally.lengths.histogram()}
            for split, tally in tallies.items()
        },
    }
