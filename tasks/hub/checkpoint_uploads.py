"""Upload of checkpoints to the Hugging Face Hub during training: the start of its program, and the program itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.cache.stage import Work
from tasks.cache.store import link_or_copy
from tasks.hub.client import build_environment
from tasks.jobs.commands import python_argv
from tasks.jobs.engines.local import LOCAL, Handle
from training.engine import checkpoints
from training.jobs.program import run_program
from training.jobs.protocol import CHECKPOINTS, EVENTS, Events, Job, Settings, read_outcome
from training.models.repository_files import part_of
from training.problems import UserError
from training.recipe import Recipe

if TYPE_CHECKING:
    from huggingface_hub import HfApi


PROGRAM = "tasks.hub.checkpoint_uploads"
FOLDER = "hub"
"""The upload program's job folder, within that of the training."""
ENDED = "ended"
"""The file in this folder that marks the end of training: no further checkpoint will follow."""
UPLOAD_TIMEOUT_S = 60.0
"""Time that a finished training waits for each remaining checkpoint."""


class UploadSettings(Settings):
    """Settings of this program."""

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
    child = LOCAL.start(folder, python_argv(PROGRAM), build_environment())
    try:
        yield
        _wait_for_uploads(child, folder, work)
    finally:
        LOCAL.stop(child, grace_s=0.0)


def _wait_for_uploads(child: Handle, folder: Path, work: Work) -> None:
    """Waits for the remaining uploads while they make progress, and warns about missing checkpoints."""
    (folder / ENDED).touch()
    saved = work.job / CHECKPOINTS
    unsent, deadline = checkpoints.list_unsent(saved), time.monotonic() + UPLOAD_TIMEOUT_S
    while LOCAL.poll(child) and time.monotonic() < deadline:
        time.sleep(0.1)
        if (still_unsent := checkpoints.list_unsent(saved)) != unsent:
            unsent, deadline = still_unsent, time.monotonic() + UPLOAD_TIMEOUT_S
    message = None
    if LOCAL.poll(child):
        message = f"nothing arrived for {UPLOAD_TIMEOUT_S:g} s after the end of training"
    elif (outcome := read_outcome(folder)) is None or outcome.failure is not None:
        message = outcome.failure.message if outcome and outcome.failure else "the upload program was killed"
    elif outcome.result["trouble"]:
        message = outcome.result["trouble"]
    missing = checkpoints.list_unsent(saved) if (work.job / checkpoints.OUTGOING).is_dir() else []
    reasons = [message] if message else []
    if missing:
        reasons = [f"{_join_names(missing)}: {message or 'damaged before it was sent'}"]
    if lost := checkpoints.list_lost(saved):
        free = f"{checkpoints.MIN_FREE_SHARE:.0%}"
        reasons.append(f"{_join_names(lost)}: removed unsent, as less than {free} of the disk was free")
    if reasons:
        work.warning(f"checkpoints are missing on the Hub: {'; '.join(reasons)}")


def _join_names(folders: list[Path]) -> str:
    return ", ".join(folder.name for folder in folders)


WEIGHTS = "last-weights"
"""The branch's folder for the newest weights, like checkpoints.LAST and BEST: its root has the promoted model."""
POLL_S = 1.0
MAX_WAIT_S = 60.0


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Pushes new checkpoints until the file ENDED appears in the folder. Returns the names of the checkpoints `pushed`,
    and the error of the last try as `trouble`.

    Inputs: job (the training's folder), tokenizer. An error adds a warning to the training's events, and the push is
    tried again at growing intervals.
    """
    from tasks.hub.push import connect

    os.nice(10)  # training comes first
    uploads = CheckpointPusher(job, job_dir / "copy", connect)
    training_events = Events(Path(job.inputs["job"]) / EVENTS)
    trouble, wait_s, next_try = None, POLL_S, 0.0
    while True:
        last = (job_dir / ENDED).exists()
        if last or time.monotonic() >= next_try:
            try:
                uploads.push_new()
                if trouble:
                    training_events.note("uploads of checkpoints succeed again")
                trouble, wait_s = None, POLL_S
            except UserError as error:
                if str(error) != trouble:
                    training_events.warning(
                        f"uploads of checkpoints wait for the next try; training continues. {error}"
                    )
                trouble, wait_s = str(error), min(2 * wait_s, MAX_WAIT_S)
            next_try = time.monotonic() + wait_s
        if last:
            return {"pushed": sorted(uploads.pushed), "trouble": trouble}
        time.sleep(POLL_S)


class CheckpointPusher:
    """Pushes the checkpoints of a training.

    Args:
        job: the job of this program.
        aside: folder for links to the checkpoint that is being sent, as the training may remove the checkpoint.
        connect: returns a client that may write to a repository.
    """

    def __init__(self, job: Job, aside: Path, connect: Callable[[str], HfApi]) -> None:
        self.pushed: set[str] = set()
        self._settings, self._tokenizer = UploadSettings.model_validate(job.settings), Path(job.inputs["tokenizer"])
        self._folder, self._aside = Path(job.inputs["job"]) / CHECKPOINTS, aside
        self._all = self._settings.checkpoints == "all_checkpoints"
        self._connect = connect
        self._hub: HfApi | None = None

    def push_new(self) -> None:
        """Pushes new checkpoints that are intact. Raises UserError if a push fails."""
        for checkpoint in self._find_new():
            if self._link_aside(checkpoint):
                self._push(checkpoint.name)
                if self._all:
                    checkpoints.mark_sent(self._folder, checkpoint.name)
            if checkpoint.is_dir():  # otherwise it was removed before it could be linked
                self.pushed.add(checkpoint.name)

    def _find_new(self) -> Iterable[Path]:
        if self._all:
            saved = checkpoints.list_unsent(self._folder)
        else:
            saved = sorted(self._folder.glob("checkpoint-*"), key=checkpoints.step_of)[-1:]
        return [checkpoint for checkpoint in saved if checkpoint.name not in self.pushed]

    def _link_aside(self, checkpoint: Path) -> bool:
        """Links the checkpoint, and the checkpoints that it needs unless all are pushed. Returns whether every file is
        intact."""
        shutil.rmtree(self._aside, ignore_errors=True)
        last = self._aside / checkpoints.LAST / checkpoint.name
        try:
            shutil.copytree(checkpoint, last, copy_function=link_or_copy)
            for needed in [] if self._all else checkpoints.list_needed(checkpoint):
                shutil.copytree(needed, self._aside / checkpoints.BEST / needed.name, copy_function=link_or_copy)
        except (OSError, shutil.Error):
            return False
        return checkpoints.find_damage(last, with_needed=not self._all) is None

    def _push(self, name: str) -> None:
        from tasks.hub.push import Branch, push

        settings = self._settings
        self._hub = self._hub or self._connect(settings.repo)
        last = self._aside / checkpoints.LAST / name
        folders: tuple[str, ...]  # of the branch, which this push replaces
        if settings.checkpoints == "every_save":
            folders = (f"{WEIGHTS}/",)
            weights = [path for path in last.iterdir() if part_of(path.name) == "model"]
            files = {folders[0] + path.name: path for path in [*self._tokenizer.iterdir(), *weights]}
        else:
            folders = (f"{name}/",) if self._all else (f"{checkpoints.LAST}/", f"{checkpoints.BEST}/")
            root = last.parent if self._all else self._aside
            files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
        push(
            self._hub,
            Branch(settings.repo, settings.revision, settings.private),
            files,
            title=f"{settings.name} {name}",
            replaced=lambda path: path.startswith(folders),
        )


if __name__ == "__main__":
    run_program(main)
