"""Tables and texts of what stages found: rows, scores, errors, slices and the verdict.

`training.data.load_rows.load` and `training.tokenization.token_files.tokenize` write the report on the rows;
`training.programs.score` writes the sample of predictions and the slices.
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
from training.recipe import FEWEST_ROWS, Recipe, fits_slice, more_is_better

REPORT = "log/report.json"
SAMPLE = "log/predictions_sample.csv"
SLICES = "slices.json"
LOGGED_WARNINGS = 10  # of a stage in a terminal or a log; the report has all
TABLE_LABELS = 20
TABLE_ROWS = 200  # Prefect's page draws all rows at once
TABLE_ERRORS = 20
TEXT_LENGTH = 500  # characters of a cell
TRACKED_GROUPS = 20  # of a slice, the largest
GROUP_LENGTH = 100  # characters of a group's name in MLflow


def read_report(artifact: Path) -> dict[str, Any]:
    """The report on the rows in an artifact of `load_data` or `tokenize`, or in a folder that they have just filled."""
    return dict(json.loads((artifact / REPORT).read_text(encoding="utf-8")))


def emit_warnings(work: Work, report: Mapping[str, Any]) -> None:
    """Passes the report's first warnings to the run's listeners, one line each."""
    found = report["problems"]
    lines = [f"{problem['where']}: {problem['message']}" for problem in found[:LOGGED_WARNINGS]]
    if more := len(found) - len(lines):
        lines.append(f"… and {more:,} more: see the report, {work.stage}/report.json in MLflow.")
    work.on_events([{"kind": "warning", "message": line} for line in lines])


def tabulate_problems(problems: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """One row per problem, errors first; one row that says so if there are none."""
    columns = ("level", "check", "where", "message")
    found = sorted(problems, key=lambda problem: problem["level"] != "error")
    table = [{name: str(problem.get(name) or "") for name in columns} for problem in found]
    return limit_rows(table, "message", "the report") or [{**dict.fromkeys(columns, ""), "message": "No problems."}]


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


def format_score(score: Mapping[str, float | None]) -> str:
    """`0.8312 (0.813 to 0.848; baseline 0.523)`: a metric's value, its interval, and the value of the best constant
    prediction, as training.programs.score writes them."""
    low, high, baseline = (score.get(part) for part in ("low", "high", "baseline"))
    details = [] if low is None or high is None else [f"{low:.3f} to {high:.3f}"]
    details += [] if baseline is None else [f"baseline {baseline:.3f}"]
    return format_value(score["value"]) + (f" ({'; '.join(details)})" if details else "")


def format_value(value: float | None) -> str:
    """A metric's value; `-` if there is none."""
    return "-" if value is None or math.isnan(value) else f"{value:.4f}"


def tabulate_scores(figures: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> list[dict[str, str]]:
    """One row per split and metric of `score`: value, interval, and the baseline if any metric has one."""
    table = []
    baselines = any("baseline" in score for metrics in figures.values() for score in metrics.values())
    for split, metrics in figures.items():
        for metric, score in metrics.items():
            low, high = score.get("low"), score.get("high")
            interval = "-" if low is None or high is None else f"{low:.4f} to {high:.4f}"
            row = {"split": split, "metric": metric, "value": format_value(score["value"]), "95 % interval": interval}
            table.append(row | ({"baseline": format_value(score.get("baseline"))} if baselines else {}))
    return table


def find_worst_errors(scores: Path) -> list[dict[str, str]]:
    """The wrong predictions with the highest confidence, with their texts."""
    csv.field_size_limit(2**31 - 1)
    with (scores / SAMPLE).open(newline="", encoding="utf-8") as file:
        wrong = [row for row in csv.DictReader(file) if row["label"] != row["prediction"]]
    wrong.sort(key=lambda row: -float(row["probability"]))
    return [{name: _shorten(cell) for name, cell in row.items()} for row in wrong[:TABLE_ERRORS]]


def _shorten(text: str) -> str:
    return text if len(text) <= TEXT_LENGTH else text[: TEXT_LENGTH - 1] + "…"


def read_slices(scores: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The groups of each slice, by split and slice, each with its rows and metrics; empty if the recipe has no
    slices."""
    file = scores / SLICES
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def find_worst_groups(recipe: Recipe, scores: Path) -> dict[str, str]:
    """The worst group of each slice on the judged split, by the slice's name:
    `genre=horror accuracy 0.7115 (0.663 to 0.760), 312 rows`.

    The metric is the one that models are compared by, or else the first that has a meaning within the slice; a slice
    without such a metric is left out. Small groups count only if all groups are small.
    """
    worst = {}
    for name, groups in read_slices(scores).get(recipe.judged_split, {}).items():
        metrics = [*groups[0]["metrics"]]
        preferred = [recipe.compared_by] if recipe.compared_by in metrics else []
        metric = next((metric for metric in preferred + metrics if fits_slice(metric, name)), None)
        if metric is None:
            continue
        sign = 1 if metric in recipe.release.gate.maximum or not more_is_better(metric) else -1
        known = [group for group in groups if group["metrics"][metric]["value"] is not None]
        large = [group for group in known if group["rows"] >= FEWEST_ROWS] or known
        if large:
            found = max(large, key=lambda group: sign * group["metrics"][metric]["value"])
            score = format_score(found["metrics"][metric])
            group = f"{make_printable(name)}={make_printable(found['group'])}"
            worst[name] = f"{group} {metric} {score}, {found['rows']:,} rows"
    return worst


def tabulate_slices(scores: Path) -> list[dict[str, str]]:
    """One row per group: its split, slice, name and number of rows, and its metrics with their intervals."""
    table = [
        {
            **{"split": split, "slice": name, "group": _shorten(group["group"]), "rows": f"{group['rows']:,}"},
            **{metric: format_score(score) for metric, score in group["metrics"].items()},
        }
        for split, slices in read_slices(scores).items()
        for name, groups in slices.items()
        for group in groups
    ]
    return limit_rows(table, "group", f"score/{SLICES}")


def limit_rows(table: list[dict[str, str]], column: str, file: str) -> list[dict[str, str]]:
    """The first rows of a table; if there are more, a last row names the file that has all."""
    more = len(table) - TABLE_ROWS
    return [*table[:TABLE_ROWS], *([{column: f"… and {more:,} more: see {file}."}] if more > 0 else [])]


def read_slice_figures(scores: Path) -> dict[str, float]:
    """Metrics of the largest groups of each slice, by `SPLIT/SLICE:GROUP/METRIC`, a name that MLflow accepts."""
    return {
        f"{split}/{format_group_name(name + '=' + group['group'])}/{metric}": score["value"]
        for split, slices in read_slices(scores).items()
        for name, groups in slices.items()
        for group in sorted(groups, key=lambda group: -group["rows"])[:TRACKED_GROUPS]
        for metric, score in group["metrics"].items()
        if score["value"] is not None
    }


def format_check_name(check: Check) -> str:
    """The name of a check's figure in MLflow."""
    if check.group is None:
        return check.figure.replace(".", "/")
    split, metric = check.figure.split(f".{check.group}.")
    return f"{split}/{format_group_name(check.group)}/{metric}"


def format_group_name(group: str) -> str:
    """`SLICE:GROUP` for `SLICE=GROUP`. MLflow accepts letters, digits and `_-.: `; a name with other characters, or a
    long one, is changed and ends with a digest of the original."""
    name = group.replace("=", ":", 1)
    plain = re.sub(r"[^\w.\-: ]", "_", name)[:GROUP_LENGTH]
    return plain if plain == name else f"{plain}_{hashlib.sha256(group.encode()).hexdigest()[:8]}"


def make_printable(text: str) -> str:
    """The text with a placeholder for each character that a terminal cannot show."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


class Markdown(str):
    """A text that is Markdown on purpose: `escape_markdown` leaves it as it is."""


def escape_markdown(text: str) -> str:
    """The text as Markdown that shows it. Rows, labels and names may contain anything, such as links that run code."""
    if isinstance(text, Markdown):
        return text
    escaped = _BEGINS_BLOCK.sub(r"\1\\\2", _MARKUP.sub(r"\\\g<0>", " ".join(text.splitlines())))
    return _ADDRESS.sub(r"\1\\\2", escaped)


_MARKUP = re.compile(r"[\\`*\[\]<>|~&!]|(?<!\w)_|_(?!\w)")
_BEGINS_BLOCK = re.compile(r"^(\s*)([#+\-=](?=\s|[=#-]{2}))")
_ADDRESS = re.compile(r"(?i)(\b(?:https?|ftp|mailto|xmpp|www))([:.])")


def describe_rows(rows: Mapping[str, Any] | None, tokens: Mapping[str, Any] | None) -> str:
    """Markdown tables of the splits: rows, labels, and lengths in characters and, if known, in tokens."""
    if rows is None:
        return ""
    head = ["split", "rows", "held out of train", "characters (min, median, max)"]
    head += ["tokens (median, max)", "rows cut"] if tokens else []
    parts = [_format_table(head, (_format_split(split, rows, tokens) for split in rows["rows"]))]
    parts += [format_markdown(tabulate_mixture(rows["mixture"]))] if "mixture" in rows else []
    parts += [_format_labels(rows["labels"])] if any(rows["labels"].values()) else []
    return "\n\n".join(parts)


def tabulate_mixture(sets: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """One row per set of a mixture: its train rows, weight, the rows that training sees in an epoch, how often the set
    is passed for them, their share of the mixture by rows, by characters and, if they were counted, by tokens, and its
    rows in other splits."""
    listed = list(sets)
    return [
        {
            "dataset": one["dataset"],
            "train rows": f"{one['rows']:,}",
            **({"weight": f"{one['weight']:g}"} if one["weight"] is not None else {}),
            "rows an epoch": f"{one['mixed']:,}",
            "passes": f"{one['passes']:.4g}",
            "share": f"{one['share']:.1%}",
            "of characters": f"{one['character_share']:.1%}",
            **({"of tokens": f"{one['token_share']:.1%}"} if "token_share" in one else {}),
            **{split: f"{one.get(split, 0):,}" for split in ("validation", "test") if any(split in o for o in listed)},
        }
        for one in listed
    ]


def tabulate_checks(verdict: Verdict) -> list[dict[str, str]]:
    """One row per bound: figure, value, bound, and whether it holds. Bounds on all rows come first, then those on
    groups, the missed ones first."""
    return [
        {
            "figure": check.figure,
            "value": format_value(check.value),
            "bound": f"≥ {check.minimum:g}" if check.minimum is not None else f"≤ {check.maximum:g}",
            "held": "yes" if check.passed else "no",
        }
        for check in sorted(verdict.checks, key=lambda check: check.group is not None and 1 + check.passed)
    ]


def tabulate_comparison(verdict: Verdict) -> list[dict[str, str]]:
    """One row that compares the model with the champion or the baseline; none without either."""
    if (comparison := verdict.comparison) is None:
        return []
    return [
        {
            "figure": f"{comparison.split}.{comparison.metric}",
            "new": f"{comparison.value:.4f}",
            comparison.champion: f"{comparison.champion_value:.4f}",
            "gain": f"{comparison.gain:+.4f}",
            f"at least, {100 * comparison.confidence:g}%": f"{comparison.at_least:+.4f}",
            "margin": f"{comparison.margin:g}",
            "p": f"{comparison.p_value:.2g}",
            "test": comparison.method,
        }
    ]


def tabulate_answers(verdict: Verdict) -> list[dict[str, str]]:
    """One row per figure of the answers of the model and its opponent."""
    found = verdict.comparison.answers if verdict.comparison else []
    return [
        {
            "figure": one.metric,
            "new": f"{one.value:.4f}",
            one.opponent: f"{one.champion_value:.4f}",
            "difference": f"{one.value - one.champion_value:+.4f}",
            "95 % interval": f"{one.low:+.4f} to {one.high:+.4f}",
            "prompts": f"{one.rows:,}",
        }
        for one in found
    ]


def describe_verdict(verdict: Verdict) -> str:
    """The decision, its reason, the comparison and the warnings, as Markdown."""
    tables = [table for table in (tabulate_comparison(verdict), tabulate_answers(verdict)) if table]
    parts = [f"**{verdict.decision}**: {escape_markdown(verdict.reason)}", *map(format_markdown, tables)]
    return "\n\n".join([*parts, *(f"Warning: {escape_markdown(warning)}" for warning in verdict.warnings)])


def _format_split(split: str, rows: Mapping[str, Any], tokens: Mapping[str, Any] | None) -> list[str]:
    share, length = rows["held_out"].get(split), rows["characters"][split]
    line = [split, f"{rows['rows'][split]:,}", f"{share:.0%}" if share else ""]
    line.append(", ".join(f"{length[name]:,}" for name in ("min", "median", "max") if name in length))
    if tokens:
        length = tokens["length"].get(split, {})
        line.append(", ".join(f"{length[name]:,}" for name in ("median", "max") if name in length))
        line.append(f"{tokens['truncated'].get(split, 0):,}")
    return line


def _format_labels(labels: Mapping[str, Mapping[str, int]]) -> str:
    names = list(dict.fromkeys(name for counts in labels.values() for name in counts))
    shown = sorted(names, key=lambda name: -sum(counts.get(name, 0) for counts in labels.values()))[:TABLE_LABELS]
    lines = [[name, *(_format_share(counts.get(name, 0), counts) for counts in labels.values())] for name in shown]
    if len(names) > len(shown):
        lines.append([f"… and {len(names) - len(shown):,} more", *("" for _ in labels)])
    return _format_table(["label", *labels], lines)


def _format_share(count: int, counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    return f"{count:,} ({count / total:.1%})" if total else "0"


def format_markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table of rows with the same columns; at least one row."""
    return _format_table(list(rows[0]), (list(row.values()) for row in rows))


def _format_table(head: list[str], lines: Iterable[list[str]]) -> str:
    names, *cells = ([escape_markdown(cell) for cell in line] for line in [head, *lines])
    return "\n".join(f"| {' | '.join(line)} |" for line in [names, ["---"] * len(head), *cells])
