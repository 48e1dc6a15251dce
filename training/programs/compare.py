"""The program that compares a model with the champion, row by row: `python -m training.programs.compare JOB`. Without
a champion the best constant answer takes its place: training/evaluation/baseline.py.

inputs     predictions, champion (each with SPLIT.parquet of training.programs.predict; no champion: the baseline),
data, tokens
           (SPLIT.arrow), model (the trained model's folder; both for the baseline alone)
settings   training.recipe.program_settings.CompareSettings
output     comparison.json         the figures
           log/disagreements.csv   rows that only one of the two gets right, with their texts: those that are lost with
                                   the new model, then those that are gained, each the plainest first
figures    the fields of tasks.cache.refs.Comparison
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from training.evaluation.constant_predictions import is_constant
from training.evaluation.predictions import Predictions
from training.evaluation.significance import Significance, mcnemar, paired
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job
from training.problems import Problem, UserError, nearest
from training.programs.score import inputs_of, read, write_samples
from training.recipe.program_settings import CompareSettings
from training.recipe.tables.metrics import METRICS, more_is_better

if TYPE_CHECKING:
    from training.evaluation.constant_predictions import Constant
    from training.task_types.task_type import TaskType

SHOWN_ROWS = 50
FEW_ROWS, HEAVY_SHARE = 0.01, 0.5
"""A tail is heavy if FEW_ROWS of the differing rows (at least one) cause more than HEAVY_SHARE of the variance."""
FEWEST_DIFFERING = 10
NAMED_ROWS = 5


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Compare them on the split; gives the figures."""
    from training import task_types

    settings = CompareSettings.model_validate(job.settings)
    task_type, split = task_types.load(settings.task, settings.options), settings.split
    new = read(task_type, Path(job.inputs["predictions"], f"{split}.parquet"), settings.labels)
    constant = None
    if settings.champion is None:
        constant = _best_constant(task_type, settings, job.inputs)
        old = constant.answered(new, split)
    else:
        old = read(task_type, Path(job.inputs["champion"], f"{split}.parquet"), settings.labels)

    def tell(done: int, total: int) -> None:
        events.progress(phase="compare", split=split, done=done, total=total)

    figures = compared(new, old, settings, constant.name if constant else None, tell)
    output = job_dir / OUTPUT
    (output / "log").mkdir(parents=True, exist_ok=True)
    (output / "comparison.json").write_text(json.dumps(figures, indent=1))
    rows = disagreements(new, old, Path(job.inputs["data"]) / f"{split}.arrow")
    write_samples(rows, output / "log" / "disagreements.csv")
    return figures


def _best_constant(task_type: TaskType, settings: CompareSettings, inputs: Mapping[str, str]) -> Constant:
    """The constant answer that is best by the compared metric."""
    from training.evaluation.baseline import best

    data, tokens, model = (Path(inputs[name]) for name in ("data", "tokens", "model"))
    baseline = task_type.baseline(data, tokens, model, settings.labels)
    assert baseline is not None  # such a task type's models are not compared without a champion
    return best(baseline, settings.figure)


def compared(
    new: Predictions,
    old: Predictions,
    settings: CompareSettings,
    constant: str | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """The fields of tasks.cache.refs.Comparison for two models on the same rows.

    Args:
        constant: the name of the constant answer that `old` is; None: `old` is the champion.
        tell: called now and then with the number of finished draws, and the number of all.

    Raises UserError where they cannot be compared.
    """
    champion = str(settings.champion) if constant is None else f"the constant answer {constant}"
    if why := new.incomparable_reason(old):
        message = f"this model and {champion} {why}, so figures by token are not comparable: train with its tokenizer "
        message += "(model.start_from: champion) and with rows as long, or name another registry."
        raise UserError([Problem(kind="release", where="release.gate.compare", message=message)])
    warnings, margin = list(settings.warnings), settings.margin
    better, worse = differing(new, old)
    gained, lost = int(better.sum()), int(worse.sum())
    correct, was_correct = new.correct, old.correct
    exact = settings.figure == new.correct_metric and margin == 0
    if correct is not None and was_correct is not None and exact:
        name, values = settings.figure, (float(correct.mean()), float(was_correct.mean()))
        found = mcnemar(gained, lost, len(new), settings.confidence)
    else:
        name, values, found = bootstrapped(new, old, settings, tell, is_baseline=constant is not None)
    if constant is not None and is_constant(new):  # not significant: another constant was best on the training rows
        found = replace(found, better=False, p_value=1.0, at_least=min(found.at_least, margin))
        same = f"this model gives every row of {settings.split} the same answer"
        warnings.append(f"{same}, so it is a constant answer, too.")
    if not exact:
        warnings += heavy_tails(name, new, old)
    figures = {
        "champion": champion,
        "metric": name,
        "split": settings.split,
        "rows": len(new),
        "value": values[0],
        "champion_value": values[1],
        "gained": gained,
        "lost": lost,
        "gain": found.gain,
        "at_least": found.at_least,
        "margin": margin,
        "confidence": settings.confidence,
        "method": "mcnemar" if exact else "permutation" if margin >= 0 else "bootstrap",
        "p_value": found.p_value,
        "least_p_value": found.least_p_value,
        "better": found.better,
        "baseline": constant is not None,
        "warnings": warnings,
    }
    return {name: None if value != value else value for name, value in figures.items()}  # nan is null in JSON


def bootstrapped(
    new: Predictions,
    old: Predictions,
    settings: CompareSettings,
    tell: Callable[[int, int], None],
    *,
    is_baseline: bool,
) -> tuple[str, tuple[float, float], Significance]:
    """The figure's name, both models' values, and the result of the paired test."""
    from training.evaluation import baseline
    from training.evaluation.metrics import compute
    from training.evaluation.metrics.bootstrap_figures import cost, figures

    metrics, name = settings.metrics, settings.figure
    values = compute(metrics, new)
    if name not in values and name in metrics:
        name = next(iter(compute([name], new)))
    if name not in values:  # a user metric's: the names of its figures are not known before
        message = f"there is no figure {name!r}: choose from {', '.join(values)}.{nearest(name, values)}"
        raise UserError([Problem(kind="release", where="release.gate.compare", message=message)])
    new_guards, old_guards = new.worst_cases(old)
    pooled = new.concatenate(new_guards).concatenate(old).concatenate(old_guards)
    figure = figures(metrics, pooled)[name]
    found = paired(
        baseline.defined(name, figure) if is_baseline else figure,
        len(new),
        len(new_guards),
        margin=settings.margin,
        confidence=settings.confidence,
        less_is_better=name in settings.less_is_better or not more_is_better(name),
        slow=name not in METRICS,
        cost=cost(name, pooled),
        tell=tell,
    )
    theirs = baseline.values(metrics, old) if is_baseline else compute(metrics, old)
    return name, (values[name], theirs.get(name, math.nan)), found


def heavy_tails(metric: str, new: Predictions, old: Predictions) -> Iterator[str]:
    """A warning if few rows decide about the difference: other rows like these may turn it round."""
    from training.evaluation.metrics.bootstrap_figures import influences

    ours, theirs = (influences(metric, model) if metric in METRICS else None for model in (new, old))
    if ours is None or theirs is None:
        return
    squares = np.square(ours - theirs)
    differing = np.count_nonzero(squares)
    few = max(1, round(FEW_ROWS * differing))
    rows = np.argsort(-squares, kind="stable")[:few]
    share = squares[rows].sum() / squares.sum() if differing >= FEWEST_DIFFERING else 0.0
    if share > HEAVY_SHARE:  # not so if it is no number
        named = ", ".join(str(row) for row in rows[:NAMED_ROWS].tolist()) + (", …" if few > NAMED_ROWS else "")
        yield (
            f"{few} of {len(new):,} rows make up {share:.0%} of the variance of the difference in {metric} (row "
            f"{named}): the interval is less certain than its confidence says. Look at these rows; add test rows, or "
            "compare by a metric that a single row moves less, such as accuracy."
        )


def differing(new: Predictions, old: Predictions) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """(N,) the rows that the new model alone gets right, and those that the old one alone does; where answers are not
    right or wrong, those that got better, and worse."""
    right, was_right = new.correct, old.correct
    if right is None or was_right is None:
        return new.row_scores > old.row_scores, new.row_scores < old.row_scores
    return right & ~was_right, ~right & was_right


def disagreements(new: Predictions, old: Predictions, data: Path) -> list[dict[str, Any]]:
    """SHOWN_ROWS rows that are lost and as many that are gained, those first whose answer lost or gained most."""
    better, worse = differing(new, old)
    order = np.argsort(new.row_scores - old.row_scores, kind="stable")
    lost = order[worse[order]][:SHOWN_ROWS]
    gained = order[::-1][better[order[::-1]]][:SHOWN_ROWS]
    chosen: npt.NDArray[np.int64] = np.concatenate([lost, gained])
    return [
        {
            "change": "gained" if better[row] else "lost",
            "row": int(row),
            **inputs,
            "label": new.describe_row(row, inputs)["label"],
            "prediction": new.describe_row(row, inputs)["prediction"],
            "champion": old.describe_row(row, inputs)["prediction"],
            new.row_score_name: round(float(new.row_scores[row]), 4),
            f"champion_{new.row_score_name}": round(float(old.row_scores[row]), 4),
        }
        for row, inputs in zip(chosen.tolist(), inputs_of(data, chosen), strict=True)
    ]


if __name__ == "__main__":
    run_program(main)
