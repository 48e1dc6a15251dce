"""Export of a trained model: whole weights, adapters merged into the base model, and the calibrated configuration."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from training.distributed import machine_files, ranks
from training.engine import checkpoints, inference
from training.jobs.protocol import PROGRESS_EVERY_S, Events, rank
from training.models import adapters, classifier_inputs, loading
from training.problems import UserError
from training.task_types.sequence_level import logits_of
from training.task_types.task_type import Calibrated, FittedHead

if TYPE_CHECKING:
    from training.engine.fit_settings import FitSettings
    from training.engine.training_task import Task, Trained


def export(
    task: Task,
    settings: FitSettings,
    inputs: Mapping[str, str],
    out: Path,
    weights: dict[str, torch.Tensor] | None,
) -> None:
    """Writes the trained model to `out`/model. With adapters, `out`/adapter has these, and model the base model with
    them added to its weights. Rank 0 calls it, with `weights` if its model holds only a share of them."""
    network, tokenizer, base = task.model, Path(inputs["tokenizer"]), Path(inputs["model"])
    if task.training.lora:
        loaded = loading.load_preprocessor(task.task_type, tokenizer, base)
        whole = loading.load_for_training(task.task_type, base, settings.labels, loaded, seed=task.training.seed)
        origin = settings.base.model_dump() if settings.base else {}
        adapters.save(network, whole, out / "adapter", origin, weights)
        network, weights = adapters.merge(whole, out / "adapter"), None
        # The Trainer sets use_cache of the model that it trains; the loop leaves it unchanged.
        if hasattr(task.model.config, "use_cache"):
            network.config.use_cache = task.model.config.use_cache
    loading.export(network, tokenizer, out / "model", weights)
    for name, text in task.task_type.exported_files(out / "model").items():
        (out / "model" / name).write_text(text, encoding="utf-8")


def fit_head(task: Task, labels: Sequence[str], exported: Path, steps: int) -> None:
    """Adds the head of a task type that fits it after training to the exported model; every rank calls it.

    The exported weights give the embeddings of the training rows. `steps` are those of the training.
    """
    task_type = task.task_type
    if not isinstance(task_type, FittedHead):
        return
    gc.collect()  # the optimizer's state
    machine_files.distribute(exported)
    network = loading.load_base(task_type, exported, seed=task.training.seed).to(task.model.device)
    name, head = classifier_inputs.take_head(network)
    size, precision = task.training.per_device_eval_batch_size, task.compute.mixed_precision
    report = _evaluation_progress(task.events, steps)
    predictions = inference.predict(task_type, network, task.train, task.collate, size, precision, report)
    if rank() == 0:
        embeddings, given = logits_of(predictions, head.in_features), predictions["label"].to_numpy()
        weights, biases = task_type.fit_head(embeddings, given, len(labels), with_bias=head.bias is not None)
        with torch.no_grad():
            head.weight.copy_(torch.from_numpy(weights))
            if head.bias is not None:
                head.bias.copy_(torch.from_numpy(biases))
        classifier_inputs.put_head(network, name, head)
        network.save_pretrained(exported)


def calibrate(task: Task, labels: Sequence[str], exported: Path, steps: int) -> None:
    """Adds the task type's calibration on the validation split, such as thresholds, to the exported model's config;
    every rank calls it.

    The exported weights predict the split: later predictions use these, and they are whole even if the processes
    sharded the model. `steps` are those of the training.
    """
    task_type = task.task_type
    if not isinstance(task_type, Calibrated) or not task_type.is_calibrated:
        return
    gc.collect()  # the optimizer's state
    machine_files.distribute(exported)
    network = loading.load_trained(task_type, exported).to(task.model.device)
    size, precision = task.training.per_device_eval_batch_size, task.compute.mixed_precision
    report = _evaluation_progress(task.events, steps)
    predictions = inference.predict(task_type, network, task.validation, task.collate, size, precision, report)
    if rank() == 0:
        loading.add_to_config(exported, task_type.calibrate(predictions, labels))


def _evaluation_progress(events: Events, steps: int) -> Callable[[int], None]:
    """Reports about once a second that an evaluation after the last of `steps` is running."""
    reported_at = time.monotonic()

    def report(done: int) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at >= PROGRESS_EVERY_S:
            reported_at = time.monotonic()
            events.progress(phase="evaluate", done=steps, total=steps)

    return report


def require_more_steps(task: Task, steps: int) -> None:
    """Raises UserError if the checkpoint that the recipe names was already at the end of this training, or of one that
    stopped early."""
    named = task.named_checkpoint
    if named is not None and checkpoints.step_of(named) >= steps:
        more = "max_steps" if task.training.max_steps > 0 else "num_train_epochs"
        message = f"{named.name} is where this training ends, after {steps} steps: raise {more}, or if it had stopped "
        message += "early, name an earlier checkpoint."
        raise UserError.of("training", checkpoints.NAMED, message)


def require_finite_weights(task: Task, trained: Trained) -> None:
    """Raises UserError on every rank if weights to be exported are NaN or infinite."""
    parameters = dict(task.model.named_parameters())
    weights = (parameters if trained.weights is None else trained.weights) if rank() == 0 else {}
    lost = [name for name in parameters if name in weights and not weights[name].isfinite().all()]
    if lost := ranks.broadcast(lost):
        message = f"{task.training.learning_rate:g} made {len(lost)} of the model's {len(parameters)} tensors NaN or "
        message += f"infinite: {lost[0]} first. Lower it, or raise training.warmup_steps."
        raise UserError.of("training", "training.learning_rate", message)
