"""The program that compares a model with the champion, row by row: `python -m training.compare JOB`.

inputs     predictions, champion (each with SPLIT.parquet of training.predict), data (SPLIT.arrow)
settings   kind, split, labels (names, in the order of their indices), metrics, figure (by which they are compared: one
           of those that the metrics give, or a metric, for its first), less_is_better (figures of the user's own of
           which it is, beside those of which that is known),
           margin, confidence, champion (NAME/VERSION), warnings
output     comparison.json         the figures
           log/disagreements.csv   rows that only one of the two gets right, with their texts: those that are lost with
                                   the new model, then those that are gained, each the plainest first
figures    the fields of tasks.runtime.refs.Comparison
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training.evidence import Evidence, bootstrap, mcnemar
from training.predicted import Predicted
from training.problems import Problem, UserError, nearest
from training.program import run_program
from training.protocol import OUTPUT, Events, Job
from training.recipe.release import more_is_better
from training.score import read, write_samples

SHOWN_ROWS = 50
EXACT = "accuracy"


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Compare them on the split; gives the figures."""
    from training import kinds

    say, split = job.settings, job.settings["split"]
    kind = kinds.load(say["kind"])
    new, old = (
        read(kind, Path(job.inputs[name], f"{split}.parquet"), say["labels"]) for name in ("predictions", "champion")
    )

    def tell(done: int, total: int) -> None:
        events.progress(phase="compare", split=split, done=done, total=total)

    figures = compared(new, old, say, tell)
    output = job_dir / OUTPUT
    (output / "log").mkdir(parents=True, exist_ok=True)
    (output / "comparison.json").write_text(json.dumps(figures, indent=1))
    rows = disagreements(new, old, Path(job.inputs["data"]) / f"{split}.arrow")
    write_samples(rows, output / "log" / "disagreements.csv")
    return figures


def compared(
    new: Predicted, old: Predicted, say: dict[str, Any], tell: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """How the new model stands beside the old one on the same rows; `tell` hears of draws that are done, and of all."""
    right, was_right = (model.predictions == model.references for model in (new, old))
    gained, lost = int((right & ~was_right).sum()), int((~right & was_right).sum())
    exact = say["figure"] == EXACT and say["margin"] == 0
    if exact:
        name, values = EXACT, (float(right.mean()), float(was_right.mean()))
        found = mcnemar(gained, lost, len(new), say["confidence"])
    else:
        name, values, found = resampled(new, old, say, tell)
    figures = {
        "champion": say["champion"],
        "metric": name,
        "split": say["split"],
        "rows": len(new),
        "value": values[0],
        "champion_value": values[1],
        "gained": gained,
        "lost": lost,
        "gain": found.gain,
        "at_least": found.at_least,
        "margin": say["margin"],
        "confidence": say["confidence"],
        "method": "mcnemar" if exact else "bootstrap",
        "p_value": found.p_value,
        "better": found.better,
        "warnings": say["warnings"],
    }
    return {name: None if value != value else value for name, value in figures.items()}  # nan is null in JSON


def resampled(
    new: Predicted, old: Predicted, say: dict[str, Any], tell: Callable[[int, int], None]
) -> tuple[str, tuple[float, float], Evidence]:
    """The figure's name, its values of both, and what the bootstrap says of their difference."""
    from training.metrics import compute
    from training.metrics.resampled import figures

    metrics, name = say["metrics"], say["figure"]
    values = compute(metrics, new)
    if name not in values and name in metrics:
        name = next(iter(compute([name], new)))
    if name not in values:  # only metrics of the user's own can get this far: their figures are known now
        message = f"there is no figure {name!r}: choose from {', '.join(values)}.{nearest(name, values)}"
        raise UserError([Problem(kind="release", where="release.gate.compare", message=message)])
    ours, theirs = (figures(metrics, model)[name] for model in (new, old))
    bounds = {"margin": say["margin"], "confidence": say["confidence"]}
    less = name in say["less_is_better"] or not more_is_better(name)
    found = bootstrap(ours, theirs, len(new), **bounds, less_is_better=less, tell=tell)
    return name, (values[name], compute(metrics, old)[name]), found


def disagreements(new: Predicted, old: Predicted, data: Path) -> list[dict[str, Any]]:
    """SHOWN_ROWS rows that are lost and as many that are gained, those first whose true label lost or gained most."""
    right, was_right = (model.predictions == model.references for model in (new, old))
    every = np.arange(len(new))
    ours, theirs = (model.probabilities[every, model.references] for model in (new, old))
    order = np.argsort(ours - theirs, kind="stable")
    lost = order[(~right & was_right)[order]][:SHOWN_ROWS]
    gained = order[::-1][(right & ~was_right)[order[::-1]]][:SHOWN_ROWS]
    chosen: npt.NDArray[np.int64] = np.concatenate([lost, gained])
    texts = pa.ipc.open_file(pa.memory_map(str(data))).read_all().drop_columns("label").take(chosen).to_pylist()
    return [
        {
            "change": "gained" if right[row] else "lost",
            "row": int(row),
            **text,
            "label": new.labels[new.references[row]],
            "prediction": new.labels[new.predictions[row]],
            "champion": new.labels[old.predictions[row]],
            "probability_of_label": round(float(ours[row]), 4),
            "champion_probability_of_label": round(float(theirs[row]), 4),
        }
        for row, text in zip(chosen, texts, strict=True)
    ]


if __name__ == "__main__":
    run_program(main)
