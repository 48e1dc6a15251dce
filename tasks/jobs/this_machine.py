"""What a recipe asks for that this machine does not have: processes, GPUs, packages, kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from tasks.jobs.hardware import gpu_compute_capabilities
from training.problems import Problem
from training.recipe import Compute, Recipe
from training.recipe.tables.exports import missing_packages
from training.recipe.tables.kernels import kernels_of
from training.recipe.training_fields import Lora, packages_of


def find_problems_here(recipe: Recipe, processes: int, gpus: int) -> Iterator[Problem]:
    """The problems of training with so many processes on this machine, which has so many GPUs."""
    yield from _find_too_many_processes(processes, recipe.compute.num_machines, gpus)
    yield from _find_strategy_problems(recipe.compute, processes, gpus)
    yield from _find_adapter_problems(recipe.training.lora, gpus)
    yield from _find_kernel_problems(recipe)
    yield from _find_export_problems(recipe)


def _find_too_many_processes(processes: int, machines: int, gpus: int) -> Iterator[Problem]:
    where = "compute.num_processes"
    if 0 < gpus * machines < processes:
        message = f"{processes} is too many: each process trains on a GPU of its own, and there are {gpus * machines}."
        yield Problem(kind="compute", where=where, message=message)
    if processes % machines:
        message = f"{processes} cannot be shared evenly by {machines} machines: give a multiple."
        yield Problem(kind="compute", where=where, message=message)


def _find_strategy_problems(compute: Compute, processes: int, gpus: int) -> list[Problem]:
    found = []
    if compute.strategy != "ddp" and processes == 1 and compute.offload == "no":
        message = f"{compute.strategy!r} shares a model among processes, and there is one GPU or none (num_processes: "
        found.append(("strategy", f"{message}auto): set compute.num_processes or compute.offload, or use ddp."))
    if compute.strategy.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        message = f"{compute.strategy!r} needs the package deepspeed, which is not installed here: install the extra, "
        found.append(("strategy", f"{message}`pip install 'finetune-flows[deepspeed]'`, or use fsdp."))
    if compute.offload != "no" and not gpus:
        message = f"{compute.offload!r} moves what a GPU does not need, and there is none here: set it to no."
        found.append(("offload", message))
    if compute.strategy != "ddp" and compute.mixed_precision == "fp16" and not gpus:
        message = f"'fp16' with {compute.strategy} needs GPUs, and there is none here: use bf16 or no."
        found.append(("mixed_precision", message))
    return [Problem(kind="compute", where=f"compute.{field}", message=message) for field, message in found]


def _find_adapter_problems(lora: Lora | None, gpus: int) -> Iterator[Problem]:
    if lora is not None and lora.quantization is not None and not gpus:
        message = f"{lora.quantization!r} holds weights in 4 bits on an NVIDIA GPU, and there is none here: set it to "
        message += "null for LoRA with weights in full precision, or run where there is one."
        yield Problem(kind="training", where="training.lora.quantization", message=message)
    for package in packages_of(lora):
        if importlib.util.find_spec(package) is None:
            extra = {"peft": "lora", "bitsandbytes": "qlora"}[package]
            message = f"needs the package {package}, which is not installed here: install the extra, "
            message += f"`pip install 'finetune-flows[{extra}]'`, or set it to null."
            where = "training.lora" if package == "peft" else "training.lora.quantization"
            yield Problem(kind="training", where=where, message=message)


def _find_kernel_problems(recipe: Recipe) -> Iterator[Problem]:
    fields = kernels_of(recipe.model.attn_implementation, recipe.training.use_liger_kernel)
    capabilities = gpu_compute_capabilities() if fields else []
    for field, kernels in fields.items():
        if lacks := list(kernels.find_lacks(capabilities)):
            value, default = (
                (repr(recipe.model.attn_implementation), "null") if field.startswith("model.") else ("true", "false")
            )
            message = f"{value} needs kernels for NVIDIA GPUs, but {', and '.join(lacks)}: set it to {default}."
            yield Problem(kind=field.partition(".")[0], where=field, message=message)


def _find_export_problems(recipe: Recipe) -> Iterator[Problem]:
    for command, packages in missing_packages(recipe.release.exports).items():
        message = f"{', '.join(recipe.release.exports)}: exports need {', '.join(packages)}, not installed here: "
        message += f"install the extra, `{command}`, or remove the field."
        yield Problem(kind="release", where="release.exports", message=message)
