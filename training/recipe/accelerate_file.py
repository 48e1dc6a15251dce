"""The file of `accelerate config`, translated into fields of the recipe: names and values of accelerate 1.15, FSDP2."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from training.problems import nearest
from training.recipe.extra_arguments import out_of_scope
from training.recipe.tables.strategies import STRATEGIES

_TRANSLATED = (
    *("distributed_type", "mixed_precision", "use_cpu", "num_processes", "num_machines", "machine_rank"),
    *("main_process_ip", "main_process_port", "fsdp_config", "deepspeed_config"),
    *("fsdp_version", "fsdp_reshard_after_forward", "fsdp_offload_params", "fsdp_transformer_layer_cls_to_wrap"),
    *("zero_stage", "offload_optimizer_device", "offload_param_device", "deepspeed_config_file"),
    *("gradient_accumulation_steps", "gradient_clipping"),
)
_WITHOUT_EFFECT = (
    *("same_network", "main_training_function", "zero3_save_16bit_model", "zero3_init_flag"),
    *("fsdp_backward_prefetch", "fsdp_use_orig_params", "fsdp_sync_module_states", "fsdp_min_num_params"),
    "fsdp_cpu_ram_efficient_loading",
)
_UNSUPPORTED: dict[str, str] = {
    "compute_environment": "run `finetune run` on a machine, and use LOCAL_MACHINE",
    "gpu_ids": "set CUDA_VISIBLE_DEVICES in the environment, and leave this out",
    "rdzv_backend": "machines meet at main_process_ip and main_process_port, so use static",
    "fp16": "use mixed_precision: fp16",
    "fp8_config": "use mixed_precision: bf16",
    "megatron_lm_config": "use distributed_type: FSDP",
    **dict.fromkeys(
        ("dynamo_config", "dynamo_backend"), "set training.extra.torch_compile in the recipe, and leave this out"
    ),
    "fsdp_activation_checkpointing": ("set training.extra.activation_checkpointing in the recipe, and leave this out"),
    "fsdp_sharding_strategy": "it is of FSDP version 1: set fsdp_reshard_after_forward, and leave this out",
    "fsdp_auto_wrap_policy": "use TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "use SHARDED_STATE_DICT",
    **dict.fromkeys(
        (
            *("debug", "enable_cpu_affinity", "parallelism_config", "mpirun_config", "downcast_bf16", "tpu_name"),
            *("tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env", "commands", "command_file"),
            *("fsdp_forward_prefetch", "fsdp_activation_checkpointing_offload", "fsdp_ignored_modules"),
            *("offload_optimizer_nvme_path", "offload_param_nvme_path", "deepspeed_multinode_launcher"),
            *("deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter"),
            "deepspeed_moe_layer_cls_names",
        ),
        "leave this out",
    ),
}
"""Fields that the recipe has nothing for, and what to do instead."""
_NEUTRAL: tuple[Any, ...] = (
    *(None, False, "", [], {}, "no", "NO", "none", "all", "static", "standard", "LOCAL_MACHINE"),
    *("TRANSFORMER_BASED_WRAP", "SHARDED_STATE_DICT", {"dynamo_backend": "NO"}, {"dynamo_backend": "no"}),
)
"""Values with which an unsupported field changes nothing."""
_TYPES = {"NO": "ddp", "MULTI_CPU": "ddp", "MULTI_GPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": None}
"""The strategy of each distributed_type; DeepSpeed's depends on zero_stage."""
_OFFLOAD = {("none", "none"): "no", ("cpu", "none"): "optimizer", ("cpu", "cpu"): "all"}
"""compute.offload by the devices of optimizer and parameters."""


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


def translated(given: Mapping[str, Any]) -> Iterator[Translation | Refusal]:
    """The file's fields as fields of the recipe, and everything that is wrong with them.

    The path of a DeepSpeed file is passed on as the value of `compute.deepspeed`.
    """
    yield from _refused(given)
    kind = given.get("distributed_type")
    if not isinstance(kind, str) or kind not in _TYPES:
        choices = f"is not supported: choose from {', '.join(_TYPES)}.{nearest(str(kind), _TYPES)}"
        yield Refusal("distributed_type", f"{kind!r} {out_of_scope(str(kind)) or choices}")
    elif (strategy := _TYPES[kind]) is not None:
        yield Translation("distributed_type", kind, "compute.strategy", strategy)
    yield from _processes(given)
    precision = given.get("mixed_precision")
    if precision == "fp8":
        yield Refusal("mixed_precision", f"{precision!r} is not supported: {_UNSUPPORTED['fp8_config']}.")
    elif precision is not None:
        yield Translation("mixed_precision", precision, "compute.mixed_precision", precision or "no")
    for group, of, translate in (("fsdp_config", "FSDP", _fsdp), ("deepspeed_config", "DEEPSPEED", _deepspeed)):
        inside = given.get(group) or {}
        if not isinstance(inside, Mapping):
            yield Refusal(group, f"{inside!r} is of the wrong type: it takes a mapping.")
        elif kind == of:
            inside = {_full_name(of, str(name)): value for name, value in inside.items()}
            yield from (found._replace(field=f"{group}.{found.field}") for found in translate(inside))
        elif inside and str(kind) in _TYPES:
            yield Refusal(group, f"is for `distributed_type: {of}` only; with {kind}, leave it out.")


def _full_name(distributed_type: str, name: str) -> str:
    # accelerate accepts FSDP's names with and without this prefix.
    return f"fsdp_{name}" if distributed_type == "FSDP" and not name.startswith("fsdp_") else name


def _refused(given: Mapping[str, Any]) -> Iterator[Refusal]:
    """The fields that are unknown, or unsupported with a value that matters."""
    known = [*_TRANSLATED, *_WITHOUT_EFFECT, *_UNSUPPORTED]
    for name, value in given.items():
        if name not in known:
            yield Refusal(str(name), f"no such field of accelerate's.{nearest(str(name), known)}")
        elif name in _UNSUPPORTED and value not in _NEUTRAL:
            yield Refusal(name, f"{value!r} is not supported: {_UNSUPPORTED[name]}.")


def _processes(given: Mapping[str, Any]) -> Iterator[Translation | Refusal]:
    kind, processes, machines = (given.get(name) for name in ("distributed_type", "num_processes", "num_machines"))
    for name, asks_for_cpu in (("use_cpu", given.get("use_cpu")), ("distributed_type", kind == "MULTI_CPU")):
        if asks_for_cpu and _sees_gpus():
            message = f"{given[name]!r} asks for CPUs, and training takes the GPUs that it sees: hide them "
            yield Refusal(name, f"{message}(CUDA_VISIBLE_DEVICES= in the environment), or leave this out.")
    if kind == "NO":
        yield Translation("distributed_type", kind, "compute.num_processes", 1)
    if processes not in (None, -1):  # -1: as many as the launcher starts
        yield Translation("num_processes", processes, "compute.num_processes", processes)
    if machines is not None:
        yield Translation("num_machines", machines, "compute.num_machines", machines)
    if machines in (None, 1):
        return
    if (rank := given.get("machine_rank")) is not None:
        yield Translation("machine_rank", rank, "compute.machine_rank", rank)
    if (host := given.get("main_process_ip")) is not None:
        address = f"{host}:{given.get('main_process_port')}"
        yield Translation("main_process_ip", host, "compute.rendezvous", address)


def _sees_gpus() -> bool:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(any(Path("/dev").glob(name)) for name in ("nvidia[0-9]*", "dxg"))


def _fsdp(given: Mapping[str, Any]) -> Iterator[Translation | Refusal]:
    yield from _refused(given)
    if (version := given.get("fsdp_version", 1)) not in (2, "2"):
        message = f"{version!r} is not supported: set it to 2 (`accelerate to-fsdp2` converts the file)."
        yield Refusal("fsdp_version", message)
    for name, recipe_field, values in (
        ("fsdp_reshard_after_forward", "compute.fsdp_reshard_after_forward", {True: True, False: False}),
        ("fsdp_offload_params", "compute.offload", {True: "all", False: "no"}),
    ):
        value = given.get(name)
        if isinstance(value, bool):
            yield Translation(name, value, recipe_field, values[value])
        elif value is not None:
            yield Refusal(name, f"{value!r} is of the wrong type: it takes true or false.")
    if classes := given.get("fsdp_transformer_layer_cls_to_wrap"):
        names = [name.strip() for name in str(classes).split(",")]
        yield Translation("fsdp_transformer_layer_cls_to_wrap", classes, "compute.fsdp_wrap", names)


def _deepspeed(given: Mapping[str, Any]) -> Iterator[Translation | Refusal]:
    yield from _refused(given)
    file = given.get("deepspeed_config_file")
    if file is not None:
        yield Translation("deepspeed_config_file", file, "compute.deepspeed", file)
    stage = given.get("zero_stage", 2 if file is None else None)  # 2: accelerate's own default
    if (strategy := f"deepspeed-zero{stage}") in STRATEGIES:
        yield Translation("zero_stage", stage, "compute.strategy", strategy)
    elif stage is not None:
        yield Refusal("zero_stage", f"{stage!r} is not supported: choose from 2, 3.")
    devices = tuple(given.get(f"offload_{name}_device") for name in ("optimizer", "param"))
    if any(devices):
        yield _offload(tuple(str(device or "none") for device in devices))
    for name, recipe_field in (
        ("gradient_accumulation_steps", "training.gradient_accumulation_steps"),
        ("gradient_clipping", "training.max_grad_norm"),
    ):
        if (value := given.get(name)) not in (None, "auto"):
            yield Translation(name, value, recipe_field, value)


def _offload(devices: Sequence[str]) -> Translation | Refusal:
    if (offload := _OFFLOAD.get((devices[0], devices[1]))) is not None:
        return Translation("offload_optimizer_device", devices[0], "compute.offload", offload)
    name, device = ("optimizer", devices[0]) if devices[0] not in ("none", "cpu") else ("param", devices[1])
    message = f"{device!r} is not supported: choose from none, cpu, and cpu for parameters only with cpu for both."
    return Refusal(f"offload_{name}_device", message)
