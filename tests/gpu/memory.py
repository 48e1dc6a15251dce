"""Cases of `make gpu` about memory: CUDA's words when it runs out, smaller micro-batches, and the estimate."""

from __future__ import annotations

from pathlib import Path

from tasks.cache.stage import Listener, Work
from tasks.jobs.commands import accelerate_argv, accelerate_environment
from tasks.jobs.retries import BatchDivision, run_child
from tests.gpu.cases import Result
from tests.gpu.ground import STALL_TIMEOUT_S, Ground
from training.jobs.program import is_out_of_memory
from training.jobs.protocol import Job

LIMIT_BYTES = 6 * 10**9
"""The GPU memory that the limited training may take: enough for the model, not for a batch of ROWS."""
ROWS = 512
STEPS = 20
LOWEST, HIGHEST = 0.9, 1.3
"""The bounds of the estimate as a share of the measured peak."""


def cuda_message(ground: Ground, folder: Path) -> Result:
    """CUDA's error about memory is recognized."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    try:
        torch.empty(2 * free, dtype=torch.uint8, device="cuda")
    except Exception as error:
        words = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        return Result({"recognized": "yes" if is_out_of_memory(error) else f"no: {words}"}, {"words": words[:200]})
    return Result({"raises": "no: twice the free memory was allocated"})


def halves_micro_batch(ground: Ground, folder: Path) -> Result:
    """A training that runs out of GPU memory continues with smaller micro-batches and the same optimizer steps."""
    job = ground.large_job("sequence-classification", folder / "job", per_device_train_batch_size=ROWS, max_steps=STEPS)
    written = Job.read(job)
    messages: list[str] = []

    class Warnings(Listener):
        def stage_events(self, stage: str, events: list[dict[str, object]]) -> None:
            messages.extend(str(event["message"]) for event in events if event["kind"] == "warning")

    work = Work(key="out-of-memory", out=folder / "out", run="gpu", listeners=[Warnings()])
    work.job.mkdir(parents=True)
    inputs = {name: Path(place) for name, place in written.inputs.items()}
    figures = run_child(
        work,
        "tests.gpu.limited_fit",
        accelerate_argv("tests.gpu.limited_fit", num_processes=1, mixed_precision="bf16", use_cpu=ground.on_cpu),
        settings=written.settings,
        inputs=inputs,
        env=accelerate_environment(num_processes=1, use_cpu=ground.on_cpu),
        batches=BatchDivision(ROWS, inputs["model"]),
        stall_timeout_s=STALL_TIMEOUT_S,
    )
    fitting = figures["micro_batch_size"]
    words = next((message for message in messages if "Continuing with at most" in message), "")
    checks = {
        "recognized": "yes" if "out of memory" in words.lower() else f"no: the warnings are {messages}",
        "halves": "yes" if fitting < ROWS else f"no: {fitting} rows fitted into {LIMIT_BYTES / 1e9:g} GB",
        "same steps": "yes" if figures["steps"] == STEPS else f"no: {figures['steps']} steps",
    }
    return Result(checks, {"micro-batch": fitting, "peak MB": figures["peak_memory_mb"], "words": words[:200]})


def estimate_and_peak(ground: Ground, folder: Path, strategy: str) -> Result:
    """The estimated memory is close to the measured peak."""
    checks, figures = {}, dict[str, float | int | str]()
    for task in ("sequence-classification", "causal-lm"):
        rows = 32 if task == "sequence-classification" else 8
        compute = {"strategy": strategy, "num_processes": 1}
        job = ground.large_job(
            task, folder / task, compute, per_device_train_batch_size=rows, max_steps=STEPS, logging_steps=5
        )
        outcome = ground.run(job)
        if outcome.failure is not None:
            checks[task] = f"no: {outcome.failure.message}"
            continue
        estimated, peak = (outcome.result[f"{name}_memory_mb"] for name in ("estimated", "peak"))
        share = estimated / peak
        checks[task] = "yes" if LOWEST <= share <= HIGHEST else f"no: {share:.2f} of the peak"
        figures[f"{task}: estimated / peak"] = share
        figures[f"{task}: peak MB"] = peak
    return Result(checks, figures)
