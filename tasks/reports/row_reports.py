"""Tables and texts of the rows: the reports that `load_data` and `tokenize` write."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tasks.cache.stage import Work
from tasks.reports.formatting import format_count, format_markdown, format_table, limit_rows
from training.data.ipc_files import CORPUS
from training.problems import Problem

REPORT = "log/report.json"
LOGGED_WARNINGS = 10  # of a stage in a terminal or a log; the report has all
TABLE_LABELS = 20


def read_report(artifact: Path) -> dict[str, Any]:
    """The report on the rows in an artifact of `load_data` or `tokenize`, or in a folder that they have just filled."""
    return dict(json.loads((artifact / REPORT).read_text(encoding="utf-8")))


def read_token_report(artifact: Path, most_generated: int | None) -> dict[str, Any]:
    """The report of `tokenize`, with a warning for each split whose targets are longer than the texts of at most
    `most_generated` tokens that the model will generate."""
    report = read_report(artifact)
    for split, length in report.get("targets", {}).get("length", {}).items():
        if split != "train" and most_generated is not None and length.get("max", 0) > most_generated:
            message = (
                f"{most_generated} tokens are fewer than the {length['max']:,} of the longest target of {split}: texts "
                "are generated up to there, and metrics compare them with whole targets. Raise it."
            )
            problem = Problem(kind="tokens", where="options.max_new_tokens", message=message, level="warning")
            report["problems"].append(problem.model_dump())
    return report


def emit_warnings(work: Work, report: Mapping[str, Any]) -> None:
    """Passes the report's first warnings to the run's listeners, one line each."""
    found = report["problems"]
    lines = [f"{problem['where']}: {problem['message']}" for problem in found[:LOGGED_WARNINGS]]
    if more := len(found) - len(lines):
        lines.append(f"… and {more:,} more: see the report, {work.stage}/report.json in MLflow.")
    for line in lines:
        work.warning(line)


def summarize_splits(report: Mapping[str, Any]) -> str:
    """The groups or the times of each split in one line; empty if rows are held out by their texts."""
    split = report.get("split", {})
    parts = []
    if "groups" in split:
        parts.append(f"groups: {', '.join(f'{name} {count:,}' for name, count in split['groups'].items())}")
    if "times" in split:
        spans = (f"{name} {' to '.join(span)}" for name, span in split["times"].items())
        parts.append(f"times: {', '.join(spans)}")
    if in_gap := sum(split.get("in_gap", {}).values()):
        parts.append(f"{format_count(in_gap, 'row')} in a gap between them")
    return "; ".join(parts)


def summarize_corrections(report: Mapping[str, Any]) -> str:
    """The numbers of rows of train that people have decided on, in one line; empty without data.corrections."""
    if (counts := report.get("corrections")) is None:
        return ""
    shown = {"corrected": "corrected", "dropped": "dropped", "kept": "kept", "already_right": "already right"}
    parts = [f"{counts[name]:,} {word}" for name, word in shown.items()]
    lines = [f"{counts[name]:,} {name.replace('_', ' ')}" for name in ("unmatched", "held_out") if counts[name]]
    return f"labels of train: {', '.join(parts)}{'; decisions ' if lines else ''}{', '.join(lines)}"


def summarize_corpus(report: Mapping[str, Any]) -> str:
    """The number of further documents, in one line; empty without data.corpus."""
    return f"data.corpus: {report[CORPUS]:,} documents beside those of the rows" if CORPUS in report else ""


def tabulate_problems(problems: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """One row per problem, errors first; one row that says so if there are none."""
    columns = ("level", "check", "where", "message")
    found = sorted(problems, key=lambda problem: problem["level"] != "error")
    table = [{name: str(problem.get(name) or "") for name in columns} for problem in found]
    return limit_rows(table, "message", "the report") or [{**dict.fromkeys(columns, ""), "message": "No problems."}]


def describe_rows(rows: Mapping[str, Any] | None, tokens: Mapping[str, Any] | None) -> str:
    """Markdown tables of the splits: rows, labels, and lengths in characters and, if known, in tokens."""
    if rows is None:
        return ""
    head = ["split", "rows", "held out of train", *rows.get("split", {})]
    head = [{"in_gap": "in a gap", "without_group": "without group"}.get(name, name) for name in head]
    head += ["characters (min, median, max)"]
    head += ["tokens (median, max)", "rows cut"] if tokens else []
    parts = [format_table(head, (_format_split(split, rows, tokens) for split in rows["rows"]))]
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


def _format_split(split: str, rows: Mapping[str, Any], tokens: Mapping[str, Any] | None) -> list[str]:
    share, length = rows["held_out"].get(split), rows["characters"][split]
    line = [split, f"{rows['rows'][split]:,}", f"{share:.0%}" if share else ""]
    for values in rows.get("split", {}).values():
        line.append(
            " to ".join(values.get(split, ())) if values is rows["split"].get("times") else f"{values[split]:,}"
        )
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
    return format_table(["label", *labels], lines)


def _format_share(count: int, counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    return f"{count:,} ({count / total:.1%})" if total else "0"
