"""The engines that train a model: the module of each, and the settings that it reads.

A new engine is a line here and the module that it names, with the function `train(task)` that
training/engine/training_task.py describes. A user's own engine needs neither: a recipe names it as `module:function`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineLimits:
    """The settings that an engine reads, if it does not read all of them. A recipe that sets another is refused."""

    training: tuple[str, ...]
    """Fields of `training`."""
    extra: tuple[str, ...]
    """Fields of `training.extra`."""
    optimizers: tuple[str, ...]
    strategies: tuple[str, ...]


@dataclass(frozen=True)
class TrainingEngine:
    """One engine, as the rules of a recipe see it."""

    module: str
    """Imported only if a recipe names the engine, so that a change to it leaves the artifacts of others valid."""
    limits: EngineLimits | None = None


ENGINES: dict[str, TrainingEngine] = {
    "trainer": TrainingEngine("training.engine.trainer"),
    "accelerate": TrainingEngine(
        "training.engine.loop",
        EngineLimits(
            training=(
                *("num_train_epochs", "max_steps", "learning_rate", "per_device_train_batch_size"),
                *("per_device_eval_batch_size", "gradient_accumulation_steps", "weight_decay", "warmup_steps"),
                *("lr_scheduler_type", "optim", "max_grad_norm", "label_smoothing_factor", "seed", "logging_steps"),
                *("eval_strategy", "eval_steps", "metric_for_best_model", "greater_is_better"),
                *("load_best_model_at_end", "loss", "focal_gamma", "class_weights", "resume_from_checkpoint"),
                *("trust_checkpoint", "inexact_resume", "lora", "teacher", "engine", "collator", "augment"),
                *("early_stopping_patience", "early_stopping_threshold", "checkpoint_interval_s", "use_liger_kernel"),
                *("extra", "report_to"),
            ),
            extra=(
                *("adam_beta1", "adam_beta2", "adam_epsilon", "optim_args", "lr_scheduler_kwargs"),
                "full_determinism",
            ),
            # Optimizers that need nothing but to be stepped.
            optimizers=("adamw_torch_fused", "adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop"),
            strategies=("ddp",),
        ),
    ),
}
"""The values of training.engine, besides code of the user's."""
