"""Stage: stored predictions, one row each."""

from __future__ import annotations

from tasks.cache.code import figures_code
from tasks.cache.results import Artifact, Lock
from tasks.jobs.batch_memory import BatchDivision
from tasks.jobs.commands import build_predict_launch
from tasks.jobs.job import Job, files_of, folder_of, stage
from training import task_types
from training.programs.predict import PredictSettings
from training.recipe import Recipe
from training.recipe.fields import answered_prompts


def answers_prompts(recipe: Recipe) -> bool:
    """Whether an evaluation generates answers."""
    return answered_prompts(recipe) > 0


@stage()
def predict(recipe: Recipe, lock: Lock, tokens: Artifact, trained: Artifact, base: Artifact | None) -> Job:
    """Predicts every row of the evaluated splits once, in order. With `base`, the base model, both models answer some
    prompts.

    The trained model, the tokens of the evaluated splits, and the number format of prediction; if prompts are answered,
    also the base model and the options of answers.
    """
    program, splits, rows = "training.programs.predict", recipe.evaluation.splits, recipe.training
    task_type = task_types.load(**recipe.task_and_options)
    return Job(
        program,
        PredictSettings(
            task=recipe.task,
            options=task_type.options_of("predict") | (task_type.options_of("answers") if base else {}),
            splits=list(splits),
            answered_prompts=answered_prompts(recipe) if base else 0,
            batch_size=rows.per_device_eval_batch_size,
            mixed_precision=lock.mixed_precision,
        ),
        reads={
            "model": folder_of(trained, "model"),
            "tokens": files_of(tokens, [f"{split}.arrow" for split in splits]),
            **({"base": folder_of(base, "model")} if base else {}),
        },
        code=task_types.code_modules(recipe.task),
        outside=(*figures_code(recipe.task), *(() if base else ("training.engine.answers",))),
        users_code=task_types.user_code(recipe.task),
        libraries=("torch", "transformers", "pyarrow"),
        field_names={
            "splits": "evaluation.splits",
            "batch_size": "training.per_device_eval_batch_size",
            "mixed_precision": "compute.mixed_precision",
        },
        launch=lambda: build_predict_launch(program, lock),
        batches=lambda model: BatchDivision(
            rows.per_device_eval_batch_size,
            model,
            program=program,
            max_length=recipe.tokens.max_length,
            mixed_precision=lock.mixed_precision,
            num_processes=lock.num_processes,
        ),
    )
