"""Upload of checkpoints to the Hugging Face Hub during training, by a child program of the flow."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from tasks.cache.stage import Work
from tasks.hub.push import environment
from tasks.jobs.launch import Handle, poll, python_argv, start, stop
from training.engine import checkpoints
from training.jobs.protocol import CHECKPOINTS, Job, read_outcome
from training.recipe import Recipe

PROGRAM = "tasks.hub.push_checkpoints"
FOLDER = "hub"
"""The child's job folder, in the training's."""
ENDED = "ended"
"""The file that marks the end of training for the child: no checkpoint will follow."""
LAST_UPLOAD_S = 60.0
"""How long the end of training waits for the next checkpoint to arrive."""


@contextlib.contextmanager
def uploading(work: Work, recipe: Recipe, tokenizer: Path) -> Iterator[None]:
    """Around the training of `work`: its checkpoints are pushed as `release.hub.checkpoints` says.

    An error of the upload is a warning; training neither waits for uploads nor fails because of them.
    """
    hub = recipe.release.hub
    outgoing = work.job / checkpoints.OUTGOING  # makes the training keep what it would rotate away unsent
    if hub is not None and hub.checkpoints == "all_checkpoints":
        outgoing.mkdir(parents=True, exist_ok=True)
    else:
        shutil.rmtree(outgoing, ignore_errors=True)
    if hub is None or hub.checkpoints == "no":
        yield
        return
    settings = hub.model_dump(include={"repo", "revision", "private", "checkpoints"})
    inputs = {"job": str(work.job.resolve()), "tokenizer": str(tokenizer)}
    folder = work.job / FOLDER
    (folder / ENDED).unlink(missing_ok=True)
    Job(program=PROGRAM, key=work.key, settings={**settings, "name": recipe.name}, inputs=inputs).write(folder)
    child = start(folder, python_argv(PROGRAM), environment())
    try:
        yield
        _end(child, folder, work)
    finally:
        stop(child, grace_s=0.0)


def _end(child: Handle, folder: Path, work: Work) -> None:
    """Waits for the remaining uploads as long as they make progress, and warns about missing checkpoints."""
    (folder / ENDED).touch()
    saved = work.job / CHECKPOINTS
    left, deadline = checkpoints.list_unsent(saved), time.monotonic() + LAST_UPLOAD_S
    while poll(child) and time.monotonic() < deadline:
        time.sleep(0.1)
        if (now := checkpoints.list_unsent(saved)) != left:
            left, deadline = now, time.monotonic() + LAST_UPLOAD_S
    message = None
    if poll(child):
        message = f"nothing arrived for {LAST_UPLOAD_S:g} s after the end of training"
    elif (outcome := read_outcome(folder)) is None or outcome.failure is not None:
        message = outcome.failure.message if outcome and outcome.failure else "what sends them was killed"
    elif outcome.figures["trouble"]:
        message = outcome.figures["trouble"]
    missing = checkpoints.list_unsent(saved) if (work.job / checkpoints.OUTGOING).is_dir() else []
    said = (
        [f"{_names(missing)}: {message or 'damaged before it was sent'}"] if missing else [message] if message else []
    )
    if lost := checkpoints.list_lost(saved):
        said.append(
            f"{_names(lost)}: the disk had less than {checkpoints.MIN_FREE_SHARE:.0%} free to keep them until then"
        )
    if said:
        work.on_events([{"kind": "warning", "message": f"the Hub has not all checkpoints: {'; '.join(said)}"}])


def _names(checkpoints: list[Path]) -> str:
    return ", ".join(checkpoint.name for checkpoint in checkpoints)
