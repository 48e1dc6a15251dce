"""Rules of a recipe about what trains: which settings each engine takes notice of.

The Trainer takes all of them. The plain loop takes those that are named here, and a recipe that asks it for others is
told. What an engine of the recipe's author takes is the author's to know.
"""

from __future__ import annotations

from collections.abc import Iterator

from training.problems import nearest
from training.recipe.extra_arguments import arguments
from training.recipe.rules.rule import MODULE_AND_NAME, WrittenRecipe

_ENGINES = ("trainer", "accelerate")

TRAINING = (
    *("num_train_epochs", "max_steps", "learning_rate", "per_device_train_batch_size", "per_device_eval_batch_size"),
    *("gradient_accumulation_steps", "weight_decay", "warmup_steps", "lr_scheduler_type", "optim", "max_grad_norm"),
    *("label_smoothing_factor", "seed", "logging_steps", "eval_strategy", "eval_steps", "metric_for_best_model"),
    *("greater_is_better", "load_best_model_at_end", "loss", "focal_gamma", "class_weights"),
    *("resume_from_checkpoint", "trust_checkpoint", "inexact_resume", "lora"),
    *("engine", "collator", "early_stopping_patience", "early_stopping_threshold", "checkpoint_interval_s", "extra"),
)
"""The fields of `training` that the plain loop takes notice of, …"""
EXTRA = ("adam_beta1", "adam_beta2", "adam_epsilon", "optim_args", "lr_scheduler_kwargs", "full_determinism")
"""… those of `training.extra`, …"""
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop")
"""… and the optimizers that need nothing but to be stepped."""

_INSTEAD = "leave it out, or use `engine: trainer`, which has it"


def engine_name(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """Whether there may be such an engine."""
    engine = written["training.engine"]
    if engine not in _ENGINES and not MODULE_AND_NAME.fullmatch(engine):
        choices = f"choose from {', '.join(_ENGINES)}, or name a function of yours as module:function"
        yield "training.engine", f"{engine!r} is unknown: {choices}.{nearest(engine, _ENGINES)}"


def engine_has(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """What the plain loop is asked for and does not have."""
    if written["training.engine"] != "accelerate":
        return
    for name, field in written.fields("training").items():
        usual = field.get_default(call_default_factory=True)
        if name not in TRAINING and written[f"training.{name}"] != usual:
            yield f"training.{name}", f"`engine: accelerate` is a plain loop without it: {_INSTEAD}."
    if (optim := written["training.optim"]) not in OPTIMIZERS:
        message = f"{optim!r} needs more than `engine: accelerate` does: choose from {', '.join(OPTIMIZERS)}, or use"
        yield "training.optim", f"{message} `engine: trainer`, which has it."
    if (strategy := written["compute.strategy"]) != "ddp":
        message = f"{strategy!r} is not for `engine: accelerate`: use ddp, or `engine: trainer`, which has it."
        yield "compute.strategy", message
    for name in written["training.extra"]:
        if name in arguments() and name not in EXTRA:
            yield f"training.extra.{name}", f"`engine: accelerate` is a plain loop without it: {_INSTEAD}."
