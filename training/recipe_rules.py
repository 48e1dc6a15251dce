"""Rules that span several fields of a recipe. Each looks at the fields as written, and at nothing else."""

from __future__ import annotations

import codecs
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from training.problems import Problem, nearest
from training.recipe_compute import SHARING_RULES
from training.recipe_extra import arguments, fits, out_of_scope, set_by_project
from training.recipe_optimizers import OPTIMIZERS, Optimizer, missing_package, optim_args
from training.recipe_problems import section_fields
from training.rows.checks import ALWAYS_ERRORS, LEVELS
from training.rows.filters import parse_filter
from training.rows.urls import secret_in

_SPLITS = ("train", "validation", "test")
# The usual ones, to be near to; any that Python knows may be used.
_ENCODINGS = (
    *("utf-8", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "ascii", "latin-1", "iso-8859-15"),
    *("cp1250", "cp1251", "cp1252", "mac-roman", "koi8-r"),
    *("shift-jis", "euc-jp", "euc-kr", "gbk", "gb18030", "big5"),
)
# Codecs of Python that no file is written in.
_NOT_OF_FILES = ("idna", "punycode", "raw-unicode-escape", "unicode-escape", "undefined", "utf-7")
_FILES = ("csv", "json", "parquet", "arrow")
_DOTTED = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_LOSSES = ("cross_entropy", "focal")
_METRICS = ("accuracy", "f1", "precision", "recall")


class WrongItself(LookupError):
    """A rule asked for a field that has a problem of its own."""


class Written:
    """The recipe as written, with the defaults where nothing is, and no value where it is wrong itself."""

    def __init__(self, recipe: type[BaseModel], values: Mapping[str, Any], wrong: Iterable[str]) -> None:
        self._recipe, self._values, self.wrong = recipe, values, set(wrong)

    def fields(self, section: str) -> dict[str, FieldInfo]:
        """The section's fields and their definitions."""
        return section_fields(self._recipe, section) or {}

    def __getitem__(self, name: str) -> Any:
        section, _, field = name.partition(".")
        if any(place == section or re.match(rf"{re.escape(name)}($|[.\[])", place) for place in self.wrong):
            raise WrongItself(name)
        written = self._values.get(section, {})
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


def _data_source(written: Written) -> Iterator[tuple[str, str]]:
    source = written["data.source"]
    if source != "hub":
        if written["data.config"] is not None:
            yield (
                "data.config",
                f"{written['data.config']!r} is for `source: hub` only; with {source}, set it to null.",
            )
        yield from _revision(written, "data")
    path = written["data.path"]
    if source == "python" and not _DOTTED.fullmatch(path):
        yield "data.path", f"{path!r} names no object of Python: with `source: python`, write module:name."


def _revision(written: Written, section: str) -> Iterator[tuple[str, str]]:
    # "main" is what no choice means: a Hub recipe that names it may be pointed at a folder by one override.
    if written[f"{section}.revision"] not in (None, "main"):
        source, revision = written[f"{section}.source"], written[f"{section}.revision"]
        yield f"{section}.revision", f"{revision!r} is for `source: hub` only; with {source}, set it to null."


def _columns(written: Written) -> Iterator[tuple[str, str]]:
    text = written["data.text"]
    if len(set(text)) < len(text):
        yield "data.text", f"{text} names a column twice; name one text column, or two different ones."
    if written["data.label"] in text:
        yield (
            "data.label",
            f"{written['data.label']!r} is also a text column; the label has a column of its own.",
        )


def _filter(written: Written) -> Iterator[tuple[str, str]]:
    if (text := written["data.filter"]) is not None:
        try:
            parse_filter(text)
        except ValueError as error:
            yield "data.filter", str(error)


def _label_names(written: Written) -> Iterator[tuple[str, str]]:
    names = written["data.label_names"] or []
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield "data.label_names", f"{name!r} is listed twice; each label is listed once."


def _secrets(written: Written) -> Iterator[tuple[str, str]]:
    places = [("data.path", written["data.path"])]
    for name, given in (written["data.splits"] or {}).items():
        places += [(f"data.splits.{name}", value) for value in (given if isinstance(given, list) else [given])]
    for where, value in places:
        if secret := secret_in(value):  # told without its value: problems end up in logs
            yield (
                where,
                f"holds {secret}, and recipes are stored and shown: set credentials in the environment instead.",
            )


def _splits(written: Written) -> Iterator[tuple[str, str]]:
    splits, source = written["data.splits"], written["data.source"]
    if splits is None:
        return
    hints = {name: nearest(name, _SPLITS) for name in splits if name not in _SPLITS}
    for name, hint in hints.items():
        yield f"data.splits.{name}", f"no such split: choose from {', '.join(_SPLITS)}.{hint}"
    if "train" not in splits and not any("'train'" in hint for hint in hints.values()):
        yield "data.splits.train", "is missing: training needs a train split."
    for name, value in splits.items():
        if name not in hints and isinstance(value, list) and source not in _FILES:
            yield f"data.splits.{name}", f"{value} is for files only; with `source: {source}`, name one split."


def _held_out(written: Written) -> Iterator[tuple[str, str]]:
    validation, test = written["data.validation_size"], written["data.test_size"]
    if validation + test >= 1:
        message = f"{test:g} is out of range: with validation_size {validation:g} it leaves no rows to train on"
        yield "data.test_size", f"{message}; together they must be below 1."


def _text_files(written: Written) -> Iterator[tuple[str, str]]:
    source, delimiter, encoding = written["data.source"], written["data.delimiter"], written["data.encoding"]
    if delimiter is not None and source != "csv":
        yield "data.delimiter", f"{delimiter!r} is for `source: csv` only; with {source}, set it to null."
    elif delimiter is not None and (not delimiter.isascii() or delimiter in '"\r\n\0'):
        yield "data.delimiter", f"{delimiter!r} cannot separate columns: use one ASCII character, such as ; or |."
    try:
        codec = " ".encode(encoding) and codecs.lookup(encoding).name
        if codec in _NOT_OF_FILES:
            raise LookupError(codec)
    except (LookupError, ValueError):  # no codec, or one that makes something other than bytes of text
        example = "utf-8, utf-16, latin-1, cp1252"
        message = f"{encoding!r} is no encoding of text: use one such as {example}.{nearest(encoding, _ENCODINGS)}"
        yield "data.encoding", message
        return
    if codec != "utf-8" and source not in ("csv", "json"):
        yield "data.encoding", f"{encoding!r} is for `source: csv` and `json` only; with {source}, leave it out."


def _renamed(written: Written) -> Iterator[tuple[str, str]]:
    rename, label, text = written["data.rename"], written["data.label"], written["data.text"]
    new = list(rename.values())
    for name in sorted({name for name in new if new.count(name) > 1}):
        old = " and ".join(repr(key) for key, value in rename.items() if value == name)
        yield "data.rename", f"{old} are both renamed to {name!r}: each column has a name of its own."
    used = [("data.text", text), ("data.label", [label])]
    used += [(f"data.cast.{name}", [name]) for name in written["data.cast"]]
    for where, names in used:
        for name in names:
            if name in rename and name not in new:
                yield where, f"{name!r} is renamed to {rename[name]!r} (data.rename): use that name."


def _cast(written: Written) -> Iterator[tuple[str, str]]:
    cast, label = written["data.cast"], written["data.label"]
    for name in written["data.text"]:
        if cast.get(name, "string") != "string":
            yield f"data.cast.{name}", f"{cast[name]!r} is no type for a text column: cast it to string, or not at all."
    if cast.get(label) == "float64":
        yield f"data.cast.{label}", "'float64' is no type for the label: cast it to string, int64 or bool."


def _checks(written: Written) -> Iterator[tuple[str, str]]:
    checks = written["data.checks"]
    known = list(LEVELS)
    for name in checks:
        if name in ALWAYS_ERRORS:
            yield f"data.checks.{name}", "is always an error: there would be nothing to train on or to judge by."
        elif name not in known:
            yield f"data.checks.{name}", f"no such check: choose from {', '.join(known)}.{nearest(name, known)}"


def _model_source(written: Written) -> Iterator[tuple[str, str]]:
    source, path = written["model.source"], written["model.path"]
    if source != "hub":
        yield from _revision(written, "model")
    if source == "scratch" and path is not None:
        yield "model.path", f"{path!r} is for `source: hub` or `folder`; with scratch, set it to null."
    if source != "scratch" and path is None:
        what = "the folder of the model" if source == "folder" else "the model's name on the Hub"
        yield "model.path", f"is missing: `source: {source}` needs {what}."
    if source != "scratch" and written["model.config"] is not None:
        yield "model.config", f"is for `source: scratch`; a {source} model brings its own, so set it to null."


def _scratch_config(written: Written) -> Iterator[tuple[str, str]]:
    if written["model.source"] != "scratch":
        return
    config = written["model.config"] or {}
    for name, kind, example in (("model_type", str, "bert"), ("vocab_size", int, "8000")):
        if name not in config:
            yield (
                f"model.config.{name}",
                f"is missing: `source: scratch` needs it, such as {name}: {example}.",
            )
        elif type(config[name]) is not kind:
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
    metric, figures = written["training.metric_for_best_model"], _figures(written)
    known = [*(figures or ()), "loss"]
    if metric is not None and figures is not None and metric not in known:
        yield (
            "training.metric_for_best_model",
            f"{metric!r} is not evaluated: choose from {', '.join(known)}, or add it to evaluation.metrics."
            f"{nearest(metric, known)}",
        )


def _loss(written: Written) -> Iterator[tuple[str, str]]:
    loss, gamma, smoothing = (written[f"training.{name}"] for name in ("loss", "focal_gamma", "label_smoothing_factor"))
    if loss not in _LOSSES and not _DOTTED.fullmatch(loss):
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
        if name is not None and not _DOTTED.fullmatch(name):
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


def _evaluated_splits(written: Written) -> Iterator[tuple[str, str]]:
    splits, evaluated = written["data.splits"], written["evaluation.splits"]
    # Rows are held out for validation wherever there is no such split.
    there = splits is None or {"validation", *splits, *(["test"] if written["data.test_size"] else [])}
    for index, name in enumerate(evaluated):
        if there is not True and name not in there:
            advice = "add it there, set data.test_size, or choose another"
            yield f"evaluation.splits[{index}]", f"{name!r} is not in data.splits: {advice}."
        elif name in evaluated[:index]:
            yield f"evaluation.splits[{index}]", f"{name!r} is listed twice."


def _metrics(written: Written) -> Iterator[tuple[str, str]]:
    metrics = written["evaluation.metrics"]
    for index, name in enumerate(metrics):
        where = f"evaluation.metrics[{index}]"
        if name in metrics[:index]:
            yield where, f"{name!r} is listed twice."
        elif name not in _METRICS and not _DOTTED.fullmatch(name):
            choices = f"choose from {', '.join(_METRICS)}, or name a class of yours as module:Class"
            yield where, f"{name!r} is unknown: {choices}.{nearest(name, _METRICS)}"


def _figures(written: Written) -> list[str] | None:
    """The figures that evaluation gives; None where they cannot be told: a class of the user's names its own."""
    metrics = written["evaluation.metrics"]
    return list(metrics) if set(metrics) <= set(_METRICS) else None


def _minimum(written: Written) -> Iterator[tuple[str, str]]:
    metrics = _figures(written)
    figures = [f"{split}.{metric}" for split in written["evaluation.splits"] for metric in metrics or ()]
    for name in written["release.minimum"]:
        if metrics is not None and name not in figures:
            yield (
                f"release.minimum.{name}",
                f"is not evaluated: choose from {', '.join(figures)}, or widen evaluation.",
            )


def _alias(written: Written) -> Iterator[tuple[str, str]]:
    alias = written["release.alias"]
    if alias == "latest" or re.fullmatch(r"[vV]\d+", alias):
        yield "release.alias", f"{alias!r} is kept by MLflow for versions: choose another, such as champion."


_RULES: tuple[Callable[[Written], Iterator[tuple[str, str]]], ...] = (
    _secrets,
    _data_source,
    _text_files,
    _columns,
    _filter,
    _renamed,
    _cast,
    _label_names,
    _splits,
    _held_out,
    _checks,
    _model_source,
    _scratch_config,
    _steps,
    _evaluation_while_training,
    _best_metric,
    _loss,
    _class_weights,
    _own_classes,
    _scheduler_settings,
    _extra,
    *SHARING_RULES,
    _extra_without_effect,
    _optimizer,
    _reporters,
    _evaluated_splits,
    _metrics,
    _minimum,
    _alias,
)
