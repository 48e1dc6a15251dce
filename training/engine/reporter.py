"""What a training tells while it goes on: how far it is, its figures, how fast it goes and when it will end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from training.engine.throughput import ExpectedEnd, Speed
from training.jobs.protocol import Events

PROGRESS_EVERY_S = 1.0


class Reporter:
    """Writes to a job's events, on rank 0.

    Args:
        total: optimizer steps of the whole training.
    """

    def __init__(self, events: Events, speed: Speed, total: int) -> None:
        self._events, self._speed, self._total = events, speed, total
        self._end = ExpectedEnd(events)
        self._loss: float | None = None
        self._diverged = False
        self._told_at = time.monotonic()
        self._told_rows = self._rows = 0

    def stepped(self, step: int, epoch: float) -> None:
        """This optimizer step, counted from 1, has ended: progress about once a second, and after the last one."""
        self._rows += self._speed.stepped(step)
        seconds = time.monotonic() - self._told_at
        if seconds >= PROGRESS_EVERY_S or step == self._total:
            rate = round((self._rows - self._told_rows) / seconds, 2)
            self._progress(step, epoch, phase="train", loss=self._loss, samples_per_second=rate)
        self._end.stepped(step, self._total)

    def evaluating(self, step: int, epoch: float) -> None:
        """An evaluation goes on."""
        if time.monotonic() - self._told_at >= PROGRESS_EVERY_S:
            self._progress(step, epoch, phase="evaluate")

    def paused(self) -> None:
        """What has gone on since the step's end was no training: an evaluation, a checkpoint."""
        self._speed.paused()
        self._told_at, self._told_rows = time.monotonic(), self._rows

    def trained(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Figures of the training since the last time, `train_loss` among them."""
        self._loss = values["train_loss"]
        if not self._diverged and not math.isfinite(self._loss):
            self._diverged = True
            self._events.warning(f"The training loss is {self._loss} at step {step}: lower training.learning_rate.")
        self._speed.tell(step)
        self.figures(step, epoch, values)

    def figures(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Figures of the curve."""
        self._events.metrics(step, {**values, "epoch": epoch})

    def ended(self, step: int) -> None:
        """Training is over."""
        self._speed.tell(step)

    def _progress(self, step: int, epoch: float, **more: object) -> None:
        self._events.progress(done=step, total=self._total, epoch=round(epoch, 4), **more)
        self._told_at, self._told_rows = time.monotonic(), self._rows
