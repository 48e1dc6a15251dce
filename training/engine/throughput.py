"""Progress and throughput of a training, reported to its job's events.

Tokens are counted without padding. The operations of a training step are counted as by Kaplan et al.
(arXiv:2001.08361), with attention: 6 for each token and each trained weight outside the embeddings, and 12 for each
layer, each unit of its width and each pair of a row's tokens. The hardware's limit is the speed of a large matrix
product on the same device in the same precision, measured at the start.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from training.jobs.protocol import PROGRESS_EVERY_S, Events

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.batching.batches import LengthGroupedBatches

MEASURED_S = 0.05
FIRST_STEPS_S, SOON_S = 10.0, 60.0
"""The expected end is reported after FIRST_STEPS_S, unless it is less than SOON_S away."""
_SIDE = {"cpu": 768, "cuda": 4096}
_AMOUNTS = ("seconds", "rows", "tokens", "flops")


class Reporter:
    """Writes the progress of training to a job's events, on rank 0.

    Args:
        speed: the throughput of this attempt.
        total: optimizer steps of the whole training.
    """

    def __init__(self, events: Events, speed: Speed, total: int) -> None:
        self._events, self._speed, self._total = events, speed, total
        self._loss: float | None = None
        self._diverged = False
        self._reported_at = time.monotonic()
        self._first: tuple[float, int] | None = None
        """Time and number of the first step, which is slow: it initializes libraries."""
        self._end_reported = False

    def report_step(self, step: int, epoch: float) -> None:
        """Reports the end of an optimizer step, counted from 1: about once a second, and after the last one."""
        self._speed.count_step(step)
        if self._is_due() or step == self._total:
            rate = round(self._speed.recent_rows_per_second(), 2)
            self._progress(step, epoch, phase="train", loss=self._loss, rows_per_second=rate)
        if not self._end_reported:
            self._report_expected_end(step)

    def report_evaluation(self, step: int, epoch: float) -> None:
        """Reports that an evaluation is running, about once a second."""
        if self._is_due():
            self._progress(step, epoch, phase="evaluate")

    def exclude_pause(self) -> None:
        """Excludes the time since the last step from the throughput: an evaluation, or a checkpoint."""
        self._speed.exclude_pause()
        self._reported_at = time.monotonic()

    def report_training(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Reports figures of the steps since the last call; `train_loss` is one of them."""
        self._loss = values["train_loss"]
        if not self._diverged and not math.isfinite(self._loss):
            self._diverged = True
            self._events.warning(f"The training loss is {self._loss} at step {step}: lower training.learning_rate.")
        self._speed.report(step)
        self.report_metrics(step, epoch, values)

    def report_metrics(self, step: int, epoch: float, values: Mapping[str, float]) -> None:
        """Reports points of the curves."""
        self._events.metrics(step, {**values, "epoch": epoch})

    def finish(self, step: int) -> float:
        """Reports the throughput of the last steps. Returns the rows per second of this attempt."""
        self._speed.report(step)
        return self._speed.rows_per_second()

    def _is_due(self) -> bool:
        return time.monotonic() - self._reported_at >= PROGRESS_EVERY_S

    def _progress(self, step: int, epoch: float, **fields: object) -> None:
        self._events.progress(done=step, total=self._total, epoch=round(epoch, 4), **fields)
        self._reported_at = time.monotonic()

    def _report_expected_end(self, step: int) -> None:
        now = time.monotonic()
        began, first = self._first = self._first or (now, step)
        if step == first or now - began < FIRST_STEPS_S:
            return
        self._end_reported = True
        remaining_s = (now - began) / (step - first) * (self._total - step)
        if remaining_s >= SOON_S:
            end = time.localtime(time.time() + remaining_s)
            clock = time.strftime("%H:%M" if remaining_s < 12 * 3600 else "%H:%M on %A, %d %B", end)
            self._events.note(f"{remaining_s / 60:,.0f} minutes to go at this speed: training ends about {clock}")


class Speed:
    """The throughput of one attempt, measured on rank 0, without evaluations and checkpoints.

    Args:
        batches: the batches of the training.
        operations: the result of `flops` for the model before it is sharded.
        limit: the floating-point operations per second of all processes together.
    """

    def __init__(
        self, events: Events, batches: LengthGroupedBatches, operations: tuple[float, float], limit: float
    ) -> None:
        self._events, self._batches, self._limit = events, batches, limit
        self._per_token, self._per_pair = operations
        self._sums = dict.fromkeys(_AMOUNTS, 0.0)
        self._epoch = -1
        self._tokens: tuple[list[int], list[int]] = ([], [])
        self._began = self._mark = self._recent_mark = time.monotonic()
        self._rows = self._recent_rows = 0

    def count_step(self, step: int) -> None:
        """Counts an optimizer step that has ended; the first is step 1."""
        epoch, within = divmod(step - 1, self._batches.steps)
        if epoch != self._epoch:
            self._epoch, self._tokens = epoch, self._batches.tokens_of_steps(epoch)
        tokens, pairs = (amounts[within] for amounts in self._tokens)
        now, rows = time.monotonic(), self._batches.rows_of_step(step - 1)
        amounts = (now - self._mark, rows, tokens, self._per_token * tokens + self._per_pair * pairs)
        self._mark = now
        for name, amount in zip(_AMOUNTS, amounts, strict=True):
            self._sums[name] += amount
        self._rows += rows

    def exclude_pause(self) -> None:
        """Excludes the time since the last step."""
        self._mark = time.monotonic()
        self._recent_mark, self._recent_rows = self._mark, self._rows

    def report(self, step: int) -> None:
        """Writes an event with the throughput since the last one."""
        amounts = self._sums | {"limit": self._limit}
        if amounts["seconds"] > 0:
            self._sums = dict.fromkeys(_AMOUNTS, 0.0)
            self._events.speed(step, _rates([amounts]), amounts)

    def recent_rows_per_second(self) -> float:
        """Rows per second since the last call or pause."""
        now = time.monotonic()
        rate = (self._rows - self._recent_rows) / (now - self._recent_mark)
        self._recent_mark, self._recent_rows = now, self._rows
        return rate

    def rows_per_second(self) -> float:
        """Rows per second since this attempt began, evaluations and checkpoints included."""
        return self._rows / (time.monotonic() - self._began)


def overall_rates(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns train_tokens_per_second and hardware_share over all steps of a job, including repeated steps; empty if
    the engine reports none."""
    speeds = [event for event in events if event["kind"] == "speed"]
    if not speeds:
        return {}
    rates = _rates(speeds)
    return {"train_tokens_per_second": rates["tokens_per_second"], "hardware_share": rates["hardware_share"]}


def _rates(amounts: list[Any]) -> dict[str, float]:
    sums = {name: sum(event[name] for event in amounts) for name in _AMOUNTS}
    possible = sum(event["seconds"] * event["limit"] for event in amounts)
    return {
        "rows_per_second": round(sums["rows"] / sums["seconds"], 3),
        "tokens_per_second": round(sums["tokens"] / sums["seconds"], 3),
        "hardware_share": round(sums["flops"] / possible, 6),
    }


def flops(network: PreTrainedModel) -> tuple[float, float]:
    """Returns the floating-point operations of a training step per token, and per pair of tokens in a row."""
    embeddings = {
        id(weight)
        for module in network.modules()
        if isinstance(module, torch.nn.Embedding)
        for weight in module.parameters()
    }
    computing = [weight for weight in network.parameters() if id(weight) not in embeddings]
    # 2 operations forward, 2 backward to earlier layers, and 2 for the gradient of a trained weight.
    # A byte holds two weights of 4 bits.
    weights = sum(
        weight.numel() * (2 if weight.dtype == torch.uint8 else 1) * (6.0 if weight.requires_grad else 4.0)
        for weight in computing
    )
    layers, width = (getattr(network.config, name, 0) or 0 for name in ("num_hidden_layers", "hidden_size"))
    return weights, 12.0 * layers * width


def hardware_limit(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second: the fastest of the matrix products within MEASURED_S."""
    side = _SIDE[device.type]
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    ends, best = time.monotonic() + MEASURED_S, float("inf")
    torch.mm(matrix, matrix)  # the first one initializes libraries
    while best == float("inf") or time.monotonic() < ends:
        _wait(device)
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return 2.0 * side**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
