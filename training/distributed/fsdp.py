"""FSDP2: every process holds a share of each weight, gradient and optimizer state, and layers are put together one
after the other while they compute.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from training.distributed import FROM_THE_MODEL
from training.problems import Problem, UserError, nearest

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, TrainingArguments

    from training.recipe import ResolvedCompute

DISTRIBUTED_TYPE = {"cpu": "FSDP", "cuda": "FSDP"}
ONE_FILE = False
UNPICKLES = True


def configuration(compute: ResolvedCompute) -> dict[str, Any]:
    """`fsdp_config`, as TrainingArguments has it."""
    return {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": compute.fsdp_wrap or FROM_THE_MODEL,
        "reshard_after_forward": compute.fsdp_reshard_after_forward,
        # Each rank writes its own share: the whole state need not fit into the memory of one.
        "state_dict_type": "SHARDED_STATE_DICT",
        "cpu_offload": compute.offload == "all",
    }


def arguments(compute: ResolvedCompute, network: PreTrainedModel) -> dict[str, Any]:
    """The fields of TrainingArguments. Raises UserError for a layer class that the model does not have, and for a model
    whose embeddings' weights are other modules' as well."""
    import torch

    _need_own_embeddings(network)
    config = configuration(compute) | {"transformer_layer_cls_to_wrap": wrapped_layers(network, compute.fsdp_wrap)}
    offload = config["cpu_offload"]
    if torch.cuda.is_available():
        # By these accelerate adds gloo to NCCL, for the shares that lie in the CPU's memory.
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": str(offload).lower()}
        return {"fsdp": True, "fsdp_config": config}
    _share_on_cpu()
    return {"fsdp": True, "fsdp_config": config, "accelerator_config": {"use_configured_state": True}}


def _need_own_embeddings(network: PreTrainedModel) -> None:
    """Raises UserError where modules have weights of the embeddings or of the model's head that are neither, as the
    encoder and the decoder of a T5 or a BART do, and what holds the head of a masked BERT: accelerate 1.15 knows of the
    two alone, and torch 2.13 shares out no weight with two groups."""
    known = {network.get_input_embeddings(), network.get_output_embeddings()} - {None}
    weights = {id(weight) for module in known for weight in module.parameters()}
    others = [
        name
        for name, module in network.named_modules()
        if module not in known and any(id(own) in weights for own in module.parameters(recurse=False))
    ]
    if others:
        message = f"'fsdp' cannot share out {type(network).__name__}: {' and '.join(others)} have the weights of its "
        message += "embeddings or its head. Choose ddp, deepspeed-zero2 or deepspeed-zero3."
        raise UserError([Problem(kind="compute", where="compute.strategy", message=message)])


def _share_on_cpu() -> None:
    """Makes accelerate's state: by itself it takes a CPU for DDP's, and forgets FSDP without a word."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(backend="gloo").distributed_type = DistributedType.MULTI_GPU


def wrapped_layers(network: PreTrainedModel, asked: list[str] | None) -> list[str]:
    """The classes of the layers that are put together one at a time: those asked for, or those that the model says
    are never to be split, or where it says nothing those of its largest list of layers. Raises UserError where one is
    not in the model, or none is known.
    """
    layers = _layers(network)
    for name in asked or ():
        if name not in layers:
            message = f"{name!r} is no layer of {type(network).__name__} that can be put together by itself: "
            message += f"choose from {', '.join(layers)}.{nearest(name, layers)}"
            raise UserError([Problem(kind="compute", where="compute.fsdp_wrap", message=message)])
    found = asked or [name for name in layers if name in (network._no_split_modules or ())] or _stacked(network, layers)
    if not found:
        message = f"is missing: {type(network).__name__} has no list of layers. Name their class, such as "
        message += f"one of {', '.join(layers)}."
        raise UserError([Problem(kind="compute", where="compute.fsdp_wrap", message=message)])
    return found


def _stacked(network: PreTrainedModel, layers: list[str]) -> list[str]:
    """The classes of the layers in the list of modules that has the most weights, such as an encoder's blocks."""
    import torch

    stacks = [module for module in network.modules() if isinstance(module, torch.nn.ModuleList)]
    largest = max(stacks, key=lambda stack: sum(weight.numel() for weight in stack.parameters()), default=())
    return [name for name in layers if name in {type(layer).__name__ for layer in largest}]


def _layers(network: PreTrainedModel) -> list[str]:
    """The classes of the modules with weights of their own or below them, without those around the embeddings:
    accelerate puts these together by themselves, and a weight is in one group only.
    """
    embeddings = {network.get_input_embeddings(), network.get_output_embeddings()} - {None}
    found, around = set(), {"ModuleList"}  # a list computes nothing
    for module in network.modules():
        if embeddings & set(module.modules()):
            around.add(type(module).__name__)
        elif next(module.parameters(), None) is not None:
            found.add(type(module).__name__)
    return sorted(found - around)


def settle(arguments: TrainingArguments, compute: ResolvedCompute) -> None:
    """In a lower precision, gradients are added up over the processes in float32: by accelerate's own choice they are
    rounded first.
    """
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy

    lower = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(compute.mixed_precision)
    if lower is not None:
        policy = MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=torch.float32)
        arguments.fsdp_plugin_args["mixed_precision_policy"] = policy


def wrong_wrapper(model: torch.nn.Module, compute: ResolvedCompute) -> str | None:
    """What is wrong with the model that is about to train, if anything."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    if not isinstance(model, FSDPModule):
        return f"it is a {type(model).__name__}"
    whole = [name for name, weight in model.named_parameters() if not isinstance(weight, DTensor)]
    return f"every process holds all of {', '.join(whole)}" if whole else None


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """The whole model's weights, or where it has adapters, what is trained, in the CPU's memory of rank 0; nothing on
    the others. Every rank calls it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=trainer.has_adapters)
    weights: dict[str, Any] = get_model_state_dict(trainer.model, options=whole)
    return weights
