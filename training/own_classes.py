"""The Trainer, its callbacks and its collator as the recipe's training section names them.

trainer     module:Class, a subclass of ExactTrainer, made with the same arguments. Whatever it overrides, it
            calls super() for the rest: compute_loss weights the rows, _save_checkpoint keeps checkpoints whole.
callbacks   module:Class, subclasses of transformers' TrainerCallback, made without arguments, one of each on every
            process. One that remembers something from step to step is an ExportableState too, and is in every
            checkpoint.
collator    module:name, called as a kind's own `collator` is, with the tokenizer and the multiple to pad to. It
            gives a function of a list of features that gives tensors by name, `labels` among them, a line a row.
            It may draw random numbers: training/drawing.py.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from transformers import EarlyStoppingCallback, PreTrainedTokenizerBase, TrainerCallback

from training import drawing
from training.model import padding_multiple
from training.named import Place
from training.trainer import ExactTrainer


def trainer_class(training: dict[str, Any]) -> type[ExactTrainer]:
    """The class to train with. Raises UserError where there is none of that name, or it is no ExactTrainer."""
    return ExactTrainer if training["trainer"] is None else _TRAINER.load(training["trainer"])


def callbacks(training: dict[str, Any]) -> list[TrainerCallback]:
    """The user's callbacks, and early stopping where it is asked for. Raises UserError as `trainer_class` does."""
    made = []
    for index, name in enumerate(training["callbacks"]):
        place = _callback(index)
        try:
            made.append(place.load(name)())
        except TypeError as error:
            raise place.refused(f"{name!r} cannot be made without arguments: {error}.") from error
    if patience := training["early_stopping_patience"]:
        made.append(EarlyStoppingCallback(patience, training["early_stopping_threshold"]))
    return made


def collator(training: dict[str, Any], kind: ModuleType, tokenizer: PreTrainedTokenizerBase) -> drawing.Collate:
    """What makes batches: the kind's own, or that which the recipe names. Raises UserError as `trainer_class` does."""
    settings = (tokenizer, padding_multiple())
    own = kind.collator(*settings)
    name = training["collator"]
    return own if name is None else drawing.collator(name, own, *settings)


def _is_trainer(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, ExactTrainer)


def _is_callback(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, TrainerCallback)


_TRAINER = Place(
    kind="training",
    where="training.trainer",
    example="my_trainer:Mine",
    accepted="a subclass of training.trainer.ExactTrainer",
    fits=_is_trainer,
)


def _callback(index: int) -> Place:
    return Place(
        kind="training",
        where=f"training.callbacks[{index}]",
        example="my_callbacks:Mine",
        accepted="a subclass of transformers.TrainerCallback",
        fits=_is_callback,
    )
