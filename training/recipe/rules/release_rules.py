"""Rules of a recipe about the evaluation of a model, its gate, and its registration and publication."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from training.problems import nearest
from training.recipe.field_types import SPLITS
from training.recipe.rules.column_rules import task_type_of
from training.recipe.rules.data_rules import holds_out_test
from training.recipe.rules.rule import MODULE_AND_NAME, Rule, WrittenRecipe
from training.recipe.rules.slice_rules import LABEL, slice_of, slices_of_any_rows
from training.recipe.tables.exports import EXPORTS
from training.recipe.tables.metrics import (
    MANY_LABELS,
    METRICS,
    ONE_LABEL,
    RIGHT_OR_WRONG,
    TAGS,
    TOOL_METRICS,
    VALID_CALLS,
    WIN_RATE,
    non_numeric_label,
)
from training.recipe.tables.strategies import STRATEGIES
from training.recipe.tables.task_types import TASK_TYPES
from training.recipe.task_specification import specification_class

if TYPE_CHECKING:
    from training.recipe import Recipe
    from training.recipe.data_fields import Data

CALIBRATING = ("calibrate", "abstain", "prediction_sets")
"""Fields of release that calibrate probabilities."""
_HUB_METRIC = re.compile(r"hub:[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*@[0-9a-f]{40}")


def _evaluated_splits(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    splits, evaluated = written["data.splits"], written["evaluation.splits"]
    # Without a validation split, rows are held out for it.
    # In a mixture the rows of a split may be in other sets than the first.
    existing = (
        splits is None
        or bool(written["data.mix"])
        or {"validation", *splits, *(["test"] if holds_out_test(written) else [])}
    )
    for index, name in enumerate(evaluated):
        if existing is not True and name not in existing:
            advice = "add it there, set data.test_size, or choose another"
            yield f"evaluation.splits[{index}]", f"{name!r} is not in data.splits: {advice}."
        elif name in evaluated[:index]:
            yield f"evaluation.splits[{index}]", f"{name!r} is listed twice."


def absent_splits(evaluated: Iterable[str], source_splits: Iterable[str], data: Data) -> Iterator[tuple[str, str]]:
    """Yields the recipe field of each evaluated split without rows, with the reason, given the source's splits (of a
    mixture: those of any set)."""
    held_out = {"validation"} | ({"test"} if any(one.holds_out_test for one in data.sets) else set())
    existing = [split for split in SPLITS if split in {*source_splits} | held_out]
    for index, name in enumerate(evaluated):
        if name not in existing:
            source = repr(data.path) if data.mix is None else f"the mixture of {' and '.join(data.set_names)}"
            message = f"{name!r} has no rows: {source} has {' and '.join(existing)}. Name its rows in "
            message += f"data.splits.{name}, hold rows of train out by data.{name}_size, or leave it out."
            yield f"evaluation.splits[{index}]", message


def _splits_to_predict(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    task_type = task_type_of(written)
    for index, name in enumerate(written["evaluation.splits"]):
        if reason := task_type.train_only_reason(name):
            yield f"evaluation.splits[{index}]", f"{name!r} {reason}."


def _folds(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """The rows of a fold can be left out of train, and no model of a fold has seen them before."""
    folds, at_once = written["evaluation.folds"], written["evaluation.parallel_folds"]
    if at_once > (folds or 1):
        message = f"is more than evaluation.folds, {folds}: lower it." if folds else "has no effect without folds."
        yield "evaluation.parallel_folds", f"{at_once} {message}"
    if folds is None:
        return
    where, champion = "evaluation.folds", written["model.start_from"] == "champion"
    if written["data.mix"] is not None:
        yield where, f"{folds} needs one set of rows, and a mixture repeats rows or leaves some out: leave folds out."
    if reason := task_type_of(written).train_only_reason("train"):
        yield where, f"{folds} needs a prediction of each training row, and 'train' {reason}."
    if written["data.negatives"] is not None:
        message = f"{folds} contradicts data.negatives: models of folds would train on documents of the rows left out."
        yield where, f"{message} Leave one of the two out."
    if champion or written["training.resume_from_checkpoint"] is not None:
        field = "model.start_from: champion" if champion else "training.resume_from_checkpoint"
        message = f"{folds} contradicts {field}: training would start from a model that has seen the rows of all folds."
        yield where, f"{message} Leave one of the two out."


def _metrics(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    metrics = written["evaluation.metrics"]
    try:
        task_type, known = written["task"], task_type_of(written).metrics
    except LookupError:  # an invalid task type is reported by its own rule
        task_type, known = "", [*METRICS]
    choices = f"choose from {', '.join(known)}, or name" if known else "name"
    choices += " your class as module:Class"
    for index, name in enumerate(metrics):
        where = f"evaluation.metrics[{index}]"
        if name in metrics[:index]:
            yield where, f"{name!r} is listed twice."
        elif name.startswith("hub:"):
            if not _HUB_METRIC.fullmatch(name):
                yield where, f"{name!r} is not pinned: write hub:owner/name@COMMIT, with all 40 digits of the commit."
            elif not written["evaluation.allow_remote_code"]:
                yield where, f"{name!r} is code from the Hub: read it, then set evaluation.allow_remote_code: true."
        elif name not in known and not MODULE_AND_NAME.fullmatch(name):
            reason = f"does not fit task {task_type}" if name in METRICS else "is unknown"
            yield where, f"{name!r} {reason}: {choices}.{nearest(name, known)}"


def with_usual_metric(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the recipe's values. The task type's usual metrics are added if none is named and accuracy alone is not
    the usual one."""
    task_type, evaluation = values.get("task"), values.get("evaluation") or {}
    if str(task_type) not in TASK_TYPES or not isinstance(evaluation, Mapping) or "metrics" in evaluation:
        return values
    found = specification_class(str(task_type))
    usual = found.usual_metrics or (() if "accuracy" in found.metrics else found.metrics[:1])
    return {**values, "evaluation": {**evaluation, "metrics": [*usual]}} if usual else values


def fits_slice(figure: str, name: str) -> bool:
    """Whether the figure is meaningful on the groups of that slice. User metrics are assumed to be."""
    return name != LABEL or figure not in METRICS or METRICS[figure].within_label


def unfitting_metrics(metrics: Iterable[str], labels: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields the fields of metrics that cannot be computed with these labels, with the reason."""
    for index, name in enumerate(metrics):
        if name in METRICS and METRICS[name].numeric_labels and (message := non_numeric_label(name, labels)):
            yield f"evaluation.metrics[{index}]", message


def undefined_metrics(
    recipe: Recipe, labels: Sequence[str], present: Callable[[str], Collection[str]]
) -> Iterator[tuple[str, str]]:
    """Yields the fields that name a metric without a value on the split where it chooses the checkpoint or the model,
    with the reason. `present` returns the labels that a split has rows of."""
    training, gate, kind = recipe.training, recipe.release.gate, specification_class(recipe.task).prediction_type
    chosen = (training.metric_for_best_model or "").removeprefix("eval_")
    uses = []
    if training.eval_strategy != "no" and (training.load_best_model_at_end or training.early_stopping_patience):
        uses.append(("training.metric_for_best_model", chosen, "validation"))
    uses += [(f"release.gate.minimum.{name}", name, recipe.judged_split) for name in gate.minimum]
    uses += [(f"release.gate.maximum.{name}", name, recipe.judged_split) for name in gate.maximum]
    if recipe.release.registry is not None:
        where = "evaluation.metrics[0]" if gate.compare is None else "release.gate.compare"
        uses.append((where, recipe.compared_by, recipe.judged_split))
    for where, name, split in uses:
        need = METRICS[name].needs.get(kind or "") if name in METRICS else None
        if need is None or (need == "second" and len(labels) != 2) or not (there := present(split)):
            continue
        wanted = {"all": set(labels), "second": {*labels[1:]}, "two": set()}[need]
        if absent := sorted(wanted - set(there)):
            reason = f"no row has the label {absent[0]!r}"
        elif need == "two" and len(there) < 2:
            reason = f"all rows have the label {next(iter(there))!r}"
        else:
            continue
        effect = "chooses no checkpoint" if where.startswith("training") else "passes no gate"
        yield where, f"{name} has no value on {split} and {effect}: {reason}. Add such rows, or choose another metric."


def _fitting_metrics(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    yield from unfitting_metrics(written["evaluation.metrics"], written["data.label_names"] or ())


def figures_of(written: WrittenRecipe) -> list[str] | None:
    """Returns the names of the computed figures; None if one is a user's metric, which chooses its own names."""
    metrics = written["evaluation.metrics"]
    return list(metrics) if set(metrics) <= set(METRICS) else None


def _gate_split(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    split, evaluated = written["release.gate.split"], written["evaluation.splits"]
    if split is not None and split not in evaluated:
        yield "release.gate.split", f"{split!r} is not evaluated: choose from {', '.join(evaluated)}, or add it there."


def _gate_figures(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    figures, gate = figures_of(written), "release.gate"
    bounds = {f"{gate}.minimum": written[f"{gate}.minimum"], f"{gate}.maximum": written[f"{gate}.maximum"]}
    for field, limits in bounds.items():
        for metric, limit in limits.items():
            where, is_maximum = f"{field}.{metric}", field.endswith("maximum")
            if message := _describe_missing(metric, figures):
                yield where, message
            elif (known_metric := METRICS.get(metric)) is None:
                continue
            elif not known_metric.more_is_better and not is_maximum:
                yield where, f"less of {metric} is better: set {gate}.maximum.{metric}."
            elif known_metric.more_is_better and is_maximum:
                yield where, f"more of {metric} is better: set {gate}.minimum.{metric}."
            elif known_metric.more_is_better and known_metric.most is not None and limit > known_metric.most:
                yield where, f"{limit:g} is out of range: it must be at most {known_metric.most:g}."


def _group_floors(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    figures, slices = figures_of(written), written["evaluation.slices"]
    for key, limits in written["release.gate.floors"].items():
        place, slice_and_group = f"release.gate.floors.{key}", slice_of(key, slices)
        if slice_and_group is None:
            choices = f"choose from {', '.join(slices)} (or {slices[0]}=GROUP), or " if slices else ""
            yield place, f"names no slice: {choices}add it to evaluation.slices.{nearest(key, slices)}"
        elif not limits:
            yield place, "names no metric: write such as {accuracy: 0.6}."
        for metric, limit in limits.items():
            if message := _describe_missing(metric, figures):
                yield f"{place}.{metric}", message
            elif (known_metric := METRICS.get(metric)) is None:
                continue
            elif not known_metric.more_is_better:
                message = f"less of {metric} is better, and a floor is a minimum: choose another metric."
                yield f"{place}.{metric}", message
            elif slice_and_group and not fits_slice(metric, slice_and_group[0]):
                message = "has no meaning if all rows have one label: choose accuracy, the share of right predictions."
                yield f"{place}.{metric}", f"{metric} {message}"
            elif known_metric.most is not None and limit > known_metric.most:
                yield f"{place}.{metric}", f"{limit:g} is out of range: it must be at most {known_metric.most:g}."


def _describe_missing(metric: str, figures: list[str] | None) -> str | None:
    """Returns the message that the metric is not evaluated; None if it is, or may be."""
    if figures is None or metric in figures:
        return None
    choices = f"choose from {', '.join(figures)}, or add it to evaluation.metrics"
    return f"is not evaluated: {choices}.{nearest(metric, figures)}"


def _gate_comparison(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    name, figures = written["release.gate.compare"], figures_of(written)
    if name == WIN_RATE:
        if written["evaluation.judge"] is None:
            yield "release.gate.compare", "win_rate needs a judge: name your function in evaluation.judge."
        if margin := written["release.gate.margin"]:
            yield (
                "release.gate.margin",
                f"{margin:g} is not for win_rate, which is tested without a margin: set it to 0.",
            )
    elif name is not None and figures is not None and name not in figures:
        choices = f"choose from {', '.join(figures)}, or add it to evaluation.metrics"
        yield "release.gate.compare", f"{name!r} is not evaluated: {choices}.{nearest(name, figures)}"
    elif (name or written["evaluation.metrics"][0]) == VALID_CALLS and written["release.gate.margin"] >= 0:
        message = f"{VALID_CALLS!r} is best if the same valid call is made each time, so no first version is promoted: "
        message += f"compare {TOOL_METRICS[0]}, and set a bound for {VALID_CALLS} in release.gate.minimum."
        yield "evaluation.metrics[0]" if name is None else "release.gate.compare", message


def _right_or_wrong(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """Flips, and rows that must hold, are right or wrong. A user's task type is checked when its predictions are."""
    kind = task_type_of(written).prediction_type
    for field, kinds in (("flips", RIGHT_OR_WRONG), ("must_hold", (ONE_LABEL, MANY_LABELS, TAGS))):
        if written[f"release.gate.{field}"] is not None and kind is not None and kind not in kinds:
            types = {name: specification_class(name) for name in TASK_TYPES}
            if field == "must_hold":  # its rows are texts
                types = {name: found for name, found in types.items() if not found.reads_images()}
            fitting = ", ".join(name for name, found in types.items() if found.prediction_type in kinds)
            message = (
                f"is not for task {written['task']}, but for tasks whose rows are each right or wrong: remove it, "
            )
            yield f"release.gate.{field}", f"{message}or choose from {fitting}."


def _answers(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """A judge, and metrics of answers, need a task type that answers prompts, and answers of at least a token."""
    task_type, judge, metrics = task_type_of(written), written["evaluation.judge"], written["evaluation.metrics"]
    if judge is not None and not MODULE_AND_NAME.fullmatch(judge):
        yield "evaluation.judge", f"{judge!r} is not the name of Python code: write it as module:function."
    if judge is not None and task_type.answers != "prompts":
        answering = [name for name in TASK_TYPES if specification_class(name).answers == "prompts"]
        message = f"does nothing with task {written['task']}, whose models answer no prompts: leave it out, or choose "
        yield "evaluation.judge", f"{message}{' or '.join(answering)}."
    readers = [name for name in metrics if name in task_type.answer_metrics] + ["evaluation.judge"] * (
        judge is not None
    )
    if task_type.answer_metrics and readers and not task_type.options.max_new_tokens:  # type: ignore[attr-defined]
        yield "options.max_new_tokens", f"0 generates no answers, which {readers[0]} needs: choose at least 1."


def _aliases(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    for field, other in (("champion", "challenger"), ("challenger", "champion")):
        alias = written[f"release.{field}"]
        if alias == "latest" or re.fullmatch(r"[vV]\d+", alias):
            yield f"release.{field}", f"{alias!r} is reserved by MLflow for versions: choose another, such as {field}."
        elif field == "challenger" and alias == written[f"release.{other}"]:
            yield f"release.{field}", f"{alias!r} is the alias of the {other} too: choose another."


def _hub_checkpoints(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    if written["release.hub"] is None or (uploads := written["release.hub.checkpoints"]) == "no":
        return
    if written["release.hub.pull_request"]:
        message = "is for the model alone: checkpoints would be committed to the branch. Set release.hub.revision to a"
        yield "release.hub.pull_request", f"{message} separate branch, or release.hub.checkpoints to no."
    engine, strategy = written["training.engine"], written["compute.strategy"]
    if uploads == "every_save" and engine != "trainer":
        message = f"'every_save' needs weights that transformers can load, and checkpoints of {engine!r} are its own"
        yield "release.hub.checkpoints", f"{message}: choose checkpoint or all_checkpoints, or `engine: trainer`."
    elif uploads == "every_save" and not STRATEGIES[strategy].replicates:
        message = f"'every_save' needs whole weights, and with {strategy} each process saves its share of them"
        yield "release.hub.checkpoints", f"{message}: choose checkpoint or all_checkpoints, or `strategy: ddp`."


def _exports(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    exports = written["release.exports"]
    for index, name in enumerate(exports):
        if name in exports[:index]:
            yield f"release.exports[{index}]", f"{name!r} is listed twice."
    auto_class = task_type_of(written).auto_class
    fitting = [name for name, form in EXPORTS.items() if auto_class in form.classes]
    for index, name in enumerate(exports):
        if name in EXPORTS and name not in fitting:
            message = f"{name!r} is for models of {', '.join(EXPORTS[name].classes)}, and task {written['task']} has "
            message += f"models of {auto_class}: "
            message += f"choose from {', '.join(fitting)}." if fitting else "remove it."
            yield f"release.exports[{index}]", message
        elif name in EXPORTS and EXPORTS[name].for_known_tokenizers and written["model.source"] == "scratch":
            message = f"{name!r} is for tokenizers that llama.cpp has, and model.source: scratch makes one of its own: "
            yield f"release.exports[{index}]", f"{message}start from a base model, or leave it out."
    answers = {*task_type_of(written).answer_metrics, WIN_RATE}
    if exports and {*written["evaluation.metrics"], written["release.gate.compare"]} <= {*answers, None}:
        message = "are compared without generated answers: add a metric that needs none to evaluation.metrics."
        yield "release.exports", message


def _calibration(name: str, written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """A field of release that calibrates needs probabilities of labels, and rows that chose nothing for what it
    promises."""
    if not written[f"release.{name}"]:
        return
    task, evaluated, task_type = written["task"], written["evaluation.splits"], task_type_of(written)
    kinds = (ONE_LABEL,) if name == "prediction_sets" else (ONE_LABEL, MANY_LABELS)
    if task_type.prediction_type not in kinds:
        fitting = [one for one in TASK_TYPES if specification_class(one).prediction_type in kinds]
        message = f"does nothing with task {task}, whose predictions have no probabilities of labels: remove it"
        if task_type.prediction_type == MANY_LABELS:
            message = f"does not fit task {task}, whose rows have any number of labels: remove it"
        yield f"release.{name}", f"{message}, or choose {' or '.join(fitting)}."
    elif "validation" not in evaluated:
        yield f"release.{name}", "needs the predictions of validation: add it to evaluation.splits."
    elif name != "calibrate" and "test" not in evaluated:
        message = "needs rows that have chosen neither the checkpoint nor the temperature: set data.test_size, or"
        yield f"release.{name}", f"{message} add a test split, and add test to evaluation.splits."


RELEASE_RULES: tuple[Rule, ...] = (
    _evaluated_splits,
    _splits_to_predict,
    _folds,
    _metrics,
    _fitting_metrics,
    slices_of_any_rows,
    _gate_split,
    _gate_figures,
    _group_floors,
    _gate_comparison,
    _right_or_wrong,
    _answers,
    _aliases,
    _hub_checkpoints,
    _exports,
    *(partial(_calibration, name) for name in CALIBRATING),
)
