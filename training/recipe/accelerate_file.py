"""The file of `accelerate config`, translated into fields of the recipe: names and values of accelerate 1.15, FSDP2."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from training.problems import nearest
from training.recipe.extra_arguments import out_of_scope

_FIELDS = {
    "mixed_precision": "compute.mixed_precision",
    "num_processes": "compute.num_processes",
    "num_machines": "compute.num_machines",
    "fsdp_reshard_after_forward": "compute.fsdp_reshard_after_forward",
    "fsdp_offload_params": "compute.offload",
    "fsdp_transformer_layer_cls_to_wrap": "compute.fsdp_wrap",
    "deepspeed_config_file": "compute.deepspeed",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "gradient_clipping": "training.max_grad_norm",
}
"""The recipe's field for a field of the file."""
_STRATEGIES = {"NO": "ddp", "MULTI_CPU": "ddp", "MULTI_GPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": None}
"""The strategy of each distributed_type; DeepSpeed's depends on zero_stage."""
_GROUPS = {"FSDP": "fsdp_config", "DEEPSPEED": "deepspeed_config"}
_OFFLOAD = {("none", "none"): "no", ("cpu", "none"): "optimizer", ("cpu", "cpu"): "all"}
"""compute.offload by the devices of optimizer and parameters."""
_READ_TOGETHER = (
    *("distributed_type", "use_cpu", "machine_rank", "main_process_ip", "main_process_port"),
    *("fsdp_version", "zero_stage", "offload_optimizer_device", "offload_param_device", *_GROUPS.values()),
)
_WITHOUT_EFFECT = (
    *("same_network", "main_training_function", "zero3_save_16bit_model", "zero3_init_flag"),
    *("fsdp_backward_prefetch", "fsdp_use_orig_params", "fsdp_sync_module_states", "fsdp_min_num_params"),
    "fsdp_cpu_ram_efficient_loading",
)
_DEFAULTS: tuple[Any, ...] = (
    *(None, False, "", [], {}, "no", "NO", "none", "all", "static", "standard", "LOCAL_MACHINE"),
    *("TRANSFORMER_BASED_WRAP", "SHARDED_STATE_DICT", {"dynamo_backend": "NO"}, {"dynamo_backend": "no"}),
)
"""Values with which all other fields change nothing."""
_INSTEAD = {
    "gpu_ids": "set CUDA_VISIBLE_DEVICES in the environment",
    "dynamo_config": "set training.extra.torch_compile in the recipe",
    "fsdp_activation_checkpointing": "set training.extra.activation_checkpointing in the recipe",
}


class Translation(NamedTuple):
    """A field of the file, and the recipe's field for it."""

    field: str
    written: Any
    recipe_field: str
    value: Any


class Refusal(NamedTuple):
    """A field of the file that the recipe cannot follow, and why."""

    field: str
    message: str


def translate(given: Mapping[str, Any]) -> Iterator[Translation | Refusal]:
    """The file's fields as fields of the recipe, and the fields that have none.

    The path of a DeepSpeed file is the value of `compute.deepspeed`.
    """
    kind = str(given.get("distributed_type"))
    group = _GROUPS.get(kind, "")
    for distributed_type, other in _GROUPS.items():
        if other != group and given.get(other) and kind in _STRATEGIES:
            yield Refusal(other, f"is for `distributed_type: {distributed_type}` only; with {kind}, leave it out.")
    inside = given.get(group)
    if inside and not isinstance(inside, Mapping):
        yield Refusal(group, f"{inside!r} is of the wrong type: it takes a mapping.")
        inside = None
    fields = dict(given) | ({f"{group}.{name}": value for name, value in inside.items()} if inside else {})
    if kind not in _STRATEGIES:
        choices = f"is not supported: choose from {', '.join(_STRATEGIES)}.{nearest(kind, _STRATEGIES)}"
        yield Refusal("distributed_type", f"{kind!r} {out_of_scope(kind) or choices}")
    elif (strategy := _STRATEGIES[kind]) is not None:
        yield Translation("distributed_type", kind, "compute.strategy", strategy)
    for field, value in fields.items():
        name = str(field).rpartition(".")[2]
        if name in _FIELDS:
            if value not in (None, "auto", -1):  # accelerate's words for its default
                yield Translation(field, value, _FIELDS[name], _recipe_value(name, value))
        elif name not in (*_READ_TOGETHER, *_WITHOUT_EFFECT) and value not in _DEFAULTS:
            instead, near = (
                _INSTEAD.get(name, "the recipe has no field for it"),
                nearest(name, (*_FIELDS, *_READ_TOGETHER)),
            )
            yield Refusal(str(field), f"{value!r} is not supported: {instead}. Leave this out.{near}")
    if (given.get("use_cpu") or kind == "MULTI_CPU") and _sees_gpus():
        message = "asks for CPUs, and training takes the GPUs that it sees: hide them"
        yield Refusal("use_cpu", f"{message} (CUDA_VISIBLE_DEVICES= in the environment), or leave this out.")
    if kind == "NO":
        yield Translation("distributed_type", kind, "compute.num_processes", 1)
    if given.get("num_machines") not in (None, 1):
        yield Translation("num_machines", given["num_machines"], "compute.cluster", "ray")
    if kind == "FSDP" and (version := fields.get(f"{group}.fsdp_version", 1)) not in (2, "2"):
        message = f"{version!r} is not supported: set it to 2 (`accelerate to-fsdp2` converts the file)."
        yield Refusal(f"{group}.fsdp_version", message)
    if kind == "DEEPSPEED":
        yield from _deepspeed(inside or {})


def _recipe_value(name: str, value: Any) -> Any:
    if name == "fsdp_offload_params" and isinstance(value, bool):
        return "all" if value else "no"
    if name == "fsdp_transformer_layer_cls_to_wrap":
        return [part.strip() for part in str(value).split(",")]
    return value


def _sees_gpus() -> bool:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(any(Path("/dev").glob(name)) for name in ("nvidia[0-9]*", "dxg"))


def _deepspeed(given: Mapping[str, Any]) -> Iterator[Translation | Refusal]:
    place = "deepspeed_config"
    default = None if given.get("deepspeed_config_file") else 2  # accelerate's own
    if (stage := given.get("zero_stage", default)) is not None:
        yield Translation(f"{place}.zero_stage", stage, "compute.strategy", f"deepspeed-zero{stage}")
    optimizer, parameters = (given.get(f"offload_{name}_device") for name in ("optimizer", "param"))
    if offload := _OFFLOAD.get((str(optimizer or "none"), str(parameters or "none"))):
        if optimizer or parameters:
            yield Translation(f"{place}.offload_optimizer_device", optimizer, "compute.offload", offload)
    else:
        message = f"{parameters!r} with {optimizer!r} for the optimizer is not supported: choose from none and cpu, "
        yield Refusal(f"{place}.offload_param_device", f"{message}and cpu for parameters only with cpu for both.")
