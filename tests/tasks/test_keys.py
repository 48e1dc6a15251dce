"""Which stages' keys hang on which field of the recipe: all fields, those that change nothing with the reason.

A new field fails the first test here: add it to FIELDS with the stages that read it, or to NOTHING.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

import pytest
from pydantic import BaseModel

from flows.pipeline import pipeline
from tasks.cache import stage as stages
from tasks.cache.code import Code, Source, code_behind
from tasks.cache.results import NumberedComparison, PinnedCommit, PinnedVersion, Verdict, Version, VersionOfTask
from tasks.cache.stage import Stage, without_number
from tasks.hub.client import Found
from tasks.jobs.job import job_of
from tasks.prediction.input_rows import Shard
from tasks.registry.model_spec import ModelSpec
from tasks.reports.stage_summaries import STAGES
from tasks.stages import resolve as resolving
from tasks.stages.load_data import load_data
from tasks.stages.predict_shard import predict_shard
from tests.made import NO_WEIGHTS
from tests.task_types import TINY
from training.evaluation.stored_calibration import Calibration
from training.recipe import Recipe, parse
from training.recipe.data_fields import MixedSet
from training.recipe.tables.exports import EXPORTS
from training.recipe.tables.metrics import MANY_LABELS, ONE_LABEL
from training.task_types import TASK_TYPES, class_of

CHAMPION = PinnedVersion(name="small", version="3", model="weights", max_length=64)


class Change(NamedTuple):
    """Another value of a field, and all stages that read the field themselves."""

    value: Any
    stages: str
    given: Mapping[str, Any] = {}
    """Other fields of the recipe, before and after."""


class Nothing(NamedTuple):
    """Another value of a field that changes no key, and why."""

    value: Any
    why: str
    given: Mapping[str, Any] = {}


def base(**more: Any) -> dict[str, Any]:
    return {
        "name": "small",
        "task": "sequence-classification",
        "data": {"source": "csv", "path": "rows", "text": ["text"], "label": "label"},
        "model": {"source": "scratch", "config": {"model_type": "bert", "vocab_size": 100}},
        "evaluation": {"splits": ["validation", "test"], "metrics": ["accuracy", "f1", "log_loss"]},
        "release": {"registry": "small"},
    } | more


def spelt(values: Mapping[str, Any], dotted: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe with these fields in place."""
    spelling = json.loads(json.dumps(values))
    for name, value in dotted.items():
        *above, last = name.split(".")
        section = spelling
        for part in above:
            section = section.setdefault(part, {})
            section = section[-1] if isinstance(section, list) else section
        section[last] = value
    return dict(spelling)


SHOWN = "it decides what is shown, and when"
PUBLISHED = {"release.hub": {"repo": "me/small", "license": "mit"}}
MUST_HOLD = {"release.gate.must_hold": {"path": "rows/train.csv"}}
EXPORTED = {"release.exports": ["onnx", "onnx-int8"]}
CALIBRATED = {"release.calibrate": True}
FOLDED = {"evaluation.folds": 2}
BY_TIME = {"by": "time", "column": "day"}
OF_HUB = {"data.source": "hub", "data.path": "me/rows"}
IN_FOLDER = {"model.source": "folder", "model.path": "me/small", "model.config": None}
SHARED = {"compute.strategy": "fsdp", "compute.num_processes": 2}
CLUSTER = {"compute.cluster": "ray", "compute.num_processes": 2}
TRANSLATION = {
    "task": "seq2seq",
    "data": {"source": "csv", "path": "rows", "columns": {"source": "en", "target": "de"}},
    "evaluation.metrics": ["chrf"],
}
CHAT = {
    "task": "sft",
    "data": {"source": "csv", "path": "rows", "columns": {"messages": "said"}},
    "evaluation.metrics": ["perplexity"],
    "model.chat_template": "template.jinja",
}
TOOL_CHAT = CHAT | {"evaluation.metrics": ["perplexity", "tool_call_accuracy"]}
PREFERENCE = {
    "task": "preference",
    "data": {"source": "csv", "path": "rows", "columns": {"prompt": "asked"}},
    "evaluation.metrics": ["accuracy"],
}
REWARD = PREFERENCE | {"task": "reward-modeling"}
RERANKING = {
    "task": "reranking",
    "data": {"source": "csv", "path": "rows", "label": "good"},
    "evaluation.metrics": ["ndcg_at_10"],
}
UNPAIRED = PREFERENCE | {"task": "kto", "data": {**PREFERENCE["data"], "label": "good"}}
SIMILARITY = {"task": "sentence-similarity", "data": {"source": "csv", "path": "rows"}, "evaluation.metrics": ["mse"]}
PAIRED = SIMILARITY | {"task": "embedding", "evaluation.metrics": ["ndcg_at_10"]}
TRIPLETS = PAIRED | {"options.loss": "triplet"}
MINED = {
    **PAIRED,
    "data": {**PAIRED["data"], "negatives": {"source": "base", "range_max": 50}},
    "model": {"source": "folder", "path": "me/small"},
}
WITH_CORPUS = {**MINED, "data": {**MINED["data"], "corpus": "others/test.csv"}}
LISTS = {"source": "csv", "path": "rows", "columns": {"documents": "documents", "labels": "labels"}}
SEARCHED: dict[str, Any] = {**RERANKING, "data": {**LISTS, "negatives": {"source": "bm25"}}}
WITH_CANDIDATES: dict[str, Any] = {**RERANKING, "data": {**LISTS, "negatives": {"source": "bm25", "num_candidates": 9}}}
FOUND = MINED | {"data": {**PAIRED["data"], "negatives": {"source": "registry", "path": "found/1"}}}
TAUGHT: dict[str, Any] = {"training.teacher": {"source": "folder", "path": "me/small"}}
UNLABELLED: dict[str, Any] = {**TAUGHT, "data.unlabelled": "others/train.csv"}
TAUGHT_BY_HUB: dict[str, Any] = {"training.teacher": {"source": "hub", "path": "me/small"}}
TAUGHT_BY_VERSION: dict[str, Any] = {"training.teacher": {"source": "registry", "path": "big/1"}}
SQUAD = {"task": "question-answering", "data": {"source": "csv", "path": "rows"}, "evaluation.metrics": ["f1"]}
IMAGES: dict[str, Any] = {
    "task": "image-classification",
    "data": {"source": "csv", "path": "rows", "label": "label"},
    "model.config": {"model_type": "vit", "image_size": 16},
}
CONTRASTIVE = SIMILARITY | {"options.loss": "contrastive"}
ANSWERED = PREFERENCE | {"evaluation.metrics": ["accuracy", "generated_length"]}
UNPAIRED_ANSWERS = UNPAIRED | {"evaluation.metrics": ["roc_auc", "generated_length"]}
TEXTS = {"data": {"source": "csv", "path": "rows", "text": ["text"]}, "evaluation.metrics": ["perplexity"]}
TAUGHT_TOKENS: dict[str, Any] = {"task": "causal-lm", **TEXTS, **TAUGHT}
JSD: dict[str, Any] = {"training.teacher": {**TAUGHT["training.teacher"], "loss": "jsd"}}
TAUGHT_TEXTS: dict[str, Any] = {**CHAT, "training.teacher": {**TAUGHT["training.teacher"], "loss": "sequence"}}

MIXTURE: dict[str, Any] = {
    "text": ["text"],
    "label": "label",
    "mix": [{"source": "csv", "path": "rows", "name": "a"}, {"source": "csv", "path": "others", "name": "b"}],
}
WEIGHTED = [{**one, "weight": 1.0} for one in MIXTURE["mix"]]

LATER = "what reports on the version compare, after its release"
OF_ITS_FILES = "teacher_outputs predict_teacher compare_teacher"
FIELDS: dict[str, Change | Nothing] = {
    "name": Nothing("other", "a name: what is made does not hang on what it is called"),
    "task": Change("mine:TaskType", "tokenize fit predict score predict_champion compare"),
    "options": Change({"prefix": "tag: "}, "tokenize predict_champion", TRANSLATION),
    "data.source": Change("json", "load_data"),
    "data.path": Change("others", "load_data"),
    "data.config": Change("sst2", "load_data", OF_HUB),
    "data.revision": Change("v2", "load_data", OF_HUB),
    "data.splits": Change({"train": "train.csv", "validation": "test.csv", "test": "validation.csv"}, "load_data"),
    "data.validation_size": Change(0.2, "load_data"),
    "data.test_size": Change(0.2, "load_data"),
    "data.split.by": Change("group", "load_data", {"data.split": BY_TIME}),
    "data.split.column": Change("sent", "load_data", {"data.split": BY_TIME}),
    "data.split.validation_from": Change("2026-05-01", "load_data", {"data.split": BY_TIME}),
    "data.split.test_from": Change("2026-05-01", "load_data", {"data.split": BY_TIME}),
    "data.split.gap": Change("7d", "load_data", {"data.split": BY_TIME}),
    "data.delimiter": Change(";", "load_data"),
    "data.quoting": Change("none", "load_data"),
    "data.header": Change(["text", "label"], "load_data"),
    "data.encoding": Change("latin-1", "load_data"),
    "data.rename": Change({"a": "b"}, "load_data"),
    "data.cast": Change({"label": "string"}, "load_data"),
    "data.filter": Change("label == 'a'", "load_data"),
    "data.limit": Change(5, "load_data"),
    "data.maxsplit": Change(1, "load_data", {"data.quoting": "none"}),
    "data.text": Change(["text", "label"], "load_data load_model", {"data.label": "other"}),
    "data.label": Change("other", "load_data"),
    "data.columns": Change({"source": "en", "target": "fr"}, "load_data", TRANSLATION),
    "data.label_separator": Change(
        ",", "load_data", {"task": "multi-label-classification", "evaluation.metrics": ["f1_micro"]}
    ),
    "data.max_file_gb": Nothing(2.0, "a limit: what it refuses is made into nothing"),
    "data.label_names": Change(["a", "b"], "load_data"),
    "data.checks": Change({"duplicates": "error"}, "load_data"),
    "data.corrections": Change("rows/train.csv", "load_data"),
    "data.corpus": Change("others/test.csv", "load_data", PAIRED),
    "data.negatives.source": Change("bm25", "mine_negatives", MINED),
    "data.negatives.path": Change("found/2", "mine_negatives", FOUND),
    "data.negatives.num_negatives": Change(5, "mine_negatives", MINED),
    "data.negatives.corpus": Change(True, "mine_negatives", WITH_CORPUS),
    "data.negatives.num_candidates": Change(9, "mine_negatives tokenize predict_champion", SEARCHED),
    "data.negatives.range_min": Change(2, "mine_negatives", MINED),
    "data.negatives.range_max": Change(30, "mine_negatives", MINED),
    "data.negatives.max_score": Change(0.9, "mine_negatives", MINED),
    "data.negatives.min_score": Change(0.1, "mine_negatives", MINED),
    "data.negatives.absolute_margin": Change(0.1, "mine_negatives", MINED),
    "data.negatives.relative_margin": Change(0.1, "mine_negatives", MINED),
    "data.unlabelled": Change("others/test.csv", "load_unlabelled", UNLABELLED),
    "data.weight_by": Change("characters", "load_data", {"data": {**MIXTURE, "mix": WEIGHTED}}),
    "data.stopping_strategy": Change("all_exhausted", "load_data", {"data": {**MIXTURE, "mix": WEIGHTED}}),
    "data.mix_seed": Change(1, "load_data", {"data": MIXTURE}),
    "data.mix.name": Change("others", "load_data", {"data": MIXTURE}),
    "data.mix.weight": Change(2.0, "load_data", {"data": {**MIXTURE, "mix": WEIGHTED}}),
    "data.mix.epochs": Change(0.5, "load_data", {"data": MIXTURE}),
    "model.source": Change("folder", "load_model", {**IN_FOLDER, "model.source": "hub"}),
    "model.path": Change("me/other", "load_model", IN_FOLDER),
    "model.revision": Change("v2", "load_model", {**IN_FOLDER, "model.source": "hub"}),
    "model.config": Change({"model_type": "bert", "vocab_size": 200}, "load_model"),
    "model.seed": Change(1, "load_model"),
    "model.chat_template": Change("another.jinja", "load_model", CHAT),
    "model.attn_implementation": Change("flash_attention_2", "fit"),
    "model.start_from": Change("champion", "load_model"),
    "tokens.max_length": Change(64, "tokenize"),
    "training.num_train_epochs": Change(4.0, "fit"),
    "training.max_steps": Change(50, "fit"),
    "training.learning_rate": Change(1e-3, "fit"),
    "training.per_device_train_batch_size": Change(8, "fit"),
    "training.per_device_eval_batch_size": Change(8, "fit predict predict_champion"),
    "training.gradient_accumulation_steps": Change(2, "fit"),
    "training.weight_decay": Change(0.1, "fit"),
    "training.warmup_steps": Change(5.0, "fit"),
    "training.lr_scheduler_type": Change("cosine", "fit"),
    "training.optim": Change("adafactor", "fit"),
    "training.max_grad_norm": Change(2.0, "fit"),
    "training.label_smoothing_factor": Change(0.1, "fit"),
    "training.use_liger_kernel": Change(True, "fit"),
    "training.seed": Change(1, "fit"),
    "training.logging_steps": Nothing(7, SHOWN),
    "training.eval_strategy": Change("no", "fit", {"training.load_best_model_at_end": False}),
    "training.eval_steps": Change(20, "fit", {"training.eval_strategy": "steps", "training.eval_steps": 10}),
    "training.metric_for_best_model": Change("f1", "fit"),
    "training.greater_is_better": Change(False, "fit"),
    "training.load_best_model_at_end": Change(False, "fit"),
    "training.resume_from_checkpoint": Change(
        "checkpoint-8", "fit", {"training.resume_from_checkpoint": "checkpoint-4"}
    ),
    "training.trust_checkpoint": Nothing(True, "a permission: the checkpoint's content counts"),
    "training.report_to": Nothing(["tensorboard"], SHOWN),
    "training.loss": Change("focal", "fit"),
    "training.focal_gamma": Change(1.0, "fit", {"training.loss": "focal"}),
    "training.class_weights": Change("balanced", "fit"),
    "training.lora.peft_type": Change("IA3", "fit", {"training.lora": {}}),
    "training.lora.settings": Change({"r": 4}, "fit", {"training.lora": {"peft_type": "VERA"}}),
    "training.lora.r": Change(4, "fit", {"training.lora": {}}),
    "training.lora.lora_alpha": Change(4, "fit", {"training.lora": {}}),
    "training.lora.lora_dropout": Change(0.1, "fit", {"training.lora": {}}),
    "training.lora.target_modules": Change("all-linear", "fit", {"training.lora": {}}),
    "training.lora.modules_to_save": Change(["head"], "fit", {"training.lora": {}}),
    "training.lora.use_rslora": Change(True, "fit", {"training.lora": {}}),
    "training.lora.use_dora": Change(True, "fit", {"training.lora": {}}),
    "training.lora.init_lora_weights": Change("pissa", "fit", {"training.lora": {}}),
    "training.lora.quantization": Change("nf4", "fit", {"training.lora": {}}),
    "training.teacher.source": Change("hub", OF_ITS_FILES, TAUGHT),
    "training.teacher.path": Change("me/other", OF_ITS_FILES, TAUGHT),
    "training.teacher.revision": Change("v2", OF_ITS_FILES, TAUGHT_BY_HUB),
    "training.teacher.temperature": Change(4.0, "fit", TAUGHT),
    "training.teacher.weight": Change(0.9, "fit", TAUGHT),
    "training.teacher.unlabelled_min_confidence": Change(0.9, "fit", UNLABELLED),
    "training.teacher.loss": Change("jsd", "fit", TAUGHT_TOKENS),
    "training.teacher.beta": Change(0.2, "fit", TAUGHT_TOKENS | JSD),
    "training.teacher.top_k": Change(9, "teacher_outputs", TAUGHT_TOKENS),
    "training.engine": Change("accelerate", "fit"),
    "training.augment.RandomResizedCrop.scale": Change(
        [0.5, 1.0], "fit", IMAGES | {"training.augment": {"RandomResizedCrop": {}}}
    ),
    "training.augment.RandomResizedCrop.ratio": Change(
        [0.5, 2.0], "fit", IMAGES | {"training.augment": {"RandomResizedCrop": {}}}
    ),
    "training.augment.RandomCrop.padding": Change(
        3, "fit", IMAGES | {"training.augment": {"RandomCrop": {"padding": 2}}}
    ),
    "training.augment.RandomCrop.padding_mode": Change(
        "edge", "fit", IMAGES | {"training.augment": {"RandomCrop": {"padding": 2}}}
    ),
    "training.augment.RandomHorizontalFlip.p": Change(
        0.1, "fit", IMAGES | {"training.augment": {"RandomHorizontalFlip": {}}}
    ),
    "training.augment.RandomVerticalFlip.p": Change(
        0.1, "fit", IMAGES | {"training.augment": {"RandomVerticalFlip": {}}}
    ),
    "training.augment.RandomRotation.degrees": Change(
        9.0, "fit", IMAGES | {"training.augment": {"RandomRotation": {"degrees": 5.0}}}
    ),
    "training.augment.RandAugment.num_ops": Change(3, "fit", IMAGES | {"training.augment": {"RandAugment": {}}}),
    "training.augment.RandAugment.magnitude": Change(3, "fit", IMAGES | {"training.augment": {"RandAugment": {}}}),
    "training.augment.ColorJitter.brightness": Change(
        0.2, "fit", IMAGES | {"training.augment": {"ColorJitter": {"hue": 0.1}}}
    ),
    "training.augment.ColorJitter.contrast": Change(
        0.2, "fit", IMAGES | {"training.augment": {"ColorJitter": {"hue": 0.1}}}
    ),
    "training.augment.ColorJitter.saturation": Change(
        0.2, "fit", IMAGES | {"training.augment": {"ColorJitter": {"hue": 0.1}}}
    ),
    "training.augment.ColorJitter.hue": Change(
        0.2, "fit", IMAGES | {"training.augment": {"ColorJitter": {"hue": 0.1}}}
    ),
    "training.augment.RandomErasing.p": Change(0.1, "fit", IMAGES | {"training.augment": {"RandomErasing": {}}}),
    "training.augment.RandomErasing.scale": Change(
        [0.1, 0.2], "fit", IMAGES | {"training.augment": {"RandomErasing": {}}}
    ),
    "training.augment.RandomErasing.ratio": Change(
        [0.5, 2.0], "fit", IMAGES | {"training.augment": {"RandomErasing": {}}}
    ),
    "training.augment.RandomErasing.value": Change(9, "fit", IMAGES | {"training.augment": {"RandomErasing": {}}}),
    "training.collator": Change("mine:rows", "fit"),
    "training.callbacks": Change(["mine:TaskType"], "fit"),
    "training.trainer": Change("mine:TaskType", "fit"),
    "training.inexact_resume": Nothing(True, "a permission: it says what a killed training may go on from"),
    "training.early_stopping_patience": Change(2, "fit"),
    "training.early_stopping_threshold": Change(0.1, "fit", {"training.early_stopping_patience": 2}),
    "training.checkpoint_interval_s": Nothing(60.0, "checkpoints are not learnt from"),
    "training.extra": Change({"adam_beta1": 0.8}, "fit"),
    "compute.strategy": Change("fsdp", "fit", {"compute.num_processes": 2}),
    "compute.offload": Change("all", "fit", SHARED),
    "compute.fsdp_reshard_after_forward": Change(False, "fit", SHARED),
    "compute.fsdp_wrap": Change(["BertLayer"], "fit", SHARED),
    "compute.deepspeed": Change(
        {"zero_optimization": {"overlap_comm": False}},
        "fit",
        {"compute.strategy": "deepspeed-zero2", "compute.num_processes": 2},
    ),
    "compute.accelerate": Nothing(
        "accelerate.yaml", "its fields become those of the recipe, which count", {"compute.num_processes": 1}
    ),
    "compute.num_processes": Change(2, "fit"),
    "compute.num_machines": Change(2, "fit", CLUSTER),
    "compute.cluster": Nothing("ray", "a place: where training runs"),
    "compute.cluster_address": Nothing("b:2", "a place: where the cluster is", CLUSTER),
    "compute.mixed_precision": Change("bf16", "fit predict predict_champion", {"compute.mixed_precision": "no"}),
    "compute.stall_timeout_s": Nothing(900.0, "how long a silent job is waited for"),
    "evaluation.splits": Change(["test"], "predict score"),
    "evaluation.metrics": Change(["accuracy", "f1"], "score"),
    "evaluation.slices": Change(["label"], "score"),
    "evaluation.folds": Change(3, "assign_folds fit_fold_3 predict_fold_3 out_of_fold", FOLDED),
    "evaluation.parallel_folds": Nothing(2, "where trainings run, and when", FOLDED),
    "evaluation.judge": Change("mine:judge", "compare", ANSWERED),
    "evaluation.allow_remote_code": Nothing(True, "a permission: a metric of the Hub counts by its commit"),
    "release.registry": Change("other", "find_champion register"),
    "release.gate.split": Change("validation", "predict_champion compare gate"),
    "release.gate.minimum": Change({"accuracy": 0.5}, "gate"),
    "release.gate.maximum": Change({"log_loss": 0.5}, "gate"),
    "release.gate.floors": Change({"label": {"accuracy": 0.5}}, "score gate", {"evaluation.slices": ["label"]}),
    "release.gate.compare": Change("f1", "compare gate"),
    "release.gate.margin": Change(0.1, "compare gate"),
    "release.gate.confidence": Change(0.9, "compare gate"),
    "release.gate.control": Change("all", "count_comparison compare gate"),
    "release.gate.min_rows": Change(50, "gate"),
    "release.gate.flips.max_share": Change(0.02, "compare gate", {"release.gate.flips.max_share": 0.01}),
    "release.gate.must_hold.path": Change("others/train.csv", "load_must_hold gate", MUST_HOLD),
    "release.gate.must_hold.reason": Change("why", "load_must_hold must_hold gate", MUST_HOLD),
    "release.gate.must_hold.min_share": Change(0.9, "gate", MUST_HOLD),
    "release.gate.baseline": Change(False, "gate"),
    "release.hub.repo": Change("me/other", "publish", PUBLISHED),
    "release.hub.license": Change("apache-2.0", "publish", PUBLISHED),
    "release.hub.private": Change(False, "publish", PUBLISHED),
    "release.hub.revision": Change("next", "publish", PUBLISHED),
    "release.hub.pull_request": Change(True, "publish", PUBLISHED),
    "release.hub.tags": Change(["small"], "publish", PUBLISHED),
    "release.hub.checkpoints": Change("checkpoint", "publish", PUBLISHED),
    "release.exports": Change(["onnx"], "export compare_exports", EXPORTED),
    "release.export_margin": Change(0.02, "compare_exports", EXPORTED),
    "release.calibrate": Change(True, "calibrate register"),
    "release.abstain.max_error": Change(0.05, "calibrate", {"release.abstain": {"max_error": 0.02}}),
    "release.abstain.confidence": Change(0.9, "calibrate", {"release.abstain": {"max_error": 0.02}}),
    "release.prediction_sets": Change(0.9, "calibrate", {"release.prediction_sets": 0.95}),
    "release.retrain.max_unreachable": Nothing(5, "when a nightly job fails that asks a Hub that is away"),
    "release.drift.cohens_w": Nothing(0.2, LATER),
    "release.drift.distance": Nothing(0.2, LATER),
    "release.drift.auc": Nothing(0.6, LATER),
    "release.drift.confidence": Nothing(0.9, LATER),
    "release.drift.min_rows": Nothing(50, LATER),
    "release.drift.max_rows": Nothing(500, LATER),
    "release.champion": Change("best", "find_champion promote"),
    "release.challenger": Change("next", "promote"),
}
"""Every field, in the order of the recipe."""


def fields(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """The dotted names of all fields, section by section."""
    for name, field in model.model_fields.items():
        section = next(sections(field.annotation), None)
        yield from fields(section, f"{above}{name}.") if section else [f"{above}{name}"]


def sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from sections(inner)


def of_last_set(field: str, change: Change | Nothing) -> Change | Nothing:
    """The change of a field of `data` as that of the last set of a mixture."""
    values = spelt(base(), change.given)
    shared = {name: value for name, value in values["data"].items() if name not in ("source", "path")}
    both = {"source": values["data"]["source"], "path": values["data"]["path"]}
    sections = {name: value for name, value in shared.items() if isinstance(value, Mapping)}
    mix = [{**both, "name": "a"}, {**both, "name": "b", **sections}]
    given = {name: value for name, value in change.given.items() if name.partition(".")[0] != "data"}
    value = ["words"] if field == "text" else change.value  # all sets have as many texts
    changed = change._replace(value=value, given={**given, "data": {**shared, "mix": mix}})
    return changed._replace(stages="load_data") if isinstance(changed, Change) else changed


FIELDS |= {
    f"data.mix.{name}": of_last_set(name, FIELDS[f"data.{name}"])
    for name in fields(MixedSet)
    if f"data.{name}" in FIELDS
}

ONLY_FOR_PEOPLE = "it says how the model answers to a person, and no stage has it write"
WRITES = {"num_beams": 2, "max_new_tokens": 8, "min_new_tokens": 4, "length_penalty": 2.0, "no_repeat_ngram_size": 2}
BEAMS = {"options.num_beams": 2}
OPTIONS: dict[str, dict[str, Change | Nothing]] = {
    "sequence-classification": {
        "contrastive": Change(True, "fit"),
        "temperature": Change(0.5, "fit", {"options.contrastive": True}),
    },
    "multi-label-classification": {},
    "regression": {},
    "token-classification": {},
    "causal-lm": {
        **{name: Nothing(value, ONLY_FOR_PEOPLE, {**TEXTS, **BEAMS}) for name, value in WRITES.items()},
        "packing": Change(False, "tokenize fit predict_champion", TEXTS),
        "append_eos": Change(False, "tokenize predict_champion", TEXTS),
    },
    "masked-lm": {
        "mlm_probability": Change(0.3, "tokenize fit predict score predict_champion compare", TEXTS),
        "whole_words": Change(True, "tokenize fit predict score predict_champion compare", TEXTS),
    },
    "span-corruption": {
        "noise_density": Change(0.3, "tokenize fit predict score predict_champion compare", TEXTS),
        "mean_noise_span_length": Change(4.0, "tokenize fit predict score predict_champion compare", TEXTS),
    },
    "seq2seq": {
        **{name: Change(value, "predict predict_champion", {**TRANSLATION, **BEAMS}) for name, value in WRITES.items()},
        "prefix": Change("tag: ", "tokenize predict_champion", TRANSLATION),
        "max_target_length": Change(64, "tokenize predict_champion", TRANSLATION),
        "generate_while_training": Change(False, "fit", {**TRANSLATION, "training.callbacks": ["mine:rows"]}),
    },
    "sft": {
        **{name: Change(value, "predict predict_champion", {**TOOL_CHAT, **BEAMS}) for name, value in WRITES.items()},
        "answered_prompts": Change(8, "predict predict_champion", TOOL_CHAT),
        "packing": Change(False, "tokenize fit predict_champion", CHAT),
        "append_eos": Change(False, "tokenize predict_champion", CHAT),
    },
    "preference": {
        **{name: Change(value, "predict predict_champion", {**ANSWERED, **BEAMS}) for name, value in WRITES.items()},
        "answered_prompts": Change(8, "predict predict_champion", ANSWERED),
        "append_eos": Change(False, "tokenize predict_champion", PREFERENCE),
        "loss": Change("ipo", "fit predict score predict_champion compare", PREFERENCE),
        "beta": Change(0.5, "fit score compare", PREFERENCE),
        "label_smoothing": Change(0.2, "fit", {**PREFERENCE, "options.loss": "robust", "options.label_smoothing": 0.1}),
        "disable_dropout": Change(False, "fit", PREFERENCE),
        "simpo_gamma": Change(1.0, "fit", {**PREFERENCE, "options.loss": "simpo"}),
    },
    "kto": {
        **{
            name: Change(value, "predict predict_champion", {**UNPAIRED_ANSWERS, **BEAMS})
            for name, value in WRITES.items()
        },
        "answered_prompts": Change(8, "predict predict_champion", UNPAIRED_ANSWERS),
        "append_eos": Change(False, "tokenize predict_champion", UNPAIRED),
        "beta": Change(0.5, "fit score compare", UNPAIRED),
        "desirable_weight": Change(1.3, "fit", UNPAIRED),
        "undesirable_weight": Change(1.3, "fit", UNPAIRED),
        "disable_dropout": Change(False, "fit", UNPAIRED),
    },
    "embedding": {
        "loss": Change("triplet", "load_data load_model fit", PAIRED),
        "scale": Change(10.0, "fit", PAIRED),
        "symmetric": Change(True, "fit", PAIRED),
        "margin": Change(0.4, "fit", TRIPLETS),
        "distance_metric": Change("cosine", "fit", TRIPLETS),
        "matryoshka_dims": Change([16], "fit", PAIRED),
        "matryoshka_weights": Change([2.0], "fit", PAIRED | {"options.matryoshka_dims": [16]}),
        "pooling": Change("cls", "fit", PAIRED),
        "normalize": Change(True, "fit", PAIRED),
        "prompts": Change({"anchor": "a: "}, "tokenize fit predict_champion", PAIRED),
        "predicted_prompt": Nothing("positive", "of rows to predict", PAIRED),
    },
    "sentence-similarity": {
        "loss": Change("contrastive", "fit", SIMILARITY),
        "scale": Change(10.0, "fit", SIMILARITY),
        "margin": Change(0.4, "fit", CONTRASTIVE),
        "distance_metric": Change("euclidean", "fit", CONTRASTIVE),
        "matryoshka_dims": Change([16], "fit", SIMILARITY),
        "matryoshka_weights": Change([2.0], "fit", SIMILARITY | {"options.matryoshka_dims": [16]}),
        "pooling": Change("cls", "fit", SIMILARITY),
        "normalize": Change(True, "fit", SIMILARITY),
        "prompts": Change({"sentence1": "a: "}, "tokenize fit predict_champion", SIMILARITY),
        "predicted_prompt": Nothing("sentence1", "of rows to predict", SIMILARITY),
    },
    "reranking": {
        "loss": Change("mse", "load_data tokenize fit predict_champion", RERANKING),
        "pos_weight": Change(2.0, "fit", RERANKING),
        "rank_fusion": Change(True, "fit", WITH_CANDIDATES),
    },
    "multiple-choice": {},
    "question-answering": {
        "stride": Change(8, "tokenize predict_champion", SQUAD),
        "max_answer_tokens": Change(8, "predict predict_champion", SQUAD),
        "no_answer": Change(True, "load_data tokenize predict score predict_champion compare", SQUAD),
        "no_answer_threshold": Change(1.0, "predict predict_champion", {**SQUAD, "options.no_answer": True}),
    },
    "reward-modeling": {
        "append_eos": Change(False, "tokenize predict_champion", REWARD),
        "center_rewards_coefficient": Change(0.01, "fit", REWARD),
        "disable_dropout": Change(False, "fit", REWARD),
    },
}
"""The options of each task type."""


class Parts(dict[str, str]):
    """The digests of an artifact that has every file; of one that is edited, or of all (an empty name), other ones."""

    def __init__(self, stage: str, edited: str | None) -> None:
        self._stage, self._edited = stage, edited

    def __contains__(self, name: object) -> bool:
        return True

    def __getitem__(self, name: str) -> str:
        return f"{self._stage}/{name}{' edited' if self._edited in ('', name) else ''}"

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]


class Keys:
    """A walk that only computes keys. All artifacts are the same ones, so a key changes only by what its stage reads.

    Args:
        edited: what a stage made otherwise, such as `fit` or `tokenize/test.arrow`.
    """

    executes = False

    def __init__(self, edited: str = "") -> None:
        self.keys: dict[str, str] = {}
        self._stage, _, self._part = edited.partition("/")

    def __call__(self, stage: Stage[Any], recipe: Recipe, *inputs: Any) -> Any:
        if stage.name == "resolve":
            return resolving.pin(recipe)
        self.keys[stage.name] = stage.key(stage.flat_inputs(recipe, *inputs)[0])
        edited = stage.name == self._stage
        digest = f"{stage.name} edited" if edited else stage.name
        if stage.cached:
            parts = Parts(stage.name, self._part if edited else None)
            folder = Path(stage.name if self._part == "" or not edited else f"{stage.name} {self._part}").absolute()
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "labels.json").write_text(json.dumps([parts["labels.json"]]))
            return SimpleNamespace(
                stage=stage.name, digest=digest, parts=parts, path=folder, result=SimpleNamespace(vocab_size=9)
            )
        made = {
            "count_comparison": NumberedComparison(comparison=2 if edited else 1, confidence=0.95),
            "find_champion": CHAMPION.model_copy(update={"model": digest}),
            "gate": Verdict(decision="reject" if edited else "promote", reason=""),
            "register": Version(name="small", version=digest),
        }
        return made.get(stage.name)

    def transaction(self) -> Any:
        return nullcontext()


def keys(values: Mapping[str, Any], edited: str = "") -> dict[str, str]:
    walk = Keys(edited)
    pipeline(walk, parse(values))
    return walk.keys


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def find_retriever(recipe: Recipe) -> VersionOfTask:
    assert recipe.data.negatives is not None
    named = str(recipe.data.negatives.path)
    return VersionOfTask(name="found", version=named[-1], model=named, max_length=64, task="embedding")


def find_teacher(recipe: Recipe) -> VersionOfTask:
    return VersionOfTask(name="big", version="1", model="weights", max_length=64, task=recipe.task, load_data="theirs")


@pytest.fixture(autouse=True)
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """A working directory with what recipes name; no network, GPU or package that is not there for all."""
    home.mkdir(mode=0o700)
    monkeypatch.chdir(tmp_path)
    for name in ("rows", "others"):
        (tmp_path / name).mkdir()
        for split in ("train", "validation", "test"):
            (tmp_path / name / f"{split}.csv").write_text(f"text,label\n{name},{split}\n")
            (tmp_path / name / f"{split}.json").write_text(f"text,label\n{name},{split}\n")
    for name in ("me/small", "me/other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps({"of": name}))
        (tmp_path / name / "tokenizer.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(NO_WEIGHTS)
    for name in ("template", "another"):
        (tmp_path / f"{name}.jinja").write_text(
            f"{name} {{% for message in messages %}}{{{{ message.content }}}}{{% endfor %}}"
        )
    for name in ("checkpoint-4", "checkpoint-8"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(name)
    (tmp_path / "accelerate.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 1\n"
    )
    (tmp_path / "mine.py").write_text(
        "from training.task_types.sequence_classification import SequenceClassification\n"
        "class TaskType(SequenceClassification): ...\n"
        "def rows(split): ...\n"
        "def judge(prompt, first, second): ...\n"
    )

    def look_up(task: str, path: str, revision: str | None, history: object) -> Found:
        name = f"{path}@{revision or 'main'}"
        return Found(PinnedCommit(name=name, commit=hashlib.sha1(name.encode()).hexdigest()))

    monkeypatch.setattr(resolving, "look_up", look_up)
    monkeypatch.setattr(resolving, "visible_gpus", lambda: [])
    monkeypatch.setattr("tasks.jobs.engines.RayEngine.find_package_problems", lambda engine: [])
    monkeypatch.setattr(resolving, "find_problems_here", lambda *given: [])
    monkeypatch.setattr(resolving, "find_retriever", find_retriever)
    monkeypatch.setattr(resolving, "find_teacher", find_teacher)
    rows_of_teacher = SimpleNamespace(path=tmp_path, parts=Parts("theirs", None))
    for module in ("tasks.stages.resolve", "tasks.stages.teacher_rows"):
        monkeypatch.setattr(f"{module}.find_training_rows", lambda version: rows_of_teacher)
    monkeypatch.setattr(resolving, "find_start", lambda *given: (CHAMPION, ""))
    monkeypatch.setattr("flows.pipeline.require_labels", lambda *given: None)  # the teachers name none
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "tensorboard" or there(name))
    monkeypatch.setattr("tasks.stages.tokenize._in_process", lambda model: True)
    monkeypatch.setattr("tasks.stages.fit.signing_key", lambda: tmp_path / "key")
    # The roots stand for all that they import: what that is, other tests tell, and it takes its time.
    monkeypatch.setattr(
        stages, "code_behind", lambda roots, outside: Code({root: Source(Path(root), "") for root in roots}, ())
    )
    monkeypatch.setattr(stages, "library_versions", lambda names: dict.fromkeys(names, "1"))


def stages_that_read(field: str, change: Change | Nothing, given: Mapping[str, Any]) -> set[str]:
    before = spelt(base(), given)
    return changed(keys(before), keys(spelt(before, {field: change.value})))


def test_every_field_and_every_option_is_listed() -> None:
    assert {*FIELDS} == {*fields(Recipe)}
    assert {task: {*OPTIONS.get(task, ())} for task in TASK_TYPES} == {
        task: {*class_of(task).Options.model_fields} for task in TASK_TYPES
    }


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_changes_the_keys_of_the_stages_that_read_it(field: str) -> None:
    change = FIELDS[field]
    assert stages_that_read(field, change, change.given) == stages_of(change)


@pytest.mark.parametrize(("task", "option"), [(task, option) for task in OPTIONS for option in OPTIONS[task]])
def test_an_option_changes_the_keys_of_the_stages_that_read_it(task: str, option: str) -> None:
    change = OPTIONS[task][option]
    given = {
        name: value for name, value in change.given.items() if (name, value) != (f"options.{option}", change.value)
    }
    assert stages_that_read(f"options.{option}", change, given | {"task": task}) == stages_of(change)


OF_TEACHER = {
    "load_data/train.arrow": "tokenize teacher_outputs",
    "load_data/validation.arrow": "tokenize",
    "load_data/labels.json": "teacher_outputs fit",
    "load_model": "tokenize fit",
    "tokenize/train.arrow": "fit",
    "teacher_outputs": "fit",
}


@pytest.mark.parametrize("edited", OF_TEACHER)
def test_a_teacher_reads_the_training_rows_and_nothing_of_the_model_that_learns(edited: str) -> None:
    values = spelt(base(), {**TAUGHT, "model": {"source": "folder", "path": "me/other"}})
    found = changed(keys(values), keys(values, edited if "/" in edited else f"{edited}/"))
    assert found & {"tokenize", "teacher_outputs", "fit"} == set(OF_TEACHER[edited].split())


OF_UNLABELLED = {
    "load_data/validation.arrow": "tokenize load_unlabelled",
    "load_unlabelled/train.arrow": "tokenize_unlabelled teacher_outputs",
    "tokenize_unlabelled/train.arrow": "fit",
    "teacher_outputs/unlabelled.arrow": "fit",
}


@pytest.mark.parametrize("edited", OF_UNLABELLED)
def test_rows_without_labels_are_trained_on_and_nothing_else(edited: str) -> None:
    values = spelt(base(), UNLABELLED)
    found = changed(keys(values), keys(values, edited)) - {"predict", "score"}
    assert found & {*keys(values)} >= {*OF_UNLABELLED[edited].split()}
    assert "gate" not in found and "load_data" not in found


OF_TEACHER_OF_TOKENS = {
    "load_data/train.arrow": "tokenize",
    "load_model/tokenizer": "tokenize teacher_outputs fit",
    "load_model/model": "fit",
    "tokenize/train.arrow": "teacher_outputs fit",
    "tokenize/validation.arrow": "fit",
    "teacher_outputs": "fit",
}


@pytest.mark.parametrize("edited", OF_TEACHER_OF_TOKENS)
def test_a_teacher_of_tokens_reads_those_of_the_training_rows(edited: str) -> None:
    values = spelt(base(), {**TAUGHT_TOKENS, "model": {"source": "folder", "path": "me/other"}})
    found = changed(keys(values), keys(values, edited if "/" in edited else f"{edited}/"))
    assert found & {"tokenize", "teacher_outputs", "fit"} == set(OF_TEACHER_OF_TOKENS[edited].split())
    temperature = {"training.teacher.temperature": 3.0}
    assert changed(keys(values), keys(spelt(values, temperature))) >= {"teacher_outputs", "fit"}
    shared = {"training.seed": 5, "training.teacher.loss": "reverse_kl", "training.teacher.weight": 1.0}
    assert "teacher_outputs" not in changed(keys(values), keys(spelt(values, shared)))


def test_targets_that_a_teacher_writes_become_tokens_and_training_knows_no_teacher() -> None:
    values = spelt(base(), TAUGHT_TEXTS)
    of_rows = {"tokenize", "teacher_outputs", "fit"}
    for edited, expected in {
        "load_data/train.arrow": {"teacher_outputs"},
        "load_data/validation.arrow": {"tokenize"},
        "teacher_outputs/train.arrow": {"tokenize"},
        "tokenize/train.arrow": {"fit"},
    }.items():
        assert changed(keys(values), keys(values, edited)) & of_rows == expected
    assert changed(keys(values), keys(spelt(values, {"options.max_new_tokens": 8}))) & of_rows == {"teacher_outputs"}
    untaught = keys(spelt(base(), CHAT))
    assert keys(values)["fit"] == untaught["fit"], "but for the tokens, which stand for one artifact here"


def test_all_students_and_the_trainings_of_folds_share_the_outputs_of_a_teacher() -> None:
    values = spelt(base(), {**TAUGHT, **FOLDED})
    changes: list[dict[str, Any]] = [
        {"training.seed": 5},
        {"training.per_device_eval_batch_size": 8},
        {"training.teacher.temperature": 9.0},
        {"model.seed": 3},
        {"data.validation_size": 0.1},
    ]
    (_,) = {keys(spelt(values, change))["teacher_outputs"] for change in changes}
    assert {"fit", "fit_fold_1", "fit_fold_2"} <= changed(keys(values), keys(values, "teacher_outputs/"))
    assert "teacher_outputs" not in keys(base())


def test_options_of_answers_change_no_key_of_sft_without_metrics_of_answers() -> None:
    options = {**WRITES, "answered_prompts": 8}
    for option, value in options.items():
        assert not stages_that_read(f"options.{option}", Change(value, "", {}), {**CHAT, **BEAMS}), option


def stages_of(change: Change | Nothing) -> set[str]:
    return set(change.stages.split()) if isinstance(change, Change) else set()


def test_a_recipe_that_calibrates_nothing_has_the_same_keys_as_one_that_says_so() -> None:
    off = {"release.calibrate": False, "release.abstain": None, "release.prediction_sets": None}
    assert keys(base()) == keys(spelt(base(), off))
    assert "calibrate" not in keys(base())
    assert changed(keys(base()), keys(spelt(base(), CALIBRATED))) == {"calibrate", "register"}


def test_only_a_mixture_that_is_weighted_by_tokens_is_made_again_for_another_tokenizer() -> None:
    weighted = spelt(base(), {**IN_FOLDER, "data": {**MIXTURE, "mix": WEIGHTED}})
    for unit, reading in (("rows", set()), ("characters", set()), ("tokens", {"load_data"})):
        values = spelt(weighted, {"data.weight_by": unit})
        again = changed(keys(values), keys(values, "load_model/tokenizer"))
        assert again - {"tokenize", "fit"} == reading, unit
        assert changed(keys(values), keys(values, "load_model/model")) == {"fit"}, unit
        assert [*keys(values)][:2] == (["load_model", "load_data"] if reading else ["load_data", "load_model"])
    lock = resolving.pin(parse(weighted))
    assert not [name for name in load_data.flat_inputs(parse(weighted), lock)[0] if "tokenizer" in name]


# What is made otherwise, and the stages that read it.
ARTIFACTS = {
    "load_data/train.arrow": "load_model tokenize score publish",
    "load_data/validation.arrow": "tokenize score publish",
    "load_data/test.arrow": "tokenize score predict_champion count_comparison compare compare_exports publish",
    "load_data/labels.json": "fit score calibrate predict_champion compare compare_exports publish",
    "load_data/test.slices.arrow": "score publish",
    "load_data/test.groups.arrow": "score calibrate count_comparison compare compare_exports publish",
    "load_model": "tokenize fit",
    "tokenize/train.arrow": "fit score",
    "tokenize/validation.arrow": "fit predict score",
    "tokenize/test.arrow": "predict score compare_exports",
    "fit/model": "predict score find_champion count_comparison export compare_exports register publish",
    "predict/test.parquet": "score calibrate count_comparison compare compare_exports publish",
    "predict/validation.parquet": "score calibrate publish",
    "score": "find_champion gate publish",
    "calibrate": "register publish",
    "find_champion": "predict_champion",
    "predict_champion": "count_comparison compare",
    "count_comparison": "compare",
    "compare": "gate",
    "gate": "export compare_exports register publish promote",
    "export": "compare_exports register publish",
    "compare_exports": "register publish",
    "register": "promote",
}


@pytest.mark.parametrize("edited", ARTIFACTS)
def test_the_parts_that_a_stage_reads_of_another_are_in_its_key(edited: str) -> None:
    all_of_them = {**PUBLISHED, **EXPORTED, **CALIBRATED, "release.gate.control": "all"}
    values = spelt(base(), {**all_of_them, "evaluation.slices": ["genre"]})
    assert changed(keys(values), keys(values, edited)) == set(ARTIFACTS[edited].split())


OF_MUST_HOLD = {
    "load_data/labels.json": "load_must_hold",
    "fit/model": "predict_must_hold",
    "load_must_hold/test.arrow": "predict_must_hold must_hold",
    "predict_must_hold": "must_hold",
    "must_hold": "gate",
}


@pytest.mark.parametrize("edited", OF_MUST_HOLD)
def test_rows_that_must_hold_are_read_by_stages_of_their_own(edited: str) -> None:
    values = spelt(base(), MUST_HOLD)
    names = {"load_must_hold", "predict_must_hold", "must_hold", "gate"}
    assert changed(keys(values), keys(values, edited)) & names == set(OF_MUST_HOLD[edited].split())
    assert not names - {"gate"} & keys(base()).keys()


class UndividedJobs(Keys):
    """A walk that lists the stages whose program can divide its batches, and whose job would not let it."""

    found: tuple[str, ...] = ()

    def __call__(self, stage: Stage[Any], recipe: Recipe, *inputs: Any) -> Any:
        if stage.cached:
            job = job_of(stage, recipe, *inputs)
            self.found += (stage.name,) * (hasattr(job.settings, "micro_batch_divisor") and job.batches is None)
        return super().__call__(stage, recipe, *inputs)


@pytest.mark.parametrize("given", [{**MUST_HOLD, **FOLDED}, TAUGHT, UNLABELLED])
def test_every_program_that_can_divide_its_batches_is_let_to_if_memory_runs_out(given: dict[str, Any]) -> None:
    walk = UndividedJobs()
    pipeline(walk, parse(spelt(base(), given)))
    assert walk.found == ()


OF_FOLDS = {
    "load_data/train.arrow": "assign_folds score_folds",
    "load_data/train.groups.arrow": "assign_folds score_folds",
    "load_data/labels.json": "assign_folds fit_fold_1 fit_fold_2 score_folds",
    "assign_folds/folds.arrow": "fit_fold_1 predict_fold_1 fit_fold_2 predict_fold_2",
    "load_model": "fit_fold_1 fit_fold_2",
    "tokenize/train.arrow": "fit_fold_1 predict_fold_1 fit_fold_2 predict_fold_2 score_folds",
    "tokenize/validation.arrow": "fit_fold_1 fit_fold_2",
    "tokenize/test.arrow": "",
    "fit_fold_2/model": "predict_fold_2",
    "predict_fold_2/train.parquet": "out_of_fold",
    "out_of_fold/train.parquet": "score_folds",
    "score_folds": "publish",
}
NAMES_OF_FOLDS = {
    *("assign_folds", "fit_fold_1", "predict_fold_1", "fit_fold_2", "predict_fold_2", "out_of_fold", "score_folds"),
}


@pytest.mark.parametrize("edited", OF_FOLDS)
def test_the_trainings_of_folds_share_what_they_read_and_read_nothing_else(edited: str) -> None:
    values = spelt(base(), {**FOLDED, **PUBLISHED})
    found = changed(keys(values), keys(values, edited))
    assert found & NAMES_OF_FOLDS == {*OF_FOLDS[edited].split()} - {"publish"}
    assert edited != "score_folds" or found == {"publish"}


def test_folds_change_no_key_of_other_stages_and_a_recipe_without_them_has_the_keys_of_one_that_says_so() -> None:
    assert keys(base()) == keys(spelt(base(), {"evaluation.folds": None}))
    assert changed(keys(base()), keys(spelt(base(), FOLDED))) == NAMES_OF_FOLDS


OF_NEGATIVES = {
    "load_data/train.arrow": "mine_negatives",
    "load_data/validation.arrow": "tokenize",
    "mine_negatives/train.arrow": "tokenize",
    "load_model/model": "mine_negatives fit",
    "load_model/tokenizer": "mine_negatives tokenize fit",
}


@pytest.mark.parametrize("edited", OF_NEGATIVES)
def test_only_training_rows_with_their_negatives_become_tokens(edited: str) -> None:
    found = changed(keys(spelt(base(), MINED)), keys(spelt(base(), MINED), edited))
    assert found & {"mine_negatives", "tokenize", "fit"} == set(OF_NEGATIVES[edited].split())


def test_negatives_are_shared_by_losses_and_trainings_and_those_by_words_by_models() -> None:
    for given, changes in (
        (MINED, {"options.loss": "triplet", "options.scale": 9.0, "training.per_device_eval_batch_size": 8}),
        (spelt(MINED, {"data.negatives.source": "bm25"}), {"model.path": "me/other", "tokens.max_length": 64}),
    ):
        values = spelt(base(), given)
        (_,) = {keys(spelt(values, {name: value}))["mine_negatives"] for name, value in changes.items()}
    assert not keys(spelt(base(), PAIRED)).keys() & {"mine_negatives"}


OF_REFERENCE = {
    "load_model": "tokenize reference_logprobs fit",
    "tokenize/test.arrow": "reference_logprobs",
    "reference_logprobs/train.arrow": "fit score",
    "reference_logprobs/validation.arrow": "fit predict score",
}


@pytest.mark.parametrize("edited", OF_REFERENCE)
def test_a_loss_with_a_reference_trains_on_rows_with_the_log_probabilities_of_the_base_model(edited: str) -> None:
    values = spelt(base(), PREFERENCE)
    assert changed(keys(values), keys(values, edited)) == set(OF_REFERENCE[edited].split())


def test_options_of_answers_change_nothing_and_the_base_model_is_not_read_unless_prompts_are_answered() -> None:
    values = spelt(base(), PREFERENCE)
    for option, value in {"max_new_tokens": 8, "answered_prompts": 8}.items():
        assert keys(values) == keys(spelt(values, {f"options.{option}": value}))
    assert "predict" not in changed(keys(values), keys(values, "load_model"))
    answered = spelt(base(), ANSWERED)
    assert "predict" in changed(keys(answered), keys(answered, "load_model"))


def test_the_reference_is_shared_by_losses_and_trainings_and_left_out_by_losses_without_one() -> None:
    values = spelt(base(), PREFERENCE)
    (key,) = {
        keys(spelt(values, change))["reference_logprobs"]
        for change in ({}, {"options.loss": "ipo"}, {"options.beta": 0.5}, {"training.learning_rate": 1e-3})
    }
    assert key != keys(spelt(values, {"training.per_device_eval_batch_size": 8}))["reference_logprobs"]
    assert "reference_logprobs" not in keys(spelt(values, {"options.loss": "orpo"}))


def test_the_table_of_stages_lists_the_stages_of_the_pipeline_in_order() -> None:
    optional = {**PUBLISHED, **EXPORTED, **MUST_HOLD, **CALIBRATED, **FOLDED}
    values = spelt(base(), {**optional, "release.gate.control": "all"})
    built = ["resolve", *dict.fromkeys(map(without_number, keys(values)))]
    others: dict[str, Any] = {"reference_logprobs": PREFERENCE, "mine_negatives": MINED}
    others |= dict.fromkeys(("load_unlabelled", "tokenize_unlabelled", "teacher_outputs"), UNLABELLED)
    others |= dict.fromkeys(("predict_teacher", "compare_teacher"), TAUGHT) | {"check_teacher": TAUGHT_BY_VERSION}
    others["process_images"] = IMAGES  # in place of tokenize
    assert built == [stage for stage in STAGES if stage not in others]
    for name, given in others.items():
        other = ["resolve", *keys(spelt(base(), given))]
        assert other == [stage for stage in STAGES if stage in other] and name in other


def test_the_shards_of_a_version_hang_on_its_calibration_and_the_code_that_applies_it() -> None:
    def inputs(scale: float | None) -> dict[str, Any]:
        found = None
        if scale is not None:
            found = Calibration(function="softmax", labels=["a", "b"], scale=[scale], offset=[0.0])
        task = {"task": "sequence-classification", "options": {}}
        model = ModelSpec("models:/a/1", 64, task, {}, digest="weights", calibration=found)
        return predict_shard.flat_inputs(model, 64, Shard("rows.csv", 0, 1, 1, "d", "c"), None)[0]

    plain, first, second = map(inputs, (None, 0.5, 0.6))
    assert first.keys() - plain.keys() == {"calibration"} and not plain.keys() - first.keys()
    assert {name for name in first if first[name] != second[name]} == {"calibration"}


CODE_LIST = Path(__file__).with_name("stage_code.txt")
CODE_LIST_HEADING = """\
# The modules whose code counts for the key of each stage: those that count for every task type, then those that one
# task type adds. Each recipe is the smallest of its task type (tests/task_types.py).
# After a change: UPDATE_STAGE_CODE=1 python -m pytest tests/tasks/test_keys.py -k listed
"""


class CodeOfStages(Keys):
    """A walk that notes the code of each cached stage."""

    def __init__(self) -> None:
        super().__init__()
        self.code: dict[str, set[str]] = {}

    def __call__(self, stage: Stage[Any], recipe: Recipe, *inputs: Any) -> Any:
        if stage.cached:
            flat, _ = stage.flat_inputs(recipe, *inputs)
            self.code[without_number(stage.name)] = {
                name.removeprefix("code.") for name in flat if name.startswith("code.")
            }
        return super().__call__(stage, recipe, *inputs)


def code_of_batches(task: str, options: dict[str, Any]) -> set[str]:
    """The code of batch predictions, which are not part of a fine-tune."""
    model = ModelSpec("models:/a/1", 64, {"task": task, "options": options}, {}, digest="weights")
    flat, _ = predict_shard.flat_inputs(model, 64, Shard("rows.csv", 0, 1, 1, "d", "c"), None)
    return {name.removeprefix("code.") for name in flat if name.startswith("code.")}


@pytest.mark.slow
def test_the_modules_behind_each_stage_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "code_behind", code_behind)
    monkeypatch.setattr(stages, "library_versions", lambda names: {})  # some exports need packages that may be absent
    found: dict[str, dict[str, set[str]]] = {}
    for task in TASK_TYPES:
        walk = CodeOfStages()
        tiny = TINY[task]
        sections = {"data": {"source": "csv", "path": "rows", **tiny.data}, "evaluation.metrics": tiny.metrics}
        kind = class_of(task)
        sections |= {"model.config": tiny.config} if kind.reads_images() else {}
        values = spelt(base(), {"task": task, "options": tiny.options, **sections})
        fitting = [name for name, form in EXPORTS.items() if kind.auto_class in form.classes]
        # A model from scratch has no tokenizer that llama.cpp knows.
        fitting = [name for name in fitting if not EXPORTS[name].for_known_tokenizers]
        optional = ({"release.exports": fitting} if fitting else {}) | (
            CALIBRATED if kind.prediction_type in (ONE_LABEL, MANY_LABELS) else {}
        )
        optional |= FOLDED if task == "sequence-classification" else {}
        optional |= {None: {}, "tokens": TAUGHT, "vectors": TAUGHT}.get(kind.teacher_outputs, UNLABELLED)
        pipeline(walk, parse(spelt(values, optional)))
        walk.code["predict_shard"] = code_of_batches(task, tiny.options)
        for stage, modules in walk.code.items():
            found.setdefault(stage, {})[task] = modules
    lines = [CODE_LIST_HEADING]
    for stage, by_task in found.items():
        shared = set.intersection(*by_task.values())
        lines += [f"{stage}", *(f"    {name}" for name in sorted(shared))]
        for task, modules in by_task.items():
            lines += [f"{stage}, {task}", *(f"    {name}" for name in sorted(modules - shared))] * bool(
                modules - shared
            )
        lines.append("")
    listed = "\n".join(lines)
    if "UPDATE_STAGE_CODE" in os.environ:
        CODE_LIST.write_text(listed)
    assert CODE_LIST.read_text() == listed, "the code behind a stage has changed: see the command in stage_code.txt"
