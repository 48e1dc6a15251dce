"""Stage: log-probabilities under the base model, for losses that compare with a reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.cache.code import figures_code
from tasks.cache.refs import Lock, Ref
from tasks.cache.stage import Inputs, Work, stage
from tasks.jobs.batch_memory import BatchDivision
from tasks.jobs.child import run_child
from tasks.jobs.commands import build_predict_launch
from training import task_types
from training.recipe import Recipe
from training.recipe.program_settings import ReferenceSettings

STAGE = "reference_logprobs"


def needs_reference(recipe: Recipe) -> bool:
    """Whether the recipe's loss compares with the base model."""
    return task_types.load(**recipe.task_and_options).needs_reference


def inputs(recipe: Recipe, lock: Lock, model: Ref, tokens: Ref) -> Inputs:
    """The base model, the token rows of all splits, and the number format of prediction. Not the loss and its settings:
    all trainings on these rows share the result."""
    return Inputs(
        {
            "task": recipe.task,
            "options": task_types.load(**recipe.task_and_options).options_of(STAGE),
            "compute": {"mixed_precision": lock.mixed_precision},
            "training": recipe.training.model_dump(include={"per_device_eval_batch_size"}),
            "upstream": {"load_model": model.digest, "tokenize": tokens.digest},
        },
        code=["training.programs.reference_logprobs", *task_types.code_modules(recipe.task)],
        outside=figures_code(recipe.task),
        named=task_types.user_code(recipe.task),
        libraries=("torch", "transformers", "pyarrow"),
    )


@stage(inputs)
def reference_logprobs(work: Work, recipe: Recipe, lock: Lock, model: Ref, tokens: Ref) -> Mapping[str, Any]:
    """Adds the log-probabilities of the base model to the token rows, so that training holds one model alone."""
    launched = build_predict_launch("training.programs.reference_logprobs", lock)
    precision, batch_size = lock.mixed_precision, recipe.training.per_device_eval_batch_size
    return run_child(
        work,
        "training.programs.reference_logprobs",
        launched.argv,
        env=launched.env,
        settings=ReferenceSettings(**recipe.task_and_options, batch_size=batch_size, mixed_precision=precision),
        inputs={"model": model.path / "model", "tokenizer": model.path / "tokenizer", "tokens": tokens.path},
        batches=BatchDivision(
            batch_size,
            model.path / "model",
            program="training.programs.reference_logprobs",
            max_length=recipe.tokens.max_length,
            mixed_precision=precision,
            num_processes=lock.num_processes,
        ),
    )
