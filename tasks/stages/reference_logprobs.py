"""Stage: log-probabilities under the base model, for losses that compare with a reference."""

from __future__ import annotations

from tasks.cache.code import figures_code
from tasks.cache.results import Artifact, Lock
from tasks.jobs.batch_memory import BatchDivision
from tasks.jobs.commands import build_predict_launch
from tasks.jobs.job import Job, files_of, folder_of, stage
from training import task_types
from training.programs.predict import ForwardSettings
from training.recipe import Recipe
from training.task_types.task_type import BaseReference


def needs_reference(recipe: Recipe) -> bool:
    """Whether the recipe's loss compares with the base model."""
    task_type = task_types.load(**recipe.task_and_options)
    return isinstance(task_type, BaseReference) and task_type.needs_reference


@stage()
def reference_logprobs(recipe: Recipe, lock: Lock, model: Artifact, tokens: Artifact) -> Job:
    """Adds the log-probabilities of the base model to the token rows, so that training holds one model alone.

    The base model, the token rows of all splits, and the number format of prediction. Not the loss and its settings:
    all trainings on these rows share the result.
    """
    program, batch_size = "training.programs.reference_logprobs", recipe.training.per_device_eval_batch_size
    return Job(
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
            "tokens": files_of(tokens, ("train.arrow", "validation.arrow", "test.arrow")),
        },
        code=task_types.code_modules(recipe.task),
        outside=figures_code(recipe.task),
        users_code=task_types.user_code(recipe.task),
        libraries=("torch", "transformers", "pyarrow"),
        field_names={
            "batch_size": "training.per_device_eval_batch_size",
            "mixed_precision": "compute.mixed_precision",
        },
        launch=lambda: build_predict_launch(program, lock),
        batches=lambda model: BatchDivision(
            batch_size,
            model,
            program=program,
            max_length=recipe.tokens.max_length,
            mixed_precision=lock.mixed_precision,
            num_processes=lock.num_processes,
        ),
    )
