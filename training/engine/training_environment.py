"""The environment of a training: stored in its checkpoints, compared before a resume.

Other library versions, other hardware, another number of processes or of threads round differently from the first step
on. A resume uses the checkpoint's number of threads: torch computes the same with as many threads on fewer cores. Other
differences are refused, or accepted if the recipe has `training.inexact_resume: true`; after some, a resume is
impossible.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from training.jobs.resources import cores
from training.problems import UserError
from training.recipe.tables.engines import ENGINES

if TYPE_CHECKING:
    from training.recipe import Lora, ResolvedCompute, Training

THREADS, GLOBAL_BATCH_SIZE, STEPS_PER_EPOCH = "threads", "global batch size", "steps per epoch"
ACCEPTED = "training.inexact_resume"
_KEPT = "the checkpoint's optimizer keeps it: for another one, begin with weights alone, by model.path"
_NEVER_RESUMES = {
    "engine": "engines write different files",
    "strategy": "strategies write different files",
    "processes": "only ddp with the engine trainer can resume with another number of processes",
    "LoRA": "its weights differ, or are added up differently",
    "optimizer": _KEPT,
    "learning rate": _KEPT,
    "weight decay": _KEPT,
    GLOBAL_BATCH_SIZE: "with another number of processes, it must stay the same: change the batch size to match",
    STEPS_PER_EPOCH: "with another number of processes, it must stay the same",
}
# With the same number of processes, these are settings that may change, as the number of epochs.
_PER_PROCESSES = {GLOBAL_BATCH_SIZE, STEPS_PER_EPOCH}


def training_environment(
    training: Training, compute: ResolvedCompute, global_batch_size: int, steps_per_epoch: int
) -> dict[str, Any]:
    """The environment of this process's training: plain JSON values by their names in messages."""
    libraries = ["torch", "transformers", "accelerate", *(["deepspeed"] if "deepspeed" in compute.strategy else [])]
    libraries += ["peft"] if training.lora else []
    return {
        "engine": training.engine,
        "strategy": compute.strategy,
        "LoRA": _describe_adapters(training.lora) if training.lora else "none",
        "processes": compute.num_processes,
        GLOBAL_BATCH_SIZE: global_batch_size,
        STEPS_PER_EPOCH: steps_per_epoch,
        **(_optimizer_settings(training) if training.engine in ENGINES else {}),
        "device": _device(),
        THREADS: torch.get_num_threads(),
        **{name: importlib.metadata.version(name) for name in libraries},
    }


def machine() -> dict[str, Any]:
    """The hardware of this machine; plain JSON values."""
    gpus = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
    return {
        "device": _device(),
        "processor": _processor(),
        "cores": cores(),
        "gpus": gpus,
        "system": f"{platform.system()} {platform.machine()}",
        THREADS: torch.get_num_threads(),
    }


def find_differences(
    checkpoint: Path, where: str, written: Mapping[str, Any], here: Mapping[str, Any], *, accepted: bool
) -> str | None:
    """The differences between a checkpoint's environment and this one, if the recipe accepts them and a resume is
    possible; None if there are none.

    `where` is the recipe's field to name. Raises UserError with all differences otherwise.
    """
    differing = [name for name, value in written.items() if name in here and here[name] != value]
    if not accepted:
        differing = [name for name in differing if name != THREADS]  # the resume uses the checkpoint's number
    if "processes" not in differing:
        differing = [name for name in differing if name not in _PER_PROCESSES]
    if not differing:
        return None
    found = ", ".join(f"{name} {written[name]} (here {here[name]})" for name in differing)
    resizable = {"processes"} if here["strategy"] == "ddp" and here["engine"] == "trainer" else set()
    never = [name for name in differing if name in _NEVER_RESUMES and name not in resizable]
    if never:
        reasons = "; ".join(f"{name}: {_NEVER_RESUMES[name]}" for name in never)
        message = f"{checkpoint.name} was written with {found}. It cannot be resumed ({reasons})."
    elif not accepted:
        message = f"{checkpoint.name} was written with {found}: resuming from it would end with other weights. Resume "
        message += f"in that environment, or accept other weights by {ACCEPTED}: true."
    else:
        return found
    raise UserError.of("training", where, message)


def _describe_adapters(lora: Lora) -> str:
    """The settings that fix the form of the weights; dropout may change."""
    usual = {"lora_dropout": lora.lora_dropout, "peft_type": "LORA"}
    return ", ".join(f"{name} {value}" for name, value in lora if value and usual.get(name) != value)


def _optimizer_settings(training: Training) -> dict[str, Any]:
    """The settings that an optimizer takes back from a checkpoint, in place of the recipe's."""
    others = [
        f"{name} {value}" for name, value in sorted(training.extra.items()) if name.startswith(("adam_", "optim_"))
    ]
    return {
        "optimizer": ", ".join([training.optim, *others]),
        "learning rate": training.learning_rate,
        "weight decay": training.weight_decay,
    }


def _device() -> str:
    """The device that a process trains on: its GPU, or the processor."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()


def _processor() -> str:
    """The processor's name, and the instruction set that torch uses."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{found[1] if found else platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
