"""The program that pushes the checkpoints of a training to the Hugging Face Hub as they appear."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.cache.store import link_or_copy
from tasks.hub.checkpoint_uploads import ENDED, UploadSettings
from tasks.hub.push import Place, connect, push
from training.engine import checkpoints
from training.jobs.program import run_program
from training.jobs.protocol import CHECKPOINTS, EVENTS, Events, Job
from training.models.repository_files import part_of
from training.problems import UserError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

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
    os.nice(10)  # training comes first
    uploads = CheckpointUploads(job, job_dir / "copy")
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


class CheckpointUploads:
    """The uploads of a training's checkpoints.

    Args:
        job: the job of this program.
        aside: folder for links to the checkpoint that is being sent, as the training may remove the checkpoint.
        connect: returns a client that may write to a repository.
    """

    def __init__(self, job: Job, aside: Path, connect: Callable[[str], HfApi] = connect) -> None:
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
            Place(settings.repo, settings.revision, settings.private),
            files,
            title=f"{settings.name} {name}",
            replaced=lambda path: path.startswith(folders),
        )


if __name__ == "__main__":
    run_program(main)
