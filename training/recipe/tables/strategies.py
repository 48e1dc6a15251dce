"""The strategies by which processes share the work: the module of each, and what a recipe may combine it with.

A new strategy is a line here and the module that it names: training/distributed/__init__.py lists what that holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Strategy:
    """One strategy, as the rules of a recipe see it."""

    module: str
    """Imported only if a recipe names the strategy, so that a change to it leaves the artifacts of others valid."""
    replicates: bool = False
    """Whether each process holds the whole model and the whole optimizer, so that one process is enough."""
    offloads: tuple[str, ...] = ()
    """Values of compute.offload besides `no`."""
    fields: tuple[str, ...] = ()
    """Fields of `compute` that only this strategy reads, or this one and others that name them too."""
    package: str | None = None
    """The package that it needs beyond those of this project."""
    refused_optimizers: Mapping[str, str] = field(default_factory=dict)
    """Values of training.optim that it cannot train with, and why."""


_ZERO = Strategy(
    "training.distributed.zero",
    fields=("deepspeed",),
    package="deepspeed",
    refused_optimizers={"adafactor": "takes means over rows and columns of whole weights, which DeepSpeed cuts up"},
)

STRATEGIES: dict[str, Strategy] = {
    "ddp": Strategy("training.distributed.ddp", replicates=True),
    "fsdp": Strategy(
        "training.distributed.fsdp", offloads=("all",), fields=("fsdp_reshard_after_forward", "fsdp_wrap")
    ),
    "deepspeed-zero1": replace(_ZERO, offloads=("optimizer",)),
    "deepspeed-zero2": replace(_ZERO, offloads=("optimizer",)),
    "deepspeed-zero3": replace(_ZERO, offloads=("optimizer", "all")),
}
"""The values of compute.strategy."""
