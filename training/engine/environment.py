"""The environment of a training, written into its checkpoints, and whether resuming in another one is exact.

Other library versions, other hardware, another number of processes or of threads round differently from the first step
on. The number of threads is taken over from the checkpoint: torch computes the same with as many threads on fewer
cores. Other differences are refused, or accepted if the recipe has `training.inexact_resume: true`; with some, no
resume is possible.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.problems import Problem, UserError

if TYPE_CHECKING:
    from training.recipe import Lora, ResolvedCompute, Training

THREADS, GLOBAL_BATCH_SIZE, STEPS_PER_EPOCH = "threads", "global batch size", "steps per epoch"
ACCEPTED = "training.inexact_resume"
_NEVER_RESUMES = {
    "engine": "each engine has files of its own",
    "strategy": "each strategy has files of its own",
    "processes": "only ddp with the engine trainer can divide its work anew",
    "LoRA": "its weights are others, or are added up differently",
    GLOBAL_BATCH_SIZE: "with another number of processes, it must stay the same: change the batch size to match",
    STEPS_PER_EPOCH: "with another number of processes, it must stay the same",
}
# With the same number of processes these are settings of the recipe, as the learning rate is.
_OF_PROCESSES = {GLOBAL_BATCH_SIZE, STEPS_PER_EPOCH}


def training_environment(
    training: Training, compute: ResolvedCompute, global_batch_size: int, steps_per_epoch: int
) -> dict[str, Any]:
    """The environment of this process's training: plain JSON values by their names in messages."""
    import torch

    libraries = ["torch", "transformers", "accelerate", *(["deepspeed"] if "deepspeed" in compute.strategy else [])]
    libraries += ["peft"] if training.lora else []
    return {
        "engine": training.engine,
        "strategy": compute.strategy,
        "LoRA": _adapters(training.lora) if training.lora else "none",
        "processes": compute.num_processes,
        GLOBAL_BATCH_SIZE: global_batch_size,
        STEPS_PER_EPOCH: steps_per_epoch,
        "device": _device(),
        THREADS: torch.get_num_threads(),
        **{name: importlib.metadata.version(name) for name in libraries},
    }


def machine() -> dict[str, Any]:
    """The hardware of this machine; plain JSON values."""
    import torch

    gpus = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "device": _device(),
        "processor": _processor(),
        "cores": cores,
        "gpus": gpus,
        "system": f"{platform.system()} {platform.machine()}",
        THREADS: torch.get_num_threads(),
    }


def differences(
    checkpoint: Path, where: str, written: Mapping[str, Any], here: Mapping[str, Any], *, accepted: bool
) -> str | None:
    """The differences between a checkpoint's environment and this one, if the recipe accepts them and a resume is
    possible; None if there are none.

    `where` is the recipe's field to name. Raises UserError with all differences otherwise.
    """
    others = [name for name, value in written.items() if name in here and here[name] != value]
    if not accepted:
        others = [name for name in others if name != THREADS]  # they are taken over
    if "processes" not in others:
        others = [name for name in others if name not in _OF_PROCESSES]
    if not others:
        return None
    found = ", ".join(f"{name} {written[name]} (here {here[name]})" for name in others)
    never = [name for name in others if name in _NEVER_RESUMES and not (name == "processes" and _divides_anew(here))]
    if never:
        reasons = "; ".join(f"{name}: {_NEVER_RESUMES[name]}" for name in never)
        message = f"{checkpoint.name} was written with {found}. It cannot be resumed ({reasons})."
    elif not accepted:
        message = f"{checkpoint.name} was written with {found}: resuming from it would end with other weights. Resume "
        message += f"where it was written, or accept that by {ACCEPTED}: true."
    else:
        return found
    raise UserError([Problem(kind="training", where=where, message=message)])


def _divides_anew(here: Mapping[str, Any]) -> bool:
    return bool(here["strategy"] == "ddp" and here["engine"] == "trainer")


def _adapters(lora: Lora) -> str:
    """The settings that the weights of a checkpoint with adapters depend on; dropout may change, as other settings."""
    return ", ".join(f"{name} {value}" for name, value in lora if value and name != "lora_dropout")


def _device() -> str:
    """The device that a process trains on: its GPU, or the processor."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()


def _processor() -> str:
    """The processor's name, and the instruction set that torch uses."""
    import torch

    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return f"{found[1] if found else platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
