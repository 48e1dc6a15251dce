"""How fast training goes: rows and tokens a second over all processes, and the share of what the hardware could do.

Tokens are those of the rows: what fills up a batch is not counted. The arithmetic of a training step is counted as
Kaplan et al. (arXiv:2001.08361) do, with attention's own part: 6 for each token and each trained weight outside the
embeddings, and 12 for each layer, each number of its width and each pair of a row's tokens. The hardware's limit is
that of a large matrix product on the same device in the same precision, measured at the start.
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
    """Counts the steps of one try, on rank 0, and writes an event `speed` whenever it is asked to.

    Evaluations and checkpoints are left out: whoever trains says when a step has ended, and when such a pause has.

    Args:
        batches: of the training.
        arithmetic: what `flops` says of the network before it is shared out.
        limit: floating-point operations a second that all processes together could do.
    """

    def __init__(
        self, events: Events, batches: LengthGroupedBatches, arithmetic: tuple[float, float], limit: float
    ) -> None:
        self._events, self._batches, self._limit = events, batches, limit
        self._a_token, self._a_pair = arithmetic
        self._sums = dict.fromkeys(_AMOUNTS, 0.0)
        self._epoch = -1
        self._tokens: tuple[list[int], list[int]] = ([], [])
        self._mark = time.monotonic()

    def stepped(self, step: int) -> int:
        """This optimizer step, counted from 1, has ended. Gives its rows."""
        epoch, within = divmod(step - 1, self._batches.steps)
        if epoch != self._epoch:
            self._epoch, self._tokens = epoch, self._batches.tokens_of_steps(epoch)
        tokens, pairs = (amounts[within] for amounts in self._tokens)
        now, rows = time.monotonic(), self._batches.rows_of_step(step - 1)
        amounts = (now - self._mark, rows, tokens, self._a_token * tokens + self._a_pair * pairs)
        self._mark = now
        for name, amount in zip(_AMOUNTS, amounts, strict=True):
            self._sums[name] += amount
        return rows

    def paused(self) -> None:
        """What has gone on since the step's end was no training."""
        self._mark = time.monotonic()

    def tell(self, step: int) -> None:
        """Writes how fast it went since the last time."""
        told = self._sums | {"limit": self._limit}
        if told["seconds"] > 0:
            self._sums = dict.fromkeys(_AMOUNTS, 0.0)
            self._events.write("speed", step=step, values=_rates([told]), **told)


class ExpectedEnd:
    """Says once, after the first steps of a try, when training will end, unless that is soon."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._since: tuple[float, int] | None = None  # after the first step, which sets things up
        self._told = False

    def stepped(self, step: int, total: int) -> None:
        """This optimizer step, counted from 1, of so many has ended."""
        now = time.monotonic()
        since, first = self._since = self._since or (now, step)
        if self._told or step == first or now - since < FIRST_STEPS_S:
            return
        self._told = True
        left = (now - since) / (step - first) * (total - step)
        if left >= SOON_S:
            self._events.note(f"{left / 60:,.0f} minutes to go at this speed: it ends about {_clock(left)}")


def _clock(left: float) -> str:
    end = time.localtime(time.time() + left)
    return time.strftime("%H:%M" if left < 12 * 3600 else "%H:%M on %A, %d %B", end)


def overall(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """train_tokens_per_second and hardware_share over all of a job's steps, those that were done again included;
    nothing where none was told."""
    told = [event for event in events if event["kind"] == "speed"]
    if not told:
        return {}
    rates = _rates(told)
    return {"train_tokens_per_second": rates["tokens_per_second"], "hardware_share": rates["hardware_share"]}


def _rates(told: list[Any]) -> dict[str, float]:
    sums = {name: sum(event[name] for event in told) for name in _AMOUNTS}
    possible = sum(event["seconds"] * event["limit"] for event in told)
    return {
        "samples_per_second": round(sums["rows"] / sums["seconds"], 3),
        "tokens_per_second": round(sums["tokens"] / sums["seconds"], 3),
        "hardware_share": round(sums["flops"] / possible, 6),
    }


def flops(network: PreTrainedModel) -> tuple[float, float]:
    """The floating-point operations of a training step for each token, and for each pair of tokens in a row."""
    embeddings = {
        id(weight)
        for module in network.modules()
        if isinstance(module, torch.nn.Embedding)
        for weight in module.parameters()
    }
    computing = [weight for weight in network.parameters() if id(weight) not in embeddings]
    # Forward, and backward for what lies before it; for itself only where it is trained.
    weights = sum(_numbers(weight) * (6.0 if weight.requires_grad else 4.0) for weight in computing)
    layers, width = (getattr(network.config, name, 0) or 0 for name in ("num_hidden_layers", "hidden_size"))
    return weights, 12.0 * layers * width


def _numbers(weight: torch.Tensor) -> int:
    """How many: in a byte, there are two of 4 bits."""
    return weight.numel() * (2 if weight.dtype == torch.uint8 else 1)


def hardware_limit(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second: the fastest of some products of large matrices within LIMIT_S."""
    side = _SIDE[device.type]
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    ends, best = time.monotonic() + LIMIT_S, float("inf")
    torch.mm(matrix, matrix)  # the first one sets things up
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
