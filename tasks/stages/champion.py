"""Stages: the champion of the registry, and its predictions on the judged split."""

from __future__ import annotations

from typing import Any

from tasks.cache.results import Artifact, Champion, Lock
from tasks.cache.stage import Inputs, Work, action
from tasks.home import registry_place
from tasks.jobs.batch_memory import BatchDivision
from tasks.jobs.commands import build_predict_launch
from tasks.jobs.job import Job, files_of, stage
from tasks.registry.champions import files_of_version, find_current
from training import task_types
from training.programs.predict_champion import PredictChampionSettings
from training.recipe import Recipe
from training.recipe.fields import answered_prompts


def inputs(recipe: Recipe, trained: Artifact, scores: Artifact) -> Inputs:
    """The registry, the alias, and the model to compare with the champion."""
    return Inputs(
        {
            "release": recipe.release.model_dump(include={"registry", "champion"}),
            "registry": registry_place(),
            "upstream": {"fit": trained.parts["model"], "score": scores.digest},
        }
    )


@action(inputs, gives=Champion)
def find_champion(work: Work, recipe: Recipe, trained: Artifact, scores: Artifact) -> Champion | None:
    """Finds the version with the champion's alias, unless it is the trained model itself."""
    if recipe.release.registry is None:
        work.state = "skipped"
        return None
    found = find_current(recipe)
    return None if found is None or found.champion.model == trained.parts["model"] else found.champion


@stage(where="there is a champion")
def predict_champion(recipe: Recipe, lock: Lock, data: Artifact, champion: Champion) -> Job:
    """Predicts every row of the judged split by the champion with its own tokenizer.

    The champion's model and options, the rows and labels, and the number format of prediction.
    """
    program, split, prompts = "training.programs.predict_champion", recipe.judged_split, answered_prompts(recipe)
    task_type = task_types.load(**_task_and_options(recipe, champion))
    batch_size = recipe.training.per_device_eval_batch_size
    options = task_type.options_of("tokenize") | task_type.options_of("predict")
    return Job(
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
            "data": files_of(data, ["labels.json", f"{split}.arrow"]),
        },
        code=task_types.code_modules(recipe.task),
        outside=() if prompts else ("training.engine.answers", "training.evaluation.preferences"),
        users_code=task_types.user_code(recipe.task),
        libraries=("torch", "transformers", "tokenizers", "pyarrow", *task_type.libraries),
        field_names={
            "batch_size": "training.per_device_eval_batch_size",
            "mixed_precision": "compute.mixed_precision",
        },
        launch=lambda: build_predict_launch(program, lock),
        batches=lambda model: BatchDivision(
            batch_size,
            model,
            program=program,
            max_length=champion.max_length,
            mixed_precision=lock.mixed_precision,
            num_processes=lock.num_processes,
        ),
    )


def _task_and_options(recipe: Recipe, champion: Champion) -> dict[str, Any]:
    """The recipe's task type and options, except options that the champion has learned with other values."""
    if champion.options is None:
        return recipe.task_and_options
    task_type = task_types.class_of(recipe.task)
    defaults = {name: task_type.Options.model_fields[name].get_default() for name in task_type.learned_options}
    learned = {name: champion.options.get(name, default) for name, default in defaults.items()}
    return recipe.task_and_options | {"options": {**recipe.options, **learned}}
