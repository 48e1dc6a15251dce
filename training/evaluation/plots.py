"""Plots: data and token reports, training curves, and predictions. A report is the log/report.json of
`training.data.load_rows` or `training.tokenization.token_files`."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from training.data.ipc_files import read_table
from training.evaluation.calibration import BINS, bins_of
from training.evaluation.predictions import ManyLabels, Numbers, OneLabel, Predictions
from training.evaluation.tagged_words import Tagged
from training.evaluation.tags import count_matches, types_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from training.evaluation.predictions import Floats, Mask

    Outcomes = tuple[Floats, Mask]

MAX_BARS = 30  # of the most frequent labels; the others share one more
MAX_NAME_LENGTH = 28  # characters of a name
MAX_LABELS_WITH_COUNTS = 20  # with more labels, a confusion matrix shows no numbers
MAX_MATRIX_LABELS = 40  # with more labels, a confusion matrix grows no further
MAX_PANELS = 4  # metrics of groups
MAX_IMAGES, IMAGES_IN_LINE = 20, 5
MAX_CURVES = 10  # curves, for the most frequent labels
HIDDEN_SUFFIXES = ("_runtime", "_per_second", "_loss", "epoch")  # ends of names of evaluated figures
LOSSES = {"train_loss": "training", "eval_loss": "validation"}
COLORS = {"train": "C0", "validation": "C1", "test": "C2"}


def draw_rows(report: Mapping[str, Any], folder: Path) -> None:
    """Writes `lengths.png`, the lengths of each split's texts in characters, and `labels.png`, the share of each label
    among a split's rows, or among its labels if rows have lists of them."""
    lengths = {
        split: entry for split, entry in report["characters"].items() if entry.get("histogram", {}).get("counts")
    }
    if lengths:
        _save(_plot_lengths(lengths, "characters"), folder / "lengths.png")
    if any(any(counts.values()) for counts in report["labels"].values()):
        label_counts = {split: sum(counts.values()) for split, counts in report["labels"].items()}
        unit = "rows" if report.get("rows", label_counts) == label_counts else "labels"
        _save(_plot_labels(report["labels"], unit), folder / "labels.png")


def draw_tokens(report: Mapping[str, Any], max_length: int, folder: Path) -> None:
    """Writes `lengths.png`: the tokens of each split's rows, and how many rows are truncated to `max_length`."""
    lengths = {split: entry for split, entry in report["length"].items() if entry["histogram"]["counts"]}
    if not lengths:
        return
    figure = _plot_lengths(lengths, "tokens")
    for axes, split in zip(figure.axes, lengths, strict=True):
        truncated, rows = report["truncated"][split], report["rows"][split]
        title = (
            f"{truncated:,} rows ({truncated / rows:.1%}) cut at {max_length}"
            if truncated
            else f"none cut at {max_length}"
        )
        axes.axvline(max_length, color="C3", linewidth=1)
        axes.set_title(title, loc="right", fontsize=9, color="C3")
    _save(figure, folder / "lengths.png")


def draw_curves(events: Iterable[Mapping[str, Any]], file: Path) -> None:
    """Draws the losses and the evaluated metrics of a training by optimizer step."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for event in events:
        for name, value in event["values"].items() if event["kind"] == "metrics" else ():
            curves.setdefault(name, []).append((event["step"], value))
    losses = {name: curves[name] for name in LOSSES if name in curves}
    metrics = {
        name: points
        for name, points in curves.items()
        if name.startswith("eval_") and not name.endswith(HIDDEN_SUFFIXES)
    }
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, title, panel in zip(figure.subplots(1, 2), ("loss", "evaluation"), (losses, metrics), strict=True):
        for name, points in panel.items():
            steps, values = zip(*sorted(points), strict=True)
            axes.plot(steps, values, marker=".", label=LOSSES.get(name, name.removeprefix("eval_")))
        axes.set_title(title)
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
        if panel:
            axes.legend()
    _save(figure, file)


def draw_scores(predicted: Predictions, split: str, folder: Path) -> None:
    """Writes the plots of a split's predictions.

    One label a row: `confusion_SPLIT.png`, rows by true and predicted label; `calibration_SPLIT.png`, the share of
    right predictions by their probability; `precision_recall_SPLIT.png`, the curve of label 1 of two, else of up to ten
    labels. Any number of labels a row: `labels_SPLIT.png`, F1 and threshold of the 30 most frequent. Numbers:
    `numbers_SPLIT.png`, predictions against labels. Tagged words: `spans_SPLIT.png`, precision, recall and F1 of the 30
    most frequent types of spans.
    """
    match predicted:
        case OneLabel():
            _save(_plot_confusion(predicted), folder / f"confusion_{split}.png")
            if np.isfinite(predicted.probabilities).all():
                _save(_plot_calibration(predicted), folder / f"calibration_{split}.png")
                _save(_plot_precision_recall(predicted), folder / f"precision_recall_{split}.png")
        case ManyLabels():
            _save(_plot_label_scores(predicted), folder / f"labels_{split}.png")
        case Numbers():
            _save(_plot_numbers(predicted), folder / f"numbers_{split}.png")
        case Tagged():
            _save(_plot_span_scores(predicted), folder / f"spans_{split}.png")


def draw_images(data: Path, column: str, rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Writes a picture of the images of some rows of a split, at most MAX_IMAGES, with labels and predictions.

    Args:
        data: the Arrow file of the split, as load_data stores it.
        column: of its images.
        rows: each with `row`, its number, `label` and `prediction`.
    """
    from training.data.images import open_image

    shown = rows[:MAX_IMAGES]
    images = read_table(data)[column].take([row["row"] for row in shown])
    lines = -(-len(shown) // IMAGES_IN_LINE)
    figure = Figure(figsize=(1.6 * IMAGES_IN_LINE, 1.9 * lines), layout="constrained")
    panels = figure.subplots(lines, IMAGES_IN_LINE, squeeze=False).flat
    for axes in panels:
        axes.set_axis_off()
    for axes, row, image in zip(figure.axes, shown, images.to_pylist(), strict=False):
        picture = open_image(image)
        picture.thumbnail((160, 160))
        axes.imshow(np.asarray(picture))
        words = "\n".join(_shorten_name(f"{name} {row[name]}") for name in ("label", "prediction"))
        axes.set_title(f"row {row['row']}\n{words}", fontsize=6, parse_math=False)
    _save(figure, file)


def draw_calibrated(before: Outcomes, after: Outcomes, folder: Path) -> None:
    """Writes `calibrated_test.png`: the share of what is true by its probability, before and after calibration."""
    _save(_plot_reliability({"before": before, "calibrated": after}), folder / "calibrated_test.png")


def draw_risk_coverage(coverage: Floats, risk: Floats, answered: tuple[float, float] | None, folder: Path) -> None:
    """Writes `risk_coverage_test.png`: the share of errors by the share of answered rows, both (C,).

    `answered`: the share of rows that the thresholds answer, and `max_error`.
    """
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlim=(0, 1), xlabel="share of answered rows", ylabel="share of errors among them")
    axes.plot(coverage, risk, drawstyle="steps-post", label="answered by probability")
    if answered is not None:
        share, most = answered
        axes.axhline(most, color="C3", linewidth=1, linestyle="--", label="max_error")
        axes.axvline(share, color="black", linewidth=1, linestyle="--", label="answered by the thresholds")
    axes.set_ylim(bottom=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.legend(loc="upper left")
    _style(axes)
    _save(figure, folder / "risk_coverage_test.png")


def draw_slice(
    name: str, split: str, groups: Sequence[Mapping[str, Any]], overall: Mapping[str, Mapping[str, Any]], folder: Path
) -> None:
    """Writes `slices_SPLIT_SLICE.png`: the first metrics of each group with their intervals, and of all rows.

    `groups` and `overall` are as training.programs.score writes them. In the file's name, characters other than
    letters, digits, - and _ become _, followed by a digest of the slice's name."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:MAX_NAME_LENGTH]
    if plain != name:
        plain = f"{plain}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    _save(_plot_slice(name, split, groups, overall), folder / f"slices_{split}_{plain}.png")


def _plot_slice(
    name: str, split: str, groups: Sequence[Mapping[str, Any]], overall: Mapping[str, Mapping[str, Any]]
) -> Figure:
    metrics = list(overall)[:MAX_PANELS]
    figure = Figure(figsize=(3 + 2.6 * len(metrics), 1.3 + 0.28 * len(groups)), layout="constrained")
    panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        scores = [group["metrics"][metric] for group in groups]
        axes.barh(range(len(groups)), [score["value"] or 0.0 for score in scores], color=COLORS.get(split))
        ends = [(place, score["low"], score["high"]) for place, score in enumerate(scores) if score["low"] is not None]
        if ends:
            axes.hlines(*zip(*ends, strict=True), color="black", linewidth=1.5)
        if overall[metric]["value"] is not None:
            axes.axvline(overall[metric]["value"], color="C3", linewidth=1, linestyle="--")
        axes.set_title(_shorten_name(metric), loc="left", fontsize=9, parse_math=False)
        _style(axes)
    names = [f"{_shorten_name(group['group'])} ({group['rows']:,})" for group in groups]
    _name_bars(panels[0], names)
    title = f"{split} by {_shorten_name(name)}: rows in brackets, lines are 95% intervals, dashed is all rows"
    figure.suptitle(title, fontsize=9, parse_math=False)
    return figure


def _plot_lengths(lengths: Mapping[str, Mapping[str, Any]], unit: str) -> Figure:
    figure = Figure(figsize=(8, 0.8 + 1.7 * len(lengths)), layout="constrained")
    panels = figure.subplots(len(lengths), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (split, entry) in zip(panels, lengths.items(), strict=True):
        edges, counts = entry["histogram"]["edges"], entry["histogram"]["counts"]
        widths = [b - a for a, b in pairwise(edges)]
        # Bins of whole numbers have two widths, so a bar's area, not its height, is its share.
        heights = [count / sum(counts) / width for count, width in zip(counts, widths, strict=True)]
        axes.bar(edges[:-1], heights, widths, align="edge", color=COLORS.get(split))
        axes.axvline(entry["median"], color="black", linewidth=1, linestyle="--")
        title = f"{split}: {sum(counts):,} rows, median {entry['median']:,}, longest {entry['max']:,} {unit}"
        axes.set_title(title, loc="left", fontsize=9)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        _style(axes)
    end = _find_axis_end(lengths)
    panels[-1].set_xlim(0, end)
    panels[-1].set_xlabel(f"{unit} (dashed: the median{'; the longest lie outside' if end else ''})")
    panels[-1].xaxis.set_major_formatter("{x:,.0f}")
    figure.supylabel(f"share of the rows, a {unit.removesuffix('s')}", fontsize="medium")
    return figure


def _find_axis_end(lengths: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Returns the right end of the axis if a few texts are far longer than the others, which would share one bar; else
    None."""
    edges = [entry["histogram"]["edges"] for entry in lengths.values()]
    outlying = [len(ends) > 2 and ends[-1] - ends[-2] > 5 * (ends[-2] - ends[-3]) for ends in edges]
    if not any(outlying):
        return None
    return 1.02 * max(ends[-2] if is_far else ends[-1] for ends, is_far in zip(edges, outlying, strict=True))


def _plot_labels(labels: Mapping[str, Mapping[str, int]], unit: str) -> Figure:
    names, table = _count_most_frequent(labels)
    figure = Figure(figsize=(3 + 2.6 * len(table), 1.1 + 0.28 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(table), sharey=True, sharex=True, squeeze=False)[0]
    for axes, (split, counts) in zip(panels, table.items(), strict=True):
        rows = sum(counts)
        shares = [count / rows if rows else 0.0 for count in counts]
        bars = axes.barh(range(len(names)), shares, color=COLORS.get(split))
        axes.bar_label(bars, [f"{c:,}" for c in counts], padding=3, fontsize=8)
        axes.set_title(f"{split}: {rows:,} {unit}", loc="left", fontsize=9)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        _style(axes)
    _name_bars(panels[0], names)
    widest = max(bar.get_width() for axes in panels for bar in axes.patches)
    panels[0].set_xlim(0, 1.25 * widest)  # with space for the numbers
    panels[0].set_xticks([tick for tick in panels[0].get_xticks() if tick <= widest * 1.1])
    figure.supxlabel(f"share of the {unit}, and their number", fontsize="medium")
    return figure


def _count_most_frequent(labels: Mapping[str, Mapping[str, int]]) -> tuple[list[str], dict[str, list[int]]]:
    """Returns the names of the most frequent labels, in the labels' order, and their rows in each split; all other
    labels are one last entry."""
    all_names = list(dict.fromkeys(name for counts in labels.values() for name in counts))
    total = {name: sum(counts.get(name, 0) for counts in labels.values()) for name in all_names}
    kept = set(sorted(all_names, key=lambda name: -total[name])[:MAX_BARS])
    names = [name for name in all_names if name in kept]
    table = {split: [counts.get(name, 0) for name in names] for split, counts in labels.items()}
    bar_names = [_shorten_name(name) for name in names]
    if others := len(all_names) - len(names):
        bar_names.append(f"{others:,} others")
        for split, counts in labels.items():
            table[split].append(sum(counts.values()) - sum(table[split]))
    return bar_names, table


def _plot_confusion(predicted: OneLabel) -> Figure:
    labels = [_shorten_name(label) for label in predicted.labels]
    counts = np.zeros((len(labels), len(labels)), dtype=np.int64)
    np.add.at(counts, (predicted.references, predicted.predictions), 1)
    side = 3.0 + 0.5 * min(len(labels), MAX_MATRIX_LABELS)  # inches
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.add_subplot(xlabel="prediction", ylabel="label")
    axes.imshow(counts, cmap="Blues")
    axes.set_xticks(range(len(labels)), labels, rotation=90, parse_math=False)
    axes.set_yticks(range(len(labels)), labels, parse_math=False)
    for (row, column), count in np.ndenumerate(counts) if len(labels) <= MAX_LABELS_WITH_COUNTS else ():
        color = "white" if count > counts.max() / 2 else "black"
        axes.text(column, row, str(count), ha="center", va="center", color=color)
    return figure


def _plot_calibration(predicted: OneLabel) -> Figure:
    from training.evaluation.metrics.probabilities import calibration

    bins, gaps = calibration(predicted.probabilities, predicted.references)
    rows = np.bincount(bins, minlength=BINS)
    is_filled = rows > 0
    confidence = (
        np.bincount(bins, weights=predicted.probabilities.max(axis=1), minlength=BINS)[is_filled] / rows[is_filled]
    )
    accuracy = confidence + np.bincount(bins, weights=gaps, minlength=BINS)[is_filled] / rows[is_filled]
    figure = Figure(figsize=(6, 6), layout="constrained")
    curve, counts = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    curve.plot((0, 1), (0, 1), color="black", linewidth=1, linestyle="--", label="perfectly calibrated")
    curve.plot(confidence, accuracy, marker="o", markersize=4, label="these rows")
    curve.set(ylabel="share of right predictions", ylim=(0, 1.02), xlim=(0, 1))
    curve.legend(loc="upper left")
    counts.bar(np.arange(BINS) / BINS, rows, 1 / BINS, align="edge")
    counts.set(ylabel="rows", xlabel="probability of the predicted label")
    curve.yaxis.set_major_formatter(PercentFormatter(1.0))
    counts.xaxis.set_major_formatter(PercentFormatter(1.0))
    _style(curve)
    _style(counts)
    return figure


def _plot_reliability(curves: Mapping[str, Outcomes]) -> Figure:
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot(xlim=(0, 1), ylim=(0, 1.02), xlabel="probability", ylabel="share that is true")
    axes.plot((0, 1), (0, 1), color="black", linewidth=1, linestyle="--", label="perfectly calibrated")
    for name, (probabilities, is_true) in curves.items():
        bins = bins_of(probabilities)
        counts, means, shares = (
            np.bincount(bins, weights=values, minlength=BINS) for values in (None, probabilities, is_true)
        )
        filled = counts > 0
        axes.plot(means[filled] / counts[filled], shares[filled] / counts[filled], marker="o", markersize=4, label=name)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0))
    axes.legend(loc="upper left")
    _style(axes)
    return figure


def _plot_precision_recall(predicted: OneLabel) -> Figure:
    from sklearn.metrics import precision_recall_curve

    rows = np.bincount(predicted.references, minlength=len(predicted.labels))
    binary = len(predicted.labels) == 2
    drawn = [1] if binary else sorted(np.argsort(-rows, kind="stable")[:MAX_CURVES])
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot(ylim=(0, 1.02), xlim=(0, 1))
    for label in (label for label in drawn if rows[label]):
        precision, recall, _ = precision_recall_curve(predicted.references == label, predicted.probabilities[:, label])
        axes.plot(recall, precision, drawstyle="steps-post", label=_shorten_name(predicted.labels[label]))
    axes.set_xlabel("recall: share of the label's rows that are predicted")
    axes.set_ylabel("precision: share of right rows among the predicted")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0))
    for text in axes.legend(loc="lower left").get_texts() if axes.lines else ():
        text.set_parse_math(False)
    _style(axes)
    return figure


def _plot_span_scores(predicted: Tagged) -> Figure:
    counts = count_matches(
        predicted.labels, predicted.references, predicted.predictions, predicted.rows, len(predicted)
    ).sum(axis=0)
    types = np.array(types_of(predicted.labels), object)
    most_frequent = np.argsort(-counts[:, 0], kind="stable")[:MAX_BARS]
    true_spans, predicted_spans, matched = counts[most_frequent].T
    figures = {
        "precision": (matched, predicted_spans),
        "recall": (matched, true_spans),
        "f1": (2 * matched, true_spans + predicted_spans),
    }
    figure = Figure(figsize=(3 + 2.6 * len(figures), 1.3 + 0.28 * len(most_frequent)), layout="constrained")
    panels = figure.subplots(1, len(figures), sharey=True, sharex=True, squeeze=False)[0]
    for axes, (name, (count, total)) in zip(panels, figures.items(), strict=True):
        shares = np.divide(count, total, out=np.zeros(len(most_frequent)), where=total > 0)
        axes.bar_label(
            axes.barh(range(len(most_frequent)), shares), [f"{share:.1%}" for share in shares], padding=3, fontsize=8
        )
        axes.set_title(name, loc="left", fontsize=9)
        axes.set_xlim(0, 1.25)
        axes.set_xticks((0, 0.5, 1))
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        _style(axes)
    names = [
        f"{_shorten_name(name)} ({number:,.0f})" for name, number in zip(types[most_frequent], true_spans, strict=True)
    ]
    _name_bars(panels[0], names)
    figure.suptitle("spans by type: in brackets their number", fontsize=9)
    return figure


def _plot_label_scores(predicted: ManyLabels) -> Figure:
    from training.evaluation.metrics.labels import f1

    references, predictions = predicted.references, predicted.predictions
    rows = references.sum(axis=0)
    scores = f1(rows, predictions.sum(axis=0), (references & predictions).sum(axis=0))
    most_frequent = np.argsort(-rows, kind="stable")[:MAX_BARS]
    places = np.arange(len(most_frequent))
    figure = Figure(figsize=(7, 1.3 + 0.28 * len(most_frequent)), layout="constrained")
    axes = figure.add_subplot(xlim=(0, 1))
    axes.barh(places, scores[most_frequent], label="F1")
    axes.plot(predicted.thresholds[most_frequent], places, "|", color="black", markersize=10, label="threshold")
    names = [f"{_shorten_name(predicted.labels[label])} ({rows[label]:,})" for label in most_frequent]
    _name_bars(axes, names)
    axes.set_xlabel("F1, and the probability from which the label is predicted; rows in brackets")
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    _style(axes)
    return figure


def _plot_numbers(predicted: Numbers) -> Figure:
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot(xlabel="label", ylabel="prediction")
    axes.plot(predicted.references, predicted.predictions, ".", markersize=4, alpha=0.5, rasterized=True)
    axes.axline((float(predicted.references.mean()),) * 2, slope=1, color="black", linewidth=1, linestyle="--")
    _style(axes)
    return figure


def _name_bars(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8, parse_math=False)
    axes.set_ylim(len(names) - 0.4, -0.6)


def _shorten_name(name: str) -> str:
    return name if len(name) <= MAX_NAME_LENGTH else name[: MAX_NAME_LENGTH - 1] + "…"


def _style(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about letters that the font lacks: boxes replace them
        figure.savefig(file, dpi=100)
