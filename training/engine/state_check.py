"""State check: a debug mode that compares the restored state with the saved one, on with FINETUNE_STATE_CHECK=1.

Equal weights at the end can be a coincidence, for example if a wrong random state is not used again.
In this mode every rank writes a digest of each part of its live state into each checkpoint:

    checkpoint-40/state.rank0.json    {"model": {tensor: digest}, "optimizer": …, "rng": …, "sampler": …, …}

After a restore and before the first step, an engine computes the digests of its live objects again and compares them.
The trained micro-batches are listed, so that two runs can be compared by them:

    logs/batches.rank0.jsonl          {"step": 40, "micro": 0, "rows": [3, 17], "batch": digest of all its tensors}
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.batching.batches import LengthGroupedBatches
from training.batching.random_states import SeededBatch
from training.engine.collation import Collate
from training.jobs.protocol import LOGS, rank

SWITCH = "FINETUNE_STATE_CHECK"
"""The environment variable that turns the mode on, by the value 1."""
STATE = "state.rank{}.json"
BATCHES = "batches.rank{}.jsonl"
ROWS = "row_numbers"

State = dict[str, dict[str, str]]
"""By part, the digest of each piece, such as a tensor by its name."""


def is_on() -> bool:
    return os.environ.get(SWITCH) == "1"


def state_of(
    *, model: torch.nn.Module, optimizer: Any, scheduler: Any, scaler: Any = None, **parts: Mapping[str, Any]
) -> State:
    """The digests of this rank's state, of a sharded model its shard. `parts` are further parts, of any values.

    Does not communicate between ranks and draws no random number, so the training is unchanged.
    """
    all_parts = {
        "model": {**dict(model.named_parameters()), **dict(model.named_buffers())},
        "optimizer": _optimizer_state(optimizer),
        # Without the schedule's function, which may differ from that of a checkpoint named in the recipe.
        "scheduler": {name: value for name, value in scheduler.state_dict().items() if name != "lr_lambdas"},
        "scaler": scaler.state_dict() if scaler else {},
        "rng": _generators(),
        **parts,
    }
    return {part: _digests(values) for part, values in all_parts.items()}


def add_row_numbers(collate: Collate) -> Collate:
    """Returns a collator that adds the row numbers, (B,) int64, to training batches; `StateCheck.record_batch` removes
    them. Returns the same collator if the mode is off."""
    return _NumberedRows(collate) if is_on() else collate


class _NumberedRows:
    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = self._collate(features)
        return {**batch, ROWS: torch.tensor(features.rows)} if isinstance(features, SeededBatch) else batch


class StateCheck:
    """Checks one rank's training; does nothing if the mode is off.

    Args:
        job_dir: the job's folder.
        batches: this rank's batches.
        live: returns the present state, made by `state_of`.
    """

    def __init__(self, job_dir: Path, batches: LengthGroupedBatches, live: Callable[[], State]) -> None:
        self._batches, self._live, self._on = batches, live, is_on()
        self._restored: Path | None = None
        self._step, self._micro = -1, 0
        if self._on:
            file = job_dir / LOGS / BATCHES.format(rank())
            self._file = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def save_state(self, checkpoint: Path, step: int) -> None:
        """Writes the state after `step` optimizer steps into a checkpoint that is being written."""
        if self._on:
            epoch, within = divmod(step, self._batches.steps)
            batches = copy.copy(self._batches)
            batches.set_epoch(epoch)
            rows = list(next(islice(batches, within * self._batches.grad_accum, None)))
            state = self._live() | {"sampler": self._sampler(epoch, rows)}
            (checkpoint / STATE.format(rank())).write_text(json.dumps(state, indent=1))

    def compare_restored(self, checkpoint: Path) -> None:
        """Raises RuntimeError with the differing parts if the live state is not the saved one."""
        if self._on:
            _require_same(checkpoint, self._live())
            self._restored = checkpoint

    def record_batch(self, step: int, batch: dict[str, Any]) -> None:
        """Removes the row numbers from a micro-batch of the step after `step` steps, and lists it.

        Raises RuntimeError if the first micro-batch after a resume differs from the one in the checkpoint.
        """
        if not self._on:
            return
        rows: list[int] = batch.pop(ROWS).tolist()
        self._micro = self._micro + 1 if step == self._step else 0
        self._step = step
        line = {"step": step, "micro": self._micro, "rows": rows, "batch": _digest(dict(batch))}
        os.write(self._file, json.dumps(line).encode() + b"\n")  # by one system call: a kill leaves no partial line
        if self._restored is not None:
            _require_same(self._restored, {"sampler": self._sampler(self._batches.epoch, rows)})
            self._restored = None

    def _sampler(self, epoch: int, rows: list[int]) -> dict[str, str]:
        return _digests({"epoch": epoch, "seed": self._batches.seed, "rows": rows})


def _require_same(checkpoint: Path, live: State) -> None:
    """Compares the parts in `live` with the saved ones. Does nothing if the mode was off at the time of saving."""
    file = checkpoint / STATE.format(rank())
    if not file.exists():
        return
    saved, differing = json.loads(file.read_text()), []
    for part, pieces in live.items():
        names = {**saved[part], **pieces}
        if unequal := [name for name in names if saved[part].get(name) != pieces.get(name)]:
            differing.append(f"{part} ({len(unequal)} of {len(names)}, first {unequal[0]})")
    if differing:
        where = f"the state that rank {rank()} restored from {checkpoint.name} differs from the saved one"
        raise RuntimeError(f"{where}: {', '.join(differing)}")


def _optimizer_state(wrapper: Any) -> dict[str, Any]:
    """Returns the settings of each group and the state of each weight; with ZeRO, also the flat weights."""
    base, flat = wrapper, None
    while True:  # accelerate's and DeepSpeed's wrappers around torch's optimizer
        flat = flat or getattr(base, "fp32_partitioned_groups_flat", None)
        if not hasattr(base, "optimizer"):
            break
        base = base.optimizer
    state: dict[str, Any] = {}
    for number, group in enumerate(base.param_groups):
        state |= {f"group {number} {name}": value for name, value in group.items() if name != "params"}
    for number, weight in enumerate(flat or [weight for group in base.param_groups for weight in group["params"]]):
        state[f"weight {number}"] = weight
        state |= {f"weight {number} {name}": value for name, value in base.state.get(weight, {}).items()}
    return state


def _generators() -> dict[str, Any]:
    states = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _digests(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: _digest(value) for name, value in values.items()}


def _digest(value: Any) -> str:
    """16 hexadecimal digits of a value's content; it may be made of plain values, arrays and tensors."""
    sha = hashlib.sha256()
    _update(sha, value)
    return sha.hexdigest()[:16]


def _update(sha: hashlib._Hash, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = getattr(value, "ds_tensor", value)  # ZeRO's shard
        if hasattr(value, "__tensor_flatten__"):  # a tensor of tensors: a DTensor holds this rank's shard
            for name in value.__tensor_flatten__()[0]:
                _update(sha, getattr(value, name))
            return
        value = value.detach().cpu().contiguous()
        sha.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        sha.update(value.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray):
        sha.update(f"{value.dtype} {value.shape} ".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        _update(sha, sorted(((str(name), inner) for name, inner in value.items()), key=lambda item: item[0]))
    elif isinstance(value, list | tuple):
        sha.update(f"[{len(value)} ".encode())
        for inner in value:
            _update(sha, inner)
    else:
        sha.update(f"{type(value).__name__} {value!r} ".encode())
