"""The engine `accelerate`: a plain loop over Accelerate, for one process and for DDP.

`Loop.run` is the table of contents. `Loop.save` and `Loop.restore` handle the state from which a killed run resumes to
the same weights. Optimizer, schedule and loss are made by transformers' functions, so a setting has the same meaning as
with the Trainer.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from safetensors.torch import load_model, save_model
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, enable_full_determinism, get_scheduler, set_seed
from transformers.trainer_pt_utils import LabelSmoother

from training import distributed
from training.batching import random_states
from training.batching.batches import Batch, EvaluationBatches, TokenRows
from training.distributed import ranks
from training.engine import checkpoints, collation, state_check
from training.engine.collation import prepare_step
from training.engine.inference import evaluate
from training.engine.throughput import Reporter, Speed, flops, hardware_limit
from training.engine.training_task import Task, Trained, is_undefined, require_requested_processes
from training.jobs.program import Interrupted, stop_requested
from training.jobs.user_code import blame_field
from training.models import adapters
from training.models.loading import DTYPES
from training.recipe.tables.metrics import more_is_better
from training.task_types.task_type import WholeStep

MODEL, OPTIMIZER, PROGRESS, RANK_STATE = "model.safetensors", "optimizer.pt", "progress.json", "rank{}.pt"
"""The files of a checkpoint: weights; optimizer and scheduler; the progress; the state of each rank."""
_ARGUMENTS = {"learning_rate", "optim", "weight_decay", "warmup_steps", "lr_scheduler_type"}


def train(task: Task) -> Trained:
    """Trains by a plain loop: the engine `accelerate`."""
    return Loop(task).run()


@dataclass
class TrainingProgress:
    """The progress of training, the same on every rank."""

    step: int = 0
    """Optimizer steps so far."""
    recorded: int = 0
    """The last step at which the training loss was recorded."""
    loss_sum: float = 0.0
    """The sum of the losses of the steps up to that one."""
    best_step: int | None = None
    best_metric: float | None = None
    evaluations_without_gain: int = 0
    """Evaluations in a row without enough gain."""
    stopped_early: bool = False


class Loop:
    """A task's training. Every rank creates one, and all ranks call its methods together."""

    def __init__(self, task: Task) -> None:
        self.task, self.training, self.progress = task, task.training, TrainingProgress()
        args = arguments(task)
        ddp = DistributedDataParallelKwargs(find_unused_parameters=True)  # a task may skip layers of a model
        self.accelerator = Accelerator(mixed_precision=args.mixed_precision, kwargs_handlers=[ddp])
        require_requested_processes(self.accelerator.state, task.compute)
        self.device, self.rank = self.accelerator.device, self.accelerator.process_index
        self.ranks = self.accelerator.num_processes
        seed, self.accumulation = self.training.seed, self.training.gradient_accumulation_steps
        (enable_full_determinism if args.full_determinism else set_seed)(seed)
        torch.manual_seed(seed + self.rank)  # each rank draws its own dropout masks
        self.batches = task.batches(self.rank)
        self.state_check = state_check.StateCheck(task.checkpoints.parent, self.batches, self.get_state)
        self.collate = state_check.add_row_numbers(task.collate)
        self.operations = flops(task.model)
        steps, epochs = self.training.max_steps, self.training.num_train_epochs
        self.total_steps = steps if steps > 0 else math.ceil(epochs * self.batches.steps)
        self.model, self.optimizer = self.accelerator.prepare(task.model, make_optimizer(task.model, args))
        if wrong := distributed.load(task.compute.strategy).check_wrapper(self.model, task.compute):
            raise RuntimeError(f"requested {task.compute.strategy}, but the model is not wrapped for it: {wrong}")
        self.scheduler = make_scheduler(self.optimizer, args, self.total_steps)
        self.schedules_by_metric = self.training.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
        self.task_loss = loss_function(task)
        self.loss = torch.zeros((), device=self.device)  # the sum over this rank's steps since the last record
        self.saved_at = 0.0

    def run(self) -> Trained:
        """Trains to the end, from a checkpoint if there is one, and leaves the weights to export in the model."""
        if checkpoint := self.task.begin():
            self.restore(checkpoint)
        progress, self.saved_at = self.progress, time.monotonic()
        if self.rank == 0:
            self.reporter = self.make_reporter()
        self.model.train()
        while progress.step < self.total_steps and not progress.stopped_early:
            epoch, steps_done = divmod(progress.step, self.batches.steps)
            batches = self.load_batches(epoch, steps_done)
            for _ in range(steps_done, min(self.batches.steps, self.total_steps - epoch * self.batches.steps)):
                gradient_norm, learning_rate = self.step(batches)
                progress.step += 1
                if self.rank == 0:
                    self.reporter.report_step(progress.step, self.epoch)
                if progress.step % self.training.logging_steps == 0:
                    self.record(gradient_norm, learning_rate)
                if evaluated := self.is_evaluation_due():
                    self.record_evaluation(self.evaluate())
                self.save_if_due(evaluated)
                if progress.stopped_early:
                    break
        rate = self.reporter.finish(progress.step) if self.rank == 0 else 0.0
        self.load_best()
        return Trained(
            steps=progress.step,
            epochs=self.epoch,
            train_loss=(progress.loss_sum + self.mean_over_ranks()) / max(progress.step, 1),
            rows_per_second=rate,
            best_step=progress.best_step,
            best_metric=progress.best_metric,
        )

    @property
    def epoch(self) -> float:
        """The passes over the training rows so far."""
        epochs, steps = divmod(self.progress.step, self.batches.steps)
        return epochs + steps * self.accumulation / len(self.batches)

    # Training

    def load_batches(self, epoch: int, steps_done: int) -> Iterator[Batch]:
        """Returns this rank's micro-batches of an epoch, without those of its first `steps_done` steps."""
        self.batches.set_epoch(epoch)
        make_loader = self.make_loader(self.task.train, islice(self.batches, steps_done * self.accumulation, None))
        # An iterator draws a seed. A resumed epoch drew it before the kill.
        with torch.random.fork_rng(devices=[], enabled=steps_done > 0):
            batches = iter(make_loader)
        # A user's collator sets the process's generators, from which dropout draws, so it must not run in a thread.
        return batches if isinstance(self.task.collate, collation.TrainingCollator) else prefetch(batches)

    def make_loader(self, rows: TokenRows, batches: Iterable[list[int]]) -> DataLoader[Any]:
        on_gpu = self.device.type == "cuda"
        return DataLoader(rows, batch_sampler=batches, collate_fn=self.collate, pin_memory=on_gpu)

    def step(self, batches: Iterator[Batch]) -> tuple[torch.Tensor, float]:
        """Runs one optimizer step. Returns the norm of its gradient, on the device, and its learning rate.

        Backward and DDP take means over micro-batches and ranks. Weighting by each micro-batch's share of the
        step's targets makes every target count the same.
        """
        step = self.progress.step
        micro_batches = min(self.accumulation, len(self.batches) - step % self.batches.steps * self.accumulation)
        own: Iterable[Batch] = islice(batches, micro_batches)  # read one by one unless the loss needs all of them first
        if isinstance(self.task.task_type, WholeStep):
            own = prepare_step(self.task.task_type, self.model, [*own])
        for number, batch in enumerate(own, 1):
            self.state_check.record_batch(step, batch)
            weight = (
                self.task.task_type.target_count(batch)
                * micro_batches
                * self.ranks
                / self.batches.targets_of_step(step)
            )
            with nullcontext() if number == micro_batches else self.accelerator.no_sync(self.model):
                loss = self.loss_and_outputs(self.model, batch)[0] * weight / micro_batches
                self.accelerator.backward(loss)
            self.loss += loss.detach()
        gradient_norm = self.accelerator.clip_grad_norm_(
            self.model.parameters(), self.training.max_grad_norm or math.inf
        )
        self.optimizer.step()
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        overflowed = self.optimizer.step_was_skipped  # the gradient, in fp16
        if not self.schedules_by_metric and not overflowed:
            self.scheduler.step()
        self.optimizer.zero_grad()
        return gradient_norm, learning_rate

    def loss_and_outputs(self, model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, Any]:
        """Returns the mean loss of a batch, (), and the model's outputs."""
        batch = {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}
        if self.task_loss is None:
            outputs = model(**batch)
            return outputs["loss"], outputs
        outputs = self.task.task_type.forward(model, batch)
        return self.task_loss(outputs["logits"], batch["labels"]), outputs

    # Evaluation

    def is_evaluation_due(self) -> bool:
        """Whether the validation split is evaluated after this step; always after the last one."""
        every = {"epoch": self.batches.steps, "steps": self.training.eval_steps}.get(self.training.eval_strategy)
        return every is not None and (self.progress.step % every == 0 or self.progress.step == self.total_steps)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Returns the loss and the metrics of the validation split; each row counts once over all ranks."""
        split, size = self.task.validation, self.training.per_device_eval_batch_size
        batches = EvaluationBatches(split.lengths, size, world=self.ranks, rank=self.rank)

        def predict_batch(batch: Batch) -> tuple[torch.Tensor, int, pa.RecordBatch]:
            batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
            loss, outputs = self.loss_and_outputs(self.task.model, batch)
            return (
                loss,
                self.task.task_type.target_count(batch),
                self.task.task_type.predictions(self.task.model, outputs, batch),
            )

        def report(done: int) -> None:
            if self.rank == 0:
                self.reporter.report_evaluation(self.progress.step, self.epoch)

        self.model.eval()
        result = evaluate(self.make_loader(split, batches), batches, predict_batch, report)
        self.model.train()
        values = {"loss": result.loss}
        if self.rank == 0:
            values |= self.task.metrics(result.predictions)
        values = {f"eval_{name.removeprefix('eval_')}": value for name, value in ranks.broadcast(values).items()}
        if self.rank == 0:
            self.reporter.report_metrics(self.progress.step, self.epoch, values)
            self.reporter.exclude_pause()
        return values

    def record_evaluation(self, values: dict[str, float]) -> None:
        """Records the best evaluation, and ends training after too many without a gain."""
        name = (self.training.metric_for_best_model or "loss").removeprefix("eval_")
        value, progress, greater = values[f"eval_{name}"], self.progress, self.training.greater_is_better
        if is_undefined(name, value):
            return
        sign = 1 if (more_is_better(name) if greater is None else greater) else -1
        gain = sign * (value - (-sign * math.inf if progress.best_metric is None else progress.best_metric))
        progress.evaluations_without_gain = (
            0 if gain > self.training.early_stopping_threshold else progress.evaluations_without_gain + 1
        )
        if gain > 0:
            progress.best_metric, progress.best_step = value, progress.step
        progress.stopped_early = 0 < (self.training.early_stopping_patience or 0) <= progress.evaluations_without_gain
        if self.schedules_by_metric:
            self.scheduler.step(value)

    def load_best(self) -> None:
        """Loads the weights of the best evaluation if they are to be exported."""
        if self.best_to_load not in (None, self.progress.step):
            best = self.task.checkpoints / checkpoints.name(self.best_to_load)
            self.task.share_checkpoint(best)
            if damage := checkpoints.find_damage(best):
                raise OSError(f"The best checkpoint was damaged ({damage}). Run again to train from an earlier one.")
            self.load_weights(best / MODEL)

    @property
    def best_to_load(self) -> int | None:
        """The step whose weights are exported; None for the last one."""
        return self.progress.best_step if self.training.load_best_model_at_end else None

    # Checkpoints

    def save_if_due(self, evaluated: bool) -> None:
        """Saves after an evaluation, after the interval, and on a request to stop, which also raises Interrupted."""
        is_due = time.monotonic() - self.saved_at >= self.training.checkpoint_interval_s
        is_due |= self.task.has_lost_checkpoint
        # Clocks and signals differ between ranks, and all must save at the same step.
        is_due, stop = ranks.any_rank(is_due, stop_requested())
        if evaluated or is_due or stop:
            self.save()
        if stop:
            self.task.finish_checkpoint()
            raise Interrupted(f"stopped after step {self.progress.step}; the next run resumes from there")

    def save(self) -> None:
        """Writes a checkpoint of all state that later steps depend on."""
        step, scaler = self.progress.step, self.accelerator.scaler
        needs = [checkpoints.name(self.best_to_load)] if self.best_to_load not in (None, step) else []
        with self.task.write_checkpoint(step, needs) as folder:
            if self.rank == 0:
                self.save_weights(folder / MODEL)
                state = {"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}
                torch.save(state | ({"scaler": scaler.state_dict()} if scaler else {}), folder / OPTIMIZER)
                (folder / PROGRESS).write_text(json.dumps(asdict(self.progress)))
            self.state_check.save_state(folder, step)
            torch.save(
                {"loss": self.loss, "random": random_states.random_states()}, folder / RANK_STATE.format(self.rank)
            )
        self.saved_at = time.monotonic()
        if self.rank == 0:
            self.reporter.exclude_pause()

    def save_weights(self, file: Path) -> None:
        if self.training.lora:
            adapters.save_trained(self.task.model, file)
        else:
            save_model(self.task.model, str(file), metadata={"format": "pt"})

    def load_weights(self, file: Path) -> None:
        (adapters.load_trained if self.training.lora else load_model)(self.task.model, file)

    def restore(self, checkpoint: Path) -> None:
        """Restores the state of a checkpoint."""
        self.progress = TrainingProgress(**json.loads((checkpoint / PROGRESS).read_text()))
        self.load_weights(checkpoint / MODEL)
        state = torch.load(checkpoint / OPTIMIZER, map_location="cpu", weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        if self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        rank_state = torch.load(checkpoint / RANK_STATE.format(self.rank), map_location="cpu", weights_only=True)
        self.loss.copy_(rank_state["loss"])
        random_states.set_random_states(rank_state["random"])
        self.state_check.compare_restored(checkpoint)

    def get_state(self) -> state_check.State:
        """Digests of the live state, which the state check compares with the saved one."""
        return state_check.state_of(
            model=self.task.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=self.accelerator.scaler,
            trainer=asdict(self.progress) | {"loss": self.loss},
        )

    # Reports

    def make_reporter(self) -> Reporter:
        limit = self.ranks * hardware_limit(self.device, DTYPES[self.task.compute.mixed_precision])
        return Reporter(
            self.task.events, Speed(self.task.events, self.batches, self.operations, limit), self.total_steps
        )

    def record(self, gradient_norm: torch.Tensor, learning_rate: float) -> None:
        """Reports the mean loss since the last call. Between evaluations, the host waits for a GPU only here."""
        progress, loss = self.progress, self.mean_over_ranks()
        mean, norm = loss / (progress.step - progress.recorded), gradient_norm.item()
        progress.loss_sum, progress.recorded = progress.loss_sum + loss, progress.step
        self.loss.zero_()
        if self.rank == 0:
            values = {"train_loss": mean, "learning_rate": learning_rate, "grad_norm": norm}
            self.reporter.report_training(progress.step, self.epoch, values)

    def mean_over_ranks(self) -> float:
        return float(self.accelerator.reduce(self.loss, "mean").item())


def prefetch(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yields the same batches. A thread prepares each one during training on the previous one."""
    with ThreadPoolExecutor(1) as thread:
        next_batch = thread.submit(next, batches, None)
        while (batch := next_batch.result()) is not None:
            next_batch = thread.submit(next, batches, None)
            yield batch


def arguments(task: Task) -> TrainingArguments:
    """Returns the arguments from which transformers makes an optimizer and a schedule. Also connects the processes.

    Raises UserError if TrainingArguments refuses a value.
    """
    precision = task.compute.mixed_precision
    with blame_field("training"):
        return TrainingArguments(
            **task.training.model_dump(mode="json", include=_ARGUMENTS),
            **task.training.extra,
            output_dir=str(task.checkpoints),
            eval_strategy=task.training.eval_strategy,  # some schedules depend on it
            eval_steps=task.training.eval_steps,
            bf16=precision == "bf16",
            fp16=precision == "fp16",
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
        )


def make_optimizer(model: torch.nn.Module, args: TrainingArguments) -> torch.optim.Optimizer:
    """Makes the Trainer's optimizer, with decay for the same weights."""
    decayed_names = set(Trainer.get_decay_parameter_names(None, model))
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    groups = [
        {"params": [weights[name] for name in weights if name in decayed_names], "weight_decay": args.weight_decay},
        {"params": [weights[name] for name in weights if name not in decayed_names], "weight_decay": 0.0},
    ]
    with blame_field("training.optim"):
        optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return optimizer_class(groups, **settings)


def make_scheduler(optimizer: torch.optim.Optimizer, args: TrainingArguments, steps: int) -> Any:
    with blame_field("training.extra.lr_scheduler_kwargs"):
        warmup = args.get_warmup_steps(steps)
        return get_scheduler(args.lr_scheduler_type, optimizer, warmup, steps, args.lr_scheduler_kwargs)


def loss_function(task: Task) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Returns the mean loss of logits (B, L) and labels (B,); None for the model's own loss."""
    smoothing = task.training.label_smoothing_factor
    if task.loss is not None or not smoothing:
        return task.loss
    smoother = LabelSmoother(smoothing)
    return lambda logits, labels: smoother({"logits": logits}, labels)
