"""Stage: training, launched or continued."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.runtime.code import here_or_installed, library_versions
from tasks.runtime.estimates import estimate
from tasks.runtime.hardware import free_gpu_memory, memory, visible_gpus
from tasks.runtime.jobs import run_child
from tasks.runtime.launch import JobFailed, Launch, accelerate_argv, accelerate_environment, python_argv
from tasks.runtime.machines import gather, machines_of
from tasks.runtime.memory import Fits
from tasks.runtime.refs import Pins, Ref
from tasks.runtime.settings import home
from tasks.runtime.stage import Ingredients, Work, stage
from training import estimate as estimating
from training import room, strategies
from training.engines import ENGINES
from training.kinds import KINDS
from training.problems import Problem, UserError
from training.protocol import Job, sha256
from training.recipe import Recipe
from training.recipe_optimizers import OPTIMIZERS

# Decide when something is written or shown, not what is learnt.
NOT_LEARNT_FROM: dict[str, Any] = {
    **dict.fromkeys(("logging_steps", "checkpoint_interval_s", "report_to"), True),
    **dict.fromkeys(("resume_from_checkpoint", "inexact_resume"), True),
    "extra": {"logging_strategy", "logging_first_step", "log_level", "log_level_replica"},
}
# What the need for memory hangs on, beside the model, the length of rows and the number format.
NEED_MEMORY = {
    *("per_device_train_batch_size", "per_device_eval_batch_size", "optim", "engine", "trainer", "collator", "extra"),
}
# What it does not hang on: how much is learnt from a step, and when something is written or compared.
NOT_NEEDED_FOR = {
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "label_smoothing_factor"),
    *("logging_steps", "checkpoint_interval_s", "report_to", "eval_steps", "metric_for_best_model"),
    *("greater_is_better", "early_stopping_patience", "early_stopping_threshold", "class_weights", "focal_gamma"),
}


def ingredients(recipe: Recipe, pins: Pins, data: Ref, model: Ref, tokens: Ref) -> Ingredients:
    """The tokens, the base model, the labels, every training setting, the user's code and what `auto` came to."""
    strategy = recipe.compute.strategy
    own, libraries = _own_code(recipe)
    return Ingredients(
        {
            "kind": recipe.kind,
            "training": recipe.training.model_dump(mode="json", exclude=NOT_LEARNT_FROM),
            "compute": _compute(recipe, pins),
            "upstream": {
                "tokenize": tokens.digest,
                "load_model": model.digest,
                "labels": data.parts["labels.json"],
                **_named_checkpoint(recipe),
            },
        },
        code=["training.fit", KINDS[recipe.kind], strategies.STRATEGIES[strategy], *_engine_code(recipe), *own],
        libraries=(
            *("torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy", *libraries),
            *(["deepspeed"] if strategy.startswith("deepspeed") else []),
        ),
    )


def _engine_code(recipe: Recipe) -> list[str]:
    return [ENGINES[name]] if (name := recipe.training.engine) in ENGINES else []


def _compute(recipe: Recipe, pins: Pins) -> dict[str, Any]:
    resolved: dict[str, Any] = {"num_processes": pins.num_processes, "mixed_precision": pins.mixed_precision}
    if pins.num_machines > 1:
        resolved["num_machines"] = pins.num_machines
    return {**recipe.compute.learnt_by(), **resolved}


def launch(recipe: Recipe, pins: Pins) -> Launch:
    """How training is launched on this machine. Raises UserError as `machines_of` does."""
    use_cpu, machines = not visible_gpus(), machines_of(recipe.compute)
    argv = accelerate_argv(
        "training.fit",
        num_processes=pins.num_processes,
        mixed_precision=pins.mixed_precision,
        use_cpu=use_cpu,
        machines=machines,
    )
    strategy = recipe.compute.strategy
    env = accelerate_environment(
        num_processes=pins.num_processes, use_cpu=use_cpu, strategy=strategy, machines=machines
    )
    return Launch(argv, env, strategies.load(strategy).configuration(_compute(recipe, pins)))


def _own_code(recipe: Recipe) -> tuple[list[str], list[str]]:
    """The modules that the recipe names, and the distributions of those that are installed; those of its metrics only
    where one of them may choose the best model. Raises UserError for modules that are nowhere."""
    training = recipe.training
    named = [("training.loss", training.loss)]
    named += [(f"training.{field}", getattr(training, field) or "") for field in ("engine", "collator", "trainer")]
    named += [(f"training.callbacks[{index}]", name) for index, name in enumerate(training.callbacks)]
    if training.metric_for_best_model not in (None, "loss"):
        named += [(f"evaluation.metrics[{index}]", name) for index, name in enumerate(recipe.evaluation.metrics)]
    modules: list[str] = []
    libraries = list(filter(None, [OPTIMIZERS[training.optim].package]))
    problems = []
    for where, name in named:
        if ":" in name:
            try:
                here, installed = here_or_installed([name.partition(":")[0]])
            except ModuleNotFoundError as error:
                problems.append(Problem(kind="training", where=where, message=f"{name!r}: {error}."))
                continue
            modules, libraries = modules + here, libraries + installed
    if problems:
        raise UserError(problems)
    return modules, libraries


def _named_checkpoint(recipe: Recipe) -> dict[str, str]:
    """The digest of the checkpoint that training begins with: that of its manifest, which has those of its files."""
    name = recipe.training.resume_from_checkpoint
    if name is None:
        return {}
    try:
        return {"checkpoint": sha256(Path(name) / "manifest.json")}
    except OSError as error:
        message = f"{name!r} is no checkpoint ({error.strerror}): name a folder such as checkpoint-40 of a job."
        where = "training.resume_from_checkpoint"
        raise UserError([Problem(kind="training", where=where, message=message)]) from error


def _reporting(work: Work, recipe: Recipe) -> dict[str, str]:
    """Where TensorBoard's files go unless the user says: to where they stay when the job's folder goes."""
    place = os.environ.get("TENSORBOARD_LOGGING_DIR") or str(home() / "tensorboard" / f"{recipe.name}-{work.key[:8]}")
    return {"TENSORBOARD_LOGGING_DIR": place} if "tensorboard" in recipe.training.report_to else {}


def _inputs(recipe: Recipe, model: Ref, tokens: Ref) -> dict[str, Path]:
    inputs = {"model": model.path / "model", "tokenizer": model.path / "tokenizer", "tokens": tokens.path}
    named = recipe.training.resume_from_checkpoint
    return inputs if named is None else {**inputs, "checkpoint": Path(named).absolute()}


def _settings(recipe: Recipe, pins: Pins, data: Ref) -> dict[str, Any]:
    return {
        "kind": recipe.kind,
        "labels": json.loads((data.path / "labels.json").read_text()),
        "training": recipe.training.model_dump(mode="json"),
        "compute": _compute(recipe, pins),
        "metrics": recipe.evaluation.metrics,
    }


def _fits(recipe: Recipe, pins: Pins, model: Ref) -> Fits:
    return Fits(
        max(recipe.training.per_device_train_batch_size, recipe.training.per_device_eval_batch_size),
        model.path / "model",
        program="training.fit",
        max_length=recipe.tokens.max_length,
        training=recipe.training.model_dump(mode="json", include=NEED_MEMORY),
        mixed_precision=pins.mixed_precision,
        num_processes=pins.num_processes,
        sharing=recipe.compute.learnt_by(),
    )


@stage(ingredients)
def fit(work: Work, recipe: Recipe, pins: Pins, data: Ref, model: Ref, tokens: Ref) -> Mapping[str, Any]:
    """Trains under `accelerate launch`; a job that was killed goes on from its newest good checkpoint."""
    machines, stall_timeout_s = machines_of(recipe.compute), recipe.compute.stall_timeout_s
    plain = launch(recipe, pins)
    launched = plain._replace(env=plain.env | _reporting(work, recipe))

    def before_try() -> None:
        launched.keep(work.job)
        if machines.count > 1:
            gather(machines, work, stall_timeout_s)

    return run_child(
        work,
        "training.fit",
        launched.argv,
        env=launched.env,
        settings=_settings(recipe, pins, data),
        inputs=_inputs(recipe, model, tokens),
        fits=_fits(recipe, pins, model),
        stall_timeout_s=stall_timeout_s,
        before_try=before_try,
    )


def foreseen(recipe: Recipe, pins: Pins, *artifacts: Any) -> list[str]:
    """What a training that has not begun will need, in lines; the artifacts are the stage's other inputs, as far as
    they are there. Raises UserError for what the recipe names and is not there.
    """
    if not all(isinstance(artifact, Ref) for artifact in artifacts):
        return ["steps, tokens, memory and disk: ?, until the stages before it have run"]
    data, model, tokens = artifacts
    inputs = {name: str(path) for name, path in _inputs(recipe, model, tokens).items()}
    asked = _settings(recipe, pins, data) | {"batch_division": _fits(recipe, pins, model).division}
    hangs_on = {
        **{name: asked[name] for name in ("kind", "labels", "compute", "batch_division")},
        "training": {name: value for name, value in asked["training"].items() if name not in NOT_NEEDED_FOR},
        "upstream": [model.digest, tokens.digest],
        "memory": memory(),
        "code": sha256(Path(estimating.__file__)),
        "libraries": library_versions(("torch", "transformers")),
    }
    job = Job(program="training.estimate", key=model.key, settings=asked, inputs=inputs)
    env = accelerate_environment(num_processes=1, use_cpu=not visible_gpus())
    try:
        found = estimate(job, python_argv("training.estimate"), env, hangs_on)
    except JobFailed as error:
        return [f"steps, tokens, memory and disk: ? ({str(error).splitlines()[0]})"]
    return _told(found, pins.num_processes // machines_of(recipe.compute).count)


def _told(found: Mapping[str, Any], processes: int) -> list[str]:
    gpus = free_gpu_memory()[:processes]
    may_take = min(gpus) if gpus else room.memory_left(processes)
    lines = [estimating.sentence(found, may_take), estimating.too_little(found, may_take)]
    try:
        room.require_disk(home(), found["disk_mb"] * 10**6)
    except UserError as error:
        lines.append(str(error))
    return [line for line in lines if line]
