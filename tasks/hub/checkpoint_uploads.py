"""Upload of checkpoints to the Hugging Face Hub during training, by a child program of the flow."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from tasks.cache.stage import Work
from tasks.hub.push import build_environment
from tasks.jobs.commands import python_argv
from tasks.jobs.engines.local import Handle, poll, start, stop
from training.engine import checkpoints
from training.jobs.protocol import CHECKPOINTS, Job, Settings, read_outcome
from training.recipe import Recipe

PROGRAM = "tasks.hub.push_checkpoints"
FOLDER = "hub"
"""The upload program's job folder, within that of the training."""
ENDED = "ended"
"""The file in this folder that marks the end of training: no further checkpoint will follow."""
UPLOAD_TIMEOUT_S = 60.0
"""Time that a finished training waits for each remaining checkpoint."""


class UploadSettings(Settings):
    """Settings of tasks.hub.push_checkpoints."""

    name: str
    """The recipe's name."""
    repo: str
    revision: str
    private: bool
    """Whether a new repository is private."""
    checkpoints: str
    """The recipe's release.hub.checkpoints."""


@contextlib.contextmanager
def upload_checkpoints(work: Work, recipe: Recipe, tokenizer: Path) -> Iterator[None]:
    """Uploads the training's checkpoints during the block, according to `release.hub.checkpoints`.

    An error of the upload is only a warning. Training does not wait for uploads; at the end of the block, the remaining
    ones get some time.
    """
    hub = recipe.release.hub
    outgoing = work.job / checkpoints.OUTGOING  # if this folder exists, training keeps checkpoints until they are sent
    if hub is not None and hub.checkpoints == "all_checkpoints":
        outgoing.mkdir(parents=True, exist_ok=True)
    else:
        shutil.rmtree(outgoing, ignore_errors=True)
    if hub is None or hub.checkpoints == "no":
        yield
        return
    settings = UploadSettings(
        name=recipe.name, **hub.model_dump(include={"repo", "revision", "private", "checkpoints"})
    )
    inputs = {"job": str(work.job.resolve()), "tokenizer": str(tokenizer)}
    folder = work.job / FOLDER
    (folder / ENDED).unlink(missing_ok=True)
    Job(program=PROGRAM, key=work.key, settings=settings.model_dump(), inputs=inputs).write(folder)
    child = start(folder, python_argv(PROGRAM), build_environment())
    try:
        yield
        _wait_for_uploads(child, folder, work)
    finally:
        stop(child, grace_s=0.0)


def _wait_for_uploads(child: Handle, folder: Path, work: Work) -> None:
    """Waits for the remaining uploads while they make progress, and warns about missing checkpoints."""
    (folder / ENDED).touch()
    saved = work.job / CHECKPOINTS
    unsent, deadline = checkpoints.list_unsent(saved), time.monotonic() + UPLOAD_TIMEOUT_S
    while poll(child) and time.monotonic() < deadline:
        time.sleep(0.1)
        if (still_unsent := checkpoints.list_unsent(saved)) != unsent:
            unsent, deadline = still_unsent, time.monotonic() + UPLOAD_TIMEOUT_S
    message = None
    if poll(child):
        message = f"nothing arrived for {UPLOAD_TIMEOUT_S:g} s after the end of training"
    elif (outcome := read_outcome(folder)) is None or outcome.failure is not None:
        message = outcome.failure.message if outcome and outcome.failure else "the upload program was killed"
    elif outcome.figures["trouble"]:
        message = outcome.figures["trouble"]
    missing = checkpoints.list_unsent(saved) if (work.job / checkpoints.OUTGOING).is_dir() else []
    reasons = [message] if message else []
    if missing:
        reasons = [f"{_join_names(missing)}: {message or 'damaged before it was sent'}"]
    if lost := checkpoints.list_lost(saved):
        free = f"{checkpoints.MIN_FREE_SHARE:.0%}"
        reasons.append(f"{_join_names(lost)}: removed unsent, as less than {free} of the disk was free")
    if reasons:
        work.on_events([{"kind": "warning", "message": f"checkpoints are missing on the Hub: {'; '.join(reasons)}"}])


def _join_names(folders: list[Path]) -> str:
    return ", ".join(folder.name for folder in folders)
