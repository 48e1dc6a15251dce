"""The environment variables of a job's processes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tasks.cache.settings import ACCESS_TOKENS, PASSWORDS, STORAGE_LOGIN
from training.jobs.search_path import VARIABLE, python_path, search_path


def environment(added: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without the variables of other launchers and without secrets, plus
    `added_environment`."""
    # Rank numbers and launcher settings may be left over from a shell, a notebook or a scheduler. Access tokens and
    # passwords are passed only to the programs that need them.
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    foreign = (*ranks, *ACCESS_TOKENS, *PASSWORDS, *STORAGE_LOGIN)
    prefixes = ("ACCELERATE_", "TORCHELASTIC_", "FSDP_", "FSSPEC_")
    env = {k: v for k, v in os.environ.items() if k not in foreign and not k.startswith(prefixes)}
    return env | added_environment(added)


def added_environment(added: Mapping[str, str]) -> dict[str, str]:
    """The variables of all jobs, and `added`, which has precedence."""
    defaults = {
        # The number of threads changes how sums are rounded: a later try must round in the same way.
        "OMP_NUM_THREADS": str(cores()),
        # Threads that spin while they wait starve each other as soon as anything else runs: with one other busy process
        # on two cores, a training step took three times as long.
        "OMP_WAIT_POLICY": "PASSIVE",
        # A training step frees and allocates tensors of megabytes. By default glibc returns them to the system, which
        # then clears 50 MB of pages at every step: a tenth of the step's time on a CPU.
        "MALLOC_MMAP_THRESHOLD_": str(2**30),
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
    }
    env = {name: os.environ.get(name, value) for name, value in defaults.items()}
    # A checkout comes first: a `training` folder of the user's must not hide ours. Programs then take over the search
    # path of this process, so that both import the same modules.
    env["PYTHONPATH"] = python_path()
    env[VARIABLE] = os.pathsep.join(search_path())
    env |= {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}
    return {**env, **added}


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
