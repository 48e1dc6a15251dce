"""The Trainer's callbacks: when checkpoints are written and training ends, what is told, and those of the recipe.

The recipe's are named as module:Class: subclasses of transformers' TrainerCallback, made without arguments, one of
each on every process. One that remembers something from step to step is an ExportableState too, and is in every
checkpoint.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from training.distributed import ranks
from training.jobs.program import Interrupted, stop_requested
from training.jobs.user_code import Place

if TYPE_CHECKING:
    from training.engine.trainer import ExactTrainer
    from training.recipe import Training


def asked_for(training: Training) -> list[TrainerCallback]:
    """The recipe's callbacks, and early stopping where it is asked for. Raises UserError where there is none
    of such a name, or it is no callback."""
    made = []
    for index, name in enumerate(training.callbacks):
        place = _callback(index)
        try:
            made.append(place.load(name)())
        except TypeError as error:
            raise place.refused(f"{name!r} cannot be made without arguments: {error}.") from error
    if patience := training.early_stopping_patience:
        made.append(EarlyStoppingCallback(patience, training.early_stopping_threshold))
    return made


class Saves(TrainerCallback):
    """Decides when a checkpoint is written beyond those at evaluations, and ends training when asked to stop.

    After the last step of an epoch only when all that comes at its end is done, such as an evaluation: a run that went
    on from there would begin the next epoch without it.
    """

    def __init__(self, trainer: ExactTrainer, interval_s: float) -> None:
        self._trainer = trainer
        self._interval_s = interval_s
        self._saved_at = time.monotonic()
        self._saved_step = 0
        self._owed = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._saved_at, self._saved_step = time.monotonic(), state.global_step
        self._trainer.restore_loss_sum()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._trainer.epoch_ends_at(state.global_step):
            control.should_save |= self._due(state)
        else:
            self._owed, control.should_save = control.should_save, False  # whoever asked for it

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        asked = (control.should_save or self._owed) and state.global_step != self._saved_step
        control.should_save, self._owed = asked or self._due(state), False

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._saved_at, self._saved_step = time.monotonic(), state.global_step
        if any(ranks.any_rank(stop_requested())):
            # Not control.should_training_stop: that would evaluate now, and count as the end of training.
            raise Interrupted(f"stopped after step {state.global_step}; the next run goes on from there")

    def _due(self, state: TrainerState) -> bool:
        late = time.monotonic() - self._saved_at >= self._interval_s
        # Clocks and signals differ between ranks, and all must save at the same step.
        return any(ranks.any_rank(late or stop_requested())) and state.global_step != self._saved_step


class Reports(TrainerCallback):
    """Hands on to the reporter what goes on."""

    def __init__(self, trainer: ExactTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._reporter = self._trainer.reporter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._reporter.stepped(state.global_step, state.epoch or 0.0)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._reporter.evaluating(state.global_step, state.epoch or 0.0)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._reporter.paused()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._reporter.paused()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._reporter.ended(state.global_step)

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
            more = ("learning_rate", "grad_norm", "num_input_tokens_seen")
            figures = {name: logs[name] for name in more if name in logs}
            self._reporter.trained(step, epoch, {"train_loss": logs["loss"], **figures})
        evaluated = {name: value for name, value in logs.items() if name.startswith("eval_") and not is_timing(name)}
        if evaluated:
            self._reporter.figures(step, epoch, evaluated)


def is_timing(name: str) -> bool:
    """Whether a logged figure says how long something took, which is never the same twice."""
    return name.endswith(("_runtime", "_per_second", "_preparation_time"))


def _is_callback(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, TrainerCallback)


def _callback(index: int) -> Place:
    return Place(
        kind="training",
        where=f"training.callbacks[{index}]",
        example="my_callbacks:Mine",
        accepted="a subclass of transformers.TrainerCallback",
        fits=_is_callback,
    )
