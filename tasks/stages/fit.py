"""The stage fit: training, launched or resumed, and the inputs of its key with the code that counts."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.cache.code import figures_code
from tasks.cache.refs import Lock, Ref
from tasks.cache.secret_files import made_once
from tasks.cache.settings import home
from tasks.cache.stage import Inputs, Work, stage
from tasks.hub.checkpoint_uploads import uploading
from tasks.jobs.batch_memory import BatchDivision
from tasks.jobs.child import run_child
from tasks.jobs.hardware import visible_gpus
from tasks.jobs.launch import Launch, accelerate_argv, accelerate_environment
from tasks.jobs.machines import find_machines, gather
from training import distributed, task_types
from training.engine import checkpoints
from training.engine.training_task import needs_own_checkpoint
from training.jobs.protocol import sha256
from training.problems import Problem, UserError
from training.recipe import Recipe, ResolvedCompute
from training.recipe.lora import packages_of
from training.recipe.program_settings import FitSettings, HubModel
from training.recipe.tables.engines import ENGINES
from training.recipe.tables.metrics import entries
from training.recipe.tables.optimizers import OPTIMIZERS
from training.recipe.tables.strategies import STRATEGIES

# Decide when something is written or shown, not what is learnt.
NOT_LEARNT_FROM: dict[str, Any] = {
    **dict.fromkeys(("logging_steps", "checkpoint_interval_s", "report_to"), True),
    **dict.fromkeys(("resume_from_checkpoint", "trust_checkpoint", "inexact_resume"), True),
    "extra": {"logging_strategy", "logging_first_step", "log_level", "log_level_replica"},
}
READ = ("train", "validation")
"""The splits whose tokens training.programs.fit reads."""
# What the need for memory hangs on, beside the model, the length of rows and the number format.
NEED_MEMORY = {
    *("per_device_train_batch_size", "per_device_eval_batch_size", "optim", "engine", "trainer", "collator", "extra"),
    "lora",
}


def inputs(recipe: Recipe, lock: Lock, data: Ref, model: Ref, tokens: Ref) -> Inputs:
    """The tokens that it reads, the base model, the labels, every training setting, the user's code and the values of
    `auto`."""
    strategy = recipe.compute.strategy
    package = OPTIMIZERS[recipe.training.optim].package
    return Inputs(
        {
            "task": recipe.task,
            "options": _options(recipe),
            "training": recipe.training.model_dump(mode="json", exclude=NOT_LEARNT_FROM),
            "compute": _compute(recipe, lock),
            **_metrics(recipe),
            **({"metrics": known} if (known := entries(_metrics_learned_from(recipe))) else {}),
            **({"base": base.model_dump()} if (base := _base(recipe, lock)) else {}),
            "upstream": {
                **{f"tokenize/{split}": tokens.parts[f"{split}.arrow"] for split in READ},
                "load_model": model.digest,
                "labels": data.parts["labels.json"],
                **_named_checkpoint(recipe),
            },
        },
        code=[
            "training.programs.fit",
            *task_types.code_modules(recipe.task),
            STRATEGIES[strategy].module,
            *_engine_code(recipe),
            *task_types.metric_modules(recipe.task, _metrics_learned_from(recipe)),
        ],
        outside=_outside(recipe),
        named=_named(recipe),
        libraries=(
            *("torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy"),
            *([package] if package else []),
            *([needed] if (needed := STRATEGIES[strategy].package) else []),
            *packages_of(recipe.training.lora),
        ),
    )


def _base(recipe: Recipe, lock: Lock) -> HubModel | None:
    """The Hub model that an exported adapter names as its base; None if it is not of the Hub."""
    if recipe.training.lora is None or lock.model_hub is None:
        return None
    return HubModel(path=str(recipe.model.path), revision=lock.model_hub.commit)


def _options(recipe: Recipe) -> dict[str, Any]:
    """The options that matter to training, and to its evaluations if their figures may change the weights."""
    task_type = task_types.load(**recipe.task_and_options)
    return task_type.options_of("fit") | (task_type.options_of("evaluate") if _metrics_matter(recipe) else {})


def _metrics_matter(recipe: Recipe) -> bool:
    """Whether figures of an evaluation may change the weights."""
    return _are_seen(recipe) or recipe.training.metric_for_best_model not in (None, "loss")


def _metrics_learned_from(recipe: Recipe) -> list[str]:
    """The metrics whose values can change the weights: all where user code sees them, else the one that chooses the
    best checkpoint."""
    if _are_seen(recipe):
        return list(recipe.evaluation.metrics)
    return [str(recipe.training.metric_for_best_model).removeprefix("eval_")] if _metrics_matter(recipe) else []


def _are_seen(recipe: Recipe) -> bool:
    """Whether code of the user's sees the figures of an evaluation, and may go by them."""
    training = recipe.training
    return bool(training.callbacks or training.trainer or ":" in training.engine)


def _outside(recipe: Recipe) -> Sequence[str]:
    """The rooms of evaluation code that cannot change the model."""
    if ":" in recipe.task:
        return ()
    if _metrics_matter(recipe):
        return ("training.evaluation.constant_predictions",)
    if task_types.calibrates(recipe.task):
        return ("training.evaluation.metrics", "training.evaluation.constant_predictions")
    return figures_code(recipe.task)


def _engine_code(recipe: Recipe) -> list[str]:
    return [ENGINES[name].module] if (name := recipe.training.engine) in ENGINES else []


def _compute(recipe: Recipe, lock: Lock) -> dict[str, Any]:
    resolved: dict[str, Any] = {"num_processes": lock.num_processes, "mixed_precision": lock.mixed_precision}
    if lock.num_machines > 1:
        resolved["num_machines"] = lock.num_machines
    return {**recipe.compute.learnt_by(), **resolved}


def _resolved_compute(recipe: Recipe, lock: Lock) -> ResolvedCompute:
    return ResolvedCompute.model_validate(_compute(recipe, lock))


def launch(recipe: Recipe, lock: Lock, key: str) -> Launch:
    """How the job of this key is launched on this machine. Raises UserError as `find_machines` does."""
    use_cpu, machines = not visible_gpus(), find_machines(recipe.compute)
    argv = accelerate_argv(
        "training.programs.fit",
        num_processes=lock.num_processes,
        mixed_precision=lock.mixed_precision,
        use_cpu=use_cpu,
        machines=machines,
    )
    strategy = recipe.compute.strategy
    env = accelerate_environment(
        num_processes=lock.num_processes, use_cpu=use_cpu, strategy=strategy, machines=machines
    )
    if "tensorboard" in recipe.training.report_to:  # unless the user says, to where it stays when the job's folder goes
        place = os.environ.get("TENSORBOARD_LOGGING_DIR") or home() / "tensorboard" / f"{recipe.name}-{key[:8]}"
        env |= {"TENSORBOARD_LOGGING_DIR": str(place)}
    return Launch(argv, env, distributed.load(strategy).build_configuration(_resolved_compute(recipe, lock)))


def _named(recipe: Recipe) -> dict[str, str]:
    """User code that can change the weights, by recipe field. Metrics are included only if they choose the best
    checkpoint.
    """
    training = recipe.training
    named = task_types.user_code(recipe.task)
    named |= {
        f"training.{field}": getattr(training, field) or "" for field in ("loss", "engine", "collator", "trainer")
    }
    named |= {f"training.callbacks[{index}]": name for index, name in enumerate(training.callbacks)}
    if _metrics_matter(recipe):
        named |= {f"evaluation.metrics[{index}]": name for index, name in enumerate(recipe.evaluation.metrics)}
    return named


def _metrics(recipe: Recipe) -> dict[str, Any]:
    """Those whose figures code of the user's sees; and those of the Hub that may choose the best model, for their names
    pin their code."""
    seen = _are_seen(recipe)
    names = [name for name in recipe.evaluation.metrics if seen or name.startswith("hub:")]
    return {"evaluation": {"metrics": names}} if _metrics_matter(recipe) and names else {}


def _named_checkpoint(recipe: Recipe) -> dict[str, str]:
    """The digest of the checkpoint that training begins with: that of its manifest, which has those of its files.

    Raises UserError where it is none, or was written elsewhere in a format that can execute code.
    """
    name = recipe.training.resume_from_checkpoint
    if name is None:
        return {}
    try:
        digest = sha256(Path(name) / checkpoints.MANIFEST)
        if needs_own_checkpoint(recipe.training, recipe.compute):
            checkpoints.require_sealed(Path(name), seal_key())  # the program looks at the files, too
        return {"checkpoint": digest}
    except OSError as error:
        message = f"{name!r} is no checkpoint ({error.strerror}): name a folder such as checkpoint-40 of a job."
        where = "training.resume_from_checkpoint"
        raise UserError([Problem(kind="training", where=where, message=message)]) from error


def seal_key() -> Path:
    """The file with the home's key, by which it knows the checkpoints that its trainings wrote; made where missing."""
    return made_once(home() / "seal.key", secrets.token_bytes(32))


def inputs_of(recipe: Recipe, model: Ref, tokens: Ref) -> dict[str, Path]:
    """What training.programs.fit reads, by the names that it has for it."""
    inputs = {"model": model.path / "model", "tokenizer": model.path / "tokenizer", "tokens": tokens.path}
    named = recipe.training.resume_from_checkpoint
    return inputs if named is None else {**inputs, "checkpoint": Path(named).absolute()}


def settings_of(recipe: Recipe, lock: Lock, data: Ref) -> FitSettings:
    """The settings of training.programs.fit, with batches as the recipe has them."""
    return FitSettings(
        **recipe.task_and_options,
        labels=json.loads((data.path / "labels.json").read_text()),
        max_length=recipe.tokens.max_length,
        training=recipe.training,
        compute=_resolved_compute(recipe, lock),
        metrics=recipe.evaluation.metrics,
        base=_base(recipe, lock),
    )


def fits_of(recipe: Recipe, lock: Lock, model: Ref) -> BatchDivision:
    """How large its batches may be here."""
    return BatchDivision(
        max(recipe.training.per_device_train_batch_size, recipe.training.per_device_eval_batch_size),
        model.path / "model",
        program="training.programs.fit",
        max_length=recipe.tokens.max_length,
        training=recipe.training.model_dump(mode="json", include=NEED_MEMORY),
        mixed_precision=lock.mixed_precision,
        num_processes=lock.num_processes,
        sharing=recipe.compute.learnt_by(),
    )


@stage(inputs)
def fit(work: Work, recipe: Recipe, lock: Lock, data: Ref, model: Ref, tokens: Ref) -> Mapping[str, Any]:
    """Trains under `accelerate launch`; a job that was killed goes on from its newest good checkpoint."""
    machines, stall_timeout_s = find_machines(recipe.compute), recipe.compute.stall_timeout_s
    launched = launch(recipe, lock, work.key)

    def before_try() -> None:
        launched.write(work.job)
        if machines.count > 1:
            gather(machines, work, stall_timeout_s)

    with uploading(work, recipe, model.path / "tokenizer"):
        return run_child(
            work,
            "training.programs.fit",
            launched.argv,
            env={**launched.env, checkpoints.SEAL_KEY: str(seal_key())},
            settings=settings_of(recipe, lock, data),
            inputs=inputs_of(recipe, model, tokens),
            batches=fits_of(recipe, lock, model),
            stall_timeout_s=stall_timeout_s,
            before_try=before_try,
        )
