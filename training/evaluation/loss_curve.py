"""A training's curves as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# What an evaluation says of itself rather than of the model.
NOT_DRAWN = ("_runtime", "_per_second", "_loss", "epoch")
LABELS = {"train_loss": "training", "eval_loss": "validation"}


def draw_curves(events: Iterable[Mapping[str, Any]], file: Path) -> None:
    """Losses on the left and the evaluated metrics on the right, by optimizer step, as a PNG."""
    from matplotlib.figure import Figure

    curves: dict[str, list[tuple[int, float]]] = {}
    for event in events:
        for name, value in event["values"].items() if event["kind"] == "metrics" else ():
            curves.setdefault(name, []).append((event["step"], value))
    losses = {name: curves[name] for name in LABELS if name in curves}
    metrics = {n: c for n, c in curves.items() if n.startswith("eval_") and not n.endswith(NOT_DRAWN)}
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, title, drawn in zip(figure.subplots(1, 2), ("loss", "evaluation"), (losses, metrics), strict=True):
        for name, points in drawn.items():
            steps, values = zip(*sorted(points), strict=True)
            axes.plot(steps, values, marker=".", label=LABELS.get(name, name.removeprefix("eval_")))
        axes.set_title(title)
        axes.set_xlabel("optimizer step")
        axes.grid(alpha=0.3)
        if drawn:
            axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)
