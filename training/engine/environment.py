"""Under what a checkpoint was written, and whether going on from it here ends with the same bytes.

Other versions, other hardware, another number of processes or of threads round otherwise, from the first step on. The
number of threads is taken over from the checkpoint: torch computes the same with as many, also on fewer cores. The
others are refused, or accepted where the recipe says `training.inexact_resume: true`; some cannot work at all.
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
    from training.engine.training_task import Task
    from training.jobs.protocol import Events, Job
    from training.recipe import Lora

THREADS = "threads"
ACCEPTED = "training.inexact_resume"
_WHY_NEVER = {
    "engine": "each engine keeps files of its own",
    "strategy": "each strategy keeps files of its own",
    "processes": "only ddp with the engine trainer can divide its work anew",
    "LoRA": "its weights are others, or are added up in another way",
    "rows a step": "with another number of processes, as many rows must make a step: change the batch size with it",
    "steps an epoch": "with another number of processes, as many steps must make an epoch",
}


def of(task: Task) -> dict[str, Any]:
    """What this process trains with; plain JSON values by what they are called in messages."""
    import torch

    from training.batching.batches import steps_an_epoch

    strategy, processes = task.compute.strategy, task.compute.num_processes
    lora = task.training.lora
    libraries = ["torch", "transformers", "accelerate", *(["deepspeed"] if "deepspeed" in strategy else [])]
    libraries += ["peft"] if lora else []
    return {
        "engine": task.training.engine,
        "strategy": strategy,
        "LoRA": _adapters(lora) if lora else "none",
        "processes": processes,
        "rows a step": task.rows_a_step,
        "steps an epoch": steps_an_epoch(len(task.train), task.rows_a_step, processes),
        "device": _device(),
        THREADS: torch.get_num_threads(),
        **{name: importlib.metadata.version(name) for name in libraries},
    }


def machine() -> dict[str, Any]:
    """What this machine computes with; plain JSON values."""
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


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """The program that finds out on what a training would run here: `python -m training.engine.environment JOB`."""
    return machine()


def require_exact(checkpoint: Path, where: str, written: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """What differs in how a checkpoint was written, where the recipe accepts that and it can work; None where nothing.

    `here` has `accepted` beside what `of` gives. `where` is the field to name. Raises UserError with all differences
    otherwise.
    """
    others = [name for name, value in written.items() if name in here and here[name] != value]
    if not here["accepted"]:
        others = [name for name in others if name != THREADS]  # they are taken over
    apart = others if "processes" in others else [name for name in others if name not in _OF_PROCESSES]
    if not apart:
        return None
    told = ", ".join(f"{name} {written[name]} (here {here[name]})" for name in apart)
    never = [name for name in apart if name in _WHY_NEVER and not (name == "processes" and _divides_anew(here))]
    if never:
        why = "; ".join(_WHY_NEVER[name] for name in never)
        message = f"{checkpoint.name} was written with {told}. It cannot be gone on from: {why}."
    elif not here["accepted"]:
        message = f"{checkpoint.name} was written with {told}: going on from it would end with other bytes. "
        message += f"Go on where it was written, or accept that by {ACCEPTED}: true."
    else:
        return told
    raise UserError([Problem(kind="training", where=where, message=message)])


_OF_PROCESSES = {"rows a step", "steps an epoch"}  # otherwise a matter of the recipe, as the learning rate is


def _divides_anew(here: Mapping[str, Any]) -> bool:
    return bool(here["strategy"] == "ddp" and here["engine"] == "trainer")


def _adapters(lora: Lora) -> str:
    """What the weights of a checkpoint with adapters mean. Its dropout is a matter of the recipe, as others are."""
    return ", ".join(f"{name} {value}" for name, value in lora if value and name != "lora_dropout")


def _device() -> str:
    """What a process trains on: its GPU, or the processor."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()


def _processor() -> str:
    """The processor's name, and the instructions that torch uses of it."""
    import torch

    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return f"{found[1] if found else platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"


if __name__ == "__main__":
    from training.jobs.program import run_program

    run_program(main)
