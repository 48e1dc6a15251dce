"""DeepSpeed's ZeRO: stage 1 shards the optimizer state, stage 2 the gradients too, stage 3 also the weights.

The optimizer and the schedule are the Trainer's, so the recipe's settings mean the same as with other strategies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from training.distributed import FROM_THE_MODEL

if TYPE_CHECKING:
    import torch

    from training.recipe import ResolvedCompute

DISTRIBUTED_TYPE = {"cpu": "DEEPSPEED", "cuda": "DEEPSPEED"}
ONE_FILE = False
UNPICKLES = True
BUCKET = 50_000_000
"""Numbers sent in one message. DeepSpeed's default of half a billion needs a buffer of 2 GB."""


def build_configuration(compute: ResolvedCompute, parameters: int | None = None) -> dict[str, Any]:
    """DeepSpeed's configuration with compute.deepspeed merged in; the Trainer fills in `auto`. `parameters` is the
    model's size, or None if the model is not known yet."""
    bucket = FROM_THE_MODEL if parameters is None else max(1, min(BUCKET, parameters))
    zero: dict[str, Any] = {"stage": _stage(compute), "reduce_bucket_size": bucket}
    if compute.offload != "no":
        zero["offload_optimizer"] = {"device": "cpu"}
    if compute.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    ours = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": zero,
        # torch's optimizer: DeepSpeed's own is compiled first and rounds differently.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return _merge(compute.deepspeed, ours)


def build_arguments(compute: ResolvedCompute, network: torch.nn.Module) -> dict[str, Any]:
    """The fields of TrainingArguments."""
    import torch

    fields = {"deepspeed": build_configuration(compute, sum(weight.numel() for weight in network.parameters()))}
    if torch.cuda.is_available():
        return fields
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}  # else each rank compiles native code for CPUs, for a minute
    _share_on_cpu()
    return fields | {"accelerator_config": {"use_configured_state": True}}


def _merge(given: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """The given values, with ours if they are missing or `auto` in ours."""
    merged = dict(given)
    for name, value in ours.items():
        if isinstance(value, dict):
            merged[name] = _merge(given.get(name) or {}, value)
        elif name not in given or value == "auto":
            merged[name] = value
    return merged


def _stage(compute: ResolvedCompute) -> int:
    return int(compute.strategy[-1])


def _share_on_cpu() -> None:
    """Creates accelerate's state: by default each process on a CPU trains alone."""
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")


def adjust_arguments(arguments: Any, compute: ResolvedCompute) -> None:
    pass


def wrapping(network: Any) -> AbstractContextManager[None]:
    return nullcontext()


def check_wrapper(model: torch.nn.Module, compute: ResolvedCompute) -> str | None:
    from deepspeed import DeepSpeedEngine

    if not isinstance(model, DeepSpeedEngine):
        return f"it is a {type(model).__name__}"
    stage, processes = model.zero_optimization_stage(), model.dp_world_size
    if (stage, processes) != (_stage(compute), compute.num_processes):
        return f"{processes} processes share it by stage {stage}"
    return None


def gather_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Weights and buffers in the optimizer's precision, in the CPU's memory of rank 0; empty on the others."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    network, is_first = trainer.model, trainer.is_world_process_zero()
    saved = network.state_dict().keys()  # without buffers that are computed when a model is loaded
    found = {name: buffer.cpu() for name, buffer in network.named_buffers() if name in saved}
    for name, weight in network.named_parameters():
        if trainer.has_adapters and not weight.requires_grad:
            continue
        if weight.requires_grad:
            gathered = safe_get_full_fp32_param(weight)  # every rank takes part
        else:  # the optimizer has no copy of a frozen one
            with GatheredParameters([weight]):
                gathered = weight.detach().float().clone()
        if is_first:
            found[name] = gathered.cpu()
    return found if is_first else {}
