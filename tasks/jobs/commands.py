"""The commands that start programs: Python alone, or `accelerate launch` for one process or several."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tasks.cache.results import Lock
from tasks.environment_variables import added_environment
from tasks.jobs.hardware import visible_gpus
from training.jobs.fork_server import LAUNCHER
from training.jobs.protocol import write_atomically
from training.jobs.resources import cores
from training.recipe.tables.strategies import STRATEGIES

GROUP_OF_ONE = {
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "FINETUNE_GROUP_STORE": ""},
}
"""The variables of a single process that joins a process group, which FSDP and DeepSpeed need. Its store is its own and
has no port."""
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""The interface on which the processes of one machine exchange tensors. By default, that of the host's name."""
LAUNCH = "launch.json"
"""In a job's folder: how its program was started."""


class Launch(NamedTuple):
    """How a job's program is started."""

    argv: list[str]
    """The command without its last argument, the job's folder."""
    env: dict[str, str]
    """Variables besides those of all jobs."""
    configuration: dict[str, Any]
    """The configuration that the program passes to accelerate or DeepSpeed."""

    def as_json(self, job: Path) -> dict[str, Any]:
        """The complete command, variables and configuration as plain JSON."""
        env = dict(sorted(added_environment(self.env).items()))
        return {"argv": [*self.argv, str(job)], "environment": env, "configuration": self.configuration}

    def write(self, job: Path) -> None:
        """Writes launch.json into the job's folder."""
        write_atomically(job / LAUNCH, json.dumps(self.as_json(job), indent=1).encode())


@dataclass(frozen=True)
class Machines:
    """The machines that train together, and the place of this one."""

    count: int = 1
    rank: int = 0
    """This machine's number."""
    rendezvous: str = ""
    """`host:port` of machine 0; empty for one machine."""


def accelerate_argv(
    program: str, *, num_processes: int, mixed_precision: str, use_cpu: bool, machines: Machines = Machines()
) -> list[str]:
    """The command, without the job's folder, that runs a module under `accelerate launch` with this number of processes
    on all machines together."""
    argv = [sys.executable, "-m", LAUNCHER]
    # A file of ours: otherwise accelerate reads the one of `accelerate config`, even if all values are given here.
    argv += ["--config_file", str(Path(__file__).with_name("accelerate.yaml"))]
    argv += ["--num_processes", str(num_processes), "--num_machines", str(machines.count)]
    argv += ["--mixed_precision", mixed_precision, "--dynamo_backend", "no"]
    if machines.count > 1:
        host, _, port = machines.rendezvous.rpartition(":")
        argv += ["--multi_gpu", "--machine_rank", str(machines.rank)]
        argv += ["--main_process_ip", host, "--main_process_port", port]
    elif num_processes > 1:
        # On CPUs too: with --cpu, accelerate silently starts one process. Port 0 is any free port.
        argv += ["--multi_gpu", "--main_process_port", "0"]
    elif use_cpu:
        argv += ["--cpu"]
    return [*argv, "-m", program]


def accelerate_environment(
    *, num_processes: int, use_cpu: bool, strategy: str = "ddp", machines: Machines = Machines()
) -> dict[str, str]:
    """The variables of the processes of `accelerate_argv`, besides those of all jobs."""
    here = num_processes // machines.count
    # A single process that sees several GPUs would use all of them, by torch's old DataParallel.
    env = {} if use_cpu else {"CUDA_VISIBLE_DEVICES": ",".join(visible_gpus()[:here])}
    env |= {"NCCL_RAS_ENABLE": "0"}  # else each process answers questions about its state on a port
    if machines.count == 1:
        env |= ON_LOOPBACK
    if num_processes == 1:
        return env if STRATEGIES[strategy].replicates else env | GROUP_OF_ONE
    env |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, cores() // here))}
    if use_cpu:
        # On CPUs accelerate supports only DDP; for the other strategies, training builds accelerate's state itself.
        env |= {"ACCELERATE_USE_CPU": "true"} if strategy == "ddp" else {}
    return env


def build_predict_launch(program: str, lock: Lock) -> Launch:
    """The launch of a program whose processes share the batches of rows: as many processes as train on this machine.

    Each has as many threads as a single process would have. The number of threads changes how sums are rounded, and
    predictions must not depend on the number of processes.
    """
    here, use_cpu = lock.num_processes // lock.num_machines, not visible_gpus()
    argv = python_argv(program)  # importing the launcher takes seconds, and one process does not need it
    if here > 1:
        argv = accelerate_argv(program, num_processes=here, mixed_precision=lock.mixed_precision, use_cpu=use_cpu)
    env = accelerate_environment(num_processes=here, use_cpu=use_cpu)
    env.pop("OMP_NUM_THREADS", None)
    return Launch(argv, env, {})


def python_argv(program: str) -> list[str]:
    """The command, without the job's folder, that runs a module as a single process."""
    return [sys.executable, "-m", program]
