"""Stage: training, launched or resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tasks.cache.code import figures_code, metrics_code
from tasks.cache.results import Artifact, Lock, label_names
from tasks.cache.stage import Work
from tasks.home import signing_key
from tasks.hub.checkpoint_uploads import upload_checkpoints
from tasks.jobs.commands import Launch, accelerate_argv, accelerate_environment
from tasks.jobs.engines import engine_of
from tasks.jobs.engines.engine import Engine, Program, Runner
from tasks.jobs.hardware import device, visible_gpus
from tasks.jobs.job import Files, StageJob, files_of, folder_of, job_of, stage
from tasks.jobs.retries import BatchDivision
from tasks.shared_store.bucket_remote import open_remote
from training import distributed, task_types
from training.engine import checkpoints
from training.engine.fit_settings import FitResult, FitSettings, HubModel
from training.jobs.protocol import Imports, sha256
from training.problems import UserError
from training.recipe import Recipe, ResolvedCompute
from training.recipe.tables.engines import ENGINES
from training.recipe.tables.kernels import Kernels, kernels_of
from training.recipe.tables.metrics import entries
from training.recipe.tables.optimizers import OPTIMIZERS
from training.recipe.tables.strategies import STRATEGIES
from training.recipe.training_fields import Training, packages_of

# Training settings that change the memory needed, in addition to the model, the length of rows and the number format.
MEMORY_SETTINGS = {
    *("per_device_train_batch_size", "per_device_eval_batch_size", "optim", "engine", "trainer", "collator", "extra"),
    *("lora", "use_liger_kernel"),
}


FitArtifact = Artifact[FitResult]


@stage(FitResult)
def fit(
    recipe: Recipe,
    lock: Lock,
    data: Artifact,
    model: Artifact,
    tokens: Artifact,
    teacher: Artifact | None = None,
    unlabelled: Artifact | None = None,
) -> StageJob:
    """Trains under `accelerate launch`; a job that was killed resumes from its newest good checkpoint. `teacher` has
    the outputs of the recipe's teacher, for the training rows and for those without labels, whose tokens are in
    `unlabelled`.

    The tokens of train and validation, the base model, the labels, the outputs of a teacher, the tokens of rows without
    labels, the training settings, the user's code and the values of `auto`.
    """
    strategy, optimizer = STRATEGIES[recipe.compute.strategy], OPTIMIZERS[recipe.training.optim]
    task_type, deciding = task_types.load(**recipe.task_and_options), _deciding_metrics(recipe)
    engine, evaluating = ENGINES.get(recipe.training.engine), task_type.options_of("evaluate")
    return StageJob(
        "training.programs.fit",
        FitSettings(
            task=recipe.task,
            options=task_type.options_of("fit") | (evaluating if deciding else {}),
            evaluation_options=evaluating,
            labels=label_names(data),
            max_length=recipe.tokens.max_length,
            training=_training(recipe),
            compute=resolved_compute(recipe, lock),
            metrics=recipe.evaluation.metrics,
            deciding_metrics=deciding,
            attn_implementation=recipe.model.attn_implementation,
            base=_hub_base(recipe, lock),
            calibration=(calibration := _choosing_calibration(lock)),
        ),
        reads={
            "model": folder_of(model, "model"),
            "tokenizer": folder_of(model, "tokenizer"),
            "tokens": files_of(tokens, ["train.arrow", "validation.arrow"]),
            **({"teacher": _outputs_of(recipe, teacher)} if teacher else {}),
            **({"unlabelled": files_of(unlabelled, ["train.arrow"])} if unlabelled else {}),
            **_start_checkpoint(recipe),
        },
        content={"calibration": calibration} if calibration else {},
        tables={"table": entries(name for name in deciding if not name.startswith("hub:"))},
        code=[
            *task_types.code_modules(recipe.task),
            strategy.module,
            *([engine.module] if engine else []),
            *task_types.metric_modules(recipe.task, deciding),
            *([recipe.training.augment.module] if recipe.training.augment else []),
        ],
        outside=_code_without_effect(recipe),
        users_code=_user_code(recipe),
        libraries=(
            *("torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy"),
            *filter(None, (optimizer.package, strategy.package)),
            *packages_of(recipe.training.lora),
            *(kernels.package for kernels in _kernels(recipe).values()),
            *(["pillow"] if recipe.training.augment else []),
        ),
        field_names={"attn_implementation": "model.attn_implementation"},
        launch=partial(launch, recipe, lock),
        batches=partial(batch_division, recipe, lock),
        secrets=_secrets,
        stall_timeout_s=recipe.compute.stall_timeout_s,
        runner=partial(_runner, recipe, lock),
        around=partial(_sharing_checkpoints, recipe, model),
    )


@stage(FitResult)
def fit_fold(
    recipe: Recipe,
    lock: Lock,
    data: Artifact,
    model: Artifact,
    tokens: Artifact,
    teacher: Artifact | None,
    unlabelled: Artifact | None,
    folds: Artifact,
    fold: int,
) -> StageJob:
    """Trains without the rows of one fold, as `fit` does.

    What the key of `fit` contains, the folds of the rows, and the number of the fold.
    """
    job = job_of(fit, recipe, lock, data, model, tokens, teacher, unlabelled)
    # The Hub gets the checkpoints of the model alone.
    unpublished = recipe.model_copy(update={"release": recipe.release.model_copy(update={"hub": None})})
    return replace(
        job,
        settings=job.settings.model_copy(update={"fold": fold}),
        reads={**job.reads, "folds": files_of(folds, ["folds.arrow"])},
        content={**job.content, "fold": fold},
        around=partial(_sharing_checkpoints, unpublished, model),
    )


def _outputs_of(recipe: Recipe, teacher: Artifact) -> Files:
    """A teacher's outputs: those of tokens are a folder of blocks."""
    if task_types.class_of(recipe.task).teacher_outputs == "tokens":
        return folder_of(teacher, "train")
    return files_of(teacher, ["train.arrow", "unlabelled.arrow"])


def _choosing_calibration(lock: Lock) -> dict[str, Any] | None:
    """The calibration of the teacher's version, if its thresholds choose rows without labels."""
    return lock.teacher_version.calibration if lock.teacher_version else None


def _training(recipe: Recipe) -> Training:
    """The settings of training: a teacher that wrote the targets takes no part in it."""
    training = recipe.training
    if training.teacher is None or not training.teacher.writes_targets:
        return training
    return training.model_copy(update={"teacher": None})


def _kernels(recipe: Recipe) -> dict[str, Kernels]:
    return kernels_of(recipe.model.attn_implementation, recipe.training.use_liger_kernel)


def _hub_base(recipe: Recipe, lock: Lock) -> HubModel | None:
    """The Hub model that an exported adapter names as its base."""
    if recipe.training.lora is None or lock.model_hub is None:
        return None
    return HubModel(path=str(recipe.model.path), revision=lock.model_hub.commit)


def _deciding_metrics(recipe: Recipe) -> list[str]:
    """The metrics that can change the weights: all if user code sees them, else the one that chooses the best
    checkpoint, and those of the Hub, one of which may be it."""
    training, metrics = recipe.training, recipe.evaluation.metrics
    best = training.metric_for_best_model
    if training.callbacks or training.trainer or ":" in training.engine:
        return list(metrics)
    if best in (None, "loss"):
        return []
    return [str(best).removeprefix("eval_"), *(name for name in metrics if name.startswith("hub:"))]


def _code_without_effect(recipe: Recipe) -> Sequence[str]:
    """The evaluation modules that cannot change the weights."""
    if ":" in recipe.task:
        return ()
    teacher = recipe.training.teacher
    # A word and no number: the thresholds of the teacher's version.
    abstains = teacher is not None and isinstance(teacher.unlabelled_min_confidence, str)
    thresholds = () if abstains else ("training.evaluation.stored_calibration",)
    if _deciding_metrics(recipe):
        return ("training.evaluation.constant_predictions", *thresholds)
    if abstains or task_types.calibrates(task_types.load(**recipe.task_and_options)):
        return ("training.evaluation.metrics", "training.evaluation.constant_predictions", *thresholds)
    return figures_code(recipe.task)


def resolved_compute(recipe: Recipe, lock: Lock) -> ResolvedCompute:
    """The recipe's compute section with the lock's values in place of `auto`."""
    resolved: dict[str, Any] = {"num_processes": lock.num_processes, "mixed_precision": lock.mixed_precision}
    if lock.num_machines > 1:
        resolved["num_machines"] = lock.num_machines
    return ResolvedCompute.model_validate({**recipe.compute.weight_settings(), **resolved})


def launch(recipe: Recipe, lock: Lock) -> Launch:
    """The command that starts the job on this machine. Each machine of a cluster makes its own."""
    use_cpu, strategy = not visible_gpus(), recipe.compute.strategy
    argv = accelerate_argv(
        "training.programs.fit",
        num_processes=lock.num_processes,
        mixed_precision=lock.mixed_precision,
        use_cpu=use_cpu,
    )
    env = accelerate_environment(num_processes=lock.num_processes, use_cpu=use_cpu, strategy=strategy)
    return Launch(argv, env, distributed.load(strategy).build_configuration(resolved_compute(recipe, lock)))


def launch_early(recipe: Recipe, lock: Lock) -> None:
    """Starts the program of a training before its data are ready: it imports, and waits for the job."""
    engine_for(recipe).start_early(_program(recipe, lock))


def engine_for(recipe: Recipe) -> Engine:
    """The engine of a recipe's trainings."""
    return engine_of(recipe.compute.cluster, recipe.compute.cluster_address, recipe.compute.stall_timeout_s)


def _program(recipe: Recipe, lock: Lock) -> Program:
    launched = launch(recipe, lock)
    env = {**launched.env, **_secrets()}
    return Program("training.programs.fit", launched.argv, env, resolved_compute(recipe, lock), _imports(recipe))


def _runner(recipe: Recipe, lock: Lock, work: Work, folders: Mapping[str, Path]) -> Runner[Any]:
    return engine_for(recipe).runner(_program(recipe, lock), folders, work.on_events)


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


def _secrets() -> dict[str, str]:
    return {checkpoints.SIGNING_KEY: str(signing_key())}


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
    if _deciding_metrics(recipe):
        named |= metrics_code(recipe, recipe.evaluation.metrics)
    return named


def _start_checkpoint(recipe: Recipe) -> dict[str, Files]:
    """The checkpoint that training starts with, named by the digest of its manifest, which holds those of all files.

    Raises UserError if there is no checkpoint, or if another home wrote it in a format that can execute code.
    """
    name = recipe.training.resume_from_checkpoint
    if name is None:
        return {}
    try:
        digest = sha256(Path(name) / checkpoints.MANIFEST)
        if checkpoints.needs_own_checkpoint(recipe.training, recipe.compute):
            checkpoints.require_signed(Path(name), signing_key())
        return {"checkpoint": Files(Path(name).absolute(), {"checkpoint": digest})}
    except OSError as error:
        message = f"{name!r} is no checkpoint ({error.strerror}): name a folder such as checkpoint-40 of a job."
        where = "training.resume_from_checkpoint"
        raise UserError.of("training", where, message) from error


def batch_division(recipe: Recipe, lock: Lock, model: Path) -> BatchDivision:
    """The division of training batches that fits into this machine's memory. `model` is the base model's folder."""
    return BatchDivision(
        max(recipe.training.per_device_train_batch_size, recipe.training.per_device_eval_batch_size),
        model,
        program="training.programs.fit",
        max_length=recipe.tokens.max_length,
        training=recipe.training.model_dump(mode="json", include=MEMORY_SETTINGS),
        mixed_precision=lock.mixed_precision,
        num_processes=lock.num_processes,
        sharing=recipe.compute.weight_settings(),
        attention=recipe.model.attn_implementation,
    )


@contextmanager
def _sharing_checkpoints(recipe: Recipe, model: Artifact, work: Work) -> Iterator[None]:
    """Stores the checkpoints of a training where other machines find them, and uploads them to the Hub if asked for."""
    own_device = None if recipe.training.inexact_resume else device()
    # Other machines share their checkpoints themselves.
    share = open_remote().share_checkpoints if engine_for(recipe).runs_here else None
    sharing = share(work, signing_key(), own_device) if share else nullcontext()
    with sharing, upload_checkpoints(work, recipe, model.path / "tokenizer"):
        yield
