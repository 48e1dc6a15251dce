"""Optimizer, schedule and loss of the plain loop, made by transformers' own functions, so that names mean the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.trainer_pt_utils import LabelSmoother

from training.engine.training_task import Task
from training.jobs.user_code import users_mistake

_NAMES = {"learning_rate", "optim", "weight_decay", "warmup_steps", "lr_scheduler_type"}


def arguments(task: Task) -> TrainingArguments:
    """The arguments from which transformers makes an optimizer and a schedule. Making them connects the processes.

    Raises UserError if TrainingArguments refuses a value.
    """
    precision = task.compute.mixed_precision
    with users_mistake("training"):
        return TrainingArguments(
            **task.training.model_dump(mode="json", include=_NAMES),
            **task.training.extra,
            output_dir=str(task.checkpoints),
            eval_strategy=task.training.eval_strategy,  # some schedules depend on it
            eval_steps=task.training.eval_steps,
            bf16=precision == "bf16",
            fp16=precision == "fp16",
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
        )


def make_optimizer(model: torch.nn.Module, args: TrainingArguments) -> torch.optim.Optimizer:
    """The Trainer's optimizer, with decay for the same weights."""
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    groups = [
        {"params": [weights[name] for name in weights if name in decayed], "weight_decay": args.weight_decay},
        {"params": [weights[name] for name in weights if name not in decayed], "weight_decay": 0.0},
    ]
    with users_mistake("training.optim"):
        kind, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return kind(groups, **settings)


def make_scheduler(optimizer: torch.optim.Optimizer, args: TrainingArguments, steps: int) -> Any:
    with users_mistake("training.extra.lr_scheduler_kwargs"):
        warmup, more = args.get_warmup_steps(steps), args.lr_scheduler_kwargs
        return get_scheduler(args.lr_scheduler_type, optimizer, warmup, steps, more)


def loss_function(task: Task) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """The mean loss of logits (B, L) and labels (B,); None for the model's own."""
    smoothing = task.training.label_smoothing_factor
    if task.loss is not None or not smoothing:
        return task.loss
    smoother = LabelSmoother(smoothing)
    return lambda logits, labels: smoother({"logits": logits}, labels)
