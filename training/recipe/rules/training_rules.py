"""Rules that span several fields of a recipe. Each looks at the fields as written, and at nothing else."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from training.problems import Problem, UserError, nearest
from training.recipe.error_messages import describe, section_fields
from training.recipe.extra_arguments import arguments, fits, out_of_scope, set_by_project
from training.recipe.lora import LORA_RULES
from training.recipe.rules.column_rules import columns_of, task_type_of
from training.recipe.rules.compute_rules import SHARING_RULES
from training.recipe.rules.data_rules import DATA_RULES, DOTTED, revision
from training.recipe.rules.engine_rules import engine_has, engine_name
from training.recipe.rules.release_rules import RELEASE_RULES, figures_of
from training.recipe.tables.optimizers import OPTIMIZERS, Optimizer, missing_package, optim_args
from training.recipe.tables.task_types import TASK_TYPES
from training.recipe.task_specification import specification, specification_class

_LOSSES = ("cross_entropy", "focal")
_LOSS_FIELDS = ("loss", "focal_gamma", "class_weights", "label_smoothing_factor")


class WrongItself(LookupError):
    """A rule asked for a field that has a problem of its own."""


class Written:
    """The recipe as written, with the defaults where nothing is, and no value where it is wrong itself."""

    def __init__(self, recipe: type[BaseModel], values: Mapping[str, Any], wrong: Iterable[str]) -> None:
        self._recipe, self._values, self.wrong = recipe, values, set(wrong)

    def fields(self, section: str) -> dict[str, FieldInfo]:
        """The section's fields and their definitions; "" is the recipe itself."""
        return (section_fields(self._recipe, section) if section else self._recipe.model_fields) or {}

    def __getitem__(self, name: str) -> Any:
        section, _, field = name.rpartition(".")
        above = [section[:end] for end in range(len(section) + 1) if section[end : end + 1] in (".", "")]
        if any(place in above or re.match(rf"{re.escape(name)}($|[.\[])", place) for place in self.wrong):
            raise WrongItself(name)
        written: Any = self._values
        for part in filter(None, section.split(".")):
            written = (written.get(part) or {}) if isinstance(written, Mapping) else {}
        if field in written:
            return written[field]
        return self.fields(section)[field].get_default(call_default_factory=True)


def broken_rules(written: Written) -> list[Problem]:
    """The problems of all rules, in turn.

    A rule says nothing more once it meets a field that is wrong itself, or by an earlier rule: a mistake is
    told once, not with all that follows from it.
    """
    problems: list[Problem] = []
    for rule in _RULES:
        try:
            for where, message in rule(written):
                problems.append(Problem(kind="recipe", where=where, message=message))
                written.wrong.add(where)
        except WrongItself:
            continue
    return problems


def _kind(written: Written) -> Iterator[tuple[str, str]]:
    task_type = written["task"]
    if task_type not in TASK_TYPES and not DOTTED.fullmatch(task_type):
        choices = f"choose from {', '.join(TASK_TYPES)}, or name a class of yours as module:Class"
        yield "task", f"{task_type!r} is unknown: {choices}.{nearest(task_type, TASK_TYPES)}"
        return
    try:
        specification_class(task_type)
    except UserError as error:  # of a module of the recipe's author
        yield "task", error.problems[0].message


def _options(written: Written) -> Iterator[tuple[str, str]]:
    known, given = specification_class(written["task"]).Options, written["options"]
    if given and not known.model_fields:
        yield "options", f"task {written['task']} has no options: leave {', '.join(given)} out."
        return
    try:
        known.model_validate(given)
        specification(written["task"], given)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            told = describe(detail, known)
            yield f"options.{told.where}", told.message
    except UserError as error:  # of an author's own task type
        yield "task", error.problems[0].message


def _model_source(written: Written) -> Iterator[tuple[str, str]]:
    source, path = written["model.source"], written["model.path"]
    if source != "hub":
        yield from revision(written, "model")
    if source == "scratch" and path is not None:
        yield "model.path", f"{path!r} is for `source: hub` or `folder`; with scratch, set it to null."
    if source != "scratch" and path is None:
        what = "the folder of the model" if source == "folder" else "the model's name on the Hub"
        yield "model.path", f"is missing: `source: {source}` needs {what}."
    if source != "scratch" and written["model.config"] is not None:
        yield "model.config", f"is for `source: scratch`; a {source} model brings its own, so set it to null."


def _start(written: Written) -> Iterator[tuple[str, str]]:
    if written["model.start_from"] == "champion" and written["release.registry"] is None:
        yield "model.start_from", "'champion' is one of a registry: set release.registry, or this to base."


def _scratch_config(written: Written) -> Iterator[tuple[str, str]]:
    if written["model.source"] != "scratch":
        return
    config = written["model.config"] or {}
    for name, task_type, example in (("model_type", str, "bert"), ("vocab_size", int, "8000")):
        if name not in config:
            yield (
                f"model.config.{name}",
                f"is missing: `source: scratch` needs it, such as {name}: {example}.",
            )
        elif type(config[name]) is not task_type:
            yield (
                f"model.config.{name}",
                f"{config[name]!r} is of the wrong type: write it such as {name}: {example}.",
            )
    positions = config.get("max_position_embeddings")
    if type(positions) is int and written["tokens.max_length"] > positions:
        yield (
            "tokens.max_length",
            f"{written['tokens.max_length']} is out of range: the model has {positions} positions "
            "(model.config.max_position_embeddings).",
        )


def _template_of_scratch(written: Written) -> Iterator[tuple[str, str]]:
    if written["model.source"] != "scratch" or written["model.chat_template"] is not None:
        return
    if wanted := [column.name for column in columns_of(written) if column.name in task_type_of(written).by_template]:
        yield (
            "model.chat_template",
            f"is missing: a model from scratch brings none, and rows with {wanted[0]} become texts by one. "
            "Name a file, such as deployments/examples/chat.jinja.",
        )


def _steps(written: Written) -> Iterator[tuple[str, str]]:
    if written["training.max_steps"] == 0:
        yield (
            "training.max_steps",
            "0 is out of range: it must be at least 1, or -1 for as many as the epochs take.",
        )
    warmup = written["training.warmup_steps"]
    if warmup > 1 and warmup != int(warmup):
        yield (
            "training.warmup_steps",
            f"{warmup} is out of range: whole steps, or below 1 the share of all steps.",
        )


def _evaluation_while_training(written: Written) -> Iterator[tuple[str, str]]:
    strategy = written["training.eval_strategy"]
    if strategy == "steps" and written["training.eval_steps"] is None:
        yield (
            "training.eval_steps",
            "is missing: `eval_strategy: steps` needs the number of steps between evaluations.",
        )
    if strategy not in ("no", False):  # YAML reads a bare `no` as false
        return
    fix = "needs evaluations, but training.eval_strategy is no: set that to epoch or steps"
    if written["training.load_best_model_at_end"]:
        yield "training.load_best_model_at_end", f"{fix}, or this to false."
    if written["training.early_stopping_patience"] is not None:
        yield "training.early_stopping_patience", f"{fix}, or this to null."
    if written["training.lr_scheduler_type"] in ("reduce_lr_on_plateau", "greedy"):
        yield (
            "training.lr_scheduler_type",
            f"{written['training.lr_scheduler_type']} {fix}, or choose another.",
        )


def _best_metric(written: Written) -> Iterator[tuple[str, str]]:
    metric, figures = written["training.metric_for_best_model"], figures_of(written)
    known = [*(figures or ()), "loss"]
    if metric is not None and figures is not None and metric not in known:
        yield (
            "training.metric_for_best_model",
            f"{metric!r} is not evaluated: choose from {', '.join(known)}, or add it to evaluation.metrics."
            f"{nearest(metric, known)}",
        )


def _metric_while_training(written: Written) -> Iterator[tuple[str, str]]:
    metric, task_type = written["training.metric_for_best_model"], task_type_of(written)
    if metric is None or metric.removeprefix("eval_") == "loss":
        return
    silent = task_type.while_training({"strategy": written["compute.strategy"]}).silent
    if silent is not None:
        told = {name: value for name, value in task_type.options if name == "generate_while_training" and not value}
        why = silent or ("options.generate_while_training is false" if told else "the options of the task type say so")
        message = f"{metric!r} is not computed while training ({why.rstrip('.')}): "
        change = "set that to true, or " if told else ""
        yield "training.metric_for_best_model", f"{message}{change}set this to null, for the loss."


def _loss_of_the_kind(written: Written) -> Iterator[tuple[str, str]]:
    """The fields about the loss are for the task types whose loss goes by them."""
    task_type, fields = task_type_of(written), written.fields("training")
    for name in _LOSS_FIELDS:
        value = written[f"training.{name}"]
        if name not in task_type.loss_fields and value != fields[name].get_default():
            usual = json.dumps(fields[name].get_default()).strip('"')
            yield (
                f"training.{name}",
                f"does nothing with task {written['task']}: leave it out, or set it to {usual}.",
            )


def _loss(written: Written) -> Iterator[tuple[str, str]]:
    loss, gamma, smoothing = (written[f"training.{name}"] for name in ("loss", "focal_gamma", "label_smoothing_factor"))
    if loss not in _LOSSES and not DOTTED.fullmatch(loss):
        choices = f"choose from {', '.join(_LOSSES)}, or name a function of yours as module:function"
        yield "training.loss", f"{loss!r} is unknown: {choices}.{nearest(loss, _LOSSES)}"
        return
    if gamma is not None and loss != "focal":
        yield "training.focal_gamma", f"{gamma:g} is for `loss: focal` only; with {loss}, set it to null."
    if smoothing and loss != "cross_entropy":
        yield (
            "training.label_smoothing_factor",
            f"{smoothing:g} is for `loss: cross_entropy` only; with {loss}, set it to 0.",
        )


def _class_weights(written: Written) -> Iterator[tuple[str, str]]:
    weights, labels = written["training.class_weights"], written["data.label_names"]
    for name in weights if isinstance(weights, dict) and labels else ():
        if name not in labels:
            message = f"is no label: data.label_names has {', '.join(labels)}.{nearest(name, labels)}"
            yield f"training.class_weights.{name}", message


def _own_classes(written: Written) -> Iterator[tuple[str, str]]:
    callbacks = written["training.callbacks"]
    named = [(f"training.{field}", written[f"training.{field}"]) for field in ("collator", "trainer")]
    named += [(f"training.callbacks[{index}]", name) for index, name in enumerate(callbacks)]
    for where, name in named:
        if name is not None and not DOTTED.fullmatch(name):
            yield where, f"{name!r} names nothing of Python: write it as module:name."
    for index, name in enumerate(callbacks):
        if name in callbacks[:index]:
            yield f"training.callbacks[{index}]", f"{name!r} is listed twice."


def _scheduler_settings(written: Written) -> Iterator[tuple[str, str]]:
    needed = {
        "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
        "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
        "warmup_stable_decay": ("num_decay_steps",),
    }.get(written["training.lr_scheduler_type"], ())
    given = written["training.extra"].get("lr_scheduler_kwargs") or {}
    if needed and not any(name in given for name in needed):
        yield (
            "training.lr_scheduler_type",
            f"{written['training.lr_scheduler_type']} needs {' or '.join(needed)}: "
            f"set training.extra.lr_scheduler_kwargs.{needed[0]}.",
        )


def _extra(written: Written) -> Iterator[tuple[str, str]]:
    extra = written["training.extra"]
    known = arguments() if extra else {}
    for name, value in extra.items():
        where = f"training.extra.{name}"
        if advice := out_of_scope(name):
            yield where, advice
        elif name in written.fields("training"):
            yield where, f"has a field of its own: set training.{name}."
        elif reason := set_by_project(name):
            yield where, f"is not the recipe's to set: {reason}."
        elif name not in known:
            open_to_recipes = [field for field in known if not set_by_project(field)]
            yield where, f"no such field of TrainingArguments.{nearest(name, open_to_recipes)}"
        elif not fits(value, known[name]):
            yield (
                where,
                f"{value!r} is of the wrong type: it takes {known[name].replace(' | ', ' or ')}.",
            )


def _extra_without_effect(written: Written) -> Iterator[tuple[str, str]]:
    """Fields that transformers would take and do nothing with."""
    extra = written["training.extra"]
    for names, needed in (
        (("activation_checkpointing_kwargs",), ("activation_checkpointing", "gradient_checkpointing")),
        (("gradient_checkpointing_kwargs",), ("gradient_checkpointing", "activation_checkpointing")),
        (("dataloader_prefetch_factor", "dataloader_multiprocessing_context"), ("dataloader_num_workers",)),
    ):
        for name in names:
            if extra.get(name) is not None and not any(extra.get(other) for other in needed):
                yield f"training.extra.{name}", f"does nothing without training.extra.{needed[0]}: set that too."
    delay, strategy = extra.get("eval_delay") or 0, written["training.eval_strategy"]
    if not delay:
        return
    if strategy in ("no", False):
        yield "training.extra.eval_delay", "does nothing, for training.eval_strategy is no: set that to epoch or steps."
    last = written["training.num_train_epochs"] if strategy == "epoch" else written["training.max_steps"]
    if written["training.max_steps"] != -1 and strategy == "epoch":
        return
    if 0 < last < delay:
        yield "training.extra.eval_delay", f"{delay} is out of range: training ends after {last:g}."


def _optimizer(written: Written) -> Iterator[tuple[str, str]]:
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
            message = f"{scheduler!r} would act beside `optim: {name}`, which schedules itself: set it to constant."
            yield "training.lr_scheduler_type", message
        if 0 < (warmup := written["training.warmup_steps"]) < 1:
            message = f"{warmup:g} is out of range: `optim: {name}` takes whole steps, not a share of them."
            yield "training.warmup_steps", message


def _optimizer_args(name: str, optimizer: Optimizer, text: Any) -> Iterator[tuple[str, str]]:
    where = "training.extra.optim_args"
    if not isinstance(text, str) or not text:
        return
    if (given := optim_args(text)) is None:
        yield where, f"{text!r} is not written as name=value,name=value."
        return
    for field in given:
        if field == "weight_decay":
            yield where, "weight_decay has a field of its own: set training.weight_decay."
        elif field not in optimizer.args:
            takes = f"it takes {', '.join(optimizer.args)}" if optimizer.args else "it takes none"
            yield where, f"{field!r} does nothing with `optim: {name}`: {takes}.{nearest(field, optimizer.args)}"


def _reporters(written: Written) -> Iterator[tuple[str, str]]:
    reporters = written["training.report_to"]
    for index, name in enumerate(reporters):
        if name in reporters[:index]:
            yield f"training.report_to[{index}]", f"{name!r} is listed twice."
        elif importlib.util.find_spec(name) is None:
            message = f"{name!r} needs a package that is not installed: pip install {name}."
            yield f"training.report_to[{index}]", message


_RULES: tuple[Callable[[Written], Iterator[tuple[str, str]]], ...] = (
    _kind,
    _options,
    *DATA_RULES,
    _model_source,
    _start,
    _scratch_config,
    _template_of_scratch,
    _steps,
    _evaluation_while_training,
    _best_metric,
    _metric_while_training,
    _loss_of_the_kind,
    _loss,
    engine_name,
    _class_weights,
    _own_classes,
    _scheduler_settings,
    _extra,
    engine_has,
    *SHARING_RULES,
    *LORA_RULES,
    _extra_without_effect,
    _optimizer,
    _reporters,
    *RELEASE_RULES,
)
