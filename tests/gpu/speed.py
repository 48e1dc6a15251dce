"""Cases of `make gpu` about speed: this project, the plain Trainer and a raw step on the same rows in one process run
after the other, in tokens per second without padding."""

from __future__ import annotations

import statistics
from pathlib import Path

from tests.gpu.cases import Result
from tests.gpu.ground import Ground
from tests.gpu.plain_trainer import WARM_UP
from tests.training import forks
from training.jobs.protocol import Job, Outcome

STEPS = 120
LAST_STEPS = 40
"""Steps at the end, when few shapes of batches are new."""
BATCH_ROWS = {"sequence-classification": 64, "causal-lm": 16}
MIN_RAW_SHARE = 0.9
"""The budget: the share of a raw step's speed."""


def training(ground: Ground, folder: Path, task: str) -> Result:
    """Training against a raw step on the same batches, and against the plain Trainer on the same rows."""
    settings = {"per_device_train_batch_size": BATCH_ROWS[task], "logging_steps": WARM_UP}
    steps = {"max_steps": WARM_UP + LAST_STEPS if ground.on_cpu else STEPS}
    job = ground.large_job(task, folder / "fit", **settings, **steps)
    fit = ground.run(job)
    raw = _run(ground, ground.large_job(task, folder / "raw", **settings, max_steps=90), "tests.benchmarks.step")
    plain = _run(ground, ground.large_job(task, folder / "plain", **settings, **steps), "tests.gpu.plain_trainer")
    for outcome in (fit, raw, plain):
        if outcome.failure is not None:
            return Result({"runs": f"no: {outcome.failure.message}"})
    pairs = zip(raw.result["raw_s"], raw.result["ours_s"], strict=True)
    share = statistics.median(raw_s / ours_s for raw_s, ours_s in pairs)
    rate, plain_rate = _rate(job, WARM_UP), plain.result["tokens_per_second"]
    return Result(
        {"raw step": _at_least(share, MIN_RAW_SHARE), "plain Trainer": _at_least(rate / plain_rate, 1.0)},
        {
            "of the raw step": share,
            "times the plain Trainer": rate / plain_rate,
            "tokens/s": rate,
            "tokens/s at the end": _rate(job, steps["max_steps"] - LAST_STEPS),
            "plain Trainer's tokens/s": plain_rate,
            "of the hardware's limit": fit.result["hardware_share"],
            "peak MB": fit.result["peak_memory_mb"],
        },
    )


def prediction(ground: Ground, folder: Path) -> Result:
    """Batch prediction against the raw forward pass on the same rows, and against the plain Trainer's predict."""
    job = ground.large_job("sequence-classification", folder / "job", per_device_eval_batch_size=128)
    outcome = _run(ground, job, "tests.gpu.predictions")
    if outcome.failure is not None:
        return Result({"runs": f"no: {outcome.failure.message}"})
    rates = outcome.result
    share, times = (rates["project"] / rates[name] for name in ("raw", "plain"))
    return Result(
        {"raw forward pass": _at_least(share, MIN_RAW_SHARE), "plain Trainer": _at_least(times, 1.0)},
        {
            "of the raw forward pass": share,
            "times the plain Trainer": times,
            "tokens/s": rates["project"],
            "of the hardware's limit": rates["hardware_share"],
        },
    )


def _rate(job: Path, first: int) -> float:
    """The tokens per second of the steps after this one."""
    events = [event for event in forks.events(job, "speed") if event["step"] > first]
    return float(sum(event["tokens"] for event in events) / sum(event["seconds"] for event in events))


def _run(ground: Ground, job: Path, program: str) -> Outcome:
    written = Job.read(job)
    Job(program=program, key=written.key, settings=written.settings, inputs=written.inputs).write(job)
    return ground.run(job, program=program)


def _at_least(share: float, least: float) -> str:
    return "yes" if share >= least else f"no: {share:.2f}, and the budget is {least:g}"
