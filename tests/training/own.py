"""User code of a recipe: losses, a collator, callbacks, a Trainer."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import ExportableState

from training.batching.batches import PadToLongest
from training.engine.trainer import ExactTrainer
from training.evaluation.metrics import LabelMetric
from training.task_types.sequence_classification import SequenceClassification
from training.task_types.task_type import Loss

Batch = dict[str, torch.Tensor]


def hinge(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.multi_margin_loss(logits, labels, reduction="none")


def mean_hinge(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return hinge(logits, labels).mean()


def for_each_logit(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits


def one_number(logits: torch.Tensor) -> torch.Tensor:
    return logits.mean()


def nll(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none")


def label_hinge(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (1 - logits * (2 * labels - 1)).clamp(min=0)


def huber(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.huber_loss(logits, labels, reduction="none")


class Unsure(SequenceClassification):
    """A task type whose loss is its own alone."""

    def loss(self, *_: Any, **__: Any) -> Loss | None:
        return nll


class UnsureToo(Unsure):
    """Inherits the loss."""


class Doubtful(SequenceClassification):
    """A task type whose loss is that of the recipe, doubled."""

    target_form = "classes"

    def loss(self, *args: Any, **settings: Any) -> Loss | None:
        found = super().loss(*args, **settings)
        return found and (lambda logits, labels: 2 * found(logits, labels))


class Masked(PadToLongest):
    """Replaces some tokens by others, drawing from all three generators."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> None:
        super().__init__(tokenizer, multiple)
        self.mask = tokenizer.unk_token_id

    def __call__(self, rows: list[dict[str, Any]]) -> Batch:
        batch = super().__call__(rows)
        shape = batch["input_ids"].shape
        hidden = (torch.rand(shape) + torch.from_numpy(np.random.random(shape))) / 2 < 0.3 * (1 + random.random())
        batch["input_ids"][hidden] = self.mask
        return batch


def twice(tokenizer: PreTrainedTokenizerBase, multiple: int) -> Callable[[list[dict[str, Any]]], Batch]:
    pad = PadToLongest(tokenizer, multiple)
    return lambda rows: pad([*rows, *rows])


class Slower(TrainerCallback, ExportableState):
    """Makes the learning rate of each step depend on those before, and requests a checkpoint whenever it can."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    def state(self) -> dict[str, Any]:
        return {"args": {"steps": self.steps}, "attributes": {}}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for group in kwargs["optimizer"].param_groups:
            group["lr"] *= 0.9**self.steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1
        control.should_save = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = True


class Copies(TrainerCallback):
    """Copies each checkpoint's manifest as soon as it is saved."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        checkpoint = Path(args.output_dir, f"checkpoint-{state.global_step}")
        shutil.copy(checkpoint / "manifest.json", Path(args.output_dir).parent / f"{checkpoint.name}.json")


class StopsAtSeven(TrainerCallback):
    """Sends the process a stop signal while it evaluates after step 7."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 7:
            os.kill(os.getpid(), signal.SIGTERM)


class NeedsMore(TrainerCallback):
    def __init__(self, more: int) -> None:
        self.more = more


class Doubled(ExactTrainer):
    """Counts every loss twice."""

    def compute_loss(self, *given: Any, **named: Any) -> Any:
        found = super().compute_loss(*given, **named)
        return (found[0] * 2, found[1]) if isinstance(found, tuple) else found * 2


class OwnEvaluation(ExactTrainer):
    """Evaluates by a DataLoader of its own."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        batches = self.evaluation_batches(self.eval_dataset)
        return DataLoader(self.eval_dataset, batch_sampler=batches, collate_fn=self.data_collator)


class OtherRows(ExactTrainer):
    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        return DataLoader(self.eval_dataset, batch_size=7, collate_fn=self.data_collator)


class Fixed(ExactTrainer):
    """Overrides what it must not."""

    def get_train_dataloader(self) -> DataLoader[Any]:
        return super().get_train_dataloader()

    def evaluation_loop(self, *given: Any, **named: Any) -> Any:
        return super().evaluation_loop(*given, **named)


class Lonely(ExactTrainer):
    def __init__(self) -> None:
        """Takes none of what a Trainer is made of."""


class Places(LabelMetric):
    """Changes with any row that is missing, comes twice, or lies elsewhere, on the side of predictions or labels."""

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        places = np.arange(1, len(references) + 1)
        right = predictions == references
        return {"rows": len(places), "labels": float(places @ references), "right": float(places @ right)}
