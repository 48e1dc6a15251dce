"""The program that compares the variants of a sweep with its recipe over several seeds: `python -m
training.programs.compare_seeds JOB`.

inputs     data (labels.json, and SPLIT.groups.arrow if rows have groups), trial_1, trial_2, … (each with SPLIT.parquet
           of training.programs.predict)
settings   CompareSeedsSettings, below
output     seeds.json   the result
result     a list of training.evaluation.scores.VariantGain, one for each variant
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic_core import to_jsonable_python

from training import task_types
from training.data.ipc_files import read_labels
from training.evaluation.bootstrap import DRAWS, SEED, draw_figures
from training.evaluation.predictions import Floats
from training.evaluation.row_groups import Groups
from training.evaluation.scores import VariantGain
from training.evaluation.seed_gains import SeedGain
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, TaskSettings
from training.programs.score import read_predictions


class CompareSeedsSettings(TaskSettings):
    """The settings of a job of this program."""

    split: str
    metrics: list[str]
    figure: str
    """The figure that is compared: one that the metrics give."""
    less_is_better: bool
    trials: dict[str, list[str]]
    """The inputs of each setting by its name, the recipe first, in the order of the seeds."""


def main(job_dir: Path, job: Job, events: Events) -> list[VariantGain]:
    """Compares each variant with the recipe."""
    from training.evaluation.metrics import compute
    from training.evaluation.metrics.resampling import figures

    settings = CompareSeedsSettings.model_validate(job.settings)
    task_type, split = task_types.load(settings.task, settings.options), settings.split
    data = Path(job.inputs["data"])
    labels = read_labels(data)
    groups, sign, rows = None, -1.0 if settings.less_is_better else 1.0, 0
    values, drawn = dict[str, Floats](), dict[str, Floats]()
    total = sum(map(len, settings.trials.values()))
    for name, trials in settings.trials.items():
        found = []
        for trial in trials:
            predicted = read_predictions(task_type, Path(job.inputs[trial], f"{split}.parquet"), labels)
            rows, groups = len(predicted), Groups.read(data, split, predicted)
            figure = figures(settings.metrics, predicted)[settings.figure]
            numbers = groups.numbers if groups else None
            (of_draws,) = draw_figures([figure], rows, DRAWS, SEED, groups=numbers)
            found.append((compute(settings.metrics, predicted)[settings.figure], of_draws))
            events.progress(phase="seeds", done=len(values) * len(trials) + len(found), total=total)
        values[name] = np.array([value for value, _ in found])
        drawn[name] = np.stack([of_draws for _, of_draws in found])
    recipe, *variants = settings.trials
    compared = []
    for name in variants:
        defined = np.isfinite(drawn[name] - drawn[recipe]).all(axis=0)
        gains = sign * (drawn[name] - drawn[recipe])[:, defined]
        units = len(groups.sizes) if groups else rows
        found_gain = SeedGain.of(sign * (values[name] - values[recipe]), gains, units)
        compared.append(build_gain(name, settings.figure, values[name], values[recipe], rows, groups, found_gain))
    (job_dir / OUTPUT / "seeds.json").write_text(json.dumps(to_jsonable_python(compared), indent=1))
    return compared


def build_gain(
    name: str, metric: str, values: Floats, of_recipe: Floats, rows: int, groups: Groups | None, found: SeedGain
) -> VariantGain:
    """The gain with its interval, and the answer."""
    low, high = found.interval
    other_seed = math.sqrt(values.var(ddof=1) + of_recipe.var(ddof=1))
    answer: Literal["variant", "seed", "unknown"] = "unknown"
    if low > 0 or high < 0:
        answer = "variant"
    elif max(-low, high) <= other_seed:
        answer = "seed"
    return VariantGain(
        variant=name,
        metric=metric,
        values=values.tolist(),
        recipe_values=of_recipe.tolist(),
        rows=rows,
        groups=len(groups.sizes) if groups else None,
        gain=found.gain,
        low=low,
        high=high,
        other_seed=other_seed,
        answer=answer,
        needed_seeds=found.needed_seeds if answer == "unknown" else None,
    )


if __name__ == "__main__":
    run_program(main)
