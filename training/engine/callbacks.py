"""The Trainer's callbacks: saving, reporting, and the recipe's.

The recipe names subclasses of transformers' TrainerCallback as module:Class; each process creates one of each, without
arguments. A callback that keeps state between steps is an ExportableState too: checkpoints contain its state.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training.distributed import ranks
from training.engine.training_task import is_undefined
from training.jobs.program import Interrupted, stop_requested
from training.jobs.user_code import CodeField

if TYPE_CHECKING:
    from training.engine.throughput import Reporter
    from training.engine.training_task import Task
    from training.recipe import Training


def recipe_callbacks(training: Training) -> list[TrainerCallback]:
    """Returns the recipe's callbacks, and early stopping if a patience is set. Raises UserError if a name is not found
    or not a callback."""
    callbacks: list[TrainerCallback] = []
    for index, name in enumerate(training.callbacks):
        field = CodeField(
            kind="training",
            where=f"training.callbacks[{index}]",
            example="my_callbacks:Mine",
            accepted="a subclass of transformers.TrainerCallback",
            accepts=lambda value: isinstance(value, type) and issubclass(value, TrainerCallback),
        )
        try:
            callbacks.append(field.load(name)())
        except TypeError as error:
            raise field.error(f"{name!r} cannot be created without arguments: {error}.") from error
    if patience := training.early_stopping_patience:
        callbacks.append(EarlyStopping(patience, training.early_stopping_threshold))
    return callbacks


class EarlyStopping(EarlyStoppingCallback):
    """Early stopping that does not count evaluations without a value."""

    def check_metric_value(self, args: Any, state: Any, control: Any, metric_value: float) -> None:
        if not is_undefined(args.metric_for_best_model, metric_value):
            super().check_metric_value(args, state, control, metric_value)


class SaveCallback(TrainerCallback):
    """Requests checkpoints between evaluations, and ends training on a request to stop.

    At the end of an epoch, it saves after all other work, such as an evaluation: a resumed run begins with the next
    epoch and would skip that work.

    Args:
        task: the task of the training.
        ends_epoch: whether an epoch, or all of training, ends with an optimizer step.
        restore: called when training begins, to restore state that the Trainer does not restore.
    """

    def __init__(self, task: Task, *, ends_epoch: Callable[[int], bool], restore: Callable[[], None]) -> None:
        self._task = task
        self._ends_epoch, self._restore = ends_epoch, restore
        self._saved_at = time.monotonic()
        self._saved_step = 0
        self._postponed = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._saved_at, self._saved_step = time.monotonic(), state.global_step
        self._restore()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._ends_epoch(state.global_step):
            control.should_save |= self._due(state)
        else:
            self._postponed, control.should_save = control.should_save, False

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        requested = (control.should_save or self._postponed) and state.global_step != self._saved_step
        control.should_save, self._postponed = requested or self._due(state), False

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._saved_at, self._saved_step = time.monotonic(), state.global_step
        if any(ranks.any_rank(stop_requested())):
            self._task.finish_checkpoint()
            # Not control.should_training_stop: that would evaluate now, and count as the end of training.
            raise Interrupted(f"stopped after step {state.global_step}; the next run resumes from there")

    def _due(self, state: TrainerState) -> bool:
        late = time.monotonic() - self._saved_at >= self._task.training.checkpoint_interval_s
        late |= self._task.has_lost_checkpoint
        # Clocks and signals differ between ranks, and all must save at the same step.
        return any(ranks.any_rank(late or stop_requested())) and state.global_step != self._saved_step


class ReportCallback(TrainerCallback):
    """Passes the Trainer's events to the reporter."""

    def __init__(self, make_reporter: Callable[[], Reporter], set_rate: Callable[[float], None]) -> None:
        self._make_reporter, self._set_rate = make_reporter, set_rate

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._reporter = self._make_reporter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._reporter.report_step(state.global_step, state.epoch or 0.0)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._reporter.report_evaluation(state.global_step, state.epoch or 0.0)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._reporter.exclude_pause()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._reporter.exclude_pause()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._set_rate(self._reporter.finish(state.global_step))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        **_: Any,
    ) -> None:
        step, epoch = state.global_step, logs.get("epoch", 0.0)
        if "loss" in logs:
            names = ("learning_rate", "grad_norm", "num_input_tokens_seen")
            values = {name: logs[name] for name in names if name in logs}
            self._reporter.report_training(step, epoch, {"train_loss": logs["loss"], **values})
        metrics = {name: value for name, value in logs.items() if name.startswith("eval_") and not is_timing(name)}
        if metrics:
            self._reporter.report_metrics(step, epoch, metrics)


def is_timing(name: str) -> bool:
    """Whether a logged figure is a duration or a rate, which differs from run to run."""
    return name.endswith(("_runtime", "_per_second", "_preparation_time"))
