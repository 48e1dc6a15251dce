"""`accelerate config`'s file: what its fields say in a recipe, and why others are refused.

Its values are those of accelerate 1.15; what is said of FSDP is said of version 2, which is what runs here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from training.problems import nearest

_TPU = "is out of scope: TPUs are not supported; train on NVIDIA GPUs or CPUs, and leave this out"
_FSDP1 = "is of FSDP version 1, and FSDP2 is what runs here: leave this out"
_ONE_COMMAND = "is not needed: run the same `finetune run` on every machine, and leave this out"

# Fields that are taken with these values, which change nothing here, and with no value; any other is refused so.
_TAKEN: dict[str, tuple[tuple[Any, ...], str]] = {
    "compute_environment": (
        ("LOCAL_MACHINE",),
        "is out of scope: SageMaker starts its own machines; run `finetune run` on one, with LOCAL_MACHINE here",
    ),
    "debug": ((False,), "is not offered: leave this out"),
    "gpu_ids": (("all",), "is the environment's to say: set CUDA_VISIBLE_DEVICES, and leave this out"),
    "rdzv_backend": (("static",), "is not offered: machines meet at main_process_ip and main_process_port; use static"),
    "enable_cpu_affinity": ((False,), "is not offered: leave this out"),
    "fp8_config": ((), "is out of scope: FP8 is not supported; use mixed_precision: bf16"),
    "megatron_lm_config": ((), "is out of scope: Megatron-LM is not supported; use distributed_type: FSDP"),
    "parallelism_config": ((), "is out of scope: tensor and context parallelism are not supported; leave this out"),
    "mpirun_config": ((), _ONE_COMMAND),
    "dynamo_config": (
        ({"dynamo_backend": "NO"}, {"dynamo_backend": "no"}),
        "is the training section's to say: set training.extra.torch_compile, and leave this out",
    ),
    "dynamo_backend": (
        ("NO", "no", False),
        "is the training section's to say: set training.extra.torch_compile, and leave this out",
    ),
    "downcast_bf16": ((False, "no"), _TPU),
    **{f"tpu_{name}": ((False,), _TPU) for name in ("name", "zone", "use_cluster", "use_sudo", "vm", "env")},
    "commands": ((), _TPU),
    "command_file": ((), _TPU),
}
_NOTHING = ("same_network", "main_training_function")
"""Fields that change nothing here, whatever they say."""
_TRANSLATED = (
    *("distributed_type", "mixed_precision", "fp16", "use_cpu", "num_processes", "num_machines", "machine_rank"),
    *("main_process_ip", "main_process_port", "fsdp_config", "deepspeed_config"),
)
_STRATEGIES = {"NO": "ddp", "MULTI_CPU": "ddp", "MULTI_GPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "deepspeed"}
_OTHER_TYPES = {
    **dict.fromkeys(("XLA", "TPU"), _TPU),
    "MEGATRON_LM": "is out of scope: Megatron-LM is not supported; use FSDP",
    **{
        f"MULTI_{name}": "is out of scope: of accelerators, NVIDIA GPUs alone are supported; use MULTI_GPU"
        for name in ("NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")
    },
}
_FSDP_TAKEN: dict[str, tuple[tuple[Any, ...], str]] = {
    "fsdp_auto_wrap_policy": (
        ("TRANSFORMER_BASED_WRAP",),
        "is not offered: whole layers are put together one at a time; use TRANSFORMER_BASED_WRAP",
    ),
    "fsdp_state_dict_type": (
        ("SHARDED_STATE_DICT",),
        "is not offered: every process writes its share of a checkpoint, and the model is exported whole; "
        "use SHARDED_STATE_DICT",
    ),
    "fsdp_sharding_strategy": ((), f"{_FSDP1} and set fsdp_reshard_after_forward"),
    "fsdp_forward_prefetch": ((False,), _FSDP1),
    "fsdp_activation_checkpointing": (
        (False,),
        "is the training section's to say: set training.extra.activation_checkpointing, and this to false",
    ),
    "fsdp_activation_checkpointing_offload": ((False,), "is not offered: leave this out"),
    "fsdp_ignored_modules": ((), "is not offered: leave this out"),
}
# Of version 1, and passed over by accelerate in version 2; a size for a policy that is refused; how models are loaded.
_FSDP_NOTHING = (
    *("fsdp_backward_prefetch", "fsdp_use_orig_params", "fsdp_sync_module_states", "fsdp_min_num_params"),
    "fsdp_cpu_ram_efficient_loading",
)
_FSDP_TRANSLATED = (
    *("fsdp_version", "fsdp_reshard_after_forward", "fsdp_offload_params"),
    "fsdp_transformer_layer_cls_to_wrap",
)
_NVME = "is not offered: what waits does so in the CPU's memory; use cpu"
_DEEPSPEED_TAKEN: dict[str, tuple[tuple[Any, ...], str]] = {
    "offload_optimizer_nvme_path": (("none",), _NVME),
    "offload_param_nvme_path": (("none",), _NVME),
    "deepspeed_multinode_launcher": (("standard",), _ONE_COMMAND),
    "deepspeed_hostfile": ((), _ONE_COMMAND),
    "deepspeed_exclusion_filter": ((), _ONE_COMMAND),
    "deepspeed_inclusion_filter": ((), _ONE_COMMAND),
    "deepspeed_moe_layer_cls_names": ((), "is not offered: leave this out"),
}
# How the model is saved, which is whole and in float32 here, and how it is loaded.
_DEEPSPEED_NOTHING = ("zero3_save_16bit_model", "zero3_init_flag")
_DEEPSPEED_TRANSLATED = (
    *("zero_stage", "offload_optimizer_device", "offload_param_device", "deepspeed_config_file"),
    *("gradient_accumulation_steps", "gradient_clipping"),
)
_OFFLOAD = {("none", "none"): "no", ("cpu", "none"): "optimizer", ("cpu", "cpu"): "all"}


class Said(NamedTuple):
    """What a field of the file says in a recipe."""

    field: str
    """Of the file, dotted."""
    written: Any
    """Its value there."""
    means: str
    """The recipe's field."""
    value: Any


class Refused(NamedTuple):
    """What cannot be done as a field of the file asks."""

    field: str
    message: str


def translated(given: Mapping[str, Any]) -> Iterator[Said | Refused]:
    """The file's fields in the recipe's words, and all that is wrong with them. The path of a file of DeepSpeed's is
    handed on as `compute.deepspeed`."""
    yield from _taken(given, "", _TAKEN, _NOTHING, _TRANSLATED)
    kind = given.get("distributed_type")
    if isinstance(kind, list | dict):
        yield Refused("distributed_type", f"{kind!r} is of the wrong type: it takes text.")
        return
    if kind is None:
        yield Refused("distributed_type", f"is missing: choose from {', '.join(_STRATEGIES)}.")
    elif kind not in _STRATEGIES:
        why = _OTHER_TYPES.get(str(kind), f"is unknown: choose from {', '.join(_STRATEGIES)}")
        yield Refused("distributed_type", f"{kind!r} {why}.{nearest(str(kind), _STRATEGIES)}")
    elif kind in ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP"):
        yield Said("distributed_type", kind, "compute.strategy", _STRATEGIES[kind])
    yield from _precision(given)
    yield from _processes(given)
    for group, of, read in (("fsdp_config", "FSDP", _fsdp), ("deepspeed_config", "DEEPSPEED", _deepspeed)):
        inside = given.get(group) or {}
        if not isinstance(inside, Mapping):
            yield Refused(group, f"{inside!r} is of the wrong type: it takes a mapping.")
        elif kind == of:
            yield from read(inside)
        elif inside and kind in _STRATEGIES:
            yield Refused(group, f"is for `distributed_type: {of}` only; with {kind}, leave it out.")


def _taken(
    given: Mapping[str, Any],
    above: str,
    taken: Mapping[str, tuple[tuple[Any, ...], str]],
    nothing: tuple[str, ...],
    translated: tuple[str, ...],
) -> Iterator[Refused]:
    for name, value in given.items():
        if name in taken:
            values, why = taken[name]
            if value not in (None, "", [], {}) and value not in values:
                yield Refused(above + name, f"{value!r} {why}.")
        elif name not in nothing and name not in translated:
            known = [*taken, *nothing, *translated]
            yield Refused(f"{above}{name}", f"no such field of accelerate's.{nearest(str(name), known)}")


def _precision(given: Mapping[str, Any]) -> Iterator[Said | Refused]:
    value = given.get("mixed_precision")
    if value is None:
        if given.get("fp16"):
            yield Said("fp16", given["fp16"], "compute.mixed_precision", "fp16")
    elif str(value).lower() == "fp8":
        yield Refused("mixed_precision", f"{value!r} {_TAKEN['fp8_config'][1]}.")
    else:
        yield Said("mixed_precision", value, "compute.mixed_precision", "no" if value is False else value)


def _processes(given: Mapping[str, Any]) -> Iterator[Said | Refused]:
    kind, processes = given.get("distributed_type"), given.get("num_processes")
    for name, asked in (("use_cpu", given.get("use_cpu")), ("distributed_type", kind == "MULTI_CPU")):
        if asked and _sees_gpus():
            message = f"{given[name]!r} asks for CPUs, and training takes the GPUs that it sees: hide them "
            yield Refused(name, f"{message}(CUDA_VISIBLE_DEVICES= in the environment), or leave this out.")
    if kind == "NO" and processes not in (None, 1):
        yield Refused("num_processes", f"{processes!r} contradicts distributed_type, which is 'NO': use MULTI_GPU.")
    elif kind == "NO":
        yield Said("distributed_type", kind, "compute.num_processes", 1)
    elif processes not in (None, -1):  # -1: whoever launches says it
        yield Said("num_processes", processes, "compute.num_processes", processes)
    machines = given.get("num_machines")
    if machines is not None:
        yield Said("num_machines", machines, "compute.num_machines", machines)
    if machines in (None, 1):
        if given.get("machine_rank"):
            yield Refused("machine_rank", f"{given['machine_rank']!r} is out of range: num_machines is 1.")
        return
    if (rank := given.get("machine_rank")) is not None:
        yield Said("machine_rank", rank, "compute.machine_rank", rank)
    host, port = given.get("main_process_ip"), given.get("main_process_port")
    if (host is None) != (port is None):
        name = "main_process_ip" if host is None else "main_process_port"
        yield Refused(name, "is missing: machines meet at main_process_ip and main_process_port.")
    elif host is not None:
        yield Said("main_process_ip", f"{host}:{port}", "compute.rendezvous", f"{host}:{port}")


def _sees_gpus() -> bool:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(any(Path("/dev").glob(name)) for name in ("nvidia[0-9]*", "dxg"))


def _fsdp(given: Mapping[str, Any]) -> Iterator[Said | Refused]:
    # accelerate itself takes the names with and without this beginning.
    given = {name if str(name).startswith("fsdp_") else f"fsdp_{name}": value for name, value in given.items()}
    above = "fsdp_config."
    yield from _taken(given, above, _FSDP_TAKEN, _FSDP_NOTHING, _FSDP_TRANSLATED)
    if (version := given.get("fsdp_version", 1)) not in (2, "2"):
        named = f"{version!r} is" if "fsdp_version" in given else "is missing, which is"
        message = f"{named} FSDP version 1 to accelerate, and FSDP2 is what runs here: set it to 2 (what else changes: "
        yield Refused(f"{above}fsdp_version", f"{message}`accelerate to-fsdp2`).")
    for name, means, choices in (
        ("fsdp_reshard_after_forward", "compute.fsdp_reshard_after_forward", {True: True, False: False}),
        ("fsdp_offload_params", "compute.offload", {True: "all", False: "no"}),
    ):
        value = given.get(name)
        truth = {"true": True, "false": False}.get(str(value).lower())
        if value is not None and truth is None:
            yield Refused(above + name, f"{value!r} is of the wrong type: it takes true or false.")
        elif truth is not None:
            yield Said(above + name, value, means, choices[truth])
    if classes := given.get("fsdp_transformer_layer_cls_to_wrap"):
        names = [name.strip() for name in str(classes).split(",")]
        yield Said(f"{above}fsdp_transformer_layer_cls_to_wrap", classes, "compute.fsdp_wrap", names)


def _deepspeed(given: Mapping[str, Any]) -> Iterator[Said | Refused]:
    above = "deepspeed_config."
    stage = given.get("zero_stage")
    yield from _taken(given, above, _DEEPSPEED_TAKEN, _DEEPSPEED_NOTHING, _DEEPSPEED_TRANSLATED)
    file = given.get("deepspeed_config_file")
    if file is not None:
        yield Said(f"{above}deepspeed_config_file", file, "compute.deepspeed", file)
    if stage is None and file is None:
        stage = 2  # accelerate's own choice
    if stage in (2, 3, "2", "3"):
        yield Said(f"{above}zero_stage", stage, "compute.strategy", f"deepspeed-zero{stage}")
    elif stage is not None:
        yield Refused(f"{above}zero_stage", f"{stage!r} is not offered: choose from 2, 3.")
    devices = [given.get(f"offload_{name}_device") for name in ("optimizer", "param")]
    if any(device is not None for device in devices):
        asked = tuple(str(device or "none").lower() for device in devices)
        if asked in _OFFLOAD:
            yield Said(f"{above}offload_optimizer_device", devices[0], "compute.offload", _OFFLOAD[asked])
        else:
            why = _NVME if "nvme" in asked else "is not offered: choose from none, cpu, and for both cpu"
            name = "optimizer" if asked[0] not in ("none", "cpu") else "param"
            yield Refused(f"{above}offload_{name}_device", f"{asked[name == 'param']!r} {why}.")
    for name, means in (
        ("gradient_accumulation_steps", "training.gradient_accumulation_steps"),
        ("gradient_clipping", "training.max_grad_norm"),
    ):
        if (value := given.get(name)) not in (None, "auto"):
            yield Said(above + name, value, means, value)
