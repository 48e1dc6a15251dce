"""The engine `trainer`: transformers' Trainer with exact resume after a kill at any instant.

It adds to transformers 5.23: checkpoints that are never half written; the path of the best model after its folder has
moved; early stopping and the running sum of the loss across a resume; the same length groups in each run; and stopping
on request.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Sampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.optimization import GreedyLR
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import SAFE_WEIGHTS_NAME

from training import distributed
from training.batching.batches import Batch, EvaluationBatches, TokenRows
from training.distributed import ranks
from training.engine import callbacks, checkpoints, state_check
from training.engine.collation import prepare_step
from training.engine.inference import evaluate
from training.engine.throughput import Reporter, Speed, flops, hardware_limit
from training.engine.training_task import Task, Trained, is_undefined, require_requested_processes
from training.jobs.protocol import rank
from training.jobs.user_code import CodeField, blame_field
from training.models import adapters
from training.models.loading import DTYPES
from training.recipe.tables.metrics import more_is_better
from training.task_types.task_type import WholeStep

LOSS_SUM = "loss_sum.rank{}.json"
_FIXED = {
    **dict.fromkeys(
        ("get_train_dataloader", "_get_train_sampler", "get_batch_samples"),
        "a resumed training has the same rows in the same order; name your collator in training.collator",
    ),
    **dict.fromkeys(
        ("evaluation_loop", "_get_eval_sampler"),
        "each row counts once over all processes; override get_eval_dataloader, or name metrics in evaluation.metrics",
    ),
    **dict.fromkeys(
        ("_run_epoch", "_load_from_checkpoint", "_load_best_model", "_load_rng_state", "_load_callback_state"),
        "a resumed training has the state of the killed one; name callbacks in training.callbacks",
    ),
}
"""The methods that a subclass of ExactTrainer must not override, with the reason and what takes their place."""
# The progress in a TrainerState, without its settings and the paths of checkpoints.
_PROGRESS = (
    *("global_step", "epoch", "best_metric", "best_global_step"),
    *("total_flos", "num_input_tokens_seen"),
)


def train(task: Task) -> Trained:
    """Trains by the Trainer: the engine `trainer`."""
    trainer = make_trainer(task)
    require_requested_processes(trainer.accelerator.state, task.compute, trainer.args.n_gpu)
    if trainer.args.torch_compile and trainer.is_world_process_zero():
        task.events.warning("torch_compile: a killed run resumes, but may end with other weights.")
    start = task.begin()
    trainer.train(resume_from_checkpoint=str(start) if start else None)
    state = trainer.state
    return Trained(
        steps=state.global_step,
        epochs=state.epoch or 0.0,
        train_loss=trainer.mean_loss,
        rows_per_second=trainer.rows_per_second,
        best_step=state.best_global_step,
        best_metric=None if state.best_global_step is None else state.best_metric,  # infinite before the first value
        weights=distributed.load(task.compute.strategy).gather_weights(trainer),
    )


def make_trainer(task: Task) -> ExactTrainer:
    """Creates the task's Trainer, of the class that the recipe names. Raises UserError if a name in the recipe is not
    found or not accepted."""
    training = task.training
    trainer_class = ExactTrainer if training.trainer is None else _load_subclass(training.trainer)
    arguments = {
        "model": task.model,
        "args": training_arguments(task),
        "train_dataset": task.train,
        "eval_dataset": task.validation,
        "data_collator": task.collate,
        "callbacks": callbacks.recipe_callbacks(training),
        "task": task,
    }
    try:
        inspect.signature(trainer_class).bind(**arguments)
    except TypeError as error:
        raise _FIELD.error(f"{training.trainer!r} does not take the arguments of ExactTrainer: {error}.") from error
    return trainer_class(**arguments)


def _load_subclass(name: str) -> type[ExactTrainer]:
    found: type[ExactTrainer] = _FIELD.load(name)
    reasons: dict[str, list[str]] = {}
    for method, reason in _FIXED.items():
        if getattr(found, method) is not getattr(ExactTrainer, method):
            reasons.setdefault(reason, []).append(method)
    if reasons:
        listed = "; ".join(f"{', '.join(methods)} ({reason})" for reason, methods in reasons.items())
        raise _FIELD.error(f"{name!r} overrides methods that it must leave as they are: {listed}.")
    return found


def training_arguments(task: Task) -> TrainingArguments:
    """Returns the training section as TrainingArguments, with the fields that the project or the strategy sets. Raises
    UserError if TrainingArguments refuses a value."""
    training, compute = task.training, task.compute
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    fields = training.model_dump(mode="json", include=names, exclude_none=True)
    project_settings = {
        "output_dir": str(task.checkpoints),
        "save_strategy": training.eval_strategy,
        "bf16": compute.mixed_precision == "bf16",
        "fp16": compute.mixed_precision == "fp16",
        "use_cpu": not torch.cuda.is_available(),
        "disable_tqdm": True,
        "report_to": "none",  # the flow tells trackers, by the events
        "remove_unused_columns": False,
        "restore_callback_states_from_checkpoint": True,
        "use_liger_kernel": False,  # they are in the model already, so that the estimate counts them
    }
    fields["logging_nan_inf_filter"] = False  # by default it logs a NaN loss as 0
    if training.eval_strategy != "no":
        fields.setdefault("metric_for_best_model", "loss")  # early stopping needs it
    if metric := fields.get("metric_for_best_model"):
        fields.setdefault("greater_is_better", more_is_better(metric.removeprefix("eval_")))
    if training.eval_strategy == "steps":
        project_settings["save_steps"] = training.eval_steps
    strategy = distributed.load(compute.strategy)
    strategy_settings = strategy.build_arguments(compute, task.model)
    if strategy_settings and rank() == 0:
        # `finetune plan --show-launch` runs without the model, so it cannot show them.
        task.events.write("strategy", arguments=strategy_settings)
    with blame_field("training"):
        arguments = TrainingArguments(**{**fields, **training.extra, **project_settings, **strategy_settings})
    strategy.adjust_arguments(arguments, compute)
    return arguments


class ExactTrainer(Trainer):
    """Trains on TokenRows in length-grouped batches, with checkpoints that are complete or absent.

    The arguments besides `task` are the Trainer's. `args.output_dir` is the folder of the checkpoints. One is written
    at each evaluation and whenever the last is older than `training.checkpoint_interval_s`. On a request to stop,
    `train` writes one and raises Interrupted. Every rank makes a Trainer; rank 0 alone writes events.

    A recipe may name a subclass, `training.trainer: module:Class`. A method that it overrides calls super():
    compute_loss weights the rows, and _save_checkpoint writes complete checkpoints. get_eval_dataloader need not, if
    its batches have the rows of `evaluation_batches`.
    """

    def __init__(self, *, task: Task, **trainer: Any) -> None:
        super().__init__(**trainer | {"data_collator": state_check.add_row_numbers(trainer["data_collator"])})
        self._task, self._events = task, task.events
        self._strategy = distributed.load(task.compute.strategy)
        # Each rank draws its own dropout masks; rank 0 draws as one process would.
        torch.manual_seed(self.args.seed + self.args.process_index)
        # Many classification heads accept the number of items of all micro-batches and ignore it: their losses
        # would add up. Without it, the Trainer takes the mean over the micro-batches.
        self.model_accepts_loss_kwargs = False
        self.remove_callback(PrinterCallback)
        if self.is_world_process_zero():
            self.add_callback(callbacks.ReportCallback(self._make_reporter, self._set_rate))
            self._operations = flops(self.model)
        self.add_callback(callbacks.SaveCallback(task, ends_epoch=self._ends_epoch, restore=self._restore_loss_sum))
        self._resumed_from: Path | None = None
        self._is_resized = False
        """Whether another number of processes wrote the checkpoint."""
        self._was_finished = False
        self.rows_per_second = 0.0
        """Of this attempt, on rank 0."""

    @property
    def has_adapters(self) -> bool:
        """Whether the model's own weights are frozen, and adapters are trained."""
        return self._task.training.lora is not None

    @property
    def mean_loss(self) -> float:
        """The mean training loss of all steps so far, including steps before a resume; 0 before the first step."""
        return self._total_loss_scalar / max(self.state.global_step, 1)

    def _get_train_sampler(self, train_dataset: TokenRows | None = None) -> Sampler[list[int]]:
        self._batches = self._task.batches(self.args.process_index)
        self._state_check = state_check.StateCheck(Path(self.args.output_dir).parent, self._batches, self._get_state)
        return self._batches

    def evaluation_batches(self, rows: TokenRows) -> EvaluationBatches:
        """The row numbers of this rank's batches of an evaluation: the `batch_sampler` of its DataLoader."""
        world, rank = self.args.world_size, self.args.process_index
        return EvaluationBatches(rows.lengths, self.args.eval_batch_size, world=world, rank=rank)

    def _get_eval_sampler(self, eval_dataset: TokenRows) -> Sampler[list[int]]:
        return self.evaluation_batches(eval_dataset)

    def evaluation_loop(
        self, dataloader: DataLoader[Any], *args: Any, metric_key_prefix: str = "eval", **named: Any
    ) -> EvalLoopOutput:
        """The loss and the metrics of the validation split, by the same inference as in the programs that predict: the
        Trainer's own loop holds the logits of all rows, and counts some twice."""
        model = self._wrap_model(self.model, training=False)
        self.callback_handler.eval_dataloader = dataloader

        task_type, plan = self._task.task_type, self.evaluation_batches(self._task.validation)
        sizes = map(len, plan)

        def predict_batch(batch: Batch) -> tuple[torch.Tensor, int, pa.RecordBatch]:
            inputs = self._prepare_inputs(batch)
            with torch.no_grad(), self.compute_loss_context_manager():
                loss, outputs = self.compute_loss(model, dict(inputs), return_outputs=True)
                predictions = task_type.predictions(self.model, outputs, inputs)
            self._require_rows(predictions.num_rows, next(sizes, 0))
            return loss, task_type.target_count(inputs), predictions

        def report(done: int) -> None:
            self.callback_handler.on_prediction_step(self.args, self.state, self.control)

        model.eval()
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()
        result = evaluate(dataloader, plan, predict_batch, report)
        self._require_rows(0, sum(sizes))
        values = {"loss": result.loss}
        if self.is_world_process_zero():
            values |= self._task.metrics(result.predictions)
        figures = {f"{metric_key_prefix}_{name.removeprefix('eval_')}": value for name, value in values.items()}
        return EvalLoopOutput(None, None, ranks.broadcast(figures), sum(plan.sizes))

    def _require_rows(self, given: int, expected: int) -> None:
        """Raises UserError for a batch of other rows than the evaluation's: a user's DataLoader made it."""
        if given != expected:
            message = f"get_eval_dataloader of {self._task.training.trainer!r} gives {given} rows where the evaluation "
            message += f"has {expected}: give its DataLoader "
            message += "`batch_sampler=self.evaluation_batches(self.eval_dataset)`."
            raise _FIELD.error(message)

    def _ends_epoch(self, step: int) -> bool:
        """Whether an epoch, or all of training, ends with this optimizer step."""
        return step % self._batches.steps == 0 or step >= self.state.max_steps

    def _make_reporter(self) -> Reporter:
        limit = self.args.world_size * hardware_limit(self.args.device, DTYPES[self._task.compute.mixed_precision])
        speed = Speed(self._events, self._batches, self._operations, limit)
        return Reporter(self._events, speed, self.state.max_steps)

    def _set_rate(self, rows_per_second: float) -> None:
        self.rows_per_second = rows_per_second

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Keeps labels, and what a loss of the whole step adds, in their precision: with DeepSpeed the Trainer would
        round them to that of the model."""
        prepared: dict[str, Any] = super()._prepare_inputs(inputs)
        kept = inputs.keys() if isinstance(self._task.task_type, WholeStep) else {"labels"} & inputs.keys()
        return prepared | {name: inputs[name].to(self.args.device) for name in kept}

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **named: Any) -> Any:
        """The loss; in training, weighted so that every target of an optimizer step counts alike.

        The Trainer and DDP take means over micro-batches and ranks. These are the mean over the step's targets only if
        all micro-batches and ranks have equally many.
        """
        targets = self._task.task_type.target_count(inputs)
        compute = super().compute_loss if self._task.loss is None else self._task_loss
        loss = compute(model, inputs, *args, **named)
        if not model.training:
            return loss
        shares = self.current_gradient_accumulation_steps * self.args.world_size
        weight = targets * shares / self._batches.targets_of_step(self.state.global_step)
        if weight == 1.0:
            return loss
        return (loss[0] * weight, loss[1]) if isinstance(loss, tuple) else loss * weight

    def get_batch_samples(self, *args: Any) -> tuple[list[Batch], Any]:
        """The micro-batches of an optimizer step, which are also kept for a loss of the whole step."""
        batches, items = super().get_batch_samples(*args)
        self._step_batches: list[Batch] = batches
        return batches, items

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any) -> torch.Tensor:
        """Lists the micro-batch for the state check, then trains on it as super does."""
        self._state_check.record_batch(self.state.global_step, inputs)
        if isinstance(self._task.task_type, WholeStep):
            inputs = self._prepared(model, inputs)
        return super().training_step(model, inputs, *args)

    def _prepared(self, model: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
        # Not in get_batch_samples: there, a resumed training has not yet compared its state, and a forward pass leaves
        # some weights of FSDP gathered.
        if inputs is self._step_batches[0]:
            model.train()  # it is in evaluation mode at the start, after a resume and after an evaluation
            with self.compute_loss_context_manager():
                self._prepared_batches = iter(prepare_step(self._task.task_type, model, self._step_batches))
        return next(self._prepared_batches)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # The last state to be restored; no callback has run yet.
        super()._load_rng_state(checkpoint)
        if self._is_resized:  # the checkpoint has no random state for this number of ranks
            torch.manual_seed(self.args.seed + self.state.global_step * self.args.world_size + self.args.process_index)
        elif checkpoint is not None:
            self._state_check.compare_restored(Path(checkpoint))

    def _get_state(self) -> state_check.State:
        progress = {name: getattr(self.state, name) for name in _PROGRESS}
        logged = [{name: log[name] for name in log if not callbacks.is_timing(name)} for log in self.state.log_history]
        callback_states = {name: state for name, state in self._callback_states().items() if name != "TrainerControl"}
        return state_check.state_of(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            scaler=getattr(self.accelerator, "scaler", None),
            trainer=progress | {"logged": logged} | self._loss_sum() | callback_states,
        )

    def _task_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        # Not the Trainer's compute_loss_func: with one, it no longer takes the mean over the micro-batches.
        assert self._task.loss is not None
        outputs = self._task.task_type.forward(model, inputs)
        loss = self._task.loss(outputs["logits"].float(), inputs["labels"])
        return (loss, outputs) if return_outputs else loss

    def _find_best(self) -> Path | None:
        step = self.state.best_global_step
        best = Path(self.args.output_dir) / checkpoints.name(step or 0)
        return best if step and self.args.load_best_model_at_end else None

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        # Not super's method: it writes in place, and records this place as the best model's path.
        self.store_flos()
        step, best = self.state.global_step, self._find_best()
        self.state.best_model_checkpoint = str(best) if best else None
        needs = [best.name] if best and best.name != checkpoints.name(step) else []
        with self._task.write_checkpoint(step, needs) as folder:
            if self._strategy.ONE_FILE:  # else the optimizer's share is saved with the model's
                self.save_model(str(folder), _internal_call=True)
            (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)  # a pickle that contains the user's token
            self._save_optimizer_and_scheduler(str(folder))
            self._save_scaler(str(folder))
            self._save_rng_state(str(folder))
            (folder / self._loss_file()).write_text(json.dumps(self._loss_sum()))
            self.state.stateful_callbacks = self._callback_states()
            self._state_check.save_state(folder, step)
            if self.is_world_process_zero():
                self.state.save_to_json(str(folder / TRAINER_STATE_NAME))
        if self._task.training.callbacks or self._task.training.trainer:
            self._task.finish_checkpoint()  # the user's code may read it

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self.has_adapters:
            # By default, models such as ViT's are saved under other names, and super's restore would pass over these.
            own: Any = self.model.save_pretrained
            self.model.save_pretrained = partial(own, save_original_format=False)
            try:
                super()._save(output_dir, state_dict)
            finally:
                del self.model.save_pretrained
        elif self.args.should_save:
            adapters.save_trained(self.model, Path(output_dir or self.args.output_dir) / SAFE_WEIGHTS_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if not self._load_adapters(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_adapters(self, checkpoint: str) -> bool:
        """Restores adapters if the checkpoint has only these: super's method would not notice missing weights."""
        if adapters_only := self.has_adapters and self._strategy.ONE_FILE:
            adapters.load_trained(self.model, Path(checkpoint, SAFE_WEIGHTS_NAME))
        return adapters_only

    def _load_callback_state(self) -> None:
        # super's method moves restored callbacks to the end.
        order = [type(callback) for callback in self.callback_handler.callbacks]
        super()._load_callback_state()
        by_class: dict[type[TrainerCallback], list[TrainerCallback]] = {}
        for callback in self.callback_handler.callbacks:
            by_class.setdefault(type(callback), []).append(callback)
        self.callback_handler.callbacks = [by_class[callback_class].pop(0) for callback_class in order]

    def _callback_states(self) -> dict[str, list[dict[str, Any]]]:
        states: dict[str, list[dict[str, Any]]] = {}
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        return states

    def _loss_file(self) -> str:
        return LOSS_SUM.format(self.args.process_index)

    def _loss_sum(self) -> dict[str, float]:
        return {
            "since_log": self._tr_loss.item(),
            "logged": self._total_loss_scalar,
            "last_log": self._globalstep_last_logged,
        }

    def _restore_loss_sum(self) -> None:
        """Restores the running loss from the checkpoint, so that the curve has the same points."""
        if self._resumed_from is not None:
            name = LOSS_SUM.format("*") if self._is_resized else self._loss_file()
            saved = [json.loads(file.read_text()) for file in self._resumed_from.glob(name)]
            self._tr_loss.fill_(sum(sums["since_log"] for sums in saved) / len(saved))
            self._total_loss_scalar = saved[0]["logged"]
            self._globalstep_last_logged = saved[0]["last_log"]

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, epochs: int, resume_from_checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        was_complete = False
        if resume_from_checkpoint is not None:
            saved = json.loads(Path(resume_from_checkpoint, TRAINER_STATE_NAME).read_text())
            was_complete = saved["global_step"] >= saved["max_steps"]
        position = super()._init_training_state(max_steps, steps_per_epoch, epochs, resume_from_checkpoint, trial)
        if resume_from_checkpoint is not None:
            self._resumed_from = Path(resume_from_checkpoint)
            processes = checkpoints.read_environment(self._resumed_from).get("processes")
            self._is_resized = processes not in (None, self.args.world_size)
            # on_train_begin resets a stop by early stopping, and an epoch continues past the last step.
            self._was_finished = self.state.global_step >= max_steps
            if not was_complete:  # the checkpoint is not the end of a shorter training
                self._was_finished |= self.control.should_training_stop
            best = self._find_best()  # the recorded path may be outdated: the folder may have moved
            self.state.best_model_checkpoint = str(best) if best else None
        return position

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        with blame_field("training.optim"):
            return super().create_optimizer(model)

    def create_scheduler(self, *args: Any, **named: Any) -> Any:
        with blame_field("training.extra.lr_scheduler_kwargs"):
            return super().create_scheduler(*args, **named)

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        if skip_scheduler and self._resumed_from is not None:
            return {}  # eval_on_start: the start was before the checkpoint
        if skip_scheduler or not isinstance(self.lr_scheduler, ReduceLROnPlateau | GreedyLR):
            return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        values = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
        name = f"eval_{self.args.metric_for_best_model.removeprefix('eval_')}"
        if not is_undefined(name, values[name]):
            self.lr_scheduler.step(values[name])
        return values

    def _finalize_training(self, *args: Any) -> Any:
        # super's method counts only this rank's loss for the steps since the last log.
        self._tr_loss.fill_(self.accelerator.gather(self._tr_loss).mean())
        # Schedule-free optimizers have separate weights for training and inference. The best weights, if loaded, were
        # saved after an evaluation, so they are weights for inference.
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()
        return super()._finalize_training(*args)

    def _prepare_for_training(self, *args: Any) -> tuple[torch.nn.Module, Any]:
        with self._strategy.wrapping(self.model):
            model, batches = super()._prepare_for_training(*args)
        wrapped = getattr(model, "_orig_mod", model)  # inside torch_compile's wrapper
        if wrong := self._strategy.check_wrapper(wrapped, self._task.compute):
            raise RuntimeError(f"requested {self._task.compute.strategy}, but the model is not wrapped for it: {wrong}")
        return model, batches

    def _run_epoch(self, *, epoch: int, **rest: Any) -> None:
        if self._was_finished:
            self.control.should_training_stop = True
            return
        # The Trainer's set_epoch does not reach the sampler after a resume with several processes.
        self._batches.set_epoch(epoch)
        super()._run_epoch(epoch=epoch, **rest)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        self._task.share_checkpoint(best)
        if damage := checkpoints.find_damage(best):
            raise OSError(f"The best checkpoint was damaged ({damage}). Run again to train from an earlier one.")
        if not self._load_adapters(str(best)):
            super()._load_best_model()


_FIELD = CodeField(
    kind="training",
    where="training.trainer",
    example="my_trainer:Mine",
    accepted="a subclass of training.engine.trainer.ExactTrainer",
    accepts=lambda value: isinstance(value, type) and issubclass(value, ExactTrainer),
)
