"""Stages as people see them: the table of stages in the order in which a run executes them, and the result and
progress of each in a few words. The table gives the values of `--force`, the lines of the terminal, the tables in
Prefect and the rows of the documentation. flows/pipeline.py connects the stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.cache.results import Artifact, PinnedVersion, Promotion, Publication, Verdict, Version
from tasks.cache.stage import Row, without_number
from tasks.reports.formatting import format_count, format_score, format_size, format_value
from tasks.reports.label_reports import summarize_suspects
from tasks.reports.model_reports import summarize_calibration, summarize_exports, summarize_teacher

if TYPE_CHECKING:
    from training.data.duplicates import RepeatedRows
    from training.data.folds import FoldsResult, OutOfFoldResult
    from training.data.hard_negatives import MineResult
    from training.data.load_rows import LoadDataResult
    from training.data.unlabelled import UnlabelledResult
    from training.engine.fit_settings import FitResult
    from training.evaluation.scores import Comparison, HeldRows, SplitScores
    from training.jobs.protocol import Points
    from training.programs.create_model import ModelResult
    from training.programs.drift import DriftResult
    from training.programs.evaluate import EvaluateResult
    from training.programs.export_model import ExportResult
    from training.programs.loaded_teacher import TeacherResult
    from training.programs.observe import ObserveResult
    from training.programs.predict import BlocksResult, PredictResult
    from training.programs.process_images import ProcessImagesResult
    from training.tokenization.token_files import TokenizeResult


class StageEntry(NamedTuple):
    """How a stage is shown."""

    summarize: Callable[[Any], str] | None = None
    """Describes the result in its artifact in a few words; None for an action."""
    is_optional: bool = False
    """Whether some runs leave it out: it is listed when it starts."""
    has_report: bool = False
    """Whether its artifact holds a report on the rows."""


def _summarize_rows(result: LoadDataResult) -> str:
    splits = [f"{split} {rows:,}" for split, rows in result.rows.items()]
    warnings = f"; {format_count(result.warnings, 'warning')}" if result.warnings else ""
    labels = f"; {result.labels} labels" if result.labels else ""
    return f"rows: {', '.join(splits)}{labels}{warnings}"


def _summarize_folds(result: FoldsResult) -> str:
    return f"{len(result.rows)} folds of {min(result.rows):,} to {max(result.rows):,} rows"


def _summarize_out_of_fold(result: OutOfFoldResult) -> str:
    return f"{result.rows:,} rows"


def _summarize_scores(result: SplitScores) -> str:
    return "; ".join(
        f"{split} " + ", ".join(f"{name} {format_score(entry)}" for name, entry in metrics.items())
        for split, metrics in result.items()
    )


def _summarize_rate(result: PredictResult) -> str:
    return f"{result.rows:,} rows, {result.rows_per_second:.0f} rows/s"


def _summarize_blocks(result: BlocksResult) -> str:
    known = f", {result.rows - result.computed:,} of them known" if result.computed < result.rows else ""
    return f"{_summarize_rate(result)}{known}"


def _summarize_unlabelled(result: UnlabelledResult) -> str:
    left_out = result.evaluated + result.near + result.repeated + result.unusable
    return f"{result.rows:,} rows" + (f", {left_out:,} left out" if left_out else "")


def _summarize_repeated(result: Mapping[str, RepeatedRows]) -> str:
    counts = [f"{split} {one.repeated:,} of {one.rows:,}" for split, one in result.items()]
    return f"rows of the teacher: {', '.join(counts)}" if counts else "not compared"


def _summarize_teacher(result: TeacherResult) -> str:
    rest = "" if result.rest is None else f", {result.rest:.1%} of the probability in other tokens"
    return f"{_summarize_blocks(result)}{rest}"


def _summarize_observed(result: ObserveResult) -> str:
    part = "" if result.observed == result.rows else f" of {result.rows:,}"
    without = f", {result.without_prediction:,} without a prediction" if result.without_prediction else ""
    return f"{result.observed:,}{part} rows{without}"


def _summarize_model(result: ModelResult) -> str:
    return f"{result.parameters:,} parameters" if result.megabytes is None else f"{result.megabytes:g} MB"


def _summarize_tokens(result: TokenizeResult) -> str:
    return f"{result.tokens:,} tokens, {result.truncated:,} rows cut"


def _summarize_images(result: ProcessImagesResult) -> str:
    return f"{result.rows:,} images of {result.height} × {result.width} pixels; {result.computed:,} processed"  # noqa: RUF001


def _summarize_mined(result: MineResult) -> str:
    texts = "" if result.texts is None else f"; {result.embedded:,} of {result.texts:,} texts embedded"
    return f"{result.negatives:,} negatives for {result.rows:,} rows{texts}"


def _summarize_training(result: FitResult) -> str:
    return f"{result.steps:,} steps, {result.train_rows_per_second:.0f} rows/s, train loss {result.train_loss:.3f}"


def _summarize_comparison(result: Comparison) -> str:
    values = format_value(result.value), format_value(result.champion_value)
    return f"{result.metric} {values[0]} against {values[1]} of {result.champion}"


def _summarize_held(result: LoadDataResult) -> str:
    return f"{result.test_rows:,} rows"


def _summarize_wrong(result: HeldRows) -> str:
    others = f", {result.others_wrong:,} of {result.others:,} others" if result.others else ""
    return f"{result.named_wrong:,} of {result.named:,} rows with a reason wrong{others}"


def _summarize_sizes(result: ExportResult) -> str:
    return ", ".join(f"{name} {format_size(size)}" for name, size in result.bytes.items())


def _summarize_verdict(result: DriftResult) -> str:
    return result.verdict


def _summarize_evaluation(result: EvaluateResult) -> str:
    return ", ".join(f"{name} {format_score(score)}" for name, score in result.metrics.items())


STAGES = {
    "resolve": StageEntry(),
    "load_data": StageEntry(_summarize_rows, has_report=True),
    "assign_folds": StageEntry(_summarize_folds, is_optional=True),
    "load_must_hold": StageEntry(_summarize_held, is_optional=True),
    "load_model": StageEntry(_summarize_model),
    "check_teacher": StageEntry(_summarize_repeated, is_optional=True),
    "mine_negatives": StageEntry(_summarize_mined, is_optional=True),
    "tokenize": StageEntry(_summarize_tokens, has_report=True),
    "process_images": StageEntry(_summarize_images, is_optional=True),
    "reference_logprobs": StageEntry(_summarize_blocks, is_optional=True),
    "load_unlabelled": StageEntry(_summarize_unlabelled, is_optional=True),
    "tokenize_unlabelled": StageEntry(_summarize_tokens, is_optional=True),
    "teacher_outputs": StageEntry(_summarize_teacher, is_optional=True),
    "fit": StageEntry(_summarize_training),
    "predict": StageEntry(_summarize_rate),
    "score": StageEntry(_summarize_scores),
    "calibrate": StageEntry(summarize_calibration, is_optional=True),
    "fit_fold": StageEntry(_summarize_training, is_optional=True),
    "predict_fold": StageEntry(_summarize_rate, is_optional=True),
    "out_of_fold": StageEntry(_summarize_out_of_fold, is_optional=True),
    "score_folds": StageEntry(_summarize_scores, is_optional=True),
    "find_champion": StageEntry(),
    "predict_champion": StageEntry(_summarize_rate, is_optional=True),
    "count_comparison": StageEntry(is_optional=True),
    "compare": StageEntry(_summarize_comparison, is_optional=True),
    "predict_teacher": StageEntry(_summarize_rate, is_optional=True),
    "compare_teacher": StageEntry(summarize_teacher, is_optional=True),
    "predict_must_hold": StageEntry(_summarize_rate, is_optional=True),
    "must_hold": StageEntry(_summarize_wrong, is_optional=True),
    "gate": StageEntry(),
    "export": StageEntry(_summarize_sizes, is_optional=True),
    "compare_exports": StageEntry(summarize_exports, is_optional=True),
    "register": StageEntry(),
    "publish": StageEntry(is_optional=True),
    "promote": StageEntry(),
}


MONITORING_STAGES = {
    "profile": StageEntry(_summarize_observed),
    "observe": StageEntry(_summarize_observed),
    "count_look": StageEntry(),
    "drift": StageEntry(_summarize_verdict),
    "record_drift": StageEntry(),
    "load_labelled": StageEntry(_summarize_rows),
    "predict_labelled": StageEntry(_summarize_rate),
    "evaluate": StageEntry(_summarize_evaluation),
    "record_evaluation": StageEntry(),
    "list_labels": StageEntry(summarize_suspects),
    "log_labels": StageEntry(),
    "compare_seeds": StageEntry(),
}
"""The stages of the flows that look at a registered version, at the rows of a run, or at the trials of a sweep."""


def entry_of(stage: str) -> StageEntry:
    """The entry of a stage: of `fit_fold_2`, that of `fit_fold`."""
    return (STAGES | MONITORING_STAGES)[without_number(stage)]


STAGES_WITH_REPORT = tuple(name for name, entry in STAGES.items() if entry.has_report)


_EVALUATED = {"eval_loss": "validation loss"}


def format_evaluation(event: Points) -> str | None:
    """`step 280: validation loss 0.7535, accuracy 0.7745`; None if the metrics are not of an evaluation."""
    found = {name: value for name, value in event["values"].items() if not name.endswith(("_second", "_runtime"))}
    if not any(name.startswith("eval_") for name in found):
        return None
    listed = ", ".join(
        f"{_EVALUATED.get(name, name.removeprefix('eval_'))} {value:.4g}" for name, value in found.items()
    )
    return f"step {event['step']}: {listed}"


def summarize_row(row: Row, result: Any) -> str:
    """`fetched 12 MB`, if the artifact was downloaded, and the result in a few words."""
    fetched = "" if row.fetched_bytes is None else f"fetched {format_size(row.fetched_bytes)}"
    return "  ".join(filter(None, [fetched, summarize_result(row.name, result)]))


def summarize_result(stage: str, result: Any) -> str:
    """A stage's result in a few words; empty if there are none."""
    if isinstance(result, Artifact):
        summarize = entry_of(stage).summarize
        return summarize(result.result) if summarize else ""
    if isinstance(result, PinnedVersion | Version):
        return f"{result.name} version {result.version}"
    if isinstance(result, Verdict):
        return result.decision
    if isinstance(result, Publication):
        return f"{result.repo} at {result.revision}, commit {result.commit[:12]}"
    if isinstance(result, Promotion):
        before = f", before that version {result.previous}" if result.previous else ""
        return f"{result.name} version {result.version}: {result.alias}{before}"
    return ""


class Pace:
    """Estimates how long a stage still takes, from its first progress on: imports take seconds, and a resumed training
    starts in the middle."""

    def __init__(self) -> None:
        self._first: tuple[float, int, int] | None = None

    def left_s(self, done: int, total: int) -> float | None:
        """Seconds until all is done, at the speed so far; None until there is a speed."""
        now = time.monotonic()
        if self._first is None or done < self._first[1] or total != self._first[2]:  # another part has begun
            self._first = (now, done, total)
        since, before, _ = self._first
        return (now - since) / (done - before) * (total - done) if done > before else None
