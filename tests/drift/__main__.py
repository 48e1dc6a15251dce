"""`python -m tests.drift --data DIR`: simulates drift reports and estimated accuracies, and prints their error rates.

DIR has folders of Parquet files with texts and labels: ag_news_10k, sst2_sentence and multi30k_en_de. Each report
compares 1,000 reference rows with new rows of AG News that the model has not seen. With `--model`, the comparison of
embeddings alone is simulated too, by the embeddings of that model.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from tests.benchmarks.table import machine
from tests.drift.subject import Model, Pool, Shift, cut, embed, misspell
from training.evaluation.drift.effects import compare_embeddings
from training.evaluation.drift.verdict import DriftComparison, Thresholds, compare, estimate_accuracy, judge
from training.evaluation.significance import alpha_spent

USUAL = Thresholds(cohens_w=0.1, distance=0.1, auc=0.55)
"""The defaults of the recipe."""

REFERENCE_ROWS = 1_000
NEW_ROWS = (100, 200, 500, 1_000, 2_000)
ALPHA = 0.05
SHARES = (0.2, 0.5)
"""Shares of changed rows."""
NIGHTS, NIGHT_ROWS = 5, 200
EMBEDDED_ROWS = 4_000
"""Rows with embeddings of a model, which take most of the time."""


def main() -> int:
    """Prints three tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.drift", description="Simulate drift reports.")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--reports", type=int, default=1_000, help="without a shift")
    parser.add_argument("--trials", type=int, default=50, help="reports for each shift and number of rows")
    parser.add_argument("--estimates", type=int, default=200, help="estimated accuracies for each shift")
    parser.add_argument("--model", type=Path, metavar="DIR", help="of embeddings, for the table `embeddings`")
    tables = ("false-alarms", "power", "coverage", "embeddings")
    parser.add_argument("--only", nargs="+", choices=tables, default=tables[:3], help="tables to compute")
    parser.add_argument(
        "--shifts", default="", metavar="WORD", help="of the table of power, only shifts with this word"
    )
    options = parser.parse_args()
    if "embeddings" in options.only and options.model is None:
        parser.error("the table embeddings needs --model")
    began = time.monotonic()
    subject = Subject(options.data)
    print(f"{machine()}.\n")
    lines = {
        "false-alarms": subject.false_alarms(options.reports),
        "power": subject.power(options.trials, options.shifts),
        "coverage": subject.coverage(options.estimates, options.shifts),
        "embeddings": subject.embeddings(options.model, options.reports, options.trials),
    }
    for name in options.only:
        for line in lines[name]:
            print(line, flush=True)
        print(flush=True)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0


class Subject:
    """AG News with a model that was trained on other rows of it."""

    def __init__(self, data: Path) -> None:
        train, test = (_read(data / "ag_news_10k" / f"{split}.parquet", "text", "label") for split in ("train", "test"))
        self.model = Model(*train)
        self.pool = self.model.observe(*test)
        self.data = data

    @cached_property
    def reviews(self) -> Pool:
        """Rows of another source."""
        return self.model.observe(_read(self.data / "sst2_sentence" / "train.parquet", "text", "label")[0])

    @cached_property
    def german(self) -> Pool:
        """Rows in another language."""
        return self.model.observe(_read(self.data / "multi30k_en_de" / "train.parquet", "de", None)[0][:7_000])

    def changed(self, change: Callable[[str], str]) -> Pool:
        """All rows with changed texts."""
        return self.model.observe([change(text) for text in self.pool.texts], self.pool.labels)

    def shifts(self) -> Mapping[str, Shift]:
        """New rows by the kind of their shift."""
        found = {}
        for name, change in (("cut texts", cut), ("texts with typing errors", misspell)):
            other = self.changed(change)
            found |= {f"{share:.0%} {name}": Shift(self.pool, None, other, share, True) for share in SHARES}
        for name, other in (("rows of another source", self.reviews), ("rows in another language", self.german)):
            found |= {f"{share:.0%} {name}": Shift(self.pool, None, other, share) for share in SHARES}
        for times in (1.5, 2, 4):
            weights = np.where(self.pool.labels == 0, float(times), 1.0)
            found[f"one label of four {times:g} times as likely"] = Shift(self.pool, weights)
        return found

    def false_alarms(self, reports: int) -> Iterator[str]:
        """The share of reports that are not steady although nothing shifted."""
        yield "| new rows | reports without a shift | not steady | at the first of many looks | most |"
        yield "|---|---|---|---|---|"
        for rows in (100, 500, 1_000):
            found = {ALPHA: 0, alpha_spent(1, ALPHA): 0}
            for trial in range(reports):
                samples = Shift(self.pool).draw(np.random.default_rng([trial, rows]), REFERENCE_ROWS, rows)
                comparisons = compare(*samples, USUAL)
                for alpha in found:
                    found[alpha] += judge(comparisons, alpha)[0] != "steady"
            shares = [f"{count / reports:.1%}" for count in found.values()]
            yield f"| {rows:,} | {reports:,} | {shares[0]} | {shares[1]} | {ALPHA:.0%} |"

    def power(self, trials: int, word: str = "") -> Iterator[str]:
        """Yields a row of the table for each shift: the share of `drifted` reports, and of `drifted` or `watch`.

        `word`: only shifts whose name contains it.
        """
        yield f"| drifted (drifted or watch) | {' | '.join(f'{rows:,} rows' for rows in NEW_ROWS)} |"
        yield "|---|" + "---|" * len(NEW_ROWS)
        for name, shift in self.shifts().items():
            if word not in name:
                continue
            cells = []
            for rows in NEW_ROWS:
                verdicts = []
                for trial in range(trials):
                    samples = shift.draw(np.random.default_rng([trial, rows, 1]), REFERENCE_ROWS, rows)
                    verdicts.append(judge(compare(*samples, USUAL), alpha_spent(1, ALPHA))[0])
                drifted, watch = (sum(verdict == kind for verdict in verdicts) for kind in ("drifted", "watch"))
                cells.append(f"{drifted / trials:.0%} ({(drifted + watch) / trials:.0%})")
            yield f"| {name} | {' | '.join(cells)} |"

    def embeddings(self, model: Path, homes: int, trials: int) -> Iterator[str]:
        """Of the comparison of a model's own embeddings alone: the share of homes with a report that is not steady in
        any of their nights although nothing shifted, and the power for topics that become more frequent."""
        labels = self.pool.labels[:EMBEDDED_ROWS]
        vectors = embed(model, self.pool.texts[:EMBEDDED_ROWS])

        def verdict(reference: np.ndarray, new: np.ndarray, look: int) -> str:
            found = compare_embeddings(vectors[reference], vectors[new], USUAL.auc)
            comparison = DriftComparison("embeddings", "auc", USUAL.auc, found.effect, found.details)
            return judge([comparison], alpha_spent(look, ALPHA))[0]

        alarms = {"the first": 0, "any": 0}
        for home in range(homes):
            order = np.random.default_rng([home, 3]).permutation(len(vectors))
            reference, *nights = np.split(order, REFERENCE_ROWS + NIGHT_ROWS * np.arange(NIGHTS + 1))[: NIGHTS + 1]
            found = [verdict(reference, new, look) != "steady" for look, new in enumerate(nights, 1)]
            alarms["the first"] += found[0]
            alarms["any"] += any(found)
        yield "| homes without a shift | nights | new rows a night | not steady at the first look | at any | most |"
        yield "|---|---|---|---|---|---|"
        shares = " | ".join(f"{count / homes:.1%}" for count in alarms.values())
        yield f"| {homes:,} | {NIGHTS} | {NIGHT_ROWS} | {shares} | {ALPHA:.0%} |"
        yield ""
        sizes = NEW_ROWS[:3]
        yield f"| drifted (drifted or watch) | {' | '.join(f'{rows:,} rows' for rows in sizes)} |"
        yield "|---|" + "---|" * len(sizes)
        for share in SHARES:
            cells = []
            for rows in sizes:
                verdicts = []
                for trial in range(trials):
                    draw = np.random.default_rng([trial, rows, 4])
                    reference, rest = np.split(draw.permutation(len(vectors)), [REFERENCE_ROWS])
                    of_topic, other = rest[labels[rest] == 0], rest[labels[rest] != 0]
                    number = draw.binomial(rows, 0.25 + 0.75 * share)
                    new = np.concatenate([of_topic[:number], other[: rows - number]])
                    verdicts.append(verdict(reference, new, 1))
                drifted, watch = (sum(one == kind for one in verdicts) / trials for kind in ("drifted", "watch"))
                cells.append(f"{drifted:.0%} ({drifted + watch:.0%})")
            yield f"| {share:.0%} of the rows become rows of one topic of four | {' | '.join(cells)} |"

    def coverage(self, trials: int, word: str = "") -> Iterator[str]:
        """How often the interval of the estimated accuracy has the true one, for rows whose labels mean the same.

        `word`: only shifts whose name contains it.
        """
        yield "| new rows | trials | true accuracy | estimated | interval covers | least | mean width |"
        yield "|---|---|---|---|---|---|---|"
        lengths = np.array([len(text) for text in self.pool.texts])
        weights = {
            "no shift": None,
            "long texts 4 times as likely": np.where(lengths > np.median(lengths), 4.0, 1.0),
            "hard rows 4 times as likely": np.where(self.pool.probabilities.max(axis=1) < 0.8, 4.0, 1.0),
        }
        shifts = {name: Shift(self.pool, chances) for name, chances in weights.items()}
        shifts |= {
            name: Shift(self.pool, None, self.changed(change), 1.0, True)
            for name, change in (("cut texts", cut), ("typing errors", misspell))
        }
        for name, shift in shifts.items():
            if word not in name:
                continue
            for rows in (200, 1_000):
                true, value, covered, width = (np.zeros(trials) for _ in range(4))
                for trial in range(trials):
                    reference, new = shift.draw(np.random.default_rng([trial, rows, 2]), REFERENCE_ROWS, rows)
                    found = estimate_accuracy(reference.confidence, reference.correct, new.confidence, seed=trial)
                    true[trial], value[trial] = new.correct.mean(), found.value
                    covered[trial], width[trial] = found.low <= true[trial] <= found.high, found.high - found.low
                figures = f"{true.mean():.3f} | {value.mean():.3f} | {covered.mean():.1%} | 90% | {width.mean():.3f}"
                yield f"| {rows:,}, {name} | {trials:,} | {figures} |"


def _read(file: Path, text: str, label: str | None) -> tuple[list[str], np.ndarray]:
    table = pq.read_table(file)
    labels = table[label].to_numpy() if label else np.full(len(table), -1)
    return table[text].to_pylist(), labels


if __name__ == "__main__":
    sys.exit(main())
