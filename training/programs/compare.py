"""The program that compares a model with the champion, row by row: `python -m training.programs.compare JOB`. Without
a champion, the baseline takes its place: training/evaluation/baseline.py; for answers to prompts, the base model.

inputs     predictions, champion (each with SPLIT.parquet of training.programs.predict; without a champion only the
           first), data (SPLIT.arrow, labels.json, and SPLIT.groups.arrow if rows have groups); for the baseline also
           data (train.arrow), tokens (train.arrow, SPLIT.arrow) and model (the trained model's folder)
settings   CompareSettings, below
output     comparison.json         the result
           log/disagreements.csv   rows that only one of the two gets right, with their texts: first those that the new
                                   model loses, then those that it gains, each by the size of the change
           log/judgements.csv      with evaluation.judge, each prompt with both answers and the better one
result     training.evaluation.scores.Comparison
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from training import task_types
from training.data.ipc_files import read_labels
from training.data.row_problems import shorten
from training.evaluation.constant_predictions import Constant, Rival, is_constant
from training.evaluation.group_tests import gain_by_groups, groups_for_share, highest_share_by_groups
from training.evaluation.judgements import difference_interval, judge_answers, paired_answers
from training.evaluation.predictions import Predictions
from training.evaluation.row_groups import Groups
from training.evaluation.scores import AnswerMetric, Comparison, FlippedRow, NegativeFlips
from training.evaluation.significance import Significance, highest_share, mcnemar, paired, rows_for_share
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, TaskSettings
from training.problems import UserError, nearest
from training.programs.score import read_inputs, write_samples
from training.recipe.tables.metrics import METRICS, TOOL_METRICS, WIN_RATE, more_is_better
from training.task_types.task_type import BaseReference
from training.tokenization.preference_rows import prompt_as_json

SHOWN_ROWS = 50
FEW_ROWS, HEAVY_SHARE = 0.01, 0.5
"""A tail is heavy if FEW_ROWS of the differing rows (at least one) cause more than HEAVY_SHARE of the variance."""
MIN_DIFFERING = 10
NAMED_ROWS = 5
NAMED_FLIPS = 10
BASE_MODEL = "the base model"
"""The opponent of a first model's answers."""


class CompareSettings(TaskSettings):
    """The settings of a job of this program."""

    split: str
    metrics: list[str]
    figure: str
    """The figure that is compared: one that the metrics give, or a metric, for its first figure."""
    less_is_better: list[str]
    """User figures for which lower is better; the direction of the project's is in their table."""
    margin: float
    """The gain that the new model must exceed, in the unit of the figure."""
    confidence: float
    """1 - the chance of a false promotion."""
    champion: str | None
    """NAME/VERSION; None: the baseline."""
    comparison: int | None = None
    """The number of the comparison among all on the same rows, if they are counted."""
    max_flips: float | None = None
    """The largest share of rows that the champion has right and the new model has wrong; None: any."""
    judge: str | None = None
    """evaluation.judge, which compares the answers of both models."""
    lengths: bool = False
    """Whether the lengths of both models' answers are reported too."""
    warnings: list[str] = Field(default_factory=list)
    """Differences between the labels of the two models."""


def main(job_dir: Path, job: Job, events: Events) -> Comparison:
    """Compares the models on the split."""
    from training.evaluation.baseline import choose_rival

    settings = CompareSettings.model_validate(job.settings)
    task_type, split = task_types.load(settings.task, settings.options), settings.split
    data = Path(job.inputs["data"])
    labels = read_labels(data)
    table = pq.read_table(Path(job.inputs["predictions"], f"{split}.parquet"))
    new, champion_table = task_type.metric_inputs(table, labels), None
    rival = None
    if settings.champion is None:
        baseline = task_type.baseline(data, Path(job.inputs["tokens"]), Path(job.inputs["model"]), labels)
        assert baseline is not None  # models of such a task type are not compared without a champion
        rival = choose_rival(baseline, settings.figure)
        old = rival.predict(new, split)
    else:
        champion_table = pq.read_table(Path(job.inputs["champion"], f"{split}.parquet"))
        rewarded = champion_table
        if isinstance(task_type, BaseReference):
            rewarded = task_type.share_reference(champion_table, table)
        old = task_type.metric_inputs(rewarded, labels)

    def report(done: int, total: int) -> None:
        events.progress(phase="compare", split=split, done=done, total=total)

    output, rows, groups = job_dir / OUTPUT, data / f"{split}.arrow", Groups.read(data, split, new)
    (output / "log").mkdir(parents=True, exist_ok=True)
    judged = compare_answers(table, champion_table, settings, rows, output / "log", report, groups)
    if settings.figure == WIN_RATE:
        compared = describe_win_rate(judged.outcomes, settings, judged.groups)
    else:
        compared = compare_models(new, old, settings, rival, report, groups)
    samples = sample_disagreements(new, old, settings.figure, rows, task_type.image_columns())
    flips = bound_flips(new, old, settings, samples, groups)
    compared = compared.model_copy(update={"answers": judged.metrics, "flips": flips})
    (output / "comparison.json").write_text(compared.model_dump_json(indent=1), encoding="utf-8")
    write_samples(samples, output / "log" / "disagreements.csv")
    return compared


class ComparedAnswers(NamedTuple):
    """The answers of a model, compared with those of its opponent to the same P prompts."""

    metrics: list[AnswerMetric]
    outcomes: npt.NDArray[np.float64]  # (P,) of judge_answers
    groups: Groups | None = None
    """Of the prompts."""


def compare_answers(
    predictions: pa.Table,
    champion: pa.Table | None,
    settings: CompareSettings,
    data: Path,
    log: Path,
    report: Callable[[int, int], None],
    groups: Groups | None = None,
) -> ComparedAnswers:
    """The metrics of the model's answers and of those of its opponent, the champion or else its base model; and the
    outcomes, which are written to the folder `log`.

    Both are empty if nothing reads answers. `groups` are those of all rows.
    """
    if not settings.lengths and settings.judge is None:
        return ComparedAnswers([], np.empty(0))
    answers, found = paired_answers(predictions, champion), list[AnswerMetric]()
    opponent = BASE_MODEL if settings.champion is None else settings.champion
    groups = groups.take(answers.rows) if groups else None

    def add(metric: str, own: npt.NDArray[np.float64], others: npt.NDArray[np.float64]) -> None:
        low, high = difference_interval(own - others, groups.numbers if groups else None)
        values = {"value": float(own.mean()), "champion_value": float(others.mean())}
        found.append(AnswerMetric(metric=metric, opponent=opponent, **values, low=low, high=high, rows=len(own)))

    if settings.lengths:
        add("generated_length", answers.own_tokens, answers.other_tokens)
    if settings.judge is None:
        return ComparedAnswers(found, np.empty(0), groups)
    inputs = read_inputs(data, answers.rows)
    prompts = list(map(prompt_as_json, inputs))
    outcomes = judge_answers(settings.judge, prompts, answers, report)
    add(WIN_RATE, outcomes, 1 - outcomes)
    names = {0.0: "opponent", 0.5: "neither", 1.0: "model"}
    texts = zip(answers.rows.tolist(), prompts, answers.own, answers.others, outcomes.tolist(), strict=True)
    judged = [
        {"row": row, "prompt": prompt, "answer": own, "opponent_answer": other, "better": names[outcome]}
        for row, prompt, own, other, outcome in texts
    ]
    write_samples(judged, log / "judgements.csv")
    return ComparedAnswers(found, outcomes, groups)


def describe_win_rate(
    outcomes: npt.NDArray[np.float64], settings: CompareSettings, groups: Groups | None = None
) -> Comparison:
    """The comparison by the outcomes of judge_answers, (P,), with a sign test."""
    wins, losses = int((outcomes == 1).sum()), int((outcomes == 0).sum())
    if groups is None:
        found = mcnemar(wins, losses, len(outcomes), settings.confidence)
    else:
        found = gain_by_groups(2 * outcomes - 1, groups, 0.0, settings.confidence)
    return Comparison(
        champion=BASE_MODEL if settings.champion is None else settings.champion,
        metric=WIN_RATE,
        split=settings.split,
        rows=len(outcomes),
        groups=len(groups.sizes) if groups else None,
        value=float(outcomes.mean()),
        champion_value=float(1 - outcomes.mean()),
        gained=wins,
        lost=losses,
        gain=found.gain,
        at_least=found.at_least,
        margin=0.0,
        confidence=settings.confidence,
        method="sign" if groups is None else "gaffke",
        p_value=found.p_value,
        least_p_value=found.least_p_value,
        better=found.better,
        baseline=settings.champion is None,
        comparison=settings.comparison,
        warnings=list(settings.warnings),
    )


def compare_models(
    new: Predictions,
    old: Predictions,
    settings: CompareSettings,
    rival: Rival | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
    groups: Groups | None = None,
) -> Comparison:
    """The comparison of two models on the same rows.

    Args:
        rival: that of the baseline if `old` are its predictions; None: `old` are those of the champion.
        report: called now and then with the numbers of finished draws and of all draws.
        groups: the group of each row; None: each row is one of its own.

    Raises UserError if they cannot be compared.
    """
    champion = str(settings.champion) if rival is None else rival.description
    by_token = not {*settings.metrics} <= {*TOOL_METRICS}
    if by_token and (reason := new.incomparable_reason(old)):
        message = (
            f"this model and {champion} {reason}, so figures by token are not comparable: train with its tokenizer "
            "(model.start_from: champion) and the same tokens.max_length, or name another registry."
        )
        raise UserError.of("release", "release.gate.compare", message)
    better, worse = find_changes(new, old, settings.figure)
    tested = run_gain_test(new, old, settings, report, groups, is_baseline=rival is not None)
    found, margin, warnings = tested.found, settings.margin, list(settings.warnings)
    if rival is not None and is_constant(new):  # only another choice among constants, which is no gain
        found = replace(found, better=False, p_value=1.0, at_least=min(found.at_least, margin))
        warnings.append(f"this model predicts the same for every row of {settings.split}, as a constant does.")
    if tested.method in ("permutation", "bootstrap"):
        warnings += find_heavy_tails(tested.metric, new, old)
    return Comparison(
        champion=champion,
        metric=tested.metric,
        split=settings.split,
        rows=len(new),
        unit=new.entries_name,
        groups=len(groups.sizes) if groups else None,
        design_effect=tested.design_effect,
        value=tested.value,
        champion_value=tested.champion_value,
        gained=int(better.sum()),
        lost=int(worse.sum()),
        gain=found.gain,
        at_least=found.at_least,
        margin=margin,
        confidence=settings.confidence,
        method=tested.method,
        p_value=found.p_value,
        least_p_value=found.least_p_value,
        better=found.better,
        baseline=rival is not None,
        is_constant=isinstance(rival, Constant),
        comparison=settings.comparison,
        warnings=warnings,
    )


class GainTest(NamedTuple):
    """A test of whether the new model is better, with its result."""

    metric: str
    """The figure that is compared."""
    value: float
    champion_value: float
    method: Literal["mcnemar", "gaffke", "permutation", "bootstrap"]
    found: Significance
    design_effect: float | None = None
    """As in Comparison."""


def run_gain_test(
    new: Predictions,
    old: Predictions,
    settings: CompareSettings,
    report: Callable[[int, int], None],
    groups: Groups | None,
    *,
    is_baseline: bool,
) -> GainTest:
    """Chooses the test, and runs it.

    | compared by | rows | margin | test |
    |---|---|---|---|
    | the share of right rows, such as accuracy | without groups | 0 | McNemar's |
    | the share of right rows | in groups | any | Gaffke's bound, over the groups |
    | anything else, and in all other cases | any | 0 or more | by permutation, and the bootstrap's interval |
    | | | below 0 | the bootstrap's interval |
    """
    correct, was_correct, margin = new.correct, old.correct, settings.margin
    by_rows = settings.figure == new.correct_metric and (groups is not None or margin == 0)
    if correct is None or was_correct is None or not by_rows:
        name, values, found = run_paired_test(new, old, settings, report, groups, is_baseline=is_baseline)
        return GainTest(name, *values, "permutation" if margin >= 0 else "bootstrap", found)
    metric, values = settings.figure, (float(correct.mean()), float(was_correct.mean()))
    if groups is None:
        gained, lost = (int(changed.sum()) for changed in find_changes(new, old, metric))
        return GainTest(metric, *values, "mcnemar", mcnemar(gained, lost, len(new), settings.confidence))
    gains = correct.astype(np.float64) - was_correct
    found = gain_by_groups(gains, groups, margin, settings.confidence)
    return GainTest(metric, *values, "gaffke", found, groups.design_effect(gains))


def bound_flips(
    new: Predictions,
    old: Predictions,
    settings: CompareSettings,
    samples: Sequence[Mapping[str, Any]] = (),
    groups: Groups | None = None,
) -> NegativeFlips | None:
    """The rows that only the old model has right, with the bound of their share; `samples` are those of
    sample_disagreements. None if the settings allow any number.

    Raises UserError if predictions are neither right nor wrong.
    """
    if settings.max_flips is None:
        return None
    if new.correct is None or old.correct is None:
        message = "the predictions of this task type are neither right nor wrong: remove it."
        raise UserError.of("release", "release.gate.flips", message)
    lost, confidence = old.correct & ~new.correct, settings.confidence
    count = int(lost.sum())
    if groups is None:
        at_most, needs = highest_share(count, len(new), confidence), rows_for_share(settings.max_flips, confidence)
    else:
        at_most = highest_share_by_groups(lost, groups, confidence)
        needs = groups_for_share(groups, settings.max_flips, confidence)
    worst = [
        FlippedRow(
            row=sample["row"],
            text=shorten(" | ".join(str(sample[name]) for name in _inputs_of(sample))),
            label=shorten(sample["label"]),
            prediction=shorten(sample["prediction"]),
        )
        for sample in samples
        if sample["change"] == "lost"
    ]
    return NegativeFlips(
        rows=count,
        share=count / len(new),
        at_most=at_most,
        max_share=settings.max_flips,
        needs=needs,
        worst=worst[:NAMED_FLIPS],
    )


def _inputs_of(sample: Mapping[str, Any]) -> list[str]:
    """The model's inputs in a row of sample_disagreements: between `row` and `label`."""
    names = list(sample)
    return names[names.index("row") + 1 : names.index("label")]


def run_paired_test(
    new: Predictions,
    old: Predictions,
    settings: CompareSettings,
    report: Callable[[int, int], None],
    groups: Groups | None,
    *,
    is_baseline: bool,
) -> tuple[str, tuple[float, float], Significance]:
    """The figure's name, both models' values, and the result of the paired test."""
    from training.evaluation import baseline
    from training.evaluation.metrics import compute
    from training.evaluation.metrics.resampling import cost, figures

    metrics, name = settings.metrics, settings.figure
    values = compute(metrics, new)
    if name not in values and name in metrics:
        name = next(iter(compute([name], new)))
    if name not in values:  # the names of a user metric's figures are known only now
        message = f"there is no figure {name!r}: choose from {', '.join(values)}.{nearest(name, values)}"
        raise UserError.of("release", "release.gate.compare", message)
    new_guards, old_guards = new.worst_cases(old)
    pooled = new.concatenate(new_guards).concatenate(old).concatenate(old_guards)
    figure = figures(metrics, pooled)[name]
    found = paired(
        baseline.fill_undefined(name, figure) if is_baseline else figure,
        len(new),
        len(new_guards),
        margin=settings.margin,
        confidence=settings.confidence,
        less_is_better=name in settings.less_is_better or not more_is_better(name),
        slow=name not in METRICS,
        cost=cost(name, pooled),
        report=report,
        groups=groups,
    )
    theirs = baseline.compute_values(metrics, old) if is_baseline else compute(metrics, old)
    return name, (values[name], theirs.get(name, math.nan)), found


def find_heavy_tails(metric: str, new: Predictions, old: Predictions) -> Iterator[str]:
    """Yields a warning if few rows decide about the difference: other such rows may reverse it."""
    from training.evaluation.metrics.resampling import influences

    ours, theirs = (influences(metric, model) if metric in METRICS else None for model in (new, old))
    if ours is None or theirs is None:
        return
    squares = np.square(ours - theirs)
    differing = np.count_nonzero(squares)
    few = max(1, round(FEW_ROWS * differing))
    rows = np.argsort(-squares, kind="stable")[:few]
    share = squares[rows].sum() / squares.sum() if differing >= MIN_DIFFERING else 0.0
    if share > HEAVY_SHARE:  # False for nan
        named = ", ".join(str(row) for row in new.rows_of(rows[:NAMED_ROWS]).tolist()) + (
            ", …" if few > NAMED_ROWS else ""
        )
        yield (
            f"{few} of {len(new):,} {new.entries_name} make up {share:.0%} of the variance of the difference in "
            f"{metric} (row {named}): the interval is less certain than its confidence says. Look at these rows; add "
            "test rows, or compare by a metric that a single row moves less, such as accuracy."
        )


def find_changes(
    new: Predictions, old: Predictions, metric: str
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """(N,) rows that only the new model gets right, and rows that only the old one does; by their scores if predictions
    are not right or wrong."""
    right, was_right = new.correct, old.correct
    if right is None or was_right is None:
        ours, theirs = new.scores_by(metric), old.scores_by(metric)
        return ours > theirs, ours < theirs
    return right & ~was_right, ~right & was_right


def sample_disagreements(
    new: Predictions, old: Predictions, metric: str, data: Path, without: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """SHOWN_ROWS rows that the new model loses and as many that it gains, each by the size of the change; their
    inputs without some columns."""
    better, worse = find_changes(new, old, metric)
    order = np.argsort(new.scores_by(metric) - old.scores_by(metric), kind="stable")
    lost = order[worse[order]][:SHOWN_ROWS]
    gained = order[::-1][better[order[::-1]]][:SHOWN_ROWS]
    chosen: npt.NDArray[np.int64] = np.concatenate([lost, gained])
    rows = new.rows_of(chosen)
    return [
        {
            "change": "gained" if better[entry] else "lost",
            "row": row,
            **inputs,
            "label": new.describe_row(entry, inputs)["label"],
            "prediction": new.describe_row(entry, inputs)["prediction"],
            "champion": old.describe_row(entry, inputs)["prediction"],
            new.row_score_name: round(float(new.row_scores[entry]), 4),
            f"champion_{new.row_score_name}": round(float(old.row_scores[entry]), 4),
        }
        for entry, row, inputs in zip(chosen.tolist(), rows.tolist(), read_inputs(data, rows, without), strict=True)
    ]


if __name__ == "__main__":
    run_program(main)
