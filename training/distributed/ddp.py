"""DDP: every process holds the whole model, and gradients are averaged. With one process, no wrapper at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from training.recipe import ResolvedCompute

DISTRIBUTED_TYPE = {"cpu": "MULTI_CPU", "cuda": "MULTI_GPU"}
ONE_FILE = True
UNPICKLES = False


def configuration(compute: ResolvedCompute) -> dict[str, Any]:
    """Nothing: it has none."""
    return {}


def arguments(compute: ResolvedCompute, network: torch.nn.Module) -> dict[str, Any]:
    """Nothing: this is what the Trainer does by itself."""
    return {}


def settle(arguments: Any, compute: ResolvedCompute) -> None:
    """Nothing."""


def wrong_wrapper(model: torch.nn.Module, compute: ResolvedCompute) -> str | None:
    """What is wrong with the model that is about to train, if anything."""
    from torch.nn.parallel import DistributedDataParallel

    several = compute.num_processes > 1
    return None if several == isinstance(model, DistributedDataParallel) else f"it is a {type(model).__name__}"


def whole_weights(trainer: Any) -> dict[str, torch.Tensor] | None:
    """None: the Trainer's model has all of them."""
    return None
