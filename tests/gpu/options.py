"""Cases of `make gpu` about the options that are for GPUs alone, each against the same training without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.gpu.cases import Result
from tests.gpu.ground import Ground
from tests.gpu.memory import HIGHEST, LOWEST
from tests.gpu.speed import BATCH_ROWS
from tests.training import forks

STEPS = 60
MAX_DIFFERENCE = 0.02
"""The largest relative difference of the mean loss of the last steps, in bf16."""


def compare(ground: Ground, folder: Path, task: str, option: dict[str, Any]) -> Result:
    """Trains without and with the option: the losses are the same, and the estimate is close to the peak."""
    settings = {"per_device_train_batch_size": BATCH_ROWS[task], "max_steps": STEPS, "logging_steps": 10}
    figures: dict[str, dict[str, Any]] = {}
    losses: dict[str, float] = {}
    for name, more in (("without", {}), ("with", option)):
        job = ground.large_job(task, folder / name, **settings, **more)
        outcome = ground.run(job)
        if outcome.failure is not None:
            return Result({f"trains {name} it": f"no: {outcome.failure.message}"})
        points = forks.curve(job)
        figures[name], losses[name] = outcome.result, points[max(points)]["train_loss"]
    difference = abs(losses["with"] / losses["without"] - 1)
    share = figures["with"]["estimated_memory_mb"] / figures["with"]["peak_memory_mb"]
    times, memory = (
        figures["with"][name] / figures["without"][name] for name in ("train_tokens_per_second", "peak_memory_mb")
    )
    return Result(
        {
            "same loss": "yes"
            if difference <= MAX_DIFFERENCE
            else f"no: {losses['with']:.4g}, not {losses['without']:.4g}",
            "estimate": "yes" if LOWEST <= share <= HIGHEST else f"no: {share:.2f} of the peak",
        },
        {
            "loss differs by": difference,
            "times the speed": times,
            "of the memory": memory,
            "tokens/s": figures["with"]["train_tokens_per_second"],
            "of the hardware's limit": figures["with"]["hardware_share"],
            "estimated / peak": share,
        },
    )
