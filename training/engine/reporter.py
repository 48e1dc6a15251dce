"""Reports of a training to its job's events: progress, figures, throughput and the expected end."""

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
        speed: the throughput of this try.
        total: optimizer steps of the whole training.
    """

    def __init__(self, events: Events, speed: Speed, total: int) -> None:
        self._events, self._speed, self._total = events, speed, total
        self._end = ExpectedEnd(events)
        self._loss: float | None = None
        self._diverged = False
        self._reported_at = time.monotonic()

    def stepped(self, step: int, epoch: float) -> None:
        """Reports the end of an optimizer step, counted from 1: about once a second, and after the last one."""
        self._speed.stepped(step)
        if self._is_due() or step == self._total:
            rate = round(self._speed.recent_rows_per_second(), 2)
            self._progress(step, epoch, phase="train", loss=self._loss, samples_per_second=rate)
        self._end.stepped(step, self._total)

    def evaluating(self, step: int, epoch: float) -> None:
        """Reports that an evaluation is running, about once a second."""
        if self._is_due():
            self._progress(step, epoch, phase="evaluate")

    def paused(self) -> None:
        """Leaves the time since the last step's end out of the throughput: an evaluation, or a checkpoint."""
        self._speed.paused()
        self._reported_at = time.monotonic()

    def trained(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Reports figures of the steps since the last call, `train_loss` among them."""
        self._loss = values["train_loss"]
        if not self._diverged and not math.isfinite(self._loss):
            self._diverged = True
            self._events.warning(f"The training loss is {self._loss} at step {step}: lower training.learning_rate.")
        self._speed.report(step)
        self.figures(step, epoch, values)

    def figures(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Reports points of the curves."""
        self._events.metrics(step, {**values, "epoch": epoch})

    def ended(self, step: int) -> float:
        """Reports the throughput of the last steps. Returns the rows per second of the whole try."""
        self._speed.report(step)
        return self._speed.rows_per_second()

    def _is_due(self) -> bool:
        return time.monotonic() - self._reported_at >= PROGRESS_EVERY_S

    def _progress(self, step: int, epoch: float, **more: object) -> None:
        self._events.progress(done=step, total=self._total, epoch=round(epoch, 4), **more)
        self._reported_at = time.monotonic()
