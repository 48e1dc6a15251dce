"""Stage: training, launched or continued."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tasks.runtime.hardware import visible_gpus
from tasks.runtime.jobs import run_child
from tasks.runtime.launch import accelerate_argv, accelerate_environment
from tasks.runtime.memory import Fits
from tasks.runtime.refs import Pins, Ref
from tasks.runtime.stage import Ingredients, Work, stage
from training.kinds import KINDS
from training.recipe import Recipe
from training.strategies import STRATEGIES

# Decide when something is written or shown, not what is learnt.
NOT_LEARNT_FROM = {"logging_steps", "checkpoint_interval_s"}
# What the need for memory hangs on, beside the model, the length of rows and the number format.
NEED_MEMORY = {"per_device_train_batch_size", "per_device_eval_batch_size", "optim", "extra"}


def ingredients(recipe: Recipe, pins: Pins, data: Ref, model: Ref, tokens: Ref) -> Ingredients:
    """The tokens, the base model, the labels, every training setting and what `auto` came to."""
    strategy = recipe.compute.strategy
    return Ingredients(
        {
            "kind": recipe.kind,
            "training": recipe.training.model_dump(mode="json", exclude=NOT_LEARNT_FROM),
            "compute": _compute(recipe, pins),
            "upstream": {
                "tokenize": tokens.digest,
                "load_model": model.digest,
                "labels": data.parts["labels.json"],
            },
        },
        code=["training.fit", KINDS[recipe.kind], STRATEGIES[strategy], *_choosing_code(recipe)],
        libraries=(
            *("torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy"),
            *(["deepspeed"] if strategy.startswith("deepspeed") else []),
        ),
    )


def _compute(recipe: Recipe, pins: Pins) -> dict[str, Any]:
    resolved = {"num_processes": pins.num_processes, "mixed_precision": pins.mixed_precision}
    return {**recipe.compute.learnt_by(), **resolved}


def _choosing_code(recipe: Recipe) -> list[str]:
    """The modules of the user's metrics, where one of them may choose the best model."""
    if recipe.training.metric_for_best_model in (None, "loss"):
        return []
    return [name.partition(":")[0] for name in recipe.evaluation.metrics if ":" in name]


@stage(ingredients)
def fit(work: Work, recipe: Recipe, pins: Pins, data: Ref, model: Ref, tokens: Ref) -> Mapping[str, Any]:
    """Trains under `accelerate launch`; a job that was killed goes on from its newest good checkpoint."""
    labels = json.loads((data.path / "labels.json").read_text())
    use_cpu = not visible_gpus()
    return run_child(
        work,
        "training.fit",
        accelerate_argv(
            "training.fit",
            num_processes=pins.num_processes,
            mixed_precision=pins.mixed_precision,
            use_cpu=use_cpu,
        ),
        env=accelerate_environment(
            num_processes=pins.num_processes,
            use_cpu=use_cpu,
            strategy=recipe.compute.strategy,
        ),
        settings={
            "kind": recipe.kind,
            "labels": labels,
            "training": recipe.training.model_dump(mode="json"),
            "compute": _compute(recipe, pins),
            "metrics": recipe.evaluation.metrics,
        },
        inputs={"model": model.path / "model", "tokenizer": model.path / "tokenizer", "tokens": tokens.path},
        fits=Fits(
            max(recipe.training.per_device_train_batch_size, recipe.training.per_device_eval_batch_size),
            model.path / "model",
            program="training.fit",
            max_length=recipe.tokens.max_length,
            training=recipe.training.model_dump(mode="json", include=NEED_MEMORY),
            mixed_precision=pins.mixed_precision,
            num_processes=pins.num_processes,
            sharing=recipe.compute.learnt_by(),
        ),
        stall_timeout_s=recipe.compute.stall_timeout_s,
    )
