"""Tables and texts of a model: scores, errors, slices, verdict and exports; of a registered version: drift of new rows,
and evaluations on rows whose labels arrived later."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.cache.results import Verdict
from tasks.reports.formatting import (
    Markdown,
    escape_markdown,
    format_count,
    format_markdown,
    format_score,
    format_size,
    format_value,
    limit_rows,
    make_printable,
    shorten,
)
from training.evaluation.scores import ComparedExport, ComparedTeacher, Scores, SliceGroup, SplitScores
from training.evaluation.stored_calibration import CalibrateResult
from training.recipe import FEWEST_ROWS, Recipe, fits_slice, more_is_better

SAMPLE = "log/predictions_sample.csv"
SLICES = "slices.json"
TABLE_ERRORS = 20
OUT_OF_FOLD = "out of fold"
"""The name of the training rows in reports, predicted by models that have not seen them."""


def tabulate_scores(scores: Mapping[str, Scores]) -> list[dict[str, str]]:
    """One row per split and metric of `score`: value, interval, and the baseline if any metric has one."""
    table = []
    baselines = any("baseline" in score for metrics in scores.values() for score in metrics.values())
    for split, metrics in scores.items():
        for metric, score in metrics.items():
            low, high = score.get("low"), score.get("high")
            interval = "-" if low is None or high is None else f"{low:.4f} to {high:.4f}"
            row = {"split": split, "metric": metric, "value": format_value(score["value"]), "95 % interval": interval}
            table.append(row | ({"baseline": format_value(score.get("baseline"))} if baselines else {}))
    return table


def name_out_of_fold(scores: SplitScores) -> SplitScores:
    """The result of `score_folds` under the name by which reports show it beside other splits."""
    return {OUT_OF_FOLD: scores["train"]}


def summarize_calibration(result: CalibrateResult) -> str:
    """`calibration error 0.0831 → 0.0124; 71.0 % answered, 2.9 % of them wrong` on the rows of test."""
    if result.test_rows is None:
        return "not measured: test is not evaluated"
    errors = [format_value(one) for one in (result.calibration_error_before, result.calibration_error)]
    parts = [f"calibration error {' → '.join(errors)}"]
    if answered := result.answered:
        wrong = f", {answered.error:.1%} of them wrong" if answered.error is not None else ""
        parts.append(f"{answered.share:.1%} answered{wrong}")
    if result.mean_set_size is not None:
        parts.append(f"{result.mean_set_size:.2f} labels a set")
    return "; ".join(parts)


def describe_calibration(result: CalibrateResult) -> Markdown:
    """The calibration of a model, and the table of its thresholds."""
    text = f"Probabilities are calibrated by {result.validation_rows:,} rows of validation (`calibration.json`)"
    if result.test_rows is None:
        return Markdown(f"{text}. No rows are left that would measure it.")
    text += f". On {result.test_rows:,} rows of test: {escape_markdown(summarize_calibration(result))}."
    if answered := result.answered:
        text += (
            f" Predictions with `review: true` are for a person. With {answered.confidence:.0%} confidence, at most "
            f"{answered.max_error:.1%} of the others err on rows like these.\n\n"
            f"{format_markdown(tabulate_answered(result))}"
        )
    return Markdown(text)


def tabulate_answered(result: CalibrateResult) -> list[dict[str, str]]:
    """One row per threshold: the predicted label, the threshold, and the rows of test that it answers."""
    groups = result.answered.groups if result.answered else ()
    return [
        {
            "prediction": "all" if len(groups) == 1 and group.label is None else group.label or "any other",
            "threshold": "none" if group.threshold is None else f"{group.threshold:.4f}",
            "answered": f"{group.answered:,} of {group.rows:,}",
            "wrong": f"{group.errors:,}",
            "at most": "-" if group.at_most is None else f"{group.at_most:.2%}",
        }
        for group in groups
    ]


def find_worst_errors(scores: Path) -> list[dict[str, str]]:
    """The wrong predictions with the highest confidence, with their texts."""
    csv.field_size_limit(2**31 - 1)
    with (scores / SAMPLE).open(newline="", encoding="utf-8") as file:
        wrong = [row for row in csv.DictReader(file) if row["label"] != row["prediction"]]
    wrong.sort(key=lambda row: -float(row["probability"]))
    return [{name: shorten(cell) for name, cell in row.items()} for row in wrong[:TABLE_ERRORS]]


def read_slices(scores: Path) -> dict[str, dict[str, list[SliceGroup]]]:
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
            found = max(large, key=lambda group: sign * (group["metrics"][metric]["value"] or 0.0))
            score = format_score(found["metrics"][metric])
            group = f"{make_printable(name)}={make_printable(found['group'])}"
            worst[name] = f"{group} {metric} {score}, {found['rows']:,} rows"
    return worst


def tabulate_slices(scores: Path) -> list[dict[str, str]]:
    """One row per group: its split, slice, name and number of rows, and its metrics with their intervals."""
    table = [
        {
            **{"split": split, "slice": name, "group": shorten(group["group"]), "rows": f"{group['rows']:,}"},
            **{metric: format_score(score) for metric, score in group["metrics"].items()},
        }
        for split, slices in read_slices(scores).items()
        for name, groups in slices.items()
        for group in groups
    ]
    return limit_rows(table, "group", f"score/{SLICES}")


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


def tabulate_flips(verdict: Verdict) -> list[dict[str, str]]:
    """Some rows that the champion has right and the model has wrong, those with the largest change first; none without
    a bound of flips."""
    flips = verdict.comparison.flips if verdict.comparison else None
    return [
        {"flipped row": f"{one.row:,}", "text": one.text, "label": one.label, "prediction": one.prediction}
        for one in (flips.worst if flips else [])
    ]


def tabulate_wrong(verdict: Verdict) -> list[dict[str, str]]:
    """Some rows that the model must have right and has wrong, those with a reason first."""
    return [
        {
            "must hold": f"{row.row:,}",
            "text": row.text,
            "label": row.label,
            "prediction": row.prediction,
            "reason": row.reason,
        }
        for row in (verdict.must_hold.wrong if verdict.must_hold else [])
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
    made = (tabulate_comparison(verdict), tabulate_answers(verdict), tabulate_flips(verdict), tabulate_wrong(verdict))
    tables = [table for table in made if table]
    parts = [f"**{verdict.decision}**: {escape_markdown(verdict.reason)}", *map(format_markdown, tables)]
    return "\n\n".join([*parts, *(f"Warning: {escape_markdown(warning)}" for warning in verdict.warnings)])


def summarize_exports(exports: Mapping[str, ComparedExport]) -> str:
    """`onnx-int8 released, 812 rows/s (3.4 times torch)`, for each export."""
    return "; ".join(
        f"{name} {'released' if one.released else 'not released'}, {format_speed(one)}" for name, one in exports.items()
    )


def format_speed(export: ComparedExport) -> str:
    """`812 rows/s (3.4 times torch)`, or `runtime: its weights in torch`."""
    if export.rows_per_second is None:
        return f"runtime: {export.runtime}"
    times = export.rows_per_second / export.torch_rows_per_second
    return f"{export.rows_per_second:,.0f} rows/s ({times:.1f} times torch)"


def tabulate_exports(exports: Mapping[str, ComparedExport]) -> list[dict[str, str]]:
    """One row per export: size, speed beside that of torch, in tokens for models that generate texts, and the metrics
    beside those of the model."""
    table = []
    for name, one in exports.items():
        comparison = one.comparison
        precision = {"no": "fp32"}.get(one.torch_precision, one.torch_precision)
        unit, per_row = ("rows/s", 1.0) if one.tokens_per_row is None else ("tokens/s", one.tokens_per_row)
        others = {
            f"{metric} (of the model)": f"{format_value(value)} ({format_value(one.model_metrics[metric])})"
            for metric, value in one.metrics.items()
            if metric != comparison.metric
        }
        table.append(
            {
                "export": name,
                "released": "yes" if one.released else "no",
                "runtime": one.runtime,
                "size": format_size(one.bytes),
                unit: "" if one.rows_per_second is None else f"{per_row * one.rows_per_second:,.0f}",
                f"torch {precision}, {unit}": f"{per_row * one.torch_rows_per_second:,.0f}",
                **others,
                f"{comparison.split}.{comparison.metric}": format_value(comparison.value),
                "of the model": format_value(comparison.champion_value),
                f"worse by at most, {100 * comparison.confidence:g}%": format_value(-min(comparison.at_least, 0.0)),
                "allowed": f"{-comparison.margin:g}",
            }
        )
    return table


def summarize_teacher(found: ComparedTeacher) -> str:
    """`accuracy 0.84 against 0.87 of big/1, 2.1 times as fast`"""
    one = found.comparison
    speed = found.student.rows_per_second / found.teacher.rows_per_second
    values = f"{one.metric} {format_value(one.value)} against {format_value(one.champion_value)} of {one.champion}"
    return f"{values}, {speed:.1f} times as fast"


def tabulate_teacher(found: ComparedTeacher) -> list[dict[str, str]]:
    """A row for the model and one for its teacher: metrics on the same rows, parameters, size and speed."""
    split = found.comparison.split
    return [
        {
            "model": name,
            **{f"{split}.{metric}": format_value(values[place]) for metric, values in found.figures.items()},
            "parameters": f"{one.parameters:,}",
            "size": format_size(one.bytes),
            "rows/s": f"{one.rows_per_second:,.0f}",
        }
        for place, (name, one) in enumerate(
            (("this model", found.student), (f"teacher {found.comparison.champion}", found.teacher))
        )
    ]


def describe_teacher(found: ComparedTeacher) -> str:
    """The difference of the metric from the teacher's, with its bound, in a sentence."""
    one = found.comparison
    word = "better" if one.gain >= 0 else "worse"
    bound = f"at {100 * one.confidence:g}% confidence, it is worse by at most {format_value(max(0.0, -one.at_least))}"
    return (
        f"By {one.metric}, the model is {word} by {format_value(abs(one.gain))} than its teacher on the same "
        f"{one.rows:,} {one.unit} of {one.split}; {bound}. Speeds are those of the CPU, on the same rows."
    )


def describe_refused(name: str, export: ComparedExport) -> str:
    """The reason why an export is not released, and the next step."""
    found = export.comparison
    rows = f"{found.rows:,} {found.unit} of {found.split}"
    values = f"{found.metric} {format_value(found.value)} against {format_value(found.champion_value)} of the model"
    if found.better:
        message = f"{name} is not released: {export.runtime} reads {export.other_tokens} rows of {found.split} as other"
        return f"{message} tokens than the model's tokenizer: leave this export out."
    if found.gain < found.margin:
        reason = f"it is worse by more than {-found.margin:g}"
        step = "allow a larger release.export_margin, or leave this export out"
    else:
        reason = f"a loss of more than {-found.margin:g} is not ruled out at {100 * found.confidence:g}% confidence"
        step = f"add rows to {found.split}, allow a larger release.export_margin, or leave this export out"
    return f"{name} is not released: {values} on the same {rows}, so {reason}: {step}."


UNITS = {"cohens_w": "Cohen's w", "distance": "KS distance", "auc": "AUC"}
CAVEAT = "It is estimated from the model's confidence, and cannot see labels that changed their meaning."
SHOWN_WORDS = 5
WORST_GROUPS = 5  # of a slice


def tabulate_drift(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each comparison: drifted ones first, then those to watch."""
    order = ("drifted", "watch", "steady")
    lines = sorted(report["comparisons"], key=lambda line: order.index(line["verdict"]))
    return [
        {
            "comparison": make_printable(line["name"]),
            "effect": f"{line['value']:.3f}",
            "95% interval": f"{line['low']:.3f} to {line['high']:.3f}",
            "threshold": f"{line['threshold']:g}",
            "unit": UNITS[line["unit"]],
            "p, any": f"{line['p_value']:.2g}",
            "p, above threshold": f"{line['p_threshold']:.2g}",
            "verdict": line["verdict"],
        }
        for line in lines
    ]


def describe_drift(report: Mapping[str, Any]) -> str:
    """One sentence on the verdict, and one on the estimated accuracy."""
    return " ".join(filter(None, [summarize_drift(report), describe_accuracy(report), describe_words(report)]))


def summarize_drift(report: Mapping[str, Any]) -> str:
    """The verdict with the differences behind it."""
    rows, verdict = report["rows"], report["verdict"]
    if verdict == "undecided":
        return f"undecided: there are {rows['new']:,} new rows and {rows['reference']:,} validation rows, too few."
    found = [make_printable(line["name"]) for line in report["comparisons"] if line["verdict"] != "steady"]
    differences = f" in {', '.join(found)}" if found else ""
    return f"{verdict}{differences}: {rows['new']:,} new rows against {rows['reference']:,} validation rows."


def describe_accuracy(report: Mapping[str, Any]) -> str:
    """The estimated accuracy with its interval and its caveat; empty without one."""
    if not (found := report["estimated_accuracy"]):
        return ""
    interval = f"{found['value']:.3f} ({found['low']:.3f} to {found['high']:.3f})"
    return f"Estimated accuracy {interval}, on validation rows {found['reference']:.3f}. {CAVEAT}"


def describe_words(report: Mapping[str, Any]) -> str:
    """The words that are most typical of new rows; empty if the words do not differ."""
    for line in report["comparisons"]:
        if line["name"] == "words" and line["verdict"] != "steady":
            typical = [word for word in line["words"] if word["speaks_for"] == "new"][:SHOWN_WORDS]
            listed = ", ".join(f"{make_printable(w['word'])} ({w['reference']:.1%} → {w['new']:.1%})" for w in typical)
            return f"Typical of new rows: {listed}." if typical else ""
    return ""


def tabulate_evaluation(evaluation: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each metric: now, as expected at its registration, and the difference."""
    table = []
    for name, score in evaluation["metrics"].items():
        expected = evaluation["expected"].get(name)
        difference = evaluation["differences"].get(name) or {}
        table.append(
            {
                "metric": name,
                "now": format_score(score),
                f"expected from {evaluation['split']}": format_score(_without_baseline(expected)) if expected else "",
                "difference": _format_difference(difference),
            }
        )
    return table


def _without_baseline(score: Mapping[str, float | None]) -> dict[str, float | None]:
    return {end: score.get(end) for end in ("value", "low", "high")}


def _format_difference(difference: Mapping[str, float | None]) -> str:
    value, low, high = (difference.get(end) for end in ("value", "low", "high"))
    if value is None:
        return ""
    return f"{value:+.4f}" + (f" ({low:+.4f} to {high:+.4f})" if low is not None and high is not None else "")


def describe_evaluation(evaluation: Mapping[str, Any]) -> list[str]:
    """Sentences on the rows, on figures outside of the gate's bounds, and on the worst groups."""
    shared = evaluation["shared_rows"]
    rows = f"{evaluation['version']}, evaluation {evaluation['number']}: {format_count(evaluation['rows'], 'row')}"
    rows += f" in {format_count(evaluation['groups'], 'group')}" if evaluation["groups"] else ""
    if shared:
        rows += f", {shared:,} of them also in {evaluation['split']} and compared with themselves"
    lines = [f"{rows}."]
    if evaluation["below"]:
        lines.append(f"Outside of the gate's bounds: {', '.join(evaluation['below'])}.")
    if (confidence := evaluation.get("confidence")) is not None:
        lines.append(_describe_confidence(confidence))
    for name, groups in evaluation["slices"].items():
        metric = next(iter(evaluation["metrics"]))
        scored = [group for group in groups if group["metrics"][metric]["value"] is not None]
        worst = sorted(scored, key=lambda group: float(group["metrics"][metric]["value"]))[:WORST_GROUPS]
        listed = ", ".join(
            f"{make_printable(group['group'])} {format_value(group['metrics'][metric]['value'])} ({group['rows']:,})"
            for group in worst
        )
        if listed:
            lines.append(f"{metric} by {make_printable(name)}, the lowest (rows): {listed}.")
    return lines


def _describe_confidence(confidence: Mapping[str, Any]) -> str:
    """A sentence on the calibration and, with `release.abstain`, on the rows that are answered."""
    text = f"Calibration error {format_value(confidence['calibration_error'])}"
    if confidence["answered"] is not None:
        wrong = f", {confidence['error']:.1%} of them wrong" if confidence["error"] is not None else ""
        bound = f" (at most {confidence['max_error']:.1%} by the bound at registration)"
        text += f"; {confidence['answered']:.1%} answered{wrong}{bound}"
    return f"{text}."


def summarize_evaluation(evaluation: Mapping[str, Any]) -> str:
    """One line: the metrics, and whether the gate would still accept them."""
    metrics = ", ".join(f"{name} {format_value(score['value'])}" for name, score in evaluation["metrics"].items())
    bounds = f"; outside of the gate's bounds: {', '.join(evaluation['below'])}" if evaluation["below"] else ""
    return f"{metrics} on {format_count(evaluation['rows'], 'row')}{bounds}"
