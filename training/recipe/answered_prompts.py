"""The prompts of a recipe that an evaluation answers, for metrics of the answers and for a judge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.recipe.task_specification import specification

if TYPE_CHECKING:
    from training.recipe.fields import Recipe


def answered_prompts(recipe: Recipe) -> int:
    """The number of prompts of each evaluated split that the trained model, its base model and the champion answer; 0
    if nothing reads the answers."""
    task_type = specification(**recipe.task_and_options)
    if recipe.evaluation.judge is None and not {*recipe.evaluation.metrics} & {*task_type.answer_metrics}:
        return 0
    return int(task_type.options.answered_prompts)  # type: ignore[attr-defined]
