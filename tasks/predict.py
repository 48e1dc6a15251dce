"""Stage: one stored row a prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.runtime.jobs import run_child
from tasks.runtime.launch import predicting
from tasks.runtime.memory import Fits
from tasks.runtime.refs import Pins, Ref
from tasks.runtime.stage import Ingredients, Work, stage
from training import kinds
from training.recipe import Recipe


def ingredients(recipe: Recipe, pins: Pins, tokens: Ref, trained: Ref) -> Ingredients:
    """The trained model, the tokens of the splits asked for, and the precision that they are predicted in."""
    splits = recipe.evaluation.splits
    return Ingredients(
        {
            "kind": recipe.kind,
            "options": kinds.load(**recipe.task).options_of("predict"),
            "evaluation": {"splits": splits},
            "compute": {"mixed_precision": pins.mixed_precision},
            "training": recipe.training.model_dump(include={"per_device_eval_batch_size"}),
            "upstream": {
                "fit": trained.parts["model"],
                **{f"tokenize/{split}": tokens.parts[f"{split}.arrow"] for split in splits},
            },
        },
        code=["training.predict", *kinds.code(recipe.kind)],
        named=kinds.named(recipe.kind),
        libraries=("torch", "transformers", "pyarrow"),
    )


@stage(ingredients)
def predict(work: Work, recipe: Recipe, pins: Pins, tokens: Ref, trained: Ref) -> Mapping[str, Any]:
    """Predicts every row of every split that is evaluated, once, in order."""
    launched = predicting("training.predict", pins)
    return run_child(
        work,
        "training.predict",
        launched.argv,
        env=launched.env,
        settings={
            **recipe.task,
            "splits": list(recipe.evaluation.splits),
            "batch_size": recipe.training.per_device_eval_batch_size,
            "mixed_precision": pins.mixed_precision,
        },
        inputs={"model": trained.path / "model", "tokens": tokens.path},
        fits=Fits(
            recipe.training.per_device_eval_batch_size,
            trained.path / "model",
            program="training.predict",
            max_length=recipe.tokens.max_length,
            mixed_precision=pins.mixed_precision,
            num_processes=pins.num_processes,
        ),
    )
