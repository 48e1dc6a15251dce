"""Stages: forward passes over stored rows. Predictions of the trained model and of the champion, one row each, and
log-probabilities under the base model, for losses that compare with a reference."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tasks.cache.code import figures_code
from tasks.cache.results import Artifact, Lock, PinnedVersion
from tasks.jobs.commands import build_predict_launch
from tasks.jobs.job import StageJob, files_of, folder_of, job_of, joined, stage
from tasks.jobs.retries import divide_batches
from tasks.registry.pinned_versions import files_of_version
from training import task_types
from training.data.ipc_files import CORPUS, SPLITS
from training.programs.predict import BlocksResult, ForwardSettings, PredictResult, PredictSettings
from training.programs.predict_champion import PredictChampionResult, PredictChampionSettings
from training.recipe import Recipe
from training.recipe.fields import answered_prompts
from training.task_types.task_type import BaseReference

FIELD_NAMES = {
    "batch_size": "training.per_device_eval_batch_size",
    "mixed_precision": "compute.mixed_precision",
}


def answers_prompts(recipe: Recipe) -> bool:
    """Whether an evaluation generates answers to prompts, which are compared with those of the base model."""
    return answered_prompts(recipe) > 0 and task_types.class_of(recipe.task).answers == "prompts"


def answers_turns(recipe: Recipe) -> bool:
    """Whether an evaluation generates answers in place of the assistant's messages."""
    return answered_prompts(recipe) > 0 and task_types.class_of(recipe.task).answers == "turns"


@stage(PredictResult)
def predict(
    recipe: Recipe, lock: Lock, tokens: Artifact, trained: Artifact, base: Artifact | None, data: Artifact | None
) -> StageJob:
    """Predicts every row of the evaluated splits once, in order. With `base`, the base model, both models answer some
    prompts; with `data`, the rows, the model answers in place of the assistant's messages in some of them.

    The trained model, the tokens of the evaluated splits, and the number format of prediction; with answers, also the
    base model or the rows, and the options of answers.
    """
    program, splits, rows = "training.programs.predict", recipe.evaluation.splits, recipe.training
    task_type, answers = task_types.load(**recipe.task_and_options), base is not None or data is not None
    return StageJob(
        program,
        PredictSettings(
            task=recipe.task,
            options=task_type.options_of("predict") | (task_type.options_of("answers") if answers else {}),
            splits=list(splits),
            answered_prompts=answered_prompts(recipe) if answers else 0,
            batch_size=rows.per_device_eval_batch_size,
            mixed_precision=lock.mixed_precision,
        ),
        reads={
            "model": folder_of(trained, "model"),
            "tokens": files_of(tokens, [f"{name}.arrow" for name in (*splits, CORPUS)]),
            **({"base": folder_of(base, "model")} if base else {}),
            **({"data": files_of(data, [f"{split}.arrow" for split in splits])} if data else {}),
        },
        code=task_types.code_modules(recipe.task),
        # A corpus is searched here, by the order of evaluations.
        outside=(
            *(figures_code(recipe.task) if recipe.data.corpus is None else ()),
            *(() if answers else ("training.engine.answers",)),
        ),
        users_code=task_types.user_code(recipe.task),
        libraries=("torch", "transformers", "pyarrow", *(("tokenizers", *task_type.libraries) if data else ())),
        field_names=FIELD_NAMES | {"splits": "evaluation.splits"},
        launch=partial(build_predict_launch, program, lock),
        batches=divide_batches(program, rows.per_device_eval_batch_size, recipe.tokens.max_length, lock),
    )


@stage(PredictResult)
def predict_fold(
    recipe: Recipe, lock: Lock, tokens: Artifact, trained: Artifact, folds: Artifact, fold: int
) -> StageJob:
    """Predicts the training rows of one fold by the model that was trained without them.

    That model, the tokens and folds of the training rows, the number of the fold, and the number format of prediction.
    """
    evaluation = recipe.evaluation.model_copy(update={"splits": ["train"]})
    job = job_of(predict, recipe.model_copy(update={"evaluation": evaluation}), lock, tokens, trained, None, None)
    return replace(
        job,
        settings=job.settings.model_copy(update={"fold": fold}),
        reads={**job.reads, "folds": files_of(folds, ["folds.arrow"])},
        content={"fold": fold},
    )


@stage(PredictChampionResult, where="there is a champion")
def predict_champion(
    recipe: Recipe, lock: Lock, data: Artifact, champion: PinnedVersion, mined: Artifact | None = None
) -> StageJob:
    """Predicts every row of the judged split by the champion with its own tokenizer. `mined` may have the rows with
    candidates.

    The champion's model and options, the rows and labels, and the number format of prediction.
    """
    program, split, prompts = "training.programs.predict_champion", recipe.judged_split, answered_prompts(recipe)
    task_type = task_types.load(**_task_and_options(recipe, champion))
    batch_size = recipe.training.per_device_eval_batch_size
    options = task_type.options_of("tokenize") | task_type.options_of("predict")
    others = ["labels.json", f"{CORPUS}.arrow"]
    rows = files_of(data, [*others, f"{split}.arrow"])
    if mined is not None and recipe.data.negatives is not None and split in recipe.data.negatives.splits:
        rows = joined("rows", files_of(data, others), files_of(mined, [f"{split}.arrow"]))
    return StageJob(
        program,
        PredictChampionSettings(
            task=recipe.task,
            options=options | (task_type.options_of("answers") if prompts else {}),
            split=split,
            champion=str(champion),
            max_length=champion.max_length,
            answered_prompts=prompts,
            batch_size=batch_size,
            mixed_precision=lock.mixed_precision,
        ),
        reads={
            **files_of_version(champion, "release.registry"),
            "data": rows,
        },
        code=task_types.code_modules(recipe.task),
        outside=() if prompts else ("training.engine.answers", "training.evaluation.preferences"),
        users_code=task_types.user_code(recipe.task),
        libraries=("torch", "transformers", "tokenizers", "pyarrow", *task_type.libraries),
        field_names=FIELD_NAMES,
        launch=partial(build_predict_launch, program, lock),
        batches=divide_batches(program, batch_size, champion.max_length, lock),
    )


def _task_and_options(recipe: Recipe, champion: PinnedVersion) -> dict[str, Any]:
    """The recipe's task type and options, except options that the champion has learned with other values."""
    if champion.options is None:
        return recipe.task_and_options
    task_type = task_types.class_of(recipe.task)
    defaults = {name: task_type.Options.model_fields[name].get_default() for name in task_type.learned_options}
    learned = {name: champion.options.get(name, default) for name, default in defaults.items()}
    return recipe.task_and_options | {"options": {**recipe.options, **learned}}


def needs_reference(recipe: Recipe) -> bool:
    """Whether the recipe's loss compares with the base model."""
    task_type = task_types.load(**recipe.task_and_options)
    return isinstance(task_type, BaseReference) and task_type.needs_reference


@stage(BlocksResult)
def reference_logprobs(recipe: Recipe, lock: Lock, model: Artifact, tokens: Artifact) -> StageJob:
    """Adds the log-probabilities of the base model to the token rows, so that training holds one model alone.

    The base model, the token rows of all splits, and the number format of prediction. Not the loss and its settings:
    all trainings on these rows share the result, and those on other rows its equal blocks of rows.
    """
    program, batch_size = "training.programs.reference_logprobs", recipe.training.per_device_eval_batch_size
    token_rows = files_of(tokens, [f"{split}.arrow" for split in SPLITS])
    return StageJob(
        program,
        ForwardSettings(
            task=recipe.task,
            options=task_types.load(**recipe.task_and_options).options_of("reference_logprobs"),
            batch_size=batch_size,
            mixed_precision=lock.mixed_precision,
        ),
        reads={
            "model": folder_of(model, "model"),
            "tokenizer": folder_of(model, "tokenizer"),
            "tokens": token_rows,
        },
        code=task_types.code_modules(recipe.task),
        outside=figures_code(recipe.task),
        users_code=task_types.user_code(recipe.task),
        libraries=("torch", "transformers", "pyarrow"),
        field_names=FIELD_NAMES,
        launch=partial(build_predict_launch, program, lock),
        batches=divide_batches(program, batch_size, recipe.tokens.max_length, lock),
        blocks_without=tuple(f"upstream.{name}" for name in token_rows.digests),
    )
