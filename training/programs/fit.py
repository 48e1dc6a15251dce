"""The program that trains: `python -m training.programs.fit JOB`, usually through `accelerate launch`.

inputs     model (config.json and safetensors), tokenizer, tokens (train.arrow, validation.arrow); perhaps checkpoint
settings   training.recipe.program_settings.FitSettings
output     model/: config.json, with what the task type settles when training has ended, safetensors and the tokenizer's
           files; with adapters, which are added to its weights, adapter/ in peft's form; log/loss.png: the curves;
           log/circumstances.json: under what it was trained
figures    trainable_parameters, steps, epochs, train_loss, best_step, best_metric, train_samples_per_second,
           micro_batch (rows);
           train_tokens_per_second and hardware_share as training.engine.throughput has them; estimated_memory_mb and
           peak_memory_mb of the process that took most, in 10^6 bytes
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.jobs.optional_packages import absent
from training.jobs.program import collect_garbage_as_usual, run_program
from training.jobs.protocol import CHECKPOINTS, EVENTS, OUTPUT, Events, Job, rank, read_events
from training.problems import Problem, UserError, nearest
from training.recipe.program_settings import FitSettings

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from training.engine.training_task import Task, Trained
    from training.recipe import Training

PROGRESS_EVERY_S = 1.0


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Train, or go on training, and export the model; gives the figures."""
    settings = FitSettings.model_validate(job.settings)
    # Wherever deepspeed is installed, accelerate imports it, and what it needs: seconds, and MLflow among it. So does
    # transformers with peft.
    needed = {
        "deepspeed": settings.compute.strategy.startswith("deepspeed"),
        "peft": settings.training.lora is not None,
    }
    with contextlib.ExitStack() as without:
        for package in needed:
            if not needed[package]:
                without.enter_context(absent(package))
        return _train(job_dir, job, settings, events)


def _train(job_dir: Path, job: Job, settings: FitSettings, events: Events) -> dict[str, Any]:
    from training.distributed import ranks
    from training.engine import environment, throughput, training_task
    from training.evaluation import loss_curve
    from training.models import loading
    from training.programs import estimate

    loading.make_deterministic()
    task = make_task(job_dir, job, events)
    train = training_task.load(task.training.engine)
    collect_garbage_as_usual()
    estimate.tell_first(task, job_dir)
    trained = train(task)
    require_more_steps(task, trained.steps)
    require_numbers(task, trained)
    if rank() == 0:
        export(task, settings, job.inputs, job_dir / OUTPUT, trained.weights)
    settle(task, settings.labels, job_dir / OUTPUT / "model", trained.steps)
    told = read_events(job_dir / EVENTS, 0, ["metrics", "speed", "estimate"])[0] if rank() == 0 else []
    if rank() == 0:
        log = job_dir / OUTPUT / "log"
        loss_curve.draw_curves(told, log / "loss.png")
        under = {**environment.machine(), **task.circumstances()}
        (log / "circumstances.json").write_text(json.dumps(under, indent=1))
    peak = max(ranks.from_all(estimate.peak_bytes()))
    ranks.part()
    return {
        "trainable_parameters": estimate.told_before(told).get("trainable"),
        "micro_batch": task.training.per_device_train_batch_size,
        "steps": trained.steps,
        "epochs": round(trained.epochs, 4),
        "train_loss": trained.train_loss,
        "best_step": trained.best_step,
        "best_metric": trained.best_metric,
        "train_samples_per_second": round(trained.samples_per_second, 3),
        "estimated_memory_mb": estimate.told_before(told).get("memory_mb"),
        "peak_memory_mb": round(peak / 1e6),
        **throughput.overall(told),
    }


def make_task(job_dir: Path, job: Job, events: Events) -> Task:
    """What the job's engine trains with. Raises UserError for what the recipe names and is not there."""
    import torch

    from training import task_types
    from training.batching.batches import TokenRows, require_a_row_each
    from training.engine import collation
    from training.engine.training_task import Task
    from training.evaluation import metrics
    from training.models import dropout, loading
    from training.task_types.task_type import TaskType

    settings = FitSettings.model_validate(job.settings)
    asked, labels, compute = settings.training, settings.labels, settings.compute
    training = divided(asked, settings.micro_batch_divisor)
    task_type = task_types.load(settings.task, settings.options).while_training(compute.strategy)
    tokenizer = loading.load_tokenizer(Path(job.inputs["tokenizer"]), Path(job.inputs["model"]))
    network = loading.load_for_training(
        task_type,
        Path(job.inputs["model"]),
        labels,
        tokenizer,
        seed=asked.seed,
        lora=asked.lora,
        precision=compute.mixed_precision,
    )
    loading.require_places(network, max_length=settings.max_length)
    if not torch.cuda.is_available():
        dropout.cheapen(network)

    tokens, named = Path(job.inputs["tokens"]), job.inputs.get("checkpoint")
    rows, validation = TokenRows(tokens / "train.arrow"), TokenRows(tokens / "validation.arrow")
    if type(task_type).target_count is not TaskType.target_count and not rows.count_targets:
        message = f"{settings.task} counts targets of its own, and its features have no column `targets`: add it."
        raise UserError([Problem(kind="recipe", where="task", message=message)])
    # A metric that cannot be computed fails before training.
    metrics.make(settings.metrics, task_type.empty_predictions(labels))
    if task_type.loss_only_reason is not None:
        require_metric(asked.metric_for_best_model, {})
    if task_type.loss_only_reason and rank() == 0:
        events.warning(task_type.loss_only_reason)

    def computed(answers: pa.Table) -> dict[str, float]:
        if task_type.loss_only_reason is not None:
            return {}
        told = task_type.decode(task_type.join_labels(answers, validation), tokenizer)
        found = metrics.compute(settings.metrics, task_type.metric_inputs(told, labels))
        require_metric(asked.metric_for_best_model, found)
        return found

    require_a_row_each(len(rows), compute.num_processes)  # on every rank, before any of them waits for the others
    a_pass = asked.per_device_train_batch_size * compute.num_processes
    return Task(
        model=network,
        train=rows,
        validation=validation,
        collate=collation.collator(asked.collator, task_type, tokenizer, loading.padding_multiple()),
        # What a model computes inside is in the lower precision where it is shared, its loss too.
        loss=task_type.loss(training, labels, rows, outside=compute.strategy != "ddp"),
        task_type=task_type,
        metrics=computed,
        training=training,
        compute=compute,
        rows_a_step=a_pass * asked.gradient_accumulation_steps,
        checkpoints=job_dir / CHECKPOINTS,
        named_checkpoint=None if named is None else Path(named),
        events=events,
    )


def export(
    task: Task,
    settings: FitSettings,
    inputs: Mapping[str, str],
    out: Path,
    weights: dict[str, torch.Tensor] | None,
) -> None:
    """Writes the trained model to `out`/model; of adapters that were trained, adapter/, and the base model as it came
    with these added to its weights. Rank 0 calls it, with `weights` where its model holds only a share of them."""
    from training.models import adapters, loading

    network, tokenizer, base = task.model, Path(inputs["tokenizer"]), Path(inputs["model"])
    if task.training.lora:
        loaded = loading.load_tokenizer(tokenizer, base)
        whole = loading.load_for_training(task.task_type, base, settings.labels, loaded, seed=task.training.seed)
        origin = settings.base.model_dump() if settings.base else {}
        adapters.save(network, whole, out / "adapter", origin, weights)
        network, weights = adapters.merged(whole, out / "adapter"), None
        # The Trainer has the config of what it trains say extra.use_cache; the loop leaves it as the model came.
        if hasattr(task.model.config, "use_cache"):
            network.config.use_cache = task.model.config.use_cache
    loading.export(network, tokenizer, out / "model", weights)


def settle(task: Task, labels: Sequence[str], exported: Path, steps: int) -> None:
    """Has the exported model's config say what the task type settles by the validation split; every rank calls it.

    The split is predicted by the weights as they were exported, for by these the model will answer, and they are whole
    also where the processes shared the model. `steps` are those of the training.
    """
    from training.distributed import ranks
    from training.engine import inference
    from training.models import loading

    task_type = task.task_type
    if not task_type.calibrate(task_type.empty_predictions(labels)):
        return
    gc.collect()  # the optimizer's state
    ranks.wait_for_all()  # the model is there
    network = loading.load_trained(task_type, exported).to(task.model.device)
    size, precision = task.training.per_device_eval_batch_size, task.compute.mixed_precision
    answers = inference.predict(
        task_type, network, task.validation, task.collate, size, precision, told_of_evaluation(task.events, steps)
    )
    if rank() == 0:
        loading.add_to_config(exported, task_type.calibrate(task_type.metric_inputs(answers, labels)))


def told_of_evaluation(events: Events, steps: int) -> Callable[[int], None]:
    """What tells now and then that an evaluation goes on after so many steps, the last ones."""
    told_at = time.monotonic()

    def tell(done: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= PROGRESS_EVERY_S:
            told_at = time.monotonic()
            events.progress(phase="evaluate", done=steps, total=steps)

    return tell


def require_metric(name: str | None, found: Mapping[str, float]) -> None:
    """Raises UserError where what chooses the best model is not evaluated: what metrics of the recipe's own give is
    known only now."""
    known = [*found, "loss"]
    if name is not None and name.removeprefix("eval_") not in known:
        message = f"{name!r} is not evaluated: choose from {', '.join(known)}.{nearest(name, known)}"
        raise UserError([Problem(kind="training", where="training.metric_for_best_model", message=message)])


def require_more_steps(task: Task, steps: int) -> None:
    """Raises UserError where a checkpoint that the recipe names was at the end of this training already, or at that of
    one that was stopped early."""
    from training.engine import checkpoints

    named = task.named_checkpoint
    if named is not None and checkpoints.step_of(named) >= steps:
        more = "max_steps" if task.training.max_steps > 0 else "num_train_epochs"
        message = f"{named.name} is where this training ends, after {steps} steps: raise {more}, or where it had been "
        message += "stopped early, name an earlier checkpoint."
        raise UserError([Problem(kind="training", where=checkpoints.NAMED, message=message)])


def require_numbers(task: Task, trained: Trained) -> None:
    """Raises UserError on every rank where weights to be exported are no numbers any more."""
    from training.distributed import ranks

    own = dict(task.model.named_parameters())
    weights = own if trained.weights is None else trained.weights
    lost = [name for name in own if name in weights and not weights[name].isfinite().all()] if rank() == 0 else []
    if lost := ranks.from_first(lost):
        message = f"{task.training.learning_rate:g} made {len(lost)} of the model's {len(own)} tensors hold values "
        message += f"that are no numbers, {lost[0]} first: lower it, or raise training.warmup_steps."
        raise UserError([Problem(kind="training", where="training.learning_rate", message=message)])


def divided(training: Training, by: int) -> Training:
    """The training section with batch sizes divided by this factor, and the same global batch size."""
    rows = training.per_device_train_batch_size
    fewer = -(-rows // by)
    return training.model_copy(
        update={
            "per_device_train_batch_size": fewer,
            "gradient_accumulation_steps": -(-rows * training.gradient_accumulation_steps // fewer),
            "per_device_eval_batch_size": -(-training.per_device_eval_batch_size // by),
        }
    )


if __name__ == "__main__":
    run_program(main, stops_itself=True)
