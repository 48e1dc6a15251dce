"""Stages: the champion of the registry, and its predictions on the judged split."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tasks.cache import settings
from tasks.cache.refs import Champion, Lock, Ref
from tasks.cache.stage import Inputs, Work, action, stage
from tasks.jobs.batch_memory import BatchDivision
from tasks.jobs.child import run_child
from tasks.jobs.commands import build_predict_launch
from tasks.registry.champions import find_current, find_folders
from training import task_types
from training.recipe import Recipe
from training.recipe.answered_prompts import answered_prompts
from training.recipe.program_settings import PredictChampionSettings


def inputs(recipe: Recipe, trained: Ref, scores: Ref) -> Inputs:
    """The registry, the alias, and the model to compare with the champion."""
    return Inputs(
        {
            "release": recipe.release.model_dump(include={"registry", "champion"}),
            "registry": settings.registry_place(),
            "upstream": {"fit": trained.parts["model"], "score": scores.digest},
        }
    )


@action(inputs, gives=Champion)
def find_champion(work: Work, recipe: Recipe, trained: Ref, scores: Ref) -> Champion | None:
    """Finds the version with the champion's alias, unless it is the trained model itself."""
    if recipe.release.registry is None:
        work.state = "skipped"
        return None
    found = find_current(recipe)
    return None if found is None or found.champion.model == trained.parts["model"] else found.champion


def prediction_inputs(recipe: Recipe, lock: Lock, data: Ref, champion: Champion) -> Inputs:
    """The champion's model and options, the rows and labels, and the number format of prediction."""
    split, task_type = recipe.judged_split, task_types.load(**_task_and_options(recipe, champion))
    answers = task_type.options_of("answers") if answered_prompts(recipe) else {}
    return Inputs(
        {
            "task": recipe.task,
            "options": task_type.options_of("tokenize") | task_type.options_of("predict") | answers,
            "split": split,
            "tokens": {"max_length": champion.max_length},
            "compute": {"mixed_precision": lock.mixed_precision},
            "training": recipe.training.model_dump(include={"per_device_eval_batch_size"}),
            "upstream": {
                "champion": champion.model,
                "load_data": data.parts[f"{split}.arrow"],
                "labels": data.parts["labels.json"],
            },
        },
        code=["training.programs.predict_champion", *task_types.code_modules(recipe.task)],
        outside=() if answers else ("training.engine.answers", "training.evaluation.generated_answers"),
        named=task_types.user_code(recipe.task),
        libraries=("torch", "transformers", "tokenizers", "pyarrow", *task_type.libraries),
    )


def _task_and_options(recipe: Recipe, champion: Champion) -> dict[str, Any]:
    """The recipe's task type and options, except options that the champion has learned with other values."""
    if champion.options is None:
        return recipe.task_and_options
    task_type = task_types.class_of(recipe.task)
    defaults = {name: task_type.Options.model_fields[name].get_default() for name in task_type.learned_options}
    learned = {name: champion.options.get(name, default) for name, default in defaults.items()}
    return recipe.task_and_options | {"options": {**recipe.options, **learned}}


@stage(prediction_inputs, where="there is a champion")
def predict_champion(work: Work, recipe: Recipe, lock: Lock, data: Ref, champion: Champion) -> Mapping[str, Any]:
    """Predicts every row of the judged split by the champion with its own tokenizer."""
    folders = find_folders(work, champion, "release.registry")
    launched = build_predict_launch("training.programs.predict_champion", lock)
    precision, batch_size = lock.mixed_precision, recipe.training.per_device_eval_batch_size
    return run_child(
        work,
        "training.programs.predict_champion",
        launched.argv,
        env=launched.env,
        settings=PredictChampionSettings(
            **_task_and_options(recipe, champion),
            split=recipe.judged_split,
            labels=json.loads((data.path / "labels.json").read_text()),
            champion=str(champion),
            max_length=champion.max_length,
            answered_prompts=answered_prompts(recipe),
            batch_size=batch_size,
            mixed_precision=precision,
        ),
        inputs={**folders, "data": data.path},
        batches=BatchDivision(
            batch_size,
            folders["model"],
            program="training.programs.predict_champion",
            max_length=champion.max_length,
            mixed_precision=precision,
            num_processes=lock.num_processes,
        ),
    )
