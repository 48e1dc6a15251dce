"""The reports of rows and of their tokens as pictures, and how good predictions are. A report is what
`training.data.load_rows` and `training.tokenization.encoder` write to log/report.json."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from training.evaluation.predictions import ManyLabels, Numbers, OneLabel, Predictions
from training.evaluation.tagged_words import Tagged
from training.evaluation.tags import agreement, types_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LABELS = 30  # the most frequent ones; the others share a bar
LONGEST_NAME = 28  # characters of a label's name beside its bar
MOST_COUNTED = 20  # labels with whose rows' numbers a confusion matrix can still be read
MOST_NAMED = 40  # labels for which a confusion matrix grows
MOST_PANELS = 4  # metrics whose groups are drawn, the first ones
MOST_CURVES = 10  # labels that have a curve of their own, the most frequent ones
COLORS = {"train": "C0", "validation": "C1", "test": "C2"}


def draw_rows(report: Mapping[str, Any], folder: Path) -> None:
    """Into the folder, which is made: `lengths.png`, how long the texts of each split are, in characters; and
    `labels.png`, which share of each split's rows has which label, or of its labels where rows have lists of them."""
    lengths = {
        split: entry for split, entry in report["characters"].items() if entry.get("histogram", {}).get("counts")
    }
    if lengths:
        _save(_lengths(lengths, "characters"), folder / "lengths.png")
    if any(any(counts.values()) for counts in report["labels"].values()):
        # More or fewer labels than rows: those of lists.
        counted = {split: sum(counts.values()) for split, counts in report["labels"].items()}
        unit = "rows" if report.get("rows", counted) == counted else "labels"
        _save(_labels(report["labels"], unit), folder / "labels.png")


def draw_tokens(report: Mapping[str, Any], max_length: int, folder: Path) -> None:
    """Into the folder, which is made: `lengths.png`, how many tokens the rows of each split have, where they are cut
    (at `max_length` tokens), and how many are."""
    lengths = _with_rows(report["length"])
    if not lengths:
        return
    figure = _lengths(lengths, "tokens")
    for axes, split in zip(figure.axes, lengths, strict=True):
        cut, rows = report["truncated"][split], report["rows"][split]
        said = f"{cut:,} rows ({cut / rows:.1%}) cut at {max_length}" if cut else f"none cut at {max_length}"
        axes.axvline(max_length, color="C3", linewidth=1)
        axes.set_title(said, loc="right", fontsize=9, color="C3")
    _save(figure, folder / "lengths.png")


def draw_scores(predicted: Predictions, split: str, folder: Path) -> None:
    """Into the folder, of a classification: `confusion_SPLIT.png`, how many rows of each true label were given each;
    `calibration_SPLIT.png`, how often predictions of some probability are right, and how many there are of it; and
    `precision_recall_SPLIT.png`, of label 1 where there are two labels, else a line for each, up to ten. Where rows
    have any number of labels, `labels_SPLIT.png`: the F1 of each and its threshold, of the most frequent 30. Of
    numbers, `numbers_SPLIT.png`: each prediction against its label. Of tagged words, `spans_SPLIT.png`: precision,
    recall and F1 of each type of span, of the most frequent 30.
    """
    match predicted:
        case OneLabel():
            _save(_confusion(predicted), folder / f"confusion_{split}.png")
            if np.isfinite(predicted.probabilities).all():
                _save(_calibration(predicted), folder / f"calibration_{split}.png")
                _save(_precision_recall(predicted), folder / f"precision_recall_{split}.png")
        case ManyLabels():
            _save(_f1_of_labels(predicted), folder / f"labels_{split}.png")
        case Numbers():
            _save(_numbers(predicted), folder / f"numbers_{split}.png")
        case Tagged():
            _save(_of_types(predicted), folder / f"spans_{split}.png")


def draw_slice(
    name: str, split: str, groups: Sequence[Mapping[str, Any]], whole: Mapping[str, Mapping[str, Any]], folder: Path
) -> None:
    """Into the folder: `slices_SPLIT_SLICE.png`, the first metrics of each group with their intervals, beside that of
    all rows. `groups` and `whole` are as training.programs.score writes them; of the slice's name the file has what is
    safe."""
    _save(_slice(name, split, groups, whole), folder / f"slices_{split}_{plain_name(name)}.png")


def plain_name(name: str) -> str:
    """A part of a file's name for any name: itself where it is plain, else what is plain of it, and a digest."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:LONGEST_NAME]
    return plain if plain == name else f"{plain}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _slice(
    name: str, split: str, groups: Sequence[Mapping[str, Any]], whole: Mapping[str, Mapping[str, Any]]
) -> Figure:
    """A panel a metric, side by side: they have the groups in common."""
    from matplotlib.figure import Figure

    metrics = list(whole)[:MOST_PANELS]
    figure = Figure(figsize=(3 + 2.6 * len(metrics), 1.3 + 0.28 * len(groups)), layout="constrained")
    panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        scores = [group["metrics"][metric] for group in groups]
        axes.barh(range(len(groups)), [_height(score["value"]) for score in scores], color=COLORS.get(split))
        ends = [(place, score["low"], score["high"]) for place, score in enumerate(scores) if score["low"] is not None]
        if ends:
            axes.hlines(*zip(*ends, strict=True), color="black", linewidth=1.5)
        if whole[metric]["value"] is not None:
            axes.axvline(whole[metric]["value"], color="C3", linewidth=1, linestyle="--")
        axes.set_title(_shown(metric), loc="left", fontsize=9, parse_math=False)
        _plain(axes)
    names = [f"{_shown(group['group'])} ({group['rows']:,})" for group in groups]
    panels[0].set_yticks(range(len(names)), names, fontsize=8, parse_math=False)
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    title = f"{split} by {_shown(name)}: rows in brackets, lines are 95% intervals, dashed is all rows"
    figure.suptitle(title, fontsize=9, parse_math=False)
    return figure


def _height(value: float | None) -> float:
    return 0.0 if value is None else value


def _with_rows(lengths: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {split: entry for split, entry in lengths.items() if entry["histogram"]["counts"]}


def _lengths(lengths: Mapping[str, Mapping[str, Any]], unit: str) -> Figure:
    """A panel a split, one below the other: they have the lengths in common, not the number of rows."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(8, 0.8 + 1.7 * len(lengths)), layout="constrained")
    panels = figure.subplots(len(lengths), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (split, entry) in zip(panels, lengths.items(), strict=True):
        edges, counts = entry["histogram"]["edges"], entry["histogram"]["counts"]
        widths = [b - a for a, b in pairwise(edges)]
        # Whole numbers fill bins of two widths: only a bar's area tells how many rows it stands for.
        heights = [count / sum(counts) / width for count, width in zip(counts, widths, strict=True)]
        axes.bar(edges[:-1], heights, widths, align="edge", color=COLORS.get(split))
        axes.axvline(entry["median"], color="black", linewidth=1, linestyle="--")
        said = f"{split}: {sum(counts):,} rows, median {entry['median']:,}, longest {entry['max']:,} {unit}"
        axes.set_title(said, loc="left", fontsize=9)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        _plain(axes)
    end = _end(lengths)
    panels[-1].set_xlim(0, end)
    panels[-1].set_xlabel(f"{unit} (dashed: the median{'; the longest lie outside' if end else ''})")
    panels[-1].xaxis.set_major_formatter("{x:,.0f}")
    figure.supylabel(f"share of the rows, a {unit.removesuffix('s')}", fontsize="medium")
    return figure


def _end(lengths: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Where the drawing ends: a few texts that are far longer than all others would press those into one bar. None:
    behind the longest."""
    edges = [entry["histogram"]["edges"] for entry in lengths.values()]
    far = [len(one) > 2 and one[-1] - one[-2] > 5 * (one[-2] - one[-3]) for one in edges]
    return max(one[-2] if out else one[-1] for one, out in zip(edges, far, strict=True)) * 1.02 if any(far) else None


def _labels(labels: Mapping[str, Mapping[str, int]], unit: str) -> Figure:
    """A panel a split, side by side: they have the labels in common. `unit` is what is counted."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    names, table = _most_frequent(labels)
    figure = Figure(figsize=(3 + 2.6 * len(table), 1.1 + 0.28 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(table), sharey=True, sharex=True, squeeze=False)[0]
    for axes, (split, counts) in zip(panels, table.items(), strict=True):
        rows = sum(counts)
        shares = [count / rows if rows else 0.0 for count in counts]
        bars = axes.barh(range(len(names)), shares, color=COLORS.get(split))
        axes.bar_label(bars, [f"{c:,}" for c in counts], padding=3, fontsize=8)
        axes.set_title(f"{split}: {rows:,} {unit}", loc="left", fontsize=9)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        _plain(axes)
    # A name is no formula, whatever it holds.
    panels[0].set_yticks(range(len(names)), names, fontsize=8, parse_math=False)
    panels[0].set_ylim(len(names) - 0.4, -0.6)
    widest = max(bar.get_width() for axes in panels for bar in axes.patches)
    panels[0].set_xlim(0, 1.25 * widest)  # with room for the numbers beside the bars
    panels[0].set_xticks([tick for tick in panels[0].get_xticks() if tick <= widest * 1.1])
    figure.supxlabel(f"share of the {unit}, and their number", fontsize="medium")
    return figure


def _most_frequent(labels: Mapping[str, Mapping[str, int]]) -> tuple[list[str], dict[str, list[int]]]:
    """The names to show, in the labels' own order, and each split's rows of them; at the end those of all others."""
    every = list(dict.fromkeys(name for counts in labels.values() for name in counts))
    total = {name: sum(counts.get(name, 0) for counts in labels.values()) for name in every}
    kept = set(sorted(every, key=lambda name: -total[name])[:MOST_LABELS])
    names = [name for name in every if name in kept]
    table = {split: [counts.get(name, 0) for name in names] for split, counts in labels.items()}
    shown = [_shown(name) for name in names]
    if others := len(every) - len(names):
        shown.append(f"{others:,} others")
        for split, counts in labels.items():
            table[split].append(sum(counts.values()) - sum(table[split]))
    return shown, table


def _confusion(predicted: OneLabel) -> Figure:
    from matplotlib.figure import Figure

    labels = [_shown(label) for label in predicted.labels]
    counts = np.zeros((len(labels), len(labels)), dtype=np.int64)
    np.add.at(counts, (predicted.references, predicted.predictions), 1)
    side = 3.0 + 0.5 * min(len(labels), MOST_NAMED)  # inches
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.add_subplot(xlabel="prediction", ylabel="label")
    axes.imshow(counts, cmap="Blues")
    axes.set_xticks(range(len(labels)), labels, rotation=90, parse_math=False)
    axes.set_yticks(range(len(labels)), labels, parse_math=False)
    for (row, column), count in np.ndenumerate(counts) if len(labels) <= MOST_COUNTED else ():
        color = "white" if count > counts.max() / 2 else "black"
        axes.text(column, row, str(count), ha="center", va="center", color=color)
    return figure


def _calibration(predicted: OneLabel) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    from training.evaluation.metrics.probabilities import BINS, calibration

    bins, gaps = calibration(predicted.probabilities, predicted.references)
    rows = np.bincount(bins, minlength=BINS)
    there = rows > 0
    confidence = np.bincount(bins, weights=predicted.probabilities.max(axis=1), minlength=BINS)[there] / rows[there]
    right = confidence + np.bincount(bins, weights=gaps, minlength=BINS)[there] / rows[there]
    figure = Figure(figsize=(6, 6), layout="constrained")
    curve, counts = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    curve.plot((0, 1), (0, 1), color="black", linewidth=1, linestyle="--", label="as sure as right")
    curve.plot(confidence, right, marker="o", markersize=4, label="these rows")
    curve.set(ylabel="share that is right", ylim=(0, 1.02), xlim=(0, 1))
    curve.legend(loc="upper left")
    counts.bar(np.arange(BINS) / BINS, rows, 1 / BINS, align="edge")
    counts.set(ylabel="rows", xlabel="probability of the predicted label")
    curve.yaxis.set_major_formatter(PercentFormatter(1.0))
    counts.xaxis.set_major_formatter(PercentFormatter(1.0))
    _plain(curve)
    _plain(counts)
    return figure


def _precision_recall(predicted: OneLabel) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter
    from sklearn.metrics import precision_recall_curve

    rows = np.bincount(predicted.references, minlength=len(predicted.labels))
    binary = len(predicted.labels) == 2
    shown = [1] if binary else sorted(np.argsort(-rows, kind="stable")[:MOST_CURVES])
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot(ylim=(0, 1.02), xlim=(0, 1))
    for label in (label for label in shown if rows[label]):
        precision, recall, _ = precision_recall_curve(predicted.references == label, predicted.probabilities[:, label])
        axes.plot(recall, precision, drawstyle="steps-post", label=_shown(predicted.labels[label]))
    axes.set_xlabel("recall: share of the label's rows that are found")
    axes.set_ylabel("precision: share of what is found that is right")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0))
    for text in axes.legend(loc="lower left").get_texts() if axes.lines else ():
        text.set_parse_math(False)  # a name is no formula
    _plain(axes)
    return figure


def _of_types(predicted: Tagged) -> Figure:
    """A panel a figure, side by side: they have the types in common."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    counts = agreement(
        predicted.labels, predicted.references, predicted.predictions, predicted.rows, len(predicted)
    ).sum(axis=0)
    types = np.array(types_of(predicted.labels), object)
    shown = np.argsort(-counts[:, 0], kind="stable")[:MOST_LABELS]
    true, found, both = counts[shown].T
    panels = {"precision": (both, found), "recall": (both, true), "f1": (2 * both, true + found)}
    figure = Figure(figsize=(3 + 2.6 * len(panels), 1.3 + 0.28 * len(shown)), layout="constrained")
    every = figure.subplots(1, len(panels), sharey=True, sharex=True, squeeze=False)[0]
    for axes, (name, (part, whole)) in zip(every, panels.items(), strict=True):
        shares = np.divide(part, whole, out=np.zeros(len(shown)), where=whole > 0)
        axes.bar_label(
            axes.barh(range(len(shown)), shares), [f"{share:.1%}" for share in shares], padding=3, fontsize=8
        )
        axes.set_title(name, loc="left", fontsize=9)
        axes.set_xlim(0, 1.25)
        axes.set_xticks((0, 0.5, 1))
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        _plain(axes)
    names = [f"{_shown(name)} ({number:,.0f})" for name, number in zip(types[shown], true, strict=True)]
    every[0].set_yticks(range(len(names)), names, fontsize=8, parse_math=False)
    every[0].set_ylim(len(names) - 0.4, -0.6)
    figure.suptitle("spans by type: in brackets how many there are", fontsize=9)
    return figure


def _f1_of_labels(predicted: ManyLabels) -> Figure:
    from matplotlib.figure import Figure

    from training.evaluation.metrics.labels import f1

    references, predictions = predicted.references, predicted.predictions
    rows = references.sum(axis=0)
    scores = f1(rows, predictions.sum(axis=0), (references & predictions).sum(axis=0))
    shown = np.argsort(-rows, kind="stable")[:MOST_LABELS]
    places = np.arange(len(shown))
    figure = Figure(figsize=(7, 1.3 + 0.28 * len(shown)), layout="constrained")
    axes = figure.add_subplot(xlim=(0, 1))
    axes.barh(places, scores[shown], label="F1")
    axes.plot(predicted.thresholds[shown], places, "|", color="black", markersize=10, label="threshold")
    names = [f"{_shown(predicted.labels[label])} ({rows[label]:,})" for label in shown]
    axes.set_yticks(places, names, fontsize=8, parse_math=False)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlabel("F1, and the least probability that is taken for the label; rows in brackets")
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    _plain(axes)
    return figure


def _numbers(predicted: Numbers) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot(xlabel="label", ylabel="prediction")
    axes.plot(predicted.references, predicted.predictions, ".", markersize=4, alpha=0.5, rasterized=True)
    axes.axline((float(predicted.references.mean()),) * 2, slope=1, color="black", linewidth=1, linestyle="--")
    _plain(axes)
    return figure


def _shown(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def _plain(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font lacks: they are drawn as boxes
        figure.savefig(file, dpi=100)
