"""DeepSpeed's ZeRO: stage 2 shares out gradients and optimizer state among the processes, stage 3 the weights, too.

The optimizer and the schedule are the Trainer's own, so the recipe's settings mean what they mean elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from training.distributed import FROM_THE_MODEL

if TYPE_CHECKING:
    import torch

    from training.recipe import ResolvedCompute

DISTRIBUTED_TYPE = {"cpu": "DEEPSPEED", "cuda": "DEEPSPEED"}
ONE_FILE = False
UNPICKLES = True
BUCKET = 50_000_000
"""Numbers that travel together. By DeepSpeed's own half a billion, a buffer of 2 GB is set aside for them."""


def configuration(compute: ResolvedCompute) -> dict[str, Any]:
    """DeepSpeed's own."""
    return config(compute, None)


def arguments(compute: ResolvedCompute, network: torch.nn.Module) -> dict[str, Any]:
    """The fields of TrainingArguments."""
    import torch

    parameters = sum(weight.numel() for weight in network.parameters())
    fields = {"deepspeed": config(compute, parameters)}
    if torch.cuda.is_available():
        return fields
    _leave_uncompiled()
    _share_on_cpu()
    return fields | {"accelerator_config": {"use_configured_state": True}}


def config(compute: ResolvedCompute, parameters: int | None) -> dict[str, Any]:
    """DeepSpeed's configuration, the recipe's own part of it included; `auto` is filled in by the Trainer from its
    arguments. `parameters` is None where the model is not known.
    """
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
        # The optimizer is torch's: DeepSpeed's own would be compiled first, and round in its own way.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return _merged(compute.deepspeed, ours)


def _merged(given: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """What is given, and ours where nothing is, or where the recipe only repeats what ours says."""
    merged = dict(given)
    for name, value in ours.items():
        if isinstance(value, dict):
            merged[name] = _merged(given.get(name) or {}, value)
        elif name not in given or value == "auto":
            merged[name] = value
    return merged


def _stage(compute: ResolvedCompute) -> int:
    return int(compute.strategy[-1])


def _leave_uncompiled() -> None:
    """Has DeepSpeed do without its native code for CPUs, which each rank would compile first, for a minute."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__ = {}


def _share_on_cpu() -> None:
    """Makes accelerate's state: by itself it lets each process on a CPU train alone."""
    from accelerate import PartialState

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")


def settle(arguments: Any, compute: ResolvedCompute) -> None:
    """Nothing."""


def wrong_wrapper(model: torch.nn.Module, compute: ResolvedCompute) -> str | None:
    """What is wrong with the model that is about to train, if anything."""
    from deepspeed import DeepSpeedEngine

    if not isinstance(model, DeepSpeedEngine):
        return f"it is a {type(model).__name__}"
    stage, processes = model.zero_optimization_stage(), model.dp_world_size
    if (stage, processes) != (_stage(compute), compute.num_processes):
        return f"{processes} processes share it by stage {stage}"
    return None


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """The whole model's weights and buffers, or where it has adapters, what is trained, in the CPU's memory of rank 0,
    in the optimizer's own precision; nothing on the others. Every rank calls it.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    network, first = trainer.model, trainer.is_world_process_zero()
    kept = network.state_dict().keys()  # not the buffers that are made anew when a model is loaded
    found = {name: buffer.cpu() for name, buffer in network.named_buffers() if name in kept}
    for name, weight in network.named_parameters():
        if trainer.has_adapters and not weight.requires_grad:
            continue
        whole = safe_get_full_fp32_param(weight)  # all ranks send, one keeps
        if first:
            found[name] = whole.cpu()
    return found if first else {}
