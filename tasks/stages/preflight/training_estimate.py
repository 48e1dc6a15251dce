"""Estimate of the steps, memory and disk space of a training, and of those of folds, for `finetune plan`.

<home>/estimates/<digest>.json    figures of training.programs.estimate, by everything that they depend on
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.cache.digests import digest_of
from tasks.cache.stage import Work
from tasks.home import home
from tasks.jobs.commands import accelerate_environment, python_argv
from tasks.jobs.hardware import free_gpu_memory, memory, visible_gpus
from tasks.jobs.job import StageJob
from tasks.jobs.launch import JobFailed, require_finished, run_job
from tasks.jobs.retries import DEFAULT_STALL_TIMEOUT_S
from tasks.reports.formatting import first_line
from training.engine import estimation
from training.engine.fit_settings import FitSettings
from training.jobs.protocol import EVENTS, INPUTS, Job, read_events, sha256, write_atomically
from training.jobs.resources import as_text, memory_left
from training.problems import Problem, UserError
from training.recipe import Recipe
from training.recipe.rules.training_rules import improbable_rates
from training.recipe.tables.engines import ENGINES

# Inputs of fit that change neither its memory nor its steps.
_WITHOUT_EFFECT = {
    f"training.{name}"
    for name in (
        *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm"),
        *("label_smoothing_factor", "class_weights", "focal_gamma", "eval_steps", "metric_for_best_model"),
        *("greater_is_better", "early_stopping_patience", "early_stopping_threshold"),
    )
}


def find_improbable_rates(recipe: Recipe) -> Iterator[Problem]:
    """The warnings about a learning rate and a decay at which no model learns."""
    for where, message in improbable_rates(recipe.training):
        yield Problem(kind="training", where=where, message=message, level="warning")


def estimate_lines(key: str, inputs: Mapping[str, Any], training: StageJob) -> list[str]:
    """The estimate for the job of fit, in lines. `key` is its key, and `inputs` are the flat inputs of it.

    A job that has started reports its own estimate: a trial at the same time could take its memory. Raises UserError
    for objects that the recipe names and that do not exist.
    """
    if begun := _latest_estimate(key):
        return [f"begun: {estimation.summary(begun, None)}"]
    settings = training.settings
    assert isinstance(settings, FitSettings)
    try:
        with tempfile.TemporaryDirectory(prefix="finetune-") as folder:
            found = _read_or_compute(inputs, training, Path(folder))
    except (JobFailed, OSError) as error:
        return [f"steps, tokens, memory and disk: ? ({first_line(error)})"]
    processes = settings.compute.num_processes // settings.compute.num_machines
    gpus = free_gpu_memory()[:processes]
    available = min(gpus) if gpus else memory_left(processes)
    lines = [estimation.summary(found, available), estimation.memory_warning(found, available)]
    lines.append(estimation.warmup_warning(settings.training, found["steps"]))
    lines += [f"{where}: {message}" for where, message in improbable_rates(settings.training)]
    try:
        estimation.require_disk(settings.training.engine, home(), found["disk_mb"] * 10**6)
    except UserError as error:
        lines.append(str(error))
    return [line for line in lines if line]


def estimate_folds(
    keys: Sequence[str | None], inputs: Mapping[str, Any], training: StageJob, at_once: int
) -> Iterator[str]:
    """Yields the disk and memory that trainings of folds with these keys need, `at_once` of them at the same time on
    this machine, and what is too small. `inputs` and `training` are those of fit."""
    settings, at_once = training.settings, min(at_once, len(keys))
    assert isinstance(settings, FitSettings)
    processes = settings.compute.num_processes // settings.compute.num_machines
    begun = (_latest_estimate(key) for key in keys if key is not None)
    found: Mapping[str, Any] = next(filter(None, begun), {})
    try:
        if not found:
            with tempfile.TemporaryDirectory(prefix="finetune-") as folder:
                found = _read_or_compute(inputs, training, Path(folder))
    except (JobFailed, OSError) as error:
        yield f"memory and disk: ? ({first_line(error)})"
        return
    trainings, free = f"{len(keys)} training{'s' * (len(keys) > 1)}", shutil.disk_usage(home()).free
    model, of_process = estimation.BYTES_PER_WEIGHT * found["parameters"], found["memory_mb"]
    disk = 1e6 * found["disk_mb"] * at_once + model * (len(keys) - at_once)  # one that has ended keeps its model alone
    in_memory = 1e6 * (of_process or 0) * processes * at_once
    of_all = f", and {at_once} at once about {as_text(in_memory)} of memory" if at_once > 1 and in_memory else ""
    yield f"{trainings} need {as_text(disk)} of disk{of_all}"
    if settings.training.engine in ENGINES and free < disk:
        message = f"evaluation.folds: {trainings} need {as_text(disk)} of disk, and {as_text(free)} are free: "
        yield f"{message}free some space, set FINETUNE_HOME to a larger disk, or choose fewer folds."

    def fits(number: int) -> bool:
        left = memory_left(processes * number)
        return left is None or 1e6 * of_process <= left

    if at_once == 1 or of_process is None or visible_gpus() or fits(at_once):  # each training has GPUs of its own
        return
    most = next((number for number in range(at_once - 1, 1, -1) if fits(number)), 1)
    message = f"evaluation.parallel_folds: {at_once} at once need about {as_text(in_memory)} of memory, and "
    yield f"{message}{as_text(memory_left(1) or 0)} are free: set it to {most}."


def _latest_estimate(key: str) -> Mapping[str, Any]:
    """The estimate of a job that has begun; empty without one."""
    return estimation.latest_estimate(read_events(home() / "jobs" / key / EVENTS, 0, ["estimate"])[0])


def _read_or_compute(inputs: Mapping[str, Any], training: StageJob, folder: Path) -> dict[str, Any]:
    places = training.link_inputs(Work("", folder, ""), folder / INPUTS)
    divisor = training.batches(places["model"]).divisor if training.batches else 1
    depends_on = {
        **{name: value for name, value in inputs.items() if name not in _WITHOUT_EFFECT},
        "micro_batch_divisor": divisor,
        "memory": memory(),
        "code.training/engine/estimation.py": sha256(Path(estimation.__file__)),
    }
    file = home() / "estimates" / f"{digest_of(depends_on)[:40]}.json"
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(file.read_bytes()))
    job = Job(
        program="training.programs.estimate",
        key=file.stem,
        settings=training.settings.model_dump(mode="json") | {"micro_batch_divisor": divisor},
        inputs={name: str(path) for name, path in places.items()},
    )
    job.write(folder)
    outcome = run_job(
        folder,
        python_argv(job.program),
        env=accelerate_environment(num_processes=1, use_cpu=not visible_gpus()),
        on_events=lambda _: None,
        stall_timeout_s=DEFAULT_STALL_TIMEOUT_S,
    )
    found = dict(require_finished(outcome).result)
    if found["memory_mb"] is not None:  # None: memory ran out, and there may be more next time
        with contextlib.suppress(OSError):  # a full disk is one of the things that an estimate reports
            file.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomically(file, json.dumps(found, indent=1).encode())
    return found
