"""The program that calibrates probabilities, without a model: `python -m training.programs.calibrate JOB`.

inputs     predictions (validation.parquet and, if it is evaluated, test.parquet of training.programs.predict), data
           (labels.json, and SPLIT.groups.arrow if rows have groups)
settings   CalibrateSettings, below
output     calibration.json               training.evaluation.stored_calibration has its form
           log/calibrated_test.png        the share of right predictions by probability, before and after
           log/risk_coverage_test.png     the share of errors by the share of answered rows
result     CalibrateResult, of training.evaluation.stored_calibration

The temperature is fitted to validation. The thresholds and all measures are of test, which the temperature has not
seen: training/evaluation/abstention.py says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from training import task_types
from training.data.ipc_files import read_labels
from training.evaluation.abstention import Judged, LabelThreshold, find_thresholds, least_probability, risk_coverage
from training.evaluation.calibration import calibration_error, fit_many_labels, fit_one_label
from training.evaluation.predictions import Floats, ManyLabels, Mask, OneLabel
from training.evaluation.row_groups import Groups
from training.evaluation.stored_calibration import (
    Abstention,
    AnsweredGroup,
    AnsweredShare,
    CalibrateResult,
    Calibration,
    PredictionSets,
    read_logits,
)
from training.jobs.program import run_program
from training.jobs.protocol import OUTPUT, Events, Job, Result, TaskSettings
from training.problems import UserError
from training.task_types.task_type import TaskType

DIGITS = 9
"""Significant digits of stored numbers: further ones depend on the machine."""


class AbstainSettings(Result):
    """The bound on the errors of answered rows."""

    max_error: float
    confidence: float


class CalibrateSettings(TaskSettings):
    """The settings of a job of this program."""

    measured: bool
    """Whether test is evaluated."""
    abstain: AbstainSettings | None
    prediction_sets: float | None
    """The share of rows whose set has the true label."""


def main(job_dir: Path, job: Job, events: Events) -> CalibrateResult:
    """Fits the calibration to validation, finds the thresholds, and measures both on test."""
    from training.evaluation import plots

    settings = CalibrateSettings.model_validate(job.settings)
    task_type = task_types.load(settings.task, settings.options)
    labels = read_labels(Path(job.inputs["data"]))
    output = job_dir / OUTPUT
    validation = _Split(task_type, job, "validation", labels)
    calibration = _fit(validation, labels)
    test, answered, before, after, size = None, None, None, None, None
    if settings.measured:
        test = _Split(task_type, job, "test", labels)
        plain = calibration.model_copy(update={"scale": [1.0], "offset": [0.0]})
        before, after = (calibration_error(*test.outcomes(one)) for one in (plain, calibration))
        if settings.abstain:
            calibration, answered = _abstain(calibration, validation, test, settings.abstain)
            _warn_of_review(answered, "groups" if test.groups else "rows", events)
        if settings.prediction_sets:
            given = calibration.probabilities(test.logits)
            least = least_probability(test.true_probabilities(given), settings.prediction_sets, test.groups)
            sets = PredictionSets(coverage=settings.prediction_sets, least_probability=least)
            calibration = calibration.model_copy(update={"prediction_sets": sets})
            size = float(np.mean([len(row) for row in calibration.label_sets(given)]))
        plots.draw_calibrated(test.outcomes(plain), test.outcomes(calibration), output / "log")
        point = (answered.share, answered.max_error) if answered else None
        plots.draw_risk_coverage(*risk_coverage(test.judge(calibration)), point, output / "log")
    else:
        events.warning(
            "the calibration is not measured: the rows of validation have chosen the temperature, and no other split "
            "is evaluated. Set data.test_size, or add a test split, and evaluate it."
        )
    calibration.write(output)
    return CalibrateResult(
        validation_rows=len(validation),
        test_rows=len(test) if test else None,
        calibration_error_before=before,
        calibration_error=after,
        answered=answered,
        mean_set_size=size,
    )


class _Split:
    """The predictions of a split."""

    def __init__(self, task_type: TaskType, job: Job, split: str, labels: Sequence[str]) -> None:
        self.table = pq.read_table(Path(job.inputs["predictions"], f"{split}.parquet"))
        self.groups = Groups.read(Path(job.inputs["data"]), split)
        if "logits" not in self.table.column_names:
            message = "needs predictions with a column `logits`, as those of sequence-classification: remove it."
            raise UserError.of("release", "release.calibrate", message)
        predicted = task_type.metric_inputs(self.table, labels)
        assert isinstance(predicted, OneLabel | ManyLabels), "a rule of the recipe allows no others"
        self.predicted, self.logits = predicted, read_logits(self.table, len(labels))

    def __len__(self) -> int:
        return len(self.table)

    def outcomes(self, calibration: Calibration) -> tuple[Floats, Mask]:
        """As Calibration.outcomes."""
        return calibration.outcomes(self.table, self.predicted)

    def judge(self, calibration: Calibration) -> Judged:
        """The predictions, with their probabilities."""
        return replace(calibration.judge(self.table, np.asarray(self.predicted.correct)), groups=self.groups)

    def true_probabilities(self, probabilities: Floats) -> Floats:
        """(N,) the probability of each row's label."""
        return np.asarray(probabilities[np.arange(len(self)), self.predicted.references])


def _fit(validation: _Split, labels: list[str]) -> Calibration:
    predicted = validation.predicted
    if isinstance(predicted, OneLabel):
        scaling = fit_one_label(validation.logits, predicted.references)
        return Calibration(function="softmax", labels=labels, scale=_rounded(scaling.scale[:1]), offset=[0.0])
    scaling = fit_many_labels(validation.logits, predicted.references)
    return Calibration(
        function="sigmoid", labels=labels, scale=_rounded(scaling.scale), offset=_rounded(scaling.offset)
    )


def _abstain(
    calibration: Calibration, validation: _Split, test: _Split, wanted: AbstainSettings
) -> tuple[Calibration, AnsweredShare]:
    """The calibration with its thresholds, and the rows of test that it answers."""
    proposing, deciding = validation.judge(calibration), test.judge(calibration)
    parts = find_thresholds(proposing, deciding, wanted.max_error, wanted.confidence)
    own = {calibration.labels[part.label]: part.threshold for part in parts if part.label is not None}
    others = next((part.threshold for part in parts if part.label is None), None)
    bound = wanted.model_dump()
    found = calibration.model_copy(update={"abstain": Abstention(**bound, thresholds=own, others=others)})
    answered = ~found.review(deciding)
    errors = int((answered & ~deciding.right).sum())
    return found, AnsweredShare(
        share=float(answered.mean()),
        error=errors / int(answered.sum()) if answered.any() else None,
        **bound,
        groups=[_describe(part, calibration.labels) for part in parts],
    )


def _describe(part: LabelThreshold, labels: Sequence[str]) -> AnsweredGroup:
    return AnsweredGroup(
        label=None if part.label is None else labels[part.label],
        threshold=part.threshold,
        rows=part.rows,
        answered=part.answered,
        errors=part.errors,
        at_most=part.at_most,
    )


def _warn_of_review(answered: AnsweredShare, unit: str, events: Events) -> None:
    """Warns if no row is answered at all, or none of some label. `unit`: what to bring more of, rows or groups."""
    silent = [group.label for group in answered.groups if group.threshold is None]
    if not silent:
        return
    if len(silent) == len(answered.groups):
        subject = "every row is for a person"
    else:
        names = [repr(label) for label in silent if label is not None] + ["another label"] * (None in silent)
        subject = f"rows predicted as {', '.join(names)} are for a person"
    events.warning(
        f"{subject}: no threshold shows on test, at {answered.confidence:.0%} confidence, that at most "
        f"{answered.max_error:.1%} of the answered rows err. Bring more {unit} to test, a better model, or a larger "
        "release.abstain.max_error."
    )


def _rounded(values: Floats) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in values]


if __name__ == "__main__":
    run_program(main)
