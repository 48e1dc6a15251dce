"""The program that scores: `python -m training.score JOB`. It reads stored predictions and needs no model.

inputs     predictions (SPLIT.parquet of training.predict), data (SPLIT.arrow, labels.json)
settings   kind, metrics, labels (names, in the order of their indices)
output     metrics.json                {"validation": {"accuracy": {"value": 0.8, "low": null, "high": null}}}
           log/confusion_SPLIT.png     rows by true and predicted label
           log/predictions_sample.csv  the most confident mistakes, then the least confident hits
figures    SPLIT.METRIC, each a number
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from training.program import run_program
from training.protocol import OUTPUT, Events, Job

if TYPE_CHECKING:
    from types import ModuleType

SAMPLE_ROWS = 50


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Score every split that has predictions; gives the figures."""
    from training import kinds, metrics

    labels = job.settings["labels"]
    kind = kinds.load(job.settings["kind"])
    output = job_dir / OUTPUT
    (output / "log").mkdir(parents=True, exist_ok=True)
    scores: dict[str, dict[str, float]] = {}
    samples: list[dict[str, Any]] = []
    for file in sorted(Path(job.inputs["predictions"]).glob("*.parquet")):
        split, table = file.stem, pq.read_table(file)
        references, predictions = table["label"].to_numpy(), table["prediction"].to_numpy()
        scores[split] = metrics.compute(job.settings["metrics"], predictions, references, labels)
        draw_confusion(references, predictions, labels, output / "log" / f"confusion_{split}.png")
        samples += worst_rows(kind, split, table, Path(job.inputs["data"]) / f"{split}.arrow", labels)
        events.progress(phase="score", split=split)
    intervals = {
        s: {n: {"value": v, "low": None, "high": None} for n, v in found.items()} for s, found in scores.items()
    }
    (output / "metrics.json").write_text(json.dumps(intervals, indent=1))
    write_samples(samples, output / "log" / "predictions_sample.csv")
    return {f"{split}.{name}": value for split, found in scores.items() for name, value in found.items()}


def worst_rows(
    kind: ModuleType, split: str, table: pa.Table, data: Path, labels: Sequence[str]
) -> list[dict[str, Any]]:
    """The SAMPLE_ROWS rows whose true label got the least probability, worst first, with their texts."""
    flat = table["logits"].combine_chunks().flatten().to_numpy()
    probabilities = kind.probabilities(flat.reshape(len(table), len(labels)))
    references, predictions = table["label"].to_numpy(), table["prediction"].to_numpy()
    worst = np.argsort(probabilities[np.arange(len(table)), references], kind="stable")[:SAMPLE_ROWS]
    rows = pa.ipc.open_file(pa.memory_map(str(data))).read_all().drop_columns("label").take(worst).to_pylist()
    return [
        {
            "split": split,
            "row": int(number),
            **texts,
            "label": labels[references[number]],
            "prediction": labels[predictions[number]],
            "probability": round(float(probabilities[number, predictions[number]]), 4),
        }
        for number, texts in zip(worst, rows, strict=True)
    ]


def write_samples(samples: list[dict[str, Any]], file: Path) -> None:
    """Rows as CSV, the header from the first of them; an empty file for none."""
    with open(file, "w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, fieldnames=list(samples[0]) if samples else [])
        writer.writeheader()
        writer.writerows(samples)


def draw_confusion(
    references: npt.NDArray[np.int64], predictions: npt.NDArray[np.int64], labels: Sequence[str], file: Path
) -> None:
    """A picture of how many rows of each true label were given each label."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = np.zeros((len(labels), len(labels)), dtype=np.int64)
    np.add.at(counts, (references, predictions), 1)
    side = 3.0 + 0.5 * min(len(labels), 40)  # inches
    figure = Figure(figsize=(side, side), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="prediction", ylabel="label")
    axes.imshow(counts, cmap="Blues")
    axes.set_xticks(range(len(labels)), labels, rotation=90)
    axes.set_yticks(range(len(labels)), labels)
    if len(labels) <= 20:  # more numbers than that cannot be read
        for (row, column), count in np.ndenumerate(counts):
            colour = "white" if count > counts.max() / 2 else "black"
            axes.text(column, row, str(count), ha="center", va="center", color=colour)
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    run_program(main)
