"""Stage: stored predictions, one row each."""

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
from training.recipe.answered_prompts import answered_prompts
from training.recipe.program_settings import PredictSettings


def answers_prompts(recipe: Recipe) -> bool:
    """Whether an evaluation generates answers."""
    return answered_prompts(recipe) > 0


def inputs(recipe: Recipe, lock: Lock, tokens: Ref, trained: Ref, base: Ref | None) -> Inputs:
    """The trained model, the tokens of the evaluated splits, and the number format of prediction; if prompts are
    answered, also the base model and the options of answers."""
    splits, task_type = recipe.evaluation.splits, task_types.load(**recipe.task_and_options)
    answers = task_type.options_of("answers") if base else {}
    return Inputs(
        {
            "task": recipe.task,
            "options": task_type.options_of("predict") | answers,
            "evaluation": {"splits": splits},
            "compute": {"mixed_precision": lock.mixed_precision},
            "training": recipe.training.model_dump(include={"per_device_eval_batch_size"}),
            "upstream": {
                "fit": trained.parts["model"],
                **{f"tokenize/{split}": tokens.parts[f"{split}.arrow"] for split in splits},
                **({"load_model": base.digest} if base else {}),
            },
        },
        code=["training.programs.predict", *task_types.code_modules(recipe.task)],
        outside=(*figures_code(recipe.task), *(() if base else ("training.engine.answers",))),
        named=task_types.user_code(recipe.task),
        libraries=("torch", "transformers", "pyarrow"),
    )


@stage(inputs)
def predict(work: Work, recipe: Recipe, lock: Lock, tokens: Ref, trained: Ref, base: Ref | None) -> Mapping[str, Any]:
    """Predicts every row of the evaluated splits once, in order. With `base`, the base model, both models answer some
    prompts."""
    folders = {"model": trained.path / "model", "tokens": tokens.path}
    launched = build_predict_launch("training.programs.predict", lock)
    return run_child(
        work,
        "training.programs.predict",
        launched.argv,
        env=launched.env,
        settings=PredictSettings(
            **recipe.task_and_options,
            splits=list(recipe.evaluation.splits),
            answered_prompts=answered_prompts(recipe) if base else 0,
            batch_size=recipe.training.per_device_eval_batch_size,
            mixed_precision=lock.mixed_precision,
        ),
        inputs=folders | ({"base": base.path / "model"} if base else {}),
        batches=BatchDivision(
            recipe.training.per_device_eval_batch_size,
            trained.path / "model",
            program="training.programs.predict",
            max_length=recipe.tokens.max_length,
            mixed_precision=lock.mixed_precision,
            num_processes=lock.num_processes,
        ),
    )
