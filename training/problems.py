"""The user's mistakes: what is wrong, where, what is allowed, and what to do next."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import shutil
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, field_validator

NETWORK = "network"
"""The kind of a problem that may be gone when the same is tried again: nothing in the recipe is wrong."""
DISK = "disk"
"""The kind of a problem that room on the disk would solve: nothing in the recipe is wrong."""
NO_ROOM_BYTES = 1_000_000
"""With less than this free, a disk counts as full."""
# SQLite's and torch's errors name neither the disk nor its state in the system's words.
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "disk is full")
_PERHAPS_FULL = "inline_container"
# torch's errors of an accelerator are plain RuntimeErrors on the way from some of its parts.
_OF_ACCELERATOR = ("CUDA", "CUBLAS", "CUDNN", "cuDNN", "NCCL", "HIP error")


class Problem(BaseModel):
    """One thing that only the user can mend."""

    model_config = ConfigDict(frozen=True)

    kind: str
    """Which part found it: recipe, data, model, tokens, training, compute, release, hub; or DISK, NETWORK."""
    where: str
    """The field (`training.learning_rate`), the file with its row, or the name that is wrong."""
    message: str
    """The value, what is allowed, and the next step, in one or two sentences."""
    check: str | None = None
    """The check of the rows that found it, as `data.checks` names it."""
    level: Literal["error", "warning"] = "error"
    """Whether it ends the run."""

    @field_validator("where", "message")
    @classmethod
    def _can_be_written(cls, text: str) -> str:
        # What is told of the user's rows may hold half a character, which no terminal, file or database takes.
        return text.encode("utf-8", "backslashreplace").decode()


class UserError(Exception):
    """All problems of one input, found together. Shown without a traceback; never retried."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{p.where}: {p.message}" for p in self.problems))

    def __reduce__(self) -> tuple[type[UserError], tuple[tuple[Problem, ...]]]:
        # Exception's own pickling would hand the joined text back to __init__.
        return type(self), (self.problems,)


def full_disk(folder: Path, error: BaseException | None = None) -> UserError | None:
    """That the disk on which `folder` lies is full, and what to do; None where it is not, or not to blame.

    With `error`, whether that came of a full disk: ask before anything is removed. Without, whether any room is left.
    """
    disk = shutil.disk_usage(folder)
    full = disk.free < NO_ROOM_BYTES
    if error is not None:
        told = isinstance(error, UserError) or not isinstance(error, Exception)
        words = f"{error} {error.strerror}" if isinstance(error, OSError) else str(error)
        full = not told and (any(w in words for w in _FULL) or (full and _PERHAPS_FULL in words))
    if not full:
        return None
    # What filled it may be gone again, such as a folder that was made for a while.
    left = f": {disk.free // 10**6} of {disk.total // 10**6} MB are free" if disk.free < NO_ROOM_BYTES else ""
    message = (
        f"the disk is full{left}. Make room and run the same "
        "command again: what is finished is kept, and training goes on from its last checkpoint."
    )
    return UserError([Problem(kind=DISK, where=str(folder), message=message)])


@contextlib.contextmanager
def mistakes_told(of: object) -> Iterator[None]:
    """Raises UserError, as `mistake_in` has it, in place of an error out of the module that has the class of this
    object."""
    try:
        yield
    except Exception as error:
        if told := mistake_in(type(of).__module__, error):
            raise told from error
        raise


def mistake_in(module: str, error: BaseException) -> UserError | None:
    """That an error came out of the code of a recipe's author: this module, and where in it. None where it did not, or
    where the module is the project's own.

    The author's is what fails in the module and in what it calls, libraries included; but not what fails in code of
    the project's that it calls, such as a reader of rows, or below that. Errors of files and the network (OSError), of
    memory and of accelerators are the machine's, wherever they come from: then the same may be tried again.
    """
    loaded = sys.modules.get(module)
    if module.startswith("training.") or loaded is None or isinstance(error, UserError) or _of_machine(error):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame.filename for frame in frames]
    ours = max((place for place, file in enumerate(files) if Path(__file__).parent in Path(file).parents), default=-1)
    place = next((frame for frame in reversed(frames[ours + 1 :]) if frame.filename == loaded.__file__), None)
    if place is None:
        return None
    told = traceback.format_exception_only(error)[-1].strip()
    message = f"`{place.name}` failed in {place.filename} line {place.lineno}: {told}"
    return UserError([Problem(kind="recipe", where="task", message=message)])


def _of_machine(error: BaseException) -> bool:
    # torch is not imported here: its error is known by name.
    if isinstance(error, OSError | MemoryError) or "AcceleratorError" in {cls.__name__ for cls in type(error).__mro__}:
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_ACCELERATOR)


def nearest(name: str, allowed: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the nearest of the allowed names, or nothing where none is near."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def server_fault(error: BaseException) -> Exception | None:
    """The answer 5xx (the server is out of order) or 429 (it has too many requests) from which an error came.

    HTTP clients may replace it by an error of their own, with or without naming its cause.
    """
    one: BaseException | None = error
    while isinstance(one, Exception):
        status = getattr(getattr(one, "response", None), "status_code", None) or getattr(one, "status", None)
        if isinstance(status, int) and (status >= 500 or status == 429):
            return one
        one = one.__cause__ or one.__context__
    return None
