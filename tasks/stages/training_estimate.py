"""What a training that has not begun will need, as `finetune plan` tells it; no stage.

<home>/estimates/<digest>.json    what the program training.programs.estimate found, by all that it hangs on
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.cache.digests import digest_of
from tasks.cache.refs import Lock, Ref
from tasks.cache.settings import home
from tasks.jobs.hardware import free_gpu_memory, memory, visible_gpus
from tasks.jobs.launch import JobFailed, accelerate_environment, python_argv, require_finished, run_job
from tasks.stages.fit import fit, fits_of, inputs_of, settings_of
from training.engine import estimation
from training.jobs import resources
from training.jobs.protocol import EVENTS, Job, read_events, sha256, write_atomically
from training.problems import UserError
from training.recipe import Recipe

STALL_TIMEOUT_S = 600.0
# Settings that fit hangs on and its needs do not: how much is learnt from a step, and when something is compared.
_NEEDS_NOTHING = {
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "label_smoothing_factor"),
    *("eval_steps", "metric_for_best_model", "greater_is_better", "early_stopping_patience"),
    *("early_stopping_threshold", "class_weights", "focal_gamma"),
}


def needs(recipe: Recipe, lock: Lock, *artifacts: Any) -> list[str]:
    """What training will need, in lines; the artifacts are fit's other inputs, as far as they are there.

    Of one that has begun, what it said itself: a trial beside it could take the memory that it runs in. Raises
    UserError for what the recipe names and is not there.
    """
    if not all(isinstance(artifact, Ref) for artifact in artifacts):
        return ["steps, tokens, memory and disk: ?, until the stages before it have run"]
    flat, _ = fit.flat_inputs(recipe, lock, *artifacts)
    if begun := estimation.latest_estimate(read_events(home() / "jobs" / fit.key(flat) / EVENTS, 0, ["estimate"])[0]):
        return [f"begun: {estimation.summary(begun, None)}"]
    try:
        found = _found(flat, recipe, lock, *artifacts)
    except (JobFailed, OSError) as error:
        return [f"steps, tokens, memory and disk: ? ({str(error).splitlines()[0]})"]
    return _told(found, recipe, lock.num_processes // lock.num_machines)


def _found(flat: Mapping[str, Any], recipe: Recipe, lock: Lock, data: Ref, model: Ref, tokens: Ref) -> dict[str, Any]:
    """The figures of training.programs.estimate: those that are remembered, else it runs."""
    division = fits_of(recipe, lock, model).divisor
    hangs_on = {
        **{name: value for name, value in flat.items() if _setting(name) not in _NEEDS_NOTHING},
        "micro_batch_divisor": division,
        "memory": memory(),
        "code.training/engine/estimation.py": sha256(Path(estimation.__file__)),
    }
    file = home() / "estimates" / f"{digest_of(hangs_on)[:40]}.json"
    with contextlib.suppress(OSError, ValueError):  # not remembered, or not to be read any more
        return dict(json.loads(file.read_bytes()))
    job = Job(
        program="training.programs.estimate",
        key=model.key,
        settings=settings_of(recipe, lock, data).model_dump(mode="json") | {"micro_batch_divisor": division},
        inputs={name: str(path) for name, path in inputs_of(recipe, model, tokens).items()},
    )
    env = accelerate_environment(num_processes=1, use_cpu=not visible_gpus())
    with tempfile.TemporaryDirectory(prefix="finetune-") as folder:
        job.write(Path(folder))
        ended = run_job(
            Path(folder), python_argv(job.program), env=env, on_events=lambda _: None, stall_timeout_s=STALL_TIMEOUT_S
        )
    found = dict(require_finished(ended).figures)
    if found["memory_mb"] is not None:  # else memory ran out, which there may be more of the next time
        with contextlib.suppress(OSError):  # a disk without room for it is what is to be told
            file.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomically(file, json.dumps(found, indent=1).encode())
    return found


def _setting(input: str) -> str | None:
    section, *names = input.split(".")
    return names[0] if section == "training" else None


def _told(found: Mapping[str, Any], recipe: Recipe, processes: int) -> list[str]:
    gpus = free_gpu_memory()[:processes]
    may_take = min(gpus) if gpus else resources.memory_left(processes)
    lines = [estimation.summary(found, may_take), estimation.memory_warning(found, may_take)]
    try:
        estimation.require_disk(recipe.training.engine, home(), found["disk_mb"] * 10**6)
    except UserError as error:
        lines.append(str(error))
    return [line for line in lines if line]
