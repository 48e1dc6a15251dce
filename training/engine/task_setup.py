"""Setup of a training task: model, rows, batches, loss and metrics from a job's settings and inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from training import task_types
from training.batching.batches import TokenRows, require_row_per_rank, rows_of_fold
from training.engine import collation
from training.engine.training_task import Task
from training.evaluation import metrics
from training.evaluation.stored_calibration import Calibration
from training.jobs.protocol import CHECKPOINTS, Events, rank
from training.models import layers, loading
from training.problems import UserError, nearest
from training.task_types.losses import TEACHER
from training.task_types.losses.distillation_loss import AddTeacher, DistillationLoss, with_outputs, with_unlabelled
from training.task_types.losses.token_distillation import TokenDistillationLoss, with_tokens
from training.task_types.task_type import LearnsTokens, LearnsVectors, TaskType
from training.tokenization.features import list_column

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.engine.fit_settings import FitSettings
    from training.models.weights import Fit
    from training.recipe import Training
    from training.recipe.training_fields import Teacher
    from training.task_types.task_type import Loss


def make_task(settings: FitSettings, inputs: Mapping[str, str], job_dir: Path, events: Events) -> Task:
    """The task that the engine trains. Raises UserError if an object that the recipe names does not exist or fit."""
    training = with_micro_batches(settings.training, settings.micro_batch_divisor)
    compute = settings.compute
    task_type = task_types.load(settings.task, settings.options | settings.evaluation_options).while_training(
        compute.strategy
    )
    tokenizer = loading.load_preprocessor(task_type, Path(inputs["tokenizer"]), Path(inputs["model"]))
    tokens, checkpoint = Path(inputs["tokens"]), inputs.get("checkpoint")
    train, validation = _train_rows(settings, inputs), TokenRows(tokens / "validation.arrow")
    fits: list[Fit] = []

    def require_usable(model: PreTrainedModel) -> None:
        if not task_type.reads_images():
            loading.require_positions(model, max_length=settings.max_length)
        collate = task_type.collator(tokenizer, loading.padding_multiple())
        warn: Callable[[str], None] = events.warning if rank() == 0 else (lambda message: None)
        collation.require_same_predictions(task_type, model, tokenizer, validation, collate, warn)

    model = loading.load_for_training(
        task_type,
        Path(inputs["model"]),
        settings.labels,
        tokenizer,
        seed=settings.training.seed,
        lora=settings.training.lora,
        precision=settings.compute.mixed_precision,
        preparing=_switched_attention(settings),
        compared=fits.append,
        require_usable=require_usable,
    )
    if not torch.cuda.is_available():
        layers.replace_dropout(model)
    _require_target_counts(settings.task, task_type, train)
    compute_metrics = _metrics(settings, task_type, tokenizer, validation, events)
    if task_type.loss_only_reason and rank() == 0:
        events.warning(task_type.loss_only_reason)
    # A sharded model computes in the lower precision, and so would the loss inside it.
    outside = compute.strategy != "ddp" or training.teacher is not None
    if training.teacher is not None and isinstance(task_type, LearnsVectors):
        task_type = _taught(task_type, training.teacher, train, model)
    loss = task_type.loss(training, settings.labels, train, outside=outside)  # of the rows with labels
    if (unlabelled := inputs.get("unlabelled")) is not None and training.teacher is not None:
        outputs, is_sure = Path(inputs["teacher"]) / "unlabelled.arrow", _certainty(settings, training.teacher)
        train = with_unlabelled(train, Path(unlabelled) / "train.arrow", outputs, is_sure)
    collate = collation.collator(training.collator, task_type, tokenizer, loading.padding_multiple())
    if training.augment is not None:
        collate = import_module(training.augment.module).AugmentImages(collate, tokenizer, training.augment)
    if training.teacher is not None:
        assert loss is not None
        loss, collate = _loss_with_teacher(task_type, loss, training.teacher), AddTeacher(collate)
    if training.use_liger_kernel:
        layers.use_liger(model, fuses_loss=loss is None and task_type.auto_class == "AutoModelForCausalLM")
    require_row_per_rank(len(train), compute.num_processes)  # on every rank, before any of them waits for the others
    return Task(
        model=model,
        train=train,
        validation=validation,
        collate=collate,
        loss=loss,
        task_type=task_type,
        metrics=compute_metrics,
        training=training,
        compute=compute,
        global_batch_size=_global_batch_size(settings),
        checkpoints=job_dir / CHECKPOINTS,
        # The input is a link: the step is in the name of the folder, and checkpoints that it needs lie beside it.
        named_checkpoint=None if checkpoint is None else Path(checkpoint).resolve(),
        events=events,
        missing_weights=len(fits[0].missing),
    )


def _train_rows(settings: FitSettings, inputs: Mapping[str, str]) -> TokenRows:
    rows = TokenRows(Path(inputs["tokens"]) / "train.arrow")
    if (teacher := inputs.get("teacher")) is not None:
        file = Path(teacher) / "train.arrow"
        rows = with_outputs(rows, file) if file.exists() else with_tokens(rows, Path(teacher))
    if settings.fold is None:
        return rows
    return rows_of_fold(rows, Path(inputs["folds"]) / "folds.arrow", settings.fold, held_out=False)


def _loss_with_teacher(task_type: TaskType, ordinary: Loss, teacher: Teacher) -> Loss:
    outputs = task_type.teacher_outputs
    assert outputs is not None and teacher.loss != "sequence"
    if outputs == "vectors":  # they are in the loss already
        return ordinary
    temperature = teacher.temperature_of(outputs)
    if outputs != "tokens":
        return DistillationLoss(ordinary, outputs, temperature, teacher.weight)
    assert isinstance(task_type, LearnsTokens)
    divergence, beta = teacher.loss or "forward_kl", teacher.beta or 0.5
    return TokenDistillationLoss(ordinary, task_type.causal, divergence, beta, temperature, teacher.weight)


def _certainty(
    settings: FitSettings, teacher: Teacher
) -> Callable[[npt.NDArray[np.float64]], npt.NDArray[np.bool_]] | None:
    """A function of the teacher's logits, (N, L), that chooses the rows of which it is sure, (N,); None if all are
    used. Raises UserError if its thresholds are for other labels."""
    least = teacher.unlabelled_min_confidence
    if least is None:
        return None
    if settings.calibration is None:
        return lambda logits: 1 / np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1) >= least
    calibration, labels = Calibration.model_validate(settings.calibration), settings.labels
    if {*labels} != {*calibration.labels}:
        message = f"abstain has thresholds for {', '.join(calibration.labels)}, and the rows have {', '.join(labels)}: "
        where = "training.teacher.unlabelled_min_confidence"
        raise UserError.of("training", where, f"{message}give a number, such as 0.9.")
    order = [labels.index(label) for label in calibration.labels]

    def is_answered(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        ordered = logits[:, order]
        columns = {"prediction": ordered.argmax(axis=1), "logits": list_column(ordered.ravel(), np.full(*logits.shape))}
        return ~calibration.review(calibration.judge(pa.table(columns)))

    return is_answered


def _taught(task_type: LearnsVectors, teacher: Teacher, train: TokenRows, model: PreTrainedModel) -> LearnsVectors:
    """The task type with the loss of the teacher's vectors. Raises UserError if they have other dimensions than the
    model's embeddings."""
    row = train[0]
    dimensions = len(row[TEACHER]) // len(row["text_ids"])
    task_type.require_dimensions(teacher.path, dimensions, model.config.get_text_config().hidden_size)
    return task_type.taught(dimensions, teacher.weight)


def with_micro_batches(training: Training, divisor: int) -> Training:
    """The training section with batch sizes divided by `divisor` and the same global batch size."""
    rows = training.per_device_train_batch_size
    micro = -(-rows // divisor)
    return training.model_copy(
        update={
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": -(-rows * training.gradient_accumulation_steps // micro),
            "per_device_eval_batch_size": -(-training.per_device_eval_batch_size // divisor),
        }
    )


def _global_batch_size(settings: FitSettings) -> int:
    """Rows of an optimizer step by the recipe; smaller micro-batches leave it unchanged."""
    training = settings.training
    rows = training.per_device_train_batch_size * settings.compute.num_processes
    return rows * training.gradient_accumulation_steps


def _switched_attention(settings: FitSettings) -> Callable[[PreTrainedModel], AbstractContextManager[None]]:
    if settings.attn_implementation is None:
        return nullcontext
    dtype = loading.DTYPES[settings.compute.mixed_precision]
    return partial(layers.switched_attention, implementation=settings.attn_implementation, dtype=dtype)


def _require_target_counts(name: str, task_type: TaskType, rows: TokenRows) -> None:
    """Raises UserError if the task type overrides `target_count` and its features lack the counts."""
    if type(task_type).target_count is not TaskType.target_count and not rows.count_targets:
        message = f"{name} overrides target_count, and its features have no column `targets`: add it."
        raise UserError.of("recipe", "task", message)


def _metrics(
    settings: FitSettings,
    task_type: TaskType,
    tokenizer: PreTrainedTokenizerBase,
    validation: TokenRows,
    events: Events,
) -> Callable[[pa.Table], dict[str, float]]:
    """Computes the recipe's metrics from predictions of the validation split; none if the task type computes only the
    loss during training."""
    chosen, labels = settings.training.metric_for_best_model, settings.labels
    names = [name for name in settings.metrics if name not in task_type.answer_metrics]
    # A metric that cannot be computed fails before training.
    metrics.make(names, task_type.empty_predictions(labels))
    if task_type.loss_only_reason is not None:
        _require_metric(chosen, {})
        return lambda predictions: {}

    def compute(predictions: pa.Table) -> dict[str, float]:
        decoded = task_type.decode(task_type.join_labels(predictions, validation), tokenizer)
        values = metrics.compute(names, task_type.metric_inputs(decoded, labels))
        _require_metric(chosen, values)
        if chosen and math.isnan(values.get(chosen.removeprefix("eval_"), 0.0)):
            events.warning(
                f"{chosen} has no value in this evaluation, which chooses no checkpoint and does not count for early "
                "stopping: docs/reference/metrics.md says when it has none."
            )
        return values

    return compute


def _require_metric(name: str | None, values: Mapping[str, float]) -> None:
    """Raises UserError if the metric that chooses the best model is not evaluated. The figures of a user's metric are
    known only after an evaluation."""
    known = [*values, "loss"]
    if name is not None and name.removeprefix("eval_") not in known:
        message = f"{name!r} is not evaluated: choose from {', '.join(known)}.{nearest(name, known)}"
        raise UserError.of("training", "training.metric_for_best_model", message)
