"""DDP: every process holds the whole model, and gradients are averaged. With one process there is no wrapper."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from training.recipe import ResolvedCompute

DISTRIBUTED_TYPE = {"cpu": "MULTI_CPU", "cuda": "MULTI_GPU"}
ONE_FILE = True
UNPICKLES = False


def build_configuration(compute: ResolvedCompute) -> dict[str, Any]:
    return {}


def build_arguments(compute: ResolvedCompute, network: torch.nn.Module) -> dict[str, Any]:
    """No fields: DDP is the Trainer's default."""
    return {}


def adjust_arguments(arguments: Any, compute: ResolvedCompute) -> None:
    pass


def wrapping(network: Any) -> AbstractContextManager[None]:
    return nullcontext()


def check_wrapper(model: torch.nn.Module, compute: ResolvedCompute) -> str | None:
    from torch.nn.parallel import DistributedDataParallel

    several = compute.num_processes > 1
    return None if several == isinstance(model, DistributedDataParallel) else f"it is a {type(model).__name__}"


def gather_weights(trainer: Any) -> dict[str, torch.Tensor] | None:
    """None: the Trainer's model has all weights."""
    return None
