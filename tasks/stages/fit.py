"""The stage fit: training, launched or resumed, and the inputs of its key with the code that counts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from tasks.cache.code import figures_code
from tasks.cache.refs import Lock, Ref
from tasks.cache.secret_files import seal_key
from tasks.cache.stage import Inputs, Work, stage
from tasks.hub.checkpoint_uploads import upload_checkpoints
from tasks.jobs import early_launch
from tasks.jobs.batch_memory import BatchDivision
from tasks.jobs.child import run_child
from tasks.jobs.commands import Launch, accelerate_argv, accelerate_environment
from tasks.jobs.engines import Engine, local
from tasks.jobs.engines.ray_engine import start_early, take_early
from tasks.jobs.engines.ray_messages import Cluster, Program
from tasks.jobs.hardware import device, visible_gpus
from tasks.shared_store.opening import open_remote
from training import distributed, task_types
from training.engine import checkpoints
from training.engine.fit_settings import FitSettings, HubModel
from training.engine.training_task import needs_own_checkpoint
from training.jobs.protocol import Imports, sha256
from training.problems import UserError
from training.recipe import Recipe, ResolvedCompute
from training.recipe.fields import packages_of
from training.recipe.tables.engines import ENGINES
from training.recipe.tables.kernels import Kernels, kernels_of
from training.recipe.tables.metrics import entries
from training.recipe.tables.optimizers import OPTIMIZERS
from training.recipe.tables.strategies import STRATEGIES

# Training settings that change only logs, checkpoints and their frequency.
WITHOUT_EFFECT_ON_WEIGHTS: dict[str, Any] = {
    **dict.fromkeys(("logging_steps", "checkpoint_interval_s", "report_to"), True),
    **dict.fromkeys(("resume_from_checkpoint", "trust_checkpoint", "inexact_resume"), True),
    "extra": {"logging_strategy", "logging_first_step", "log_level", "log_level_replica"},
}
SPLITS = ("train", "validation")
# Training settings that change the memory needed, in addition to the model, the length of rows and the number format.
MEMORY_SETTINGS = {
    *("per_device_train_batch_size", "per_device_eval_batch_size", "optim", "engine", "trainer", "collator", "extra"),
    *("lora", "use_liger_kernel"),
}


class TrainingJob(NamedTuple):
    """The job of training.programs.fit."""

    settings: FitSettings
    folders: dict[str, Path]
    """The folders that it reads, by name."""
    batches: BatchDivision
    """The division of batches that fits into memory."""


def inputs(recipe: Recipe, lock: Lock, data: Ref, model: Ref, tokens: Ref) -> Inputs:
    """The tokens of train and validation, the base model, the labels, the training settings, the user's code and the
    values of `auto`."""
    strategy, optimizer = STRATEGIES[recipe.compute.strategy], OPTIMIZERS[recipe.training.optim]
    metrics, base = _metrics_that_affect_weights(recipe), _hub_base(recipe, lock)
    engine = ENGINES.get(recipe.training.engine)
    return Inputs(
        {
            "task": recipe.task,
            "options": _options(recipe),
            "training": recipe.training.model_dump(mode="json", exclude=WITHOUT_EFFECT_ON_WEIGHTS),
            "compute": _compute(recipe, lock),
            **(
                {"model": {"attn_implementation": attention}} if (attention := recipe.model.attn_implementation) else {}
            ),
            **_metric_names(recipe),
            **({"metrics": known} if (known := entries(metrics)) else {}),
            **({"base": base.model_dump()} if base else {}),
            "upstream": {
                **{f"tokenize/{split}": tokens.parts[f"{split}.arrow"] for split in SPLITS},
                "load_model": model.digest,
                "labels": data.parts["labels.json"],
                **_start_checkpoint(recipe),
            },
        },
        code=[
            "training.programs.fit",
            *task_types.code_modules(recipe.task),
            strategy.module,
            *([engine.module] if engine else []),
            *task_types.metric_modules(recipe.task, metrics),
        ],
        outside=_code_without_effect(recipe),
        named=_user_code(recipe),
        libraries=(
            *("torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy"),
            *filter(None, (optimizer.package, strategy.package)),
            *packages_of(recipe.training.lora),
            *(kernels.package for kernels in _kernels(recipe).values()),
        ),
    )


def _kernels(recipe: Recipe) -> dict[str, Kernels]:
    return kernels_of(recipe.model.attn_implementation, recipe.training.use_liger_kernel)


def _hub_base(recipe: Recipe, lock: Lock) -> HubModel | None:
    """The Hub model that an exported adapter names as its base."""
    if recipe.training.lora is None or lock.model_hub is None:
        return None
    return HubModel(path=str(recipe.model.path), revision=lock.model_hub.commit)


def _options(recipe: Recipe) -> dict[str, Any]:
    task_type = task_types.load(**recipe.task_and_options)
    return task_type.options_of("fit") | (task_type.options_of("evaluate") if _metrics_affect_weights(recipe) else {})


def _metrics_affect_weights(recipe: Recipe) -> bool:
    return _user_code_sees_metrics(recipe) or recipe.training.metric_for_best_model not in (None, "loss")


def _metrics_that_affect_weights(recipe: Recipe) -> list[str]:
    """All metrics if user code sees them, else only the one that chooses the best checkpoint."""
    if _user_code_sees_metrics(recipe):
        return list(recipe.evaluation.metrics)
    if _metrics_affect_weights(recipe):
        return [str(recipe.training.metric_for_best_model).removeprefix("eval_")]
    return []


def _user_code_sees_metrics(recipe: Recipe) -> bool:
    training = recipe.training
    return bool(training.callbacks or training.trainer or ":" in training.engine)


def _code_without_effect(recipe: Recipe) -> Sequence[str]:
    """The evaluation modules that cannot change the weights."""
    if ":" in recipe.task:
        return ()
    if _metrics_affect_weights(recipe):
        return ("training.evaluation.constant_predictions",)
    if task_types.calibrates(recipe.task):
        return ("training.evaluation.metrics", "training.evaluation.constant_predictions")
    return figures_code(recipe.task)


def _compute(recipe: Recipe, lock: Lock) -> dict[str, Any]:
    resolved: dict[str, Any] = {"num_processes": lock.num_processes, "mixed_precision": lock.mixed_precision}
    if lock.num_machines > 1:
        resolved["num_machines"] = lock.num_machines
    return {**recipe.compute.weight_settings(), **resolved}


def _resolved_compute(recipe: Recipe, lock: Lock) -> ResolvedCompute:
    return ResolvedCompute.model_validate(_compute(recipe, lock))


def launch(recipe: Recipe, lock: Lock) -> Launch:
    """The command that starts the job on this machine; with a cluster, each machine makes its own."""
    use_cpu, strategy = not visible_gpus(), recipe.compute.strategy
    argv = accelerate_argv(
        "training.programs.fit",
        num_processes=lock.num_processes,
        mixed_precision=lock.mixed_precision,
        use_cpu=use_cpu,
    )
    env = accelerate_environment(num_processes=lock.num_processes, use_cpu=use_cpu, strategy=strategy)
    return Launch(argv, env, distributed.load(strategy).build_configuration(_resolved_compute(recipe, lock)))


def launch_early(recipe: Recipe, lock: Lock) -> None:
    """Starts the launcher of a training before its data are ready: it imports, and waits for the job."""
    if recipe.compute.cluster:
        start_early(*_on_cluster(recipe, lock))
        return
    launched = launch(recipe, lock)
    early_launch.start(launched.argv, _environment(launched), _imports(recipe))


def _imports(recipe: Recipe) -> Imports:
    """What the processes of a training import, before they know more than the recipe."""
    strategy, engine = STRATEGIES[recipe.compute.strategy], ENGINES.get(recipe.training.engine)
    modules = ["training.engine.task_setup", "training.engine.export", strategy.module]
    modules += [engine.module] if engine else []
    modules += task_types.code_modules(recipe.task)
    modules += task_types.metric_modules(recipe.task, recipe.evaluation.metrics)
    needed = {"deepspeed": strategy.package == "deepspeed", "peft": recipe.training.lora is not None}
    return Imports(
        modules=modules,
        hidden=[package for package in needed if not needed[package]],
        needed=[package for package in needed if needed[package]],
    )


def _environment(launched: Launch) -> dict[str, str]:
    return {**launched.env, checkpoints.SEAL_KEY: str(seal_key())}


def _user_code(recipe: Recipe) -> dict[str, str]:
    """User code that can change the weights, by recipe field. Metrics are included only if they choose the best
    checkpoint.
    """
    training = recipe.training
    named = task_types.user_code(recipe.task)
    named |= {
        f"training.{field}": getattr(training, field) or "" for field in ("loss", "engine", "collator", "trainer")
    }
    named |= {f"training.callbacks[{index}]": name for index, name in enumerate(training.callbacks)}
    if _metrics_affect_weights(recipe):
        named |= {f"evaluation.metrics[{index}]": name for index, name in enumerate(recipe.evaluation.metrics)}
    return named


def _metric_names(recipe: Recipe) -> dict[str, Any]:
    """The metrics that user code sees; else those of the Hub that may choose the best checkpoint, whose names pin
    their code."""
    seen = _user_code_sees_metrics(recipe)
    names = [name for name in recipe.evaluation.metrics if seen or name.startswith("hub:")]
    return {"evaluation": {"metrics": names}} if _metrics_affect_weights(recipe) and names else {}


def _start_checkpoint(recipe: Recipe) -> dict[str, str]:
    """The digest of the manifest of the checkpoint that training starts with: it holds the digests of all files.

    Raises UserError if there is no checkpoint, or if another home wrote it in a format that can execute code.
    """
    name = recipe.training.resume_from_checkpoint
    if name is None:
        return {}
    try:
        digest = sha256(Path(name) / checkpoints.MANIFEST)
        if needs_own_checkpoint(recipe.training, recipe.compute):
            checkpoints.require_sealed(Path(name), seal_key())
        return {"checkpoint": digest}
    except OSError as error:
        message = f"{name!r} is no checkpoint ({error.strerror}): name a folder such as checkpoint-40 of a job."
        where = "training.resume_from_checkpoint"
        raise UserError.of("training", where, message) from error


def training_job(recipe: Recipe, lock: Lock, data: Ref, model: Ref, tokens: Ref) -> TrainingJob:
    """The job with the recipe's batch sizes."""
    settings = FitSettings(
        **recipe.task_and_options,
        labels=json.loads((data.path / "labels.json").read_text()),
        max_length=recipe.tokens.max_length,
        training=recipe.training,
        compute=_resolved_compute(recipe, lock),
        metrics=recipe.evaluation.metrics,
        attn_implementation=recipe.model.attn_implementation,
        base=_hub_base(recipe, lock),
    )
    folders = {"model": model.path / "model", "tokenizer": model.path / "tokenizer", "tokens": tokens.path}
    if checkpoint := recipe.training.resume_from_checkpoint:
        folders["checkpoint"] = Path(checkpoint).absolute()
    return TrainingJob(settings, folders, batch_division(recipe, lock, model))


def batch_division(recipe: Recipe, lock: Lock, model: Ref) -> BatchDivision:
    """The division of training batches that fits into this machine's memory."""
    return BatchDivision(
        max(recipe.training.per_device_train_batch_size, recipe.training.per_device_eval_batch_size),
        model.path / "model",
        program="training.programs.fit",
        max_length=recipe.tokens.max_length,
        training=recipe.training.model_dump(mode="json", include=MEMORY_SETTINGS),
        mixed_precision=lock.mixed_precision,
        num_processes=lock.num_processes,
        sharing=recipe.compute.weight_settings(),
        attention=recipe.model.attn_implementation,
    )


@stage(inputs)
def fit(work: Work, recipe: Recipe, lock: Lock, data: Ref, model: Ref, tokens: Ref) -> Mapping[str, Any]:
    """Trains under `accelerate launch`; a job that was killed resumes from its newest good checkpoint."""
    launched, job = launch(recipe, lock), training_job(recipe, lock, data, model, tokens)
    own_device = None if recipe.training.inexact_resume else device()
    # On a cluster, the machines have the checkpoints.
    sharing = nullcontext() if recipe.compute.cluster else open_remote().share_checkpoints(work, seal_key(), own_device)
    with sharing, upload_checkpoints(work, recipe, model.path / "tokenizer"):
        return run_child(
            work,
            "training.programs.fit",
            launched.argv,
            env=_environment(launched),
            settings=job.settings,
            inputs=job.folders,
            batches=job.batches,
            stall_timeout_s=recipe.compute.stall_timeout_s,
            before_try=lambda: launched.write(work.job),
            engine=_engine(work, recipe, lock, job),
        )


def _engine(work: Work, recipe: Recipe, lock: Lock, job: TrainingJob) -> Engine[Any]:
    if recipe.compute.cluster is None:
        return local
    return take_early(*_on_cluster(recipe, lock)).bind(job.folders, work.on_events)


def _on_cluster(recipe: Recipe, lock: Lock) -> tuple[Cluster, Program]:
    cluster = Cluster(
        recipe.compute.cluster_address,
        machines=lock.num_machines,
        processes=lock.num_processes,
        uses_gpus=bool(visible_gpus()),
        wait_s=recipe.compute.stall_timeout_s,
    )
    threads = launch(recipe, lock).env.get("OMP_NUM_THREADS")  # as on one machine: it changes how sums round
    env = {"OMP_NUM_THREADS": threads} if threads else {}
    return cluster, Program("training.programs.fit", _resolved_compute(recipe, lock), env, _imports(recipe))
