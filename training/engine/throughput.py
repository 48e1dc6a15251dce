"""Throughput of a training: rows and tokens per second over all processes, and the share of the hardware's limit.

Tokens are those of the rows: padding is not counted. The operations of a training step are counted as by Kaplan et al.
(arXiv:2001.08361), with attention's own part: 6 for each token and each trained weight outside the embeddings, and 12
for each layer, each unit of its width and each pair of a row's tokens. The hardware's limit is the speed of a large
matrix product on the same device in the same precision, measured at the start.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from training.jobs.protocol import Events

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.batching.batches import LengthGroupedBatches

LIMIT_S = 0.05
FIRST_STEPS_S, SOON_S = 10.0, 60.0
_SIDE = {"cpu": 768, "cuda": 4096}
_AMOUNTS = ("seconds", "rows", "tokens", "flops")


class Speed:
    """The throughput of one try, measured on rank 0.

    The events `speed` leave out evaluations and checkpoints: the engine calls `stepped` at the end of each step, and
    `paused` at the end of such a pause.

    Args:
        batches: those of the training.
        arithmetic: the result of `flops` for the model before it is sharded.
        limit: floating-point operations per second that all processes together could do.
    """

    def __init__(
        self, events: Events, batches: LengthGroupedBatches, arithmetic: tuple[float, float], limit: float
    ) -> None:
        self._events, self._batches, self._limit = events, batches, limit
        self._a_token, self._a_pair = arithmetic
        self._sums = dict.fromkeys(_AMOUNTS, 0.0)
        self._epoch = -1
        self._tokens: tuple[list[int], list[int]] = ([], [])
        self._began = self._mark = self._recent_mark = time.monotonic()
        self._rows = self._recent_rows = 0

    def stepped(self, step: int) -> None:
        """Counts an optimizer step that has ended; the first is step 1."""
        epoch, within = divmod(step - 1, self._batches.steps)
        if epoch != self._epoch:
            self._epoch, self._tokens = epoch, self._batches.tokens_of_steps(epoch)
        tokens, pairs = (amounts[within] for amounts in self._tokens)
        now, rows = time.monotonic(), self._batches.rows_of_step(step - 1)
        amounts = (now - self._mark, rows, tokens, self._a_token * tokens + self._a_pair * pairs)
        self._mark = now
        for name, amount in zip(_AMOUNTS, amounts, strict=True):
            self._sums[name] += amount
        self._rows += rows

    def paused(self) -> None:
        """Leaves out the time since the last step's end."""
        self._mark = time.monotonic()
        self._recent_mark, self._recent_rows = self._mark, self._rows

    def report(self, step: int) -> None:
        """Writes an event with the throughput since the last one."""
        amounts = self._sums | {"limit": self._limit}
        if amounts["seconds"] > 0:
            self._sums = dict.fromkeys(_AMOUNTS, 0.0)
            self._events.write("speed", step=step, values=_rates([amounts]), **amounts)

    def recent_rows_per_second(self) -> float:
        """Rows per second since the last call or pause."""
        now = time.monotonic()
        rate = (self._rows - self._recent_rows) / (now - self._recent_mark)
        self._recent_mark, self._recent_rows = now, self._rows
        return rate

    def rows_per_second(self) -> float:
        """Rows per second since this try began, evaluations and checkpoints included."""
        return self._rows / (time.monotonic() - self._began)


class ExpectedEnd:
    """Reports once, after the first steps of a try, when training will end, unless that is soon."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._since: tuple[float, int] | None = None  # after the first step, which initializes
        self._reported = False

    def stepped(self, step: int, total: int) -> None:
        """Counts an optimizer step of `total` that has ended; the first is step 1."""
        now = time.monotonic()
        since, first = self._since = self._since or (now, step)
        if self._reported or step == first or now - since < FIRST_STEPS_S:
            return
        self._reported = True
        left = (now - since) / (step - first) * (total - step)
        if left >= SOON_S:
            self._events.note(f"{left / 60:,.0f} minutes to go at this speed: training ends about {_clock(left)}")


def _clock(left: float) -> str:
    end = time.localtime(time.time() + left)
    return time.strftime("%H:%M" if left < 12 * 3600 else "%H:%M on %A, %d %B", end)


def overall(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """train_tokens_per_second and hardware_share over all of a job's steps, repeated ones included; empty if its engine
    reports none."""
    speeds = [event for event in events if event["kind"] == "speed"]
    if not speeds:
        return {}
    rates = _rates(speeds)
    return {"train_tokens_per_second": rates["tokens_per_second"], "hardware_share": rates["hardware_share"]}


def _rates(amounts: list[Any]) -> dict[str, float]:
    sums = {name: sum(one[name] for one in amounts) for name in _AMOUNTS}
    possible = sum(one["seconds"] * one["limit"] for one in amounts)
    return {
        "samples_per_second": round(sums["rows"] / sums["seconds"], 3),
        "tokens_per_second": round(sums["tokens"] / sums["seconds"], 3),
        "hardware_share": round(sums["flops"] / possible, 6),
    }


def flops(network: PreTrainedModel) -> tuple[float, float]:
    """The floating-point operations of a training step per token, and per pair of tokens in a row."""
    embeddings = {
        id(weight)
        for module in network.modules()
        if isinstance(module, torch.nn.Embedding)
        for weight in module.parameters()
    }
    computing = [weight for weight in network.parameters() if id(weight) not in embeddings]
    # Forward, and backward to the layers before; backward for the weight itself only if it is trained.
    weights = sum(_numbers(weight) * (6.0 if weight.requires_grad else 4.0) for weight in computing)
    layers, width = (getattr(network.config, name, 0) or 0 for name in ("num_hidden_layers", "hidden_size"))
    return weights, 12.0 * layers * width


def _numbers(weight: torch.Tensor) -> int:
    """The number of weights; a byte holds two of 4 bits."""
    return weight.numel() * (2 if weight.dtype == torch.uint8 else 1)


def hardware_limit(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second: the fastest of the matrix products that fit into LIMIT_S."""
    side = _SIDE[device.type]
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    ends, best = time.monotonic() + LIMIT_S, float("inf")
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
