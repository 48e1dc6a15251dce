"""The page of pictures of a drift report."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from training.evaluation.drift.verdict import Observations

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"reference": "C0", "new": "C1"}
VERDICT_COLORS = {"steady": "C2", "watch": "C1", "drifted": "C3"}
MAX_BARS = 12  # of the most frequent predictions
MAX_WORDS = 16
MAX_NAME_LENGTH = 28  # characters
BINS = 30


def draw_report(report: Mapping[str, Any], reference: Observations, new: Observations, title: str, file: Path) -> None:
    """Draws all effects with their intervals, in multiples of their thresholds, and the distributions of predictions,
    confidences and lengths, and the most telling words."""
    figure = Figure(figsize=(13, 9), layout="constrained")
    accuracy = report["estimated_accuracy"]
    estimated = f"; estimated accuracy {accuracy['value']:.3f}" if accuracy else ""
    figure.suptitle(f"{_printable(title)}: {report['verdict']}, {report['rows']['new']:,} new rows{estimated}")
    grid = figure.subplots(2, 3)
    _plot_effects(grid[0, 0], report["comparisons"])
    for line in report["comparisons"]:
        if line.get("words"):
            _plot_words(grid[0, 1], line["words"])
    samples = {"reference": reference, "new": new}
    fields = {name: [sample.fields.get(name, ()) for sample in samples.values()] for name in reference.fields}
    categories = [name for name, values in fields.items() if any(isinstance(v, str) for v in values[0][:1])]
    numbers = [name for name, values in fields.items() if name not in categories and all(map(len, values))]
    if categories:
        _plot_categories(grid[0, 2], f"predicted {categories[0]}", fields[categories[0]])
    panels = {f"predicted {name}": fields[name] for name in numbers[:1]}
    for name in ("tokens", "tokens_per_word"):
        values = [getattr(sample, name) for sample in samples.values()]
        if values[0] is not None and values[1] is not None:
            panels[name.replace("_", " ")] = values
    for axes, (name, values) in zip(grid[1], panels.items(), strict=False):
        _plot_numbers(axes, name, values)
    for axes in grid.flat:
        if not axes.has_data():  # of a task type without such values
            axes.set_axis_off()
    file.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about letters that the font lacks: boxes replace them
        figure.savefig(file, dpi=100)


def _plot_effects(axes: Axes, lines: Sequence[Mapping[str, Any]]) -> None:
    for place, line in enumerate(lines):
        none = 0.5 if line["unit"] == "auc" else 0.0
        multiple = line["threshold"] - none or 1.0  # of a threshold of no effect, the effect itself
        low, value, high = ((line[end] - none) / multiple for end in ("low", "value", "high"))
        axes.hlines(place, low, high, color=VERDICT_COLORS[line["verdict"]])
        axes.plot(value, place, marker="o", color=VERDICT_COLORS[line["verdict"]])
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(lines)), [line["name"] for line in lines])
    axes.invert_yaxis()
    axes.set_xlabel("effect, in multiples of its threshold")
    axes.set_title("effects with 95 % intervals")


def _plot_words(axes: Axes, words: Sequence[Mapping[str, Any]]) -> None:
    shown = sorted(words, key=lambda word: -abs(word["new"] - word["reference"]))[:MAX_WORDS]
    for shift, sample in enumerate(COLORS):
        places = [place + 0.4 * shift for place in range(len(shown))]
        axes.barh(places, [word[sample] for word in shown], height=0.4, color=COLORS[sample], label=sample)
    axes.set_yticks([place + 0.2 for place in range(len(shown))], [_printable(word["word"]) for word in shown])
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_title("most telling words, share of rows")
    axes.legend()


def _plot_categories(axes: Axes, title: str, samples: Sequence[Sequence[Any]]) -> None:
    counts = [Counter(map(str, sample)) for sample in samples]
    shown = [name for name, _ in (counts[0] + counts[1]).most_common(MAX_BARS)]
    for shift, (name, count) in enumerate(zip(COLORS, counts, strict=True)):
        shares = [count[label] / max(count.total(), 1) for label in shown]
        axes.barh([place + 0.4 * shift for place in range(len(shown))], shares, height=0.4, color=COLORS[name])
    axes.set_yticks([place + 0.2 for place in range(len(shown))], list(map(_printable, shown)))
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_title(_printable(title))


def _plot_numbers(axes: Axes, title: str, samples: Sequence[Any]) -> None:
    values = [np.asarray(sample, np.float64) for sample in samples]
    edges = np.histogram_bin_edges(np.concatenate(values), BINS)
    for name, sample in zip(COLORS, values, strict=True):
        weights = np.full(len(sample), 1 / max(len(sample), 1))
        axes.hist(sample, edges.tolist(), weights=weights, alpha=0.5, color=COLORS[name], label=name)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_title(_printable(title))
    axes.legend()


def _printable(name: str) -> str:
    """A name without the signs that start formulas, cut to a width."""
    name = "".join(character if character.isprintable() else " " for character in name).replace("$", r"\$")
    return name if len(name) <= MAX_NAME_LENGTH * 2 else f"{name[: MAX_NAME_LENGTH * 2 - 1]}…"
