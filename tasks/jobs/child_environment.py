"""The environment variables of a job's processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tasks.cache.settings import ACCESS_TOKENS, PASSWORDS
from training.jobs.search_path import VARIABLE, python_path, search_path


def environment(added: Mapping[str, str]) -> dict[str, str]:
    """What a job's processes see: this process's environment without what would make them another run, and ours."""
    # A rank number or a launcher's setting left over from a shell, a notebook or a scheduler's step.
    # Nor an access token or a password: only a program that needs one is given it.
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    foreign = (*ranks, *ACCESS_TOKENS, *PASSWORDS)
    prefixes = ("ACCELERATE_", "TORCHELASTIC_", "FSDP_")
    env = {k: v for k, v in os.environ.items() if k not in foreign and not k.startswith(prefixes)}
    return env | added_environment(added)


def added_environment(added: Mapping[str, str]) -> dict[str, str]:
    """What a job's processes are given beside the environment of this process, `added` included and winning."""
    ours = {
        # The number of threads changes how sums are rounded: fixed, so that a later try rounds alike.
        "OMP_NUM_THREADS": str(cores()),
        # Threads that spin while they wait starve each other as soon as anything else runs: beside one busy process,
        # a training step on two cores took three times as long.
        "OMP_WAIT_POLICY": "PASSIVE",
        # A training step frees and asks again for tensors of megabytes. By its own limits glibc gives those back to
        # the system each time, which then clears 50 MB of pages anew at every step: a tenth of its time on a CPU.
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
    }
    env = {name: os.environ.get(name, value) for name, value in ours.items()}
    # A checkout first: no `training` folder of the user's may be taken for ours. A program then takes over the search
    # path of this process, so that both import the same modules.
    env["PYTHONPATH"] = python_path()
    env[VARIABLE] = os.pathsep.join(search_path())
    env |= {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
    return {**env, **added}


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
