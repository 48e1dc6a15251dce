"""The order of a fine-tune's stages, for runs, trials and plans alike."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.cache.results import Artifact, Lock, PinnedVersion, Promotion, Publication, Selection, Verdict, Version
from tasks.cache.stage import Builder
from tasks.jobs import fork_client
from tasks.jobs.parallel_calls import ParallelCalls
from tasks.registry.comparisons import counts_comparisons
from tasks.stages.calibrate import CalibrateArtifact, calibrate
from tasks.stages.compare import compare, count_comparison, find_champion, has_opponent
from tasks.stages.exports import CompareExportsArtifact, compare_exports, export, wants_exports
from tasks.stages.fit import FitArtifact, engine_for, fit, fit_fold
from tasks.stages.folds import FoldsArtifact, assign_folds, out_of_fold, require_gpus
from tasks.stages.gate import gate
from tasks.stages.load_data import LoadDataArtifact, load_data, needs_tokenizer, trains_tokenizer
from tasks.stages.load_model import load_model, require_same_labels
from tasks.stages.load_unlabelled import load_unlabelled
from tasks.stages.mine_negatives import mine_negatives
from tasks.stages.must_hold import load_must_hold, must_hold, predict_must_hold
from tasks.stages.predict import (
    answers_prompts,
    answers_turns,
    needs_reference,
    predict,
    predict_champion,
    predict_fold,
    reference_logprobs,
)
from tasks.stages.process_images import has_images, process_images
from tasks.stages.publish import publish
from tasks.stages.register import promote, register
from tasks.stages.resolve import resolve
from tasks.stages.score import (
    ScoreArtifact,
    require_fitting,
    require_fitting_lengths,
    score,
    score_folds,
)
from tasks.stages.teacher_outputs import (
    by_tokens,
    compare_teacher,
    is_beside_teacher,
    predict_teacher,
    require_dimensions,
    require_labels,
    teacher_outputs,
)
from tasks.stages.teacher_rows import check_teacher, find_teachers_rows
from tasks.stages.tokenize import tokenize, tokenize_unlabelled
from training.recipe import Recipe


@dataclass(frozen=True)
class Finished:
    """The results of all stages. In a plan, the result of a stage that has to run is Unknown."""

    lock: Lock
    data: LoadDataArtifact
    trained: FitArtifact
    scores: ScoreArtifact
    scores_of_folds: ScoreArtifact | None
    """The metrics of out-of-fold predictions; None if the recipe has no folds."""
    calibration: CalibrateArtifact | None
    """None if the recipe calibrates no probabilities."""
    champion: PinnedVersion | None
    verdict: Verdict
    exports: CompareExportsArtifact | None
    """The comparison of the exports with the model; None if the recipe names none or the model is rejected."""
    version: Version | None
    publication: Publication | None
    promotion: Promotion | None


@dataclass(frozen=True)
class TrainingInputs:
    """What training starts from."""

    lock: Lock
    data: LoadDataArtifact
    model: Artifact
    tokens: Artifact
    mined: Artifact | None
    """The rows with mined documents; None if the recipe mines none."""
    teacher: Artifact | None
    """The teacher's outputs for the training rows; None if the recipe has no teacher."""
    unlabelled: Artifact | None
    """The tokens of rows without labels; None if the recipe has none."""
    held: Artifact | None
    """The rows that the model must have right."""
    folds: FoldsArtifact | None
    """The fold of each training row; None if the recipe has no folds."""


@dataclass(frozen=True)
class Scored(TrainingInputs):
    """A trained model and its metrics."""

    trained: FitArtifact
    predictions: Artifact
    scores: ScoreArtifact


def prepare(build: Builder, recipe: Recipe, lock: Lock | None = None) -> TrainingInputs:
    """Builds all that training needs. With `lock`, nothing is resolved again."""
    lock = lock or build(resolve, recipe)
    if recipe.evaluation.parallel_folds > 1 and engine_for(recipe).runs_here:
        require_gpus(recipe, lock)
    # The model's tokenizer may count the tokens by which a mixture is weighted, or its chat template refuse rows.
    first = build(load_model, recipe, lock, None) if needs_tokenizer(recipe, lock) else None
    data = build(load_data, recipe, lock, first)
    require_fitting(recipe, data)
    folds = build(assign_folds, recipe, data) if recipe.evaluation.folds else None
    held = build(load_must_hold, recipe, lock, data) if recipe.release.gate.must_hold else None
    rows_of_tokenizer = data if trains_tokenizer(recipe, lock) else None
    model = first if first is not None else build(load_model, recipe, lock, rows_of_tokenizer)
    require_same_labels(lock, data, model)
    require_labels(recipe, lock, data)
    if (rows_of_teacher := find_teachers_rows(recipe, lock, data)) is not None:
        build(check_teacher, recipe, lock, data, rows_of_teacher)
    require_dimensions(recipe, lock, model)
    mined, written = None, None
    if (negatives := recipe.data.negatives) is not None:
        mined = build(mine_negatives, recipe, lock, data, model if negatives.source == "base" else None)
    if (taught := recipe.training.teacher) is not None and taught.writes_targets:
        written = build(teacher_outputs, recipe, lock, data)
    tokens: Artifact
    if has_images(recipe):
        tokens = build(process_images, recipe, data, model)
    else:
        tokens = build(tokenize, recipe, data, model, mined, written)
    require_fitting_lengths(recipe, tokens)
    with_reference = build(reference_logprobs, recipe, lock, model, tokens) if needs_reference(recipe) else tokens
    unlabelled, teacher, more_tokens = None, None, None
    if recipe.data.unlabelled is not None:
        unlabelled = build(load_unlabelled, recipe, lock, data)
        more_tokens = build(tokenize_unlabelled, recipe, unlabelled, model)
    if taught is not None and not taught.writes_targets:
        of_tokens = (model, tokens) if by_tokens(recipe) else (None, None)
        teacher = build(teacher_outputs, recipe, lock, data, unlabelled, *of_tokens, mined)
    return TrainingInputs(lock, data, model, with_reference, mined, teacher, more_tokens, held, folds)


def train_and_score(build: Builder, recipe: Recipe, lock: Lock | None = None) -> Scored:
    """Builds the stages up to the metrics of the trained model: those of a trial."""
    ready = prepare(build, recipe, lock)
    trained = build(fit, recipe, ready.lock, ready.data, ready.model, ready.tokens, ready.teacher, ready.unlabelled)
    base = ready.model if answers_prompts(recipe) else None
    data = ready.data if answers_turns(recipe) else None
    predictions = build(predict, recipe, ready.lock, ready.tokens, trained, base, data)
    scores = build(score, recipe, ready.data, ready.tokens, trained, predictions)
    return Scored(**vars(ready), trained=trained, predictions=predictions, scores=scores)


def predict_out_of_fold(build: Builder, recipe: Recipe, ready: TrainingInputs) -> Artifact:
    """Builds a training for each fold, without the fold's rows, and the predictions of all training rows by them."""
    lock, data, model, tokens, folds = ready.lock, ready.data, ready.model, ready.tokens, ready.folds
    taught = (ready.teacher, ready.unlabelled)

    def predict_rows(fold: int) -> Artifact:
        trained = build(fit_fold.numbered(fold), recipe, lock, data, model, tokens, *taught, folds, fold)
        return build(predict_fold.numbered(fold), recipe, lock, tokens, trained, folds, fold)

    numbers, at_once = range(1, (recipe.evaluation.folds or 0) + 1), recipe.evaluation.parallel_folds
    if at_once == 1 or not build.executes:
        return build(out_of_fold, recipe, *map(predict_rows, numbers))
    fork_client.start()  # each thread would start one
    engine, waiting, found = engine_for(recipe), [*numbers], dict[int, Artifact]()
    with (
        engine.keep_open(several=True),
        ParallelCalls(at_once, predict_rows, divides_gpus=engine.runs_here) as calls,
    ):
        while waiting or calls.busy:
            while waiting and calls.free:
                calls.start(waiting.pop(0))
            found |= dict(calls.wait())
    return build(out_of_fold, recipe, *(found[fold] for fold in numbers))


def pipeline(
    build: Builder, recipe: Recipe, selection: Selection | None = None, recorded: Lock | None = None
) -> Finished:
    """Builds all stages, from a recipe to a model that is registered, published and promoted if the gate allows it.

    Args:
        build: Runs the stages, or plans them.
        recipe: All that makes the model.
        selection: How a sweep chose the settings.
        recorded: The lock of the run that is reproduced, whose names are not resolved again.
    """
    lock = build(resolve, recipe, recorded)
    scored = train_and_score(build, recipe, lock)
    data, model, tokens = scored.data, scored.model, scored.tokens
    trained, predictions, scores = scored.trained, scored.predictions, scored.scores
    calibration = build(calibrate, recipe, data, predictions) if recipe.release.calibrates else None
    scores_of_folds = None
    if scored.folds is not None:
        predicted = predict_out_of_fold(build, recipe, scored)
        scores_of_folds = build(score_folds, recipe, data, tokens, trained, predicted)
    champion = build(find_champion, recipe, trained, scores)
    opponent = build(predict_champion, recipe, lock, data, champion, scored.mined) if champion else None
    number, comparison = None, None
    if has_opponent(recipe, champion):
        if counts_comparisons(recipe):
            number = build(count_comparison, recipe, data, trained, predictions, opponent)
        comparison = build(compare, recipe, champion, number, data, tokens, trained, predictions, opponent)
    beside_teacher = None
    if is_beside_teacher(recipe):
        predicted_teacher = build(predict_teacher, recipe, lock, data)
        beside_teacher = build(compare_teacher, recipe, lock, data, trained, predictions, predicted_teacher)
    held = None
    if scored.held is not None:
        predicted_held = build(predict_must_hold, recipe, lock, trained, scored.held)
        held = build(must_hold, recipe, scored.held, predicted_held)
    verdict = build(gate, recipe, scores, comparison, selection, held)
    exports, compared, publication = None, None, None
    if wants_exports(recipe, verdict):
        exports = build(export, recipe, trained)
        compared = build(compare_exports, recipe, lock, data, tokens, trained, predictions, exports)
    with build.transaction():
        models = (data, model, tokens, trained, predictions, scores, scores_of_folds, calibration)
        artifacts = (*models, scored.mined, opponent, comparison, exports, compared, beside_teacher)
        version = build(register, recipe, lock, verdict, *artifacts)
        if recipe.release.hub is not None:
            compared_with = (exports, compared, beside_teacher)
            published = (data, trained, predictions, scores, scores_of_folds, calibration, *compared_with)
            publication = build(publish, recipe, lock, verdict, version, *published)
        promotion = build(promote, recipe, version, verdict)
    judged = (scores, scores_of_folds, calibration, champion, verdict, compared)
    return Finished(lock, data, trained, *judged, version, publication, promotion)
