"""TrainingArguments from the recipe, the project's own decisions, and the strategy's."""

from __future__ import annotations

import dataclasses

import torch
from transformers import TrainingArguments

from training import distributed
from training.engine.training_task import Task
from training.jobs.protocol import rank
from training.jobs.user_code import users_mistake
from training.recipe.tables.metrics import more_is_better


def training_arguments(task: Task) -> TrainingArguments:
    """The recipe's training section as TrainingArguments, with the fields that the project or the strategy sets. Raises
    UserError if TrainingArguments refuses a value.
    """
    training, compute = task.training, task.compute
    known = {field.name for field in dataclasses.fields(TrainingArguments)}
    fields = training.model_dump(mode="json", include=known, exclude_none=True)
    decided = {
        "output_dir": str(task.checkpoints),
        "save_strategy": training.eval_strategy,
        "bf16": compute.mixed_precision == "bf16",
        "fp16": compute.mixed_precision == "fp16",
        "use_cpu": not torch.cuda.is_available(),
        "disable_tqdm": True,
        "report_to": training.report_to or "none",
        "remove_unused_columns": False,
        "restore_callback_states_from_checkpoint": True,
    }
    fields["logging_nan_inf_filter"] = False  # by default it logs a NaN loss as 0
    if training.eval_strategy != "no":
        fields.setdefault("metric_for_best_model", "loss")  # early stopping needs it
    if metric := fields.get("metric_for_best_model"):
        fields.setdefault("greater_is_better", more_is_better(metric.removeprefix("eval_")))
    if training.eval_strategy == "steps":
        decided["save_steps"] = training.eval_steps
    strategy = distributed.load(compute.strategy)
    shared = strategy.build_arguments(compute, task.model)
    if shared and rank() == 0:
        task.events.write("strategy", arguments=shared)  # `finetune plan --show-launch` could not know them yet
    with users_mistake("training"):
        arguments = TrainingArguments(**{**fields, **training.extra, **decided, **shared})
    strategy.adjust_arguments(arguments, compute)
    return arguments
