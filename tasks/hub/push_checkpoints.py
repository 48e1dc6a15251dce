"""The program that pushes the checkpoints of a training to the Hugging Face Hub as they appear."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.hub.checkpoint_uploads import ENDED
from tasks.hub.push import Place, connected, push
from training.engine import checkpoints
from training.jobs.program import run_program
from training.jobs.protocol import CHECKPOINTS, EVENTS, Events, Job
from training.models.repository_files import part_of
from training.problems import UserError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

SAVED = "last-weights"
"""A folder of the branch, as checkpoints.LAST and BEST are: at its root lies the model that was promoted."""
POLL_S = 1.0
LONGEST_WAIT_S = 60.0


def main(job_dir: Path, job: Job, events: Events) -> dict[str, Any]:
    """Pushes until the file ENDED is in its folder, and what is there then.

    Settings: name (of the recipe), repo, revision, private, checkpoints (what of them, as release.hub says). Inputs:
    job (the training's folder), tokenizer. Figures: pushed (names), trouble (what kept the last try from it, or null).

    What goes wrong is a warning among the training's own events, and tried again, ever more rarely.
    """
    os.nice(10)  # training comes first
    uploads = Uploads(job, job_dir / "copy")
    told = Events(Path(job.inputs["job"]) / EVENTS)
    trouble, wait_s, next_try = None, POLL_S, 0.0
    while True:
        last = (job_dir / ENDED).exists()
        if last or time.monotonic() >= next_try:
            try:
                uploads.push_new()
                if trouble:
                    told.note("the Hub has the checkpoints again")
                trouble, wait_s = None, POLL_S
            except UserError as error:
                if str(error) != trouble:
                    told.warning(f"checkpoints wait; training goes on, and it is tried again. {error}")
                trouble, wait_s = str(error), min(2 * wait_s, LONGEST_WAIT_S)
            next_try = time.monotonic() + wait_s
        if last:
            return {"pushed": sorted(uploads.pushed), "trouble": trouble}
        time.sleep(POLL_S)


class Uploads:
    """The checkpoints of a training that are on the Hub, and the upload of new ones.

    Args:
        job: as `main` has it.
        aside: where a checkpoint is held while it is sent, for the training may remove it meanwhile.
        connect: gives a client that may write to a repository.
    """

    def __init__(self, job: Job, aside: Path, connect: Callable[[str], HfApi] = connected) -> None:
        self.pushed: set[str] = set()
        self._say, self._tokenizer = job.settings, Path(job.inputs["tokenizer"])
        self._folder, self._aside = Path(job.inputs["job"]) / CHECKPOINTS, aside
        self._all = job.settings["checkpoints"] == "all_checkpoints"
        self._connect = connect
        self._hub: HfApi | None = None

    def push_new(self) -> None:
        """Pushes the checkpoints that are due and good. Raises UserError where the Hub does not take them."""
        for checkpoint in self._due():
            if self._held(checkpoint):
                self._push(checkpoint.name)
                if self._all:
                    checkpoints.mark_sent(self._folder, checkpoint.name)
            if checkpoint.is_dir():  # else it was rotated before it could be read
                self.pushed.add(checkpoint.name)

    def _due(self) -> Iterable[Path]:
        if self._all:
            found = checkpoints.list_unsent(self._folder)
        else:
            found = sorted(self._folder.glob("checkpoint-*"), key=checkpoints.step_of)[-1:]
        return [checkpoint for checkpoint in found if checkpoint.name not in self.pushed]

    def _held(self, checkpoint: Path) -> bool:
        """Links the checkpoint aside, with those it needs unless all are sent. Returns whether every file is intact."""
        shutil.rmtree(self._aside, ignore_errors=True)
        last = self._aside / checkpoints.LAST / checkpoint.name
        try:
            shutil.copytree(checkpoint, last, copy_function=_link)
            for needed in [] if self._all else checkpoints.list_needed(checkpoint):
                shutil.copytree(needed, self._aside / checkpoints.BEST / needed.name, copy_function=_link)
        except (OSError, shutil.Error):
            return False
        return checkpoints.find_damage(last, with_needed=not self._all) is None

    def _push(self, name: str) -> None:
        repo, which = self._say["repo"], self._say["checkpoints"]
        self._hub = self._hub or self._connect(repo)
        last = self._aside / checkpoints.LAST / name
        below: tuple[str, ...]
        if which == "every_save":
            below = (f"{SAVED}/",)
            held = [path for path in last.iterdir() if part_of(path.name) == "model"]
            files = {below[0] + path.name: path for path in [*self._tokenizer.iterdir(), *held]}
        else:
            below = (f"{name}/",) if self._all else (f"{checkpoints.LAST}/", f"{checkpoints.BEST}/")
            root = last.parent if self._all else self._aside
            files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
        push(
            self._hub,
            Place(repo, self._say["revision"], self._say["private"]),
            files,
            title=f"{self._say['name']} {name}",
            replaced=lambda path: path.startswith(below),
        )


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


if __name__ == "__main__":
    run_program(main)
