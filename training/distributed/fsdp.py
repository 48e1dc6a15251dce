"""FSDP2: every process holds a shard of each weight, gradient and optimizer state. Layers are gathered one after the
other while they compute.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from training.distributed import FROM_THE_MODEL
from training.problems import UserError, nearest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, TrainingArguments

    from training.recipe import ResolvedCompute

DISTRIBUTED_TYPE = {"cpu": "FSDP", "cuda": "FSDP"}
ONE_FILE = False
UNPICKLES = True


def build_configuration(compute: ResolvedCompute) -> dict[str, Any]:
    """The field `fsdp_config` of TrainingArguments."""
    return {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": compute.fsdp_wrap or FROM_THE_MODEL,
        "reshard_after_forward": compute.fsdp_reshard_after_forward,
        # Each rank writes its own shard: one rank's memory need not hold the whole state.
        "state_dict_type": "SHARDED_STATE_DICT",
        "cpu_offload": compute.offload == "all",
    }


def build_arguments(compute: ResolvedCompute, network: PreTrainedModel) -> dict[str, Any]:
    """The fields of TrainingArguments. Raises UserError for a layer class that the model lacks, and for units that
    share a weight."""
    import torch

    config = build_configuration(compute)
    config["transformer_layer_cls_to_wrap"] = wrapped = find_wrapped_layers(network, compute.fsdp_wrap)
    require_one_group(network, wrapped)
    if torch.cuda.is_available():
        # With these variables accelerate adds gloo to NCCL, for shards in the CPU's memory.
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": str(config["cpu_offload"]).lower()}
        return {"fsdp": True, "fsdp_config": config}
    _share_on_cpu()
    return {"fsdp": True, "fsdp_config": config, "accelerator_config": {"use_configured_state": True}}


def require_one_group(network: PreTrainedModel, wrapped: Collection[str]) -> None:
    """Raises UserError if modules in two units (layers of the classes `wrapped`, and the rest of the model) share a
    weight: torch 2.13 has a weight in one unit only."""
    units: dict[str, Any] = {"": network}
    units |= {
        name: module
        for name, module in network.named_modules(remove_duplicate=False)
        if type(module).__name__ in wrapped
    }
    holders: dict[int, dict[str, str]] = {}
    for name, weight in network.named_parameters(remove_duplicate=False):
        unit = max((unit for unit in units if f"{name}.".startswith(f"{unit}." if unit else "")), key=len)
        holders.setdefault(id(weight), {}).setdefault(str(id(units[unit])), name)
    for names in holders.values():
        if len(names) > 1:
            message = f"'fsdp' cannot share out {type(network).__name__}: {' and '.join(names.values())} share "
            message += "a weight, but are in different units. Name other layer classes in compute.fsdp_wrap, or choose "
            message += "ddp or deepspeed-zero3."
            raise UserError.of("compute", "compute.strategy", message)


@contextmanager
def wrapping(network: PreTrainedModel) -> Iterator[None]:
    """Inside, accelerate leaves the embeddings and the head in the unit of the whole model if other modules have their
    weights, as in T5, BART and masked BERT. Accelerate 1.15 makes them a unit of their own, and torch 2.13 has a weight
    in one unit only."""
    hidden = ("get_input_embeddings", "get_output_embeddings") if _find_sharers(network) else ()
    for name in hidden:
        setattr(network, name, lambda: None)
    try:
        yield
    finally:
        for name in hidden:
            delattr(network, name)


def _find_sharers(network: PreTrainedModel) -> set[torch.nn.Module]:
    """The modules besides the embeddings and the head that have weights of these."""
    known = {module for embeddings in _find_embeddings(network) for module in embeddings.modules()}
    weights = {id(weight) for module in known for weight in module.parameters(recurse=False)}
    others = {module for module in network.modules() if module not in known}
    return {module for module in others if any(id(own) in weights for own in module.parameters(recurse=False))}


def _find_embeddings(network: PreTrainedModel) -> set[torch.nn.Module]:
    """The embeddings and the head, which accelerate gathers separately: layers of words, or of patches of images.
    Raises UserError for a model without them, such as a convolutional one: accelerate 1.15 would fail."""
    try:
        return {network.get_input_embeddings(), network.get_output_embeddings()} - {None}
    except NotImplementedError as error:
        message = f"'fsdp' cannot share out {type(network).__name__}, which has no embeddings. Choose ddp, "
        raise UserError.of("compute", "compute.strategy", f"{message}deepspeed-zero2 or deepspeed-zero3.") from error


def _share_on_cpu() -> None:
    """Creates accelerate's state: by default it uses DDP on CPUs and silently ignores FSDP."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(backend="gloo").distributed_type = DistributedType.MULTI_GPU


def find_wrapped_layers(network: PreTrainedModel, requested: list[str] | None) -> list[str]:
    """The layer classes that are gathered as a unit: the requested ones; or the model's `_no_split_modules`; or those
    of its largest list of layers. Raises UserError if a requested class is not in the model, or none is found.
    """
    import torch

    layers = _shardable_classes(network)
    for name in requested or ():
        if name not in layers:
            message = f"{name!r} is no layer of {type(network).__name__} that can be a unit: "
            message += f"choose from {', '.join(layers)}.{nearest(name, layers)}"
            raise UserError.of("compute", "compute.fsdp_wrap", message)
    found = requested or [name for name in layers if name in (network._no_split_modules or ())]
    if not found:
        stacks = [module for module in network.modules() if isinstance(module, torch.nn.ModuleList)]
        largest = max(stacks, key=lambda stack: sum(weight.numel() for weight in stack.parameters()), default=())
        found = [name for name in layers if name in {type(layer).__name__ for layer in largest}]
    if not found:
        message = f"is missing: {type(network).__name__} has no list of layers. Name their class, such as "
        message += f"one of {', '.join(layers)}."
        raise UserError.of("compute", "compute.fsdp_wrap", message)
    return found


def _shardable_classes(network: PreTrainedModel) -> list[str]:
    """The classes of modules that can be units of their own: they have weights, and none that the embeddings have too,
    because a weight is in one unit only."""
    embeddings = _find_embeddings(network) | _find_sharers(network)
    found, around = set(), {"ModuleList"}  # a list has no forward pass
    for module in network.modules():
        if embeddings & set(module.modules()):
            around.add(type(module).__name__)
        elif next(module.parameters(), None) is not None:
            found.add(type(module).__name__)
    return sorted(found - around)


def adjust_arguments(arguments: TrainingArguments, compute: ResolvedCompute) -> None:
    """Sums gradients over the ranks in float32: by default accelerate rounds them to the lower precision first."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    lower = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(compute.mixed_precision)
    if lower is not None:
        policy = MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=torch.float32)
        arguments.fsdp_plugin_args["mixed_precision_policy"] = policy


def check_wrapper(model: torch.nn.Module, compute: ResolvedCompute) -> str | None:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    if not isinstance(model, FSDPModule):
        return f"it is a {type(model).__name__}"
    unsharded = [name for name, weight in model.named_parameters() if not isinstance(weight, DTensor)]
    return f"every process holds all of {', '.join(unsharded)}" if unsharded else None


def gather_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """In the CPU's memory of rank 0; empty on the others. A weight of several modules is one tensor, as in a model that
    is not sharded, so that an export has it once."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=trainer.has_adapters)
    weights: dict[str, Any] = get_model_state_dict(trainer.model, options=options)
    first: dict[int, str] = {}
    network = getattr(trainer.model, "_orig_mod", trainer.model)  # inside torch_compile's wrapper
    for name, weight in network.named_parameters(remove_duplicate=False):
        if (known := first.setdefault(id(weight), name)) != name and {known, name} <= weights.keys():
            weights[name] = weights[known]
    return weights
