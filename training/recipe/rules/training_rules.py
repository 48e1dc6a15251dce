"""Rules of a recipe about how the model is trained: steps, evaluations, loss, optimizer, engine."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from training.problems import nearest
from training.recipe.extra_arguments import arguments, fits, out_of_scope, set_by_project
from training.recipe.rules.column_rules import task_type_of
from training.recipe.rules.release_rules import figures_of
from training.recipe.rules.rule import MODULE_AND_NAME, Rule, WrittenRecipe
from training.recipe.tables.engines import ENGINES
from training.recipe.tables.metrics import METRICS, more_is_better
from training.recipe.tables.optimizers import OPTIMIZERS, Optimizer, missing_package, optim_args
from training.recipe.tables.trackers import TRACKERS

if TYPE_CHECKING:
    from training.recipe import Training
    from training.recipe.task_specification import TargetForm

_WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")
"""The schedules to which transformers' get_scheduler does not pass the warm-up."""
_LOSSES = ("cross_entropy", "focal")
_LOSS_FIELDS = ("loss", "focal_gamma", "class_weights", "label_smoothing_factor")
_NUMBERS = dict.fromkeys(_LOSS_FIELDS[1:], "whose targets are numbers, without classes")
_IDLE: dict[TargetForm, dict[str, str]] = {
    "classes": {},
    "labels": {},
    "binary": {"class_weights": "whose targets have no names"},
    "places": {"class_weights": "whose targets are places, without names"},
    "tokens": {"class_weights": "whose targets are tokens"},
    "numbers": _NUMBERS,
}
"""By `target_form` of a task type, the fields about the loss that do nothing, with the reason."""


def _steps(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    if written["training.max_steps"] == 0:
        yield "training.max_steps", "0 is out of range: it must be at least 1, or -1 for as many as the epochs take."
    warmup = written["training.warmup_steps"]
    if warmup > 1 and warmup != int(warmup):
        yield "training.warmup_steps", f"{warmup} is out of range: whole steps, or below 1 the share of all steps."
    scheduler, optimizer = written["training.lr_scheduler_type"], OPTIMIZERS[written["training.optim"]]
    if warmup and scheduler in _WITHOUT_WARMUP and not optimizer.schedules_itself:
        other = "constant_with_warmup" if scheduler == "constant" else "another schedule"
        message = f"does nothing with `lr_scheduler_type: {scheduler}`: choose {other}, or leave it out."
        yield "training.warmup_steps", message


def improbable_rates(training: Training) -> Iterator[tuple[str, str]]:
    """Yields the rates at which no model learns, most of them slips of a digit or a sign, with the reason. A recipe may
    have them, because a sweep may try them."""
    rate, decay = training.learning_rate, training.weight_decay
    most = 100 if "sgd" in training.optim else 1  # other optimizers move each weight by about the rate at each step
    if rate > most:
        message = f"{rate:g} is far above the rates at which {training.optim} trains (up to about {most / 100:g}): "
        yield "training.learning_rate", f"{message}is a sign or a point missing, as in 2.0e-5?"
    elif rate * decay >= 0.5:
        message = (
            f"{decay:g} times the learning rate ({rate:g}) takes {min(1.0, rate * decay):.0%} of each weight away "
        )
        yield "training.weight_decay", f"{message}at every step: usual values are 0 to 0.1."


def _evaluation_while_training(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    strategy = written["training.eval_strategy"]
    if strategy == "steps" and written["training.eval_steps"] is None:
        yield "training.eval_steps", "is missing: `eval_strategy: steps` needs the number of steps between evaluations."
    if strategy != "no":
        return
    message = "needs evaluations, but training.eval_strategy is no: set that to epoch or steps"
    if written["training.load_best_model_at_end"]:
        yield "training.load_best_model_at_end", f"{message}, or this to false."
    if written["training.early_stopping_patience"] is not None:
        yield "training.early_stopping_patience", f"{message}, or this to null."
    if written["training.lr_scheduler_type"] in ("reduce_lr_on_plateau", "greedy"):
        yield "training.lr_scheduler_type", f"{written['training.lr_scheduler_type']} {message}, or choose another."


def _best_metric(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    metric, figures = written["training.metric_for_best_model"], figures_of(written)
    choices = [*(figures or ()), "loss"]
    if metric is not None and figures is not None and metric not in choices:
        yield (
            "training.metric_for_best_model",
            f"{metric!r} is not evaluated: choose from {', '.join(choices)}, or add it to evaluation.metrics."
            f"{nearest(metric, choices)}",
        )


def _metric_while_training(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    metric, task_type = written["training.metric_for_best_model"], task_type_of(written)
    if metric is None or metric.removeprefix("eval_") == "loss":
        return
    if metric.removeprefix("eval_") in task_type.answer_metrics:
        yield "training.metric_for_best_model", f"{metric!r} is of the trained model alone: choose another metric."
        return
    reason = task_type.while_training(written["compute.strategy"]).loss_only_reason
    if reason is not None:
        is_switched_off = ("generate_while_training", False) in list(task_type.options)
        cause = reason or (
            "options.generate_while_training is false" if is_switched_off else "by the options of the task type"
        )
        message = f"{metric!r} is not computed while training ({cause.rstrip('.')}): "
        switch = "set that to true, or " if is_switched_off else ""
        yield "training.metric_for_best_model", f"{message}{switch}set this to null, for the loss."


def _loss_of_the_task_type(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """Fields about the loss apply only to task types whose loss reads them."""
    task_type, fields = task_type_of(written), written.fields("training")
    if (form := task_type.recipe_loss_form) is not None:
        idle = _IDLE[form]
    else:
        others = [name for name in _LOSS_FIELDS if name not in task_type.loss_fields]
        reason = "which has a loss of its own"
        if (inherited := task_type.target_form) is not None:
            reason += f' (if it calls super().loss, declare target_form = "{inherited}" in its class)'
        idle = dict.fromkeys(others, reason)
    for name, reason in idle.items():
        if written[f"training.{name}"] != fields[name].get_default():
            default = json.dumps(fields[name].get_default()).strip('"')
            message = f"does nothing with task {written['task']}, {reason}: leave it out, or set it to {default}."
            yield f"training.{name}", message
    if form == "numbers" and written["training.loss"] == "focal":
        message = f"'focal' is for classes, and the targets of task {written['task']} are numbers: leave it out, "
        yield "training.loss", f"{message}for the squared error, or name your function as module:function."


def _contrastive(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """Contrastive training has a loss and a head of its own."""
    options = written["options"]
    if "contrastive" not in type(task_type_of(written)).Options.model_fields:
        return
    if not options.get("contrastive"):
        if "temperature" in options:
            yield "options.temperature", "does nothing without options.contrastive: set that to true, or leave it out."
        return
    if written["task"] != "sequence-classification":
        yield "options.contrastive", "true is for task sequence-classification alone: leave it out."
        return
    reasons = dict.fromkeys(_LOSS_FIELDS, "has a loss of its own") | {
        "lora": "trains all weights",
        "teacher": "learns from labels",
    }
    fields = written.fields("training")
    for name, reason in reasons.items():
        default = fields[name].get_default()
        if written[f"training.{name}"] != default:
            shown = "null" if default is None else json.dumps(default).strip('"')
            yield f"training.{name}", f"does nothing with options.contrastive, which {reason}: set it to {shown}."


def _loss(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    loss, gamma, smoothing = (written[f"training.{name}"] for name in ("loss", "focal_gamma", "label_smoothing_factor"))
    if loss not in _LOSSES and not MODULE_AND_NAME.fullmatch(loss):
        choices = f"choose from {', '.join(_LOSSES)}, or name your function as module:function"
        yield "training.loss", f"{loss!r} is unknown: {choices}.{nearest(loss, _LOSSES)}"
        return
    if gamma is not None and loss != "focal":
        yield "training.focal_gamma", f"{gamma:g} is for `loss: focal` only; with {loss}, set it to null."
    if smoothing and loss != "cross_entropy":
        message = f"{smoothing:g} is for `loss: cross_entropy` only; with {loss}, set it to 0."
        yield "training.label_smoothing_factor", message


def _class_weights(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    weights, labels = written["training.class_weights"], written["data.label_names"]
    for name in weights if isinstance(weights, dict) and labels else ():
        if name not in labels:
            message = f"is no label: data.label_names has {', '.join(labels)}.{nearest(name, labels)}"
            yield f"training.class_weights.{name}", message


def unfitting_weights(weights: object, labels: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the entries of training.class_weights that are no labels of the rows, with the reason."""
    for name in weights if isinstance(weights, dict) else ():
        if name not in labels:
            known = ", ".join(map(repr, labels[:20])) + (", …" if len(labels) > 20 else "")
            message = f"the data has no such label: choose from {known}.{nearest(name, labels)}"
            yield f"training.class_weights.{name}", message


def _direction_of_best(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    greater = written["training.greater_is_better"]
    metric = (written["training.metric_for_best_model"] or "loss").removeprefix("eval_")
    if greater is None or not (metric == "loss" or metric in METRICS) or metric.endswith("_length"):
        return
    if greater != more_is_better(metric):
        message = f"{str(greater).lower()} would keep the worst checkpoint by {metric}: leave it out."
        yield "training.greater_is_better", message


def _user_classes(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    callbacks = written["training.callbacks"]
    names = [(f"training.{field}", written[f"training.{field}"]) for field in ("collator", "trainer")]
    names += [(f"training.callbacks[{index}]", name) for index, name in enumerate(callbacks)]
    for where, name in names:
        if name is not None and not MODULE_AND_NAME.fullmatch(name):
            yield where, f"{name!r} is not the name of Python code: write it as module:name."
    for index, name in enumerate(callbacks):
        if name in callbacks[:index]:
            yield f"training.callbacks[{index}]", f"{name!r} is listed twice."


def _engine(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    engine = written["training.engine"]
    if engine not in ENGINES and not MODULE_AND_NAME.fullmatch(engine):
        choices = f"choose from {', '.join(ENGINES)}, or name your function as module:function"
        yield "training.engine", f"{engine!r} is unknown: {choices}.{nearest(engine, ENGINES)}"


def _settings_that_the_engine_reads(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """Settings apply only to engines that read them. A user's engine may read all of them."""
    name = written["training.engine"]
    if name not in ENGINES or (limits := ENGINES[name].limits) is None:
        return
    alternatives = " or ".join(f"`engine: {other}`" for other, engine in ENGINES.items() if engine.limits is None)
    message = f"`engine: {name}` does not read this field: leave it out, or use {alternatives}."
    for field, info in written.fields("training").items():
        default = info.get_default(call_default_factory=True)
        if field not in limits.training and written[f"training.{field}"] != default:
            yield f"training.{field}", message
    for where, choices in (("training.optim", limits.optimizers), ("compute.strategy", limits.strategies)):
        if (value := written[where]) not in choices:
            yield (
                where,
                f"{value!r} is not for `engine: {name}`: choose from {', '.join(choices)}, or use {alternatives}.",
            )
    for field in written["training.extra"]:
        if field in arguments() and field not in limits.extra:
            yield f"training.extra.{field}", message


def _scheduler_settings(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    needed = {
        "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
        "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
        "warmup_stable_decay": ("num_decay_steps",),
    }.get(written["training.lr_scheduler_type"], ())
    settings = written["training.extra"].get("lr_scheduler_kwargs") or {}
    if needed and not any(name in settings for name in needed):
        yield (
            "training.lr_scheduler_type",
            f"{written['training.lr_scheduler_type']} needs {' or '.join(needed)}: "
            f"set training.extra.lr_scheduler_kwargs.{needed[0]}.",
        )


def _extra(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    extra = written["training.extra"]
    known = arguments() if extra else {}
    for name, value in extra.items():
        where = f"training.extra.{name}"
        if advice := out_of_scope(name):
            yield where, advice
        elif name in written.fields("training"):
            yield where, f"has its own field: set training.{name}."
        elif reason := set_by_project(name):
            yield where, f"cannot be set in a recipe: {reason}."
        elif name not in known:
            open_to_recipes = [field for field in known if not set_by_project(field)]
            yield where, f"no such field of TrainingArguments.{nearest(name, open_to_recipes)}"
        elif not fits(value, known[name]):
            yield where, f"{value!r} is of the wrong type: it takes {known[name].replace(' | ', ' or ')}."


def _extra_without_effect(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """Fields that transformers would accept and ignore have the fields that they depend on."""
    extra = written["training.extra"]
    for names, needed in (
        (("activation_checkpointing_kwargs",), ("activation_checkpointing", "gradient_checkpointing")),
        (("gradient_checkpointing_kwargs",), ("gradient_checkpointing", "activation_checkpointing")),
        (("dataloader_prefetch_factor", "dataloader_multiprocessing_context"), ("dataloader_num_workers",)),
    ):
        for name in names:
            if extra.get(name) is not None and not any(extra.get(other) for other in needed):
                yield f"training.extra.{name}", f"does nothing without training.extra.{needed[0]}: set that too."


def _optimizer(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    name = written["training.optim"]
    if package := missing_package(name):
        yield "training.optim", f"{name!r} needs a package that is not installed: pip install {package}."
    optimizer, extra = OPTIMIZERS[name], written["training.extra"]
    for field in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        if extra.get(field) is not None and field not in optimizer.settings:
            yield f"training.extra.{field}", f"does nothing with `optim: {name}`: leave it out."
    yield from _optimizer_args(name, optimizer, extra.get("optim_args"))
    if optimizer.schedules_itself:
        if (scheduler := written["training.lr_scheduler_type"]) != "constant":
            message = f"{scheduler!r} conflicts with `optim: {name}`, which schedules itself: set it to constant."
            yield "training.lr_scheduler_type", message
        if 0 < (warmup := written["training.warmup_steps"]) < 1:
            message = f"{warmup:g} is out of range: `optim: {name}` takes whole steps, not a share of them."
            yield "training.warmup_steps", message


def _optimizer_args(name: str, optimizer: Optimizer, text: Any) -> Iterator[tuple[str, str]]:
    where = "training.extra.optim_args"
    if not isinstance(text, str) or not text:
        return
    if (names := optim_args(text)) is None:
        yield where, f"{text!r} is not written as name=value,name=value."
        return
    for field in names:
        if field == "weight_decay":
            yield where, "weight_decay has its own field: set training.weight_decay."
        elif field not in optimizer.args:
            takes = f"it takes {', '.join(optimizer.args)}" if optimizer.args else "it takes none"
            yield where, f"{field!r} does nothing with `optim: {name}`: {takes}.{nearest(field, optimizer.args)}"


def _reporters(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    reporters = written["training.report_to"]
    for index, name in enumerate(reporters):
        if name in reporters[:index]:
            yield f"training.report_to[{index}]", f"{name!r} is listed twice."
        elif importlib.util.find_spec(package := TRACKERS[name].package) is None:
            message = f"{name!r} needs a package that is not installed: pip install {package}."
            yield f"training.report_to[{index}]", message


TRAINING_RULES: tuple[Rule, ...] = (
    _steps,
    _evaluation_while_training,
    _best_metric,
    _direction_of_best,
    _metric_while_training,
    _loss_of_the_task_type,
    _contrastive,
    _loss,
    _engine,
    _class_weights,
    _user_classes,
    _scheduler_settings,
    _extra,
    _settings_that_the_engine_reads,
    _extra_without_effect,
    _optimizer,
    _reporters,
)
