"""Rules of a recipe about its task type and the model that training starts from."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from training.problems import UserError, nearest
from training.recipe.error_messages import describe
from training.recipe.field_types import ABSTAIN, VERSION_NAME, split_version_name
from training.recipe.rules.column_rules import columns_of, task_type_of
from training.recipe.rules.data_rules import revision
from training.recipe.rules.rule import MODULE_AND_NAME, Rule, WrittenRecipe
from training.recipe.tables.task_types import TASK_TYPES
from training.recipe.task_specification import specification, specification_class


def _task(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    task_type = written["task"]
    if task_type not in TASK_TYPES and not MODULE_AND_NAME.fullmatch(task_type):
        choices = f"choose from {', '.join(TASK_TYPES)}, or name your class as module:Class"
        yield "task", f"{task_type!r} is unknown: {choices}.{nearest(task_type, TASK_TYPES)}"
        return
    try:
        specification_class(task_type)
    except UserError as error:  # from the user's module
        yield "task", error.problems[0].message


def _options(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    options_class, options = specification_class(written["task"]).Options, written["options"]
    if options and not options_class.model_fields:
        yield "options", f"task {written['task']} has no options: leave {', '.join(options)} out."
        return
    try:
        options_class.model_validate(options)
        specification(written["task"], options)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            problem = describe(detail, options_class)
            yield f"options.{problem.where}", problem.message
    except UserError as error:  # from the user's task type
        yield "task", error.problems[0].message


def _model_source(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    source, path = written["model.source"], written["model.path"]
    if source != "hub":
        yield from revision(written, "model")
    if source == "scratch" and path is not None:
        yield "model.path", f"{path!r} is for `source: hub`, `folder` or `registry`; with scratch, set it to null."
    if source in _PATHS and path is None:
        yield "model.path", f"is missing: `source: {source}` needs {_PATHS[source]}."
    if source != "scratch" and written["model.config"] is not None:
        yield "model.config", f"is for `source: scratch`; a {source} model has its own, so set it to null."


_PATHS = {
    "hub": "the model's name on the Hub",
    "folder": "the folder of the model",
    "registry": "a registered version, such as support-sft@champion or support-sft/7",
}
"""What model.path names, by source."""


def _registered_version(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    if written["model.source"] == "registry" and written["model.path"] is not None:
        yield from _version_name(written, "model.path", ", or another base model with model.start_from: champion")


def _version_name(written: WrittenRecipe, where: str, instead: str = "") -> Iterator[tuple[str, str]]:
    """A field names a version, and none by an alias that the recipe's own runs move."""
    path: str = written[where]
    name, alias, version = split_version_name(path)
    if not VERSION_NAME.fullmatch(path) or not (alias or version):
        example = name or "support-sft"
        yield where, f"{path!r} names no version: write {example}@champion (an alias) or {example}/1 (a number)."
    elif name == written["release.registry"] and alias in (written["release.champion"], written["release.challenger"]):
        message = f"{path!r} is an alias that each run of this recipe may move, so the next run would train again: "
        yield where, f"{message}name a version, such as {name}/1{instead}."


def _negatives(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    if written["data.negatives"] is None:
        return
    source, path, where = written["data.negatives.source"], written["data.negatives.path"], "data.negatives.path"
    sources = task_type_of(written).negative_sources
    if not sources:
        message = f"task {written['task']} with these options takes no mined negatives: set it to null."
        yield "data.negatives", message
    elif source not in sources:
        message = f"{source!r} needs a base model of embeddings, and task {written['task']} trains none: choose from "
        yield "data.negatives.source", f"{message}{', '.join(sources)}."
    elif source == "base" and written["model.source"] == "scratch":
        message = "'base' would be random weights with model.source scratch: choose from "
        yield "data.negatives.source", f"{message}{', '.join(one for one in sources if one != source)}."
    if source != "registry":
        if path is not None:
            yield where, f"{path!r} is for `source: registry` only; with {source}, set it to null."
    elif path is None:
        yield where, f"is missing: `source: registry` needs {_PATHS['registry']}."
    else:
        yield from _version_name(written, where)
    if written["data.negatives.corpus"] and written["data.corpus"] is None:
        message = "takes documents of data.corpus, which names none: name their file there, or set this to false."
        yield "data.negatives.corpus", message
    if written["data.negatives.num_candidates"] is not None:
        where = "data.negatives.num_candidates"
        if not task_type_of(written).takes_candidates:
            message = f"is for rows with candidates, as task reranking has them, and not for {written['task']}: "
            yield where, f"{message}set it to null."
        elif written["data.label"] is not None:
            message = (
                "needs rows with lists, so that a row can have candidates: name the columns documents and labels in"
            )
            yield where, f"{message} data.columns in place of document and data.label; a list may have one document."
    if "train" in written["evaluation.splits"]:
        message = (
            "'train' has documents that were chosen because they are hard (data.negatives): choose from validation, "
        )
        yield "evaluation.splits", f"{message}test."
    least, most = (written[f"data.negatives.range_{end}"] for end in ("min", "max"))
    if most is not None and most - least < (number := written["data.negatives.num_negatives"]):
        message = (
            f"{most} leaves {max(0, most - least)} documents after range_min, fewer than num_negatives, {number}: "
        )
        yield "data.negatives.range_max", f"{message}set it to {least + number} or more, or to null."


def _rank_fusion(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    if not task_type_of(written).takes_candidates or not written["options"].get("rank_fusion"):
        return
    if written["data.negatives.num_candidates"] is None:
        message = (
            "true needs data.negatives.num_candidates: otherwise the documents of a row are in the order of the file, "
            "which often has the relevant ones first. Set data.negatives.num_candidates, or this to false."
        )
        yield "options.rank_fusion", message


def _teacher(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    if written["training.teacher"] is None:
        if (path := written["data.unlabelled"]) is not None:
            message = f"{path!r} are rows from which only a teacher's outputs teach: set training.teacher, or this to "
            yield "data.unlabelled", f"{message}null."
        return
    if written["training.teacher.unlabelled_min_confidence"] is not None:
        where = "training.teacher.unlabelled_min_confidence"
        if task_type_of(written).teacher_outputs != "classes" or written["task"] == "token-classification":
            yield where, f"is for sequence-classification; with task {written['task']}, set it to null."
        elif written["data.unlabelled"] is None:
            yield where, "does nothing without data.unlabelled: set that too, or this to null."
        elif written[where] == ABSTAIN and written["training.teacher.source"] != "registry":
            yield where, "abstain is for a version of a registry, which has the thresholds: give a number, such as 0.9."
    if task_type_of(written).teacher_outputs is None:
        known = [name for name in TASK_TYPES if specification_class(name).teacher_outputs]
        message = f"task {written['task']} learns from no teacher: set it to null. Task types that do: "
        yield "training.teacher", f"{message}{', '.join(known)}."
        return
    yield from _teacher_loss(written)
    if written["training.collator"] is not None and written["training.teacher.loss"] != "sequence":
        message = "makes batches without the outputs of training.teacher: set this or the teacher to null."
        yield "training.collator", message
    if written["training.teacher.source"] == "registry":
        yield from _version_name(written, "training.teacher.path")
    if written["training.teacher.source"] != "hub":
        yield from revision(written, "training.teacher")


def _teacher_loss(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    """Fields of the teacher that do nothing with its loss, and losses that the task type has not."""
    loss, task_type = written["training.teacher.loss"], task_type_of(written)
    if task_type.teacher_outputs == "tokens" and (path := written["data.unlabelled"]) is not None:
        message = f"{path!r} has rows without targets, and a language model learns from target tokens: set it to null."
        yield "data.unlabelled", message
    if task_type.teacher_outputs == "vectors" and (path := written["data.unlabelled"]) is not None:
        message = f"{path!r} has rows without targets, and task {written['task']} compares texts that belong together: "
        yield "data.unlabelled", f"{message}add them to data, or set it to null."
    if loss is not None and task_type.teacher_outputs != "tokens":
        message = f"is for language models, and task {written['task']} has the loss of its outputs: set it to null."
        yield "training.teacher.loss", f"{loss} {message}"
        return
    if loss == "sequence" and not task_type.teacher_writes:
        known = [name for name in TASK_TYPES if specification_class(name).teacher_writes]
        message = f"sequence needs prompts that the teacher answers, and task {written['task']} has none: choose "
        yield "training.teacher.loss", f"{message}forward_kl, or one of the task types {', '.join(known)}."
        return
    if loss == "sequence" and written["options"].get("max_new_tokens") == 0:
        message = "0 lets the teacher write nothing, and its texts are the targets: give the most tokens of an answer."
        yield "options.max_new_tokens", message
    without = {"beta"} if loss != "jsd" else set()
    without |= {"temperature", "weight", "top_k"} if loss == "sequence" else set()
    without |= {"top_k"} if task_type.teacher_outputs != "tokens" else set()
    without |= {"temperature"} if task_type.teacher_outputs == "vectors" else set()
    for name in sorted(without):
        default = written.fields("training.teacher")[name].default
        if (value := written[f"training.teacher.{name}"]) != default:
            of_task = name == "top_k" or task_type.teacher_outputs == "vectors"
            has = f"`loss: {loss}`" if loss else f"task {written['task']}" if of_task else "forward_kl"
            yield f"training.teacher.{name}", f"{value} does nothing with {has}: leave it out."


def _attention(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    implementation = written["model.attn_implementation"]
    if implementation is not None and written["compute.mixed_precision"] == "no":
        message = f"{implementation!r} computes in 16 bits: set compute.mixed_precision to bf16 or fp16, or this to"
        yield "model.attn_implementation", f"{message} null."


def _start(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    if written["model.start_from"] == "champion" and written["release.registry"] is None:
        yield "model.start_from", "'champion' needs a registry: set release.registry, or set this to base."


def _scratch_config(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    if written["model.source"] != "scratch":
        return
    config = written["model.config"] or {}
    of_images = task_type_of(written).reads_images()
    size = ("image_size", int, "224") if of_images else ("vocab_size", int, "8000")
    for name, type_, example in (("model_type", str, "vit" if of_images else "bert"), size):
        if name not in config:
            yield f"model.config.{name}", f"is missing: `source: scratch` needs it, such as {name}: {example}."
        elif type(config[name]) is not type_:
            message = f"{config[name]!r} is of the wrong type: write it such as {name}: {example}."
            yield f"model.config.{name}", message
    positions = None if of_images else config.get("max_position_embeddings")
    if type(positions) is int and written["tokens.max_length"] > positions:
        message = f"{written['tokens.max_length']} is out of range: the model has {positions} positions "
        yield "tokens.max_length", f"{message}(model.config.max_position_embeddings)."


def _template_of_scratch(written: WrittenRecipe) -> Iterator[tuple[str, str]]:
    if written["model.source"] != "scratch" or written["model.chat_template"] is not None:
        return
    if needed := [
        column.name for column in columns_of(written) if column.name in task_type_of(written).chat_template_columns
    ]:
        yield (
            "model.chat_template",
            f"is missing: a model from scratch has none, and rows with {needed[0]} need one. "
            "Name a file, such as deployments/examples/chat.jinja.",
        )


TASK_RULES: tuple[Rule, ...] = (_task, _options)
MODEL_RULES: tuple[Rule, ...] = (
    _model_source,
    _registered_version,
    _negatives,
    _rank_fusion,
    _teacher,
    _attention,
    _start,
    _scratch_config,
    _template_of_scratch,
)
