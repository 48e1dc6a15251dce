"""What stages found, as a run's listeners show it: the report on the rows, the worst errors and groups, the verdict on
the model.

The rows' report lies beside an artifact, in the form that `training.data.load_rows.load` and
`training.tokenization.token_files.tokenize` write it; the sample of predictions and the slices are
training.programs.score's.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.cache.refs import Check, Verdict
from tasks.cache.stage import Work
from training.problems import Problem
from training.recipe import FEWEST_ROWS, Recipe, fits_slice, more_is_better

REPORT = "log/report.json"
SAMPLE = "log/predictions_sample.csv"
SLICES = "slices.json"
MOST_TOLD = 10  # warnings of a stage in a terminal or a log; the report holds them all
MOST_LABELS = 20
MOST_PROBLEMS = 200  # in Prefect's view, which draws them all at once
MOST_ERRORS = 20
LONGEST_TEXT = 500  # characters
MOST_GROUPS = 20  # of a slice that are tracked, those of most rows
LONGEST_GROUP = 100  # characters


def read_report(artifact: Path) -> dict[str, Any] | None:
    """The report of an artifact or of a folder that is being filled; None where there is none."""
    file = artifact / REPORT
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def need_report(out: Path) -> dict[str, Any]:
    """The report in a folder that was just filled."""
    report = read_report(out)
    assert report is not None  # whatever reads rows writes it last
    return report


def tell_warnings(work: Work, report: Mapping[str, Any]) -> None:
    """Tells all who follow the run what the report warns of, the first ones a line each."""
    found = report["problems"]
    lines = [f"{problem['where']}: {problem['message']}" for problem in found[:MOST_TOLD]]
    if more := len(found) - len(lines):
        lines.append(f"… and {more:,} more: see the report, {work.stage}/report.json in MLflow.")
    work.on_events([{"kind": "warning", "message": line} for line in lines])


def problems_table(problems: Iterable[Mapping[str, Any] | Problem]) -> list[dict[str, str]]:
    """A row a problem, errors first; one that says so where there is none."""
    found = [problem.model_dump() if isinstance(problem, Problem) else problem for problem in problems]
    found.sort(key=lambda problem: problem["level"] != "error")
    table = [
        {name: str(problem.get(name) or "") for name in ("level", "check", "where", "message")}
        for problem in found[:MOST_PROBLEMS]
    ]
    if more := len(found) - len(table):
        table.append({"level": "", "check": "", "where": "", "message": f"… and {more:,} more: see the report."})
    return table or [{"level": "", "check": "", "where": "", "message": "No problems."}]


def counted(number: int, noun: str) -> str:
    """`1 warning`, `2 warnings`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def score_told(score: Mapping[str, float | None]) -> str:
    """`0.8312 (0.813 to 0.848; baseline 0.523)`: a metric's value, the ends of its interval, and the figure of the best
    constant answer, as training.programs.score gives them."""
    low, high, baseline = (score.get(part) for part in ("low", "high", "baseline"))
    beside = [] if low is None or high is None else [f"{low:.3f} to {high:.3f}"]
    beside += [] if baseline is None else [f"baseline {baseline:.3f}"]
    return value_told(score["value"]) + (f" ({'; '.join(beside)})" if beside else "")


def value_told(value: float | None) -> str:
    """A metric's value, `-` where it has none."""
    return "-" if value is None or math.isnan(value) else f"{value:.4f}"


def scores_table(figures: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> list[dict[str, str]]:
    """A row a figure of `score`: split, metric, value, the ends of its interval, and the baseline if there is one."""
    table = []
    baselines = any("baseline" in score for metrics in figures.values() for score in metrics.values())
    for split, metrics in figures.items():
        for metric, score in metrics.items():
            low, high = score.get("low"), score.get("high")
            between = "-" if low is None or high is None else f"{low:.4f} to {high:.4f}"
            row = {"split": split, "metric": metric, "value": value_told(score["value"]), "95 % interval": between}
            table.append(row | ({"baseline": value_told(score.get("baseline"))} if baselines else {}))
    return table


def worst_errors(scores: Path) -> list[dict[str, str]]:
    """The wrong predictions with most confidence, worst first, with their texts; none where all are right."""
    limit = csv.field_size_limit(2**31 - 1)  # a text may be as long as it likes
    try:
        with (scores / SAMPLE).open(newline="", encoding="utf-8") as file:
            wrong = [row for row in csv.DictReader(file) if row["label"] != row["prediction"]]
    finally:
        csv.field_size_limit(limit)  # the rows of users have another
    wrong.sort(key=lambda row: -float(row["probability"]))
    return [{name: _cut(cell) for name, cell in row.items()} for row in wrong[:MOST_ERRORS]]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


def read_slices(scores: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The groups of each slice, by split and slice, in an artifact of `score`; empty where no slice was asked for."""
    file = scores / SLICES
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def worst_groups(recipe: Recipe, scores: Path) -> dict[str, str]:
    """Of each slice the group that is worst by the metric that models are compared by, on the split that is judged:
    `genre=horror accuracy 0.7115 (0.663 to 0.760), 312 rows`, by the slice's name. Groups of few rows count only where
    all have few. Where that metric means nothing there, the first that does decides; none does, none is told."""
    worst = {}
    for name, groups in read_slices(scores).get(recipe.judged_split, {}).items():
        metrics = [*groups[0]["metrics"]]
        preferred = [recipe.compared_by] if recipe.compared_by in metrics else []
        metric = next((metric for metric in preferred + metrics if fits_slice(metric, name)), None)
        if metric is None:
            continue
        less = metric in recipe.release.gate.maximum or not more_is_better(metric)
        known = [group for group in groups if group["metrics"][metric]["value"] is not None]
        many = [group for group in known if group["rows"] >= FEWEST_ROWS] or known
        if many:
            found = min(many, key=lambda group: (-1 if less else 1) * group["metrics"][metric]["value"])
            score = score_told(found["metrics"][metric])
            worst[name] = f"{printable(name)}={printable(found['group'])} {metric} {score}, {found['rows']:,} rows"
    return worst


def slices_table(scores: Path) -> list[dict[str, str]]:
    """A row a group: its split, slice, name and number of rows, and its figures with their intervals."""
    table = [
        {
            **{"split": split, "slice": name, "group": _cut(group["group"]), "rows": f"{group['rows']:,}"},
            **{metric: score_told(score) for metric, score in group["metrics"].items()},
        }
        for split, slices in read_slices(scores).items()
        for name, groups in slices.items()
        for group in groups
    ]
    return first_rows(table, "group", f"score/{SLICES}")


def first_rows(table: list[dict[str, str]], column: str, file: str) -> list[dict[str, str]]:
    """As many rows as Prefect shows, then how many more MLflow has, and in which file."""
    more = len(table) - MOST_PROBLEMS
    return [*table[:MOST_PROBLEMS], *([{column: f"… and {more:,} more: see {file}."}] if more > 0 else [])]


def slice_figures(scores: Path) -> dict[str, float]:
    """The figures of each slice's groups of most rows, under names that MLflow takes: SPLIT/SLICE:GROUP/METRIC."""
    return {
        f"{split}/{tracked_name(name + '=' + group['group'])}/{metric}": score["value"]
        for split, slices in read_slices(scores).items()
        for name, groups in slices.items()
        for group in sorted(groups, key=lambda group: -group["rows"])[:MOST_GROUPS]
        for metric, score in group["metrics"].items()
        if score["value"] is not None
    }


def tracked_figure(check: Check) -> str:
    """The name of what was checked, as MLflow takes it."""
    if check.group is None:
        return check.figure.replace(".", "/")
    split, metric = check.figure.split(f".{check.group}.")
    return f"{split}/{tracked_name(check.group)}/{metric}"


def tracked_name(group: str) -> str:
    """`SLICE:GROUP` for `SLICE=GROUP`. MLflow takes letters, digits and `_-.: `: where there is anything else, or more
    than is worth showing, it is left out and a digest tells the names apart."""
    name = group.replace("=", ":", 1)
    plain = re.sub(r"[^\w.\-: ]", "_", name)[:LONGEST_GROUP]
    return plain if plain == name else f"{plain}_{hashlib.sha256(group.encode()).hexdigest()[:8]}"


def printable(text: str) -> str:
    """What a terminal can show of the user's text."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def as_markdown(rows: Mapping[str, Any] | None, tokens: Mapping[str, Any] | None) -> str:
    """Tables of what each split holds: rows, labels, lengths in characters and, where they are known, in tokens."""
    parts = []
    if rows is not None:
        head = ["split", "rows", "held out of train", "characters (min, median, max)"]
        head += ["tokens (median, max)", "rows cut"] if tokens else []
        parts.append(_table(head, (_split_line(split, rows, tokens) for split in rows["rows"])))
        parts += [_labels(rows["labels"])] if any(rows["labels"].values()) else []
    return "\n\n".join(parts)


def checks_table(verdict: Verdict) -> list[dict[str, str]]:
    """A row a bound: the figure, its value, the bound, and whether it is held; those of all rows
    first, then those of groups that are missed."""
    return [
        {
            "figure": check.figure,
            "value": value_told(None if math.isnan(check.value) else check.value),
            "bound": f"≥ {check.minimum:g}" if check.minimum is not None else f"≤ {check.maximum:g}",
            "held": "yes" if check.held else "no",
        }
        for check in sorted(verdict.checks, key=lambda check: check.group is not None and 1 + check.held)
    ]


def comparison_table(verdict: Verdict) -> list[dict[str, str]]:
    """A row of the model beside the champion or the baseline; none where there is neither."""
    if (beside := verdict.comparison) is None:
        return []
    return [
        {
            "figure": f"{beside.split}.{beside.metric}",
            "new": f"{beside.value:.4f}",
            beside.champion: f"{beside.champion_value:.4f}",
            "gain": f"{beside.gain:+.4f}",
            f"at least, {100 * beside.confidence:g}%": f"{beside.at_least:+.4f}",
            "margin": f"{beside.margin:g}",
            "p": f"{beside.p_value:.2g}",
            "test": beside.method,
        }
    ]


def verdict_markdown(verdict: Verdict) -> str:
    """The decision, its reason, how the model stands beside the champion, and what is to be known of that."""
    beside = comparison_table(verdict)
    parts = [f"**{verdict.decision}**: {verdict.reason}"]
    parts += [markdown_table(beside)] if beside else []
    return "\n\n".join([*parts, *(f"Warning: {warning}" for warning in verdict.warnings)])


def _split_line(split: str, rows: Mapping[str, Any], tokens: Mapping[str, Any] | None) -> list[str]:
    share, length = rows["held_out"].get(split), rows["characters"][split]
    line = [split, f"{rows['rows'][split]:,}", f"{share:.0%}" if share else ""]
    line.append(", ".join(f"{length[name]:,}" for name in ("min", "median", "max") if name in length))
    if tokens:
        length = tokens["length"].get(split, {})
        line.append(", ".join(f"{length[name]:,}" for name in ("median", "max") if name in length))
        line.append(f"{tokens['truncated'].get(split, 0):,}")
    return line


def _labels(labels: Mapping[str, Mapping[str, int]]) -> str:
    names = list(dict.fromkeys(name for counts in labels.values() for name in counts))
    shown = sorted(names, key=lambda name: -sum(counts.get(name, 0) for counts in labels.values()))[:MOST_LABELS]
    lines = [[name, *(_count(counts.get(name, 0), counts) for counts in labels.values())] for name in shown]
    if len(names) > len(shown):
        lines.append([f"… and {len(names) - len(shown):,} more", *("" for _ in labels)])
    return _table(["label", *labels], lines)


def _count(count: int, counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    return f"{count:,} ({count / total:.1%})" if total else "0"


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows with the same columns, of which there is one at least."""
    return _table(list(rows[0]), (list(row.values()) for row in rows))


def _table(head: list[str], lines: Iterable[list[str]]) -> str:
    # A label may hold whatever a cell of the user's file holds.
    clean = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *clean])
