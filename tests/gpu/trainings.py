"""Cases of `make gpu`: a training that is killed and resumes ends with the same bytes, and its model can be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from tasks.jobs import fork_client
from tests.gpu.cases import Result
from tests.gpu.ground import Ground
from tests.matrix.cells import TRAINING, Exported, Victim
from tests.training import forks
from training.jobs.processes import variable
from training.jobs.protocol import Failure, Outcome

GLOBAL_BATCH_SIZE = 20
MIN_GAIN = 0.2
"""The least share of its loss that a training must lose."""
ROUNDING = 0.02
"""The largest relative difference of a metric between the training and the exported model, in 16 bits."""
ROUNDING_OF_4_BITS = 0.2
"""The same for weights that were trained in 4 bits and are exported in 32."""
KILLS = 2


def train_and_resume(
    ground: Ground,
    folder: Path,
    task: str,
    strategy: str,
    precision: str,
    processes: int,
    offload: str = "no",
    config: dict[str, Any] | None = None,
    attn_implementation: str | None = None,
    **more: Any,
) -> Result:
    """Trains once without a kill and once with kills, and compares all bytes. `config` is that of another model, and
    `more` has further settings of training."""
    compute = {"strategy": strategy, "num_processes": processes, "mixed_precision": precision, "offload": offload}
    training = {
        **TRAINING,
        "per_device_train_batch_size": GLOBAL_BATCH_SIZE // TRAINING["gradient_accumulation_steps"] // processes,
        "extra": {"full_determinism": True},
        **more,
    }
    world, rounding = ground.world(task, config), ROUNDING_OF_4_BITS if "lora" in more else ROUNDING
    whole, killed = (
        ground.small_job(world, task, folder / name, compute, attn_implementation, **training)
        for name in ("whole", "killed")
    )
    outcome = ground.run(whole, checks_state=True)
    if outcome.failure is not None:
        if reason := _refusal(outcome.failure):
            return Result({}, refused=reason)
        return Result({"trains": f"no: {outcome.failure.message}"})
    kills, resumed = _run_with_kills(ground, killed, processes)
    exported = Exported(whole, world)
    with ground.loading:
        reloads = exported.figures(outcome.result["best_step"], ground.device, precision, rounding)
    checks = {
        "trains": _trains(whole, outcome),
        "resumes": _resumes(whole, killed, kills, resumed),
        "exports": exported.files(),
        "reloads": reloads,
    }
    names = ("train_tokens_per_second", "peak_memory_mb")
    return Result(checks, {name: outcome.result[name] for name in names if outcome.result.get(name) is not None})


def train_as_fork(ground: Ground, folder: Path, task: str) -> Result:
    """Trains in a new process and in a fork of the fork server, and compares all bytes."""
    compute = {"strategy": "ddp", "num_processes": 1, "mixed_precision": "bf16"}
    training = {**TRAINING, "extra": {"full_determinism": True}}
    jobs = [
        ground.small_job(ground.world(task), task, folder / name, compute, **training) for name in ("whole", "forked")
    ]
    outcomes = [ground.run(jobs[0], threads=None)]
    forks_seen: list[bool] = []

    def look(events: list[dict[str, Any]]) -> None:
        started = [event["pid"] for event in events if event["kind"] == "started"]
        # A fork shows the environment of the fork server, which alone has this variable.
        forks_seen.extend(variable(pid, "PYTORCH_NVML_BASED_CUDA_CHECK") is not None for pid in started)

    with mock.patch.object(fork_client, "MODULES", fork_client.TRAINING), fork_client.forked_programs():
        fork_client.start()
        fork_client.wait_for(fork_client.TRAINING[-1])
        outcomes.append(ground.run(jobs[1], on_events=look, threads=None))
    for outcome in outcomes:
        if outcome.failure is not None:
            return Result({"trains": f"no: {outcome.failure.message}"})
    models = [{file.name: file.read_bytes() for file in (job / "output/model").iterdir()} for job in jobs]
    return Result(
        {
            "is a fork": "yes" if forks_seen == [True] else "no: it was a new process",
            "same bytes": "yes" if models[0] == models[1] else "no: other weights",
        }
    )


def _refusal(failure: Failure) -> str:
    """Why the strategy refuses the model; empty if the training failed for another reason."""
    problems = [problem for problem in failure.problems if problem.where == "compute.strategy"]
    return "; ".join(f"{problem.where}: {problem.message}" for problem in problems)


def _run_with_kills(ground: Ground, job: Path, processes: int) -> tuple[int, Outcome]:
    """The number of kills that happened, each of another rank, and the outcome of the last try."""
    for kills in range(KILLS):
        victim = Victim(kills % processes, tries_before=kills)
        outcome = ground.run(job, victim=victim, checks_state=True)
        if not victim.killed:
            return kills, outcome
    return KILLS, ground.run(job, checks_state=True)


def _trains(job: Path, outcome: Outcome) -> str:
    losses = [point["train_loss"] for point in forks.curve(job).values() if "train_loss" in point]
    first, last = (sum(some) / len(some) for some in (losses[:4], losses[-4:]))
    found = f"{outcome.result['steps']} steps, loss {first:.3g} to {last:.3g}"
    return f"yes, {found}" if last < first * (1 - MIN_GAIN) else f"no: {found}"


def _resumes(whole: Path, killed: Path, kills: int, outcome: Outcome) -> str:
    if outcome.failure is not None:
        return f"no: {outcome.failure.message}"
    if kills < KILLS:
        return f"no: it ended after {kills} kills"
    models = [{file.name: file.read_bytes() for file in (job / "output/model").iterdir()} for job in (whole, killed)]
    if models[0] != models[1]:
        return "no: other weights"
    # As texts, because NaN, the norm of a gradient that overflowed in fp16, is not equal to itself.
    curves = [repr(forks.curve(job)) for job in (whole, killed)]
    if curves[0] != curves[1] or forks.batches(whole) != forks.batches(killed):
        return "no: the same weights after other steps"
    return f"yes, {kills} kills"
