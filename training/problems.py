"""Errors of the user: the wrong field, its value, the allowed values and the next step."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, field_validator

NETWORK = "network"
"""The kind of a problem that a later attempt may not have: nothing in the recipe is wrong."""
DISK = "disk"
"""The kind of a problem that more space on the disk solves: nothing in the recipe is wrong."""
NO_ROOM_BYTES = 1_000_000
"""A disk with less free space counts as full."""
# SQLite and torch report a full disk in words of their own.
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "disk is full")
_PERHAPS_FULL = "inline_container"
# Some parts of torch raise plain RuntimeErrors for errors of an accelerator.
_OF_ACCELERATOR = ("CUDA", "CUBLAS", "CUDNN", "cuDNN", "NCCL", "HIP error")


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""Characters that control a terminal or the direction of a text, other than tabs and line ends; and those that UTF-8 or
YAML cannot hold."""


def visible(text: str) -> str:
    """The text with the codes of characters that would control a terminal: texts of rows, labels and file names may
    contain any."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def on_one_line(name: str) -> str:
    """A name that is visible and has codes in place of line ends and tabs: it cannot add a line to a message."""
    return visible(name).replace("\n", "\\n").replace("\t", "\\t")


class Problem(BaseModel):
    """A problem that only the user can solve."""

    model_config = ConfigDict(frozen=True)

    kind: str
    """The part that found it, such as recipe, data, option or registry; or DISK, NETWORK."""
    where: str
    """The wrong field (`training.learning_rate`), file and row, or name."""
    message: str
    """The value, what is allowed, and the next step, in one or two sentences."""
    check: str | None = None
    """The check of rows that found it, by its name in `data.checks`."""
    level: Literal["error", "warning"] = "error"
    """Whether it ends the run."""

    @field_validator("where", "message")
    @classmethod
    def _can_be_written(cls, text: str) -> str:
        # Values of the user's rows may hold half a surrogate pair, which no terminal, file or database accepts.
        return visible(text.encode("utf-8", "backslashreplace").decode())


class UserError(Exception):
    """All problems of one input, found together. Shown without a traceback; never retried."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{p.where}: {p.message}" for p in self.problems))

    @classmethod
    def of(cls, kind: str, where: str, message: str) -> Self:
        """The error of one problem."""
        return cls([Problem(kind=kind, where=where, message=message)])

    def __reduce__(self) -> tuple[type[UserError], tuple[tuple[Problem, ...]]]:
        # Exception's default pickling would pass the joined text to __init__.
        return type(self), (self.problems,)


def rename(where: str, names: Mapping[str, str]) -> str:
    """Returns the name under which the user knows a field.

    Args:
        where: The `where` of a problem.
        names: The user's name by field: of `inputs`, for its items too (`inputs[1]`). A field that ends with a dot has
            named values: `{"thresholds.": "--set "}` makes `thresholds.auc` `--set auc`.
    """
    field, _, value = where.partition(".")
    if f"{field}." in names:
        return f"{names[f'{field}.']}{value}"
    return names.get(re.sub(r"\[\d+\]$", "", where), where)


@contextlib.contextmanager
def relocated(to: str | Callable[[str], str]) -> Iterator[None]:
    """Inside, the problems of a UserError have this `where`, or the one that `to` returns for theirs."""
    try:
        yield
    except UserError as error:
        raise UserError(
            problem.model_copy(update={"where": to if isinstance(to, str) else to(problem.where)})
            for problem in error.problems
        ) from error


def renamed(names: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
    """Inside, the problems of a UserError have the names that `rename` returns."""
    return relocated(lambda where: rename(where, names))


@contextlib.contextmanager
def collected(problems: list[Problem]) -> Iterator[None]:
    """A UserError ends the block, and its problems are added to the list: what comes next finds its own too."""
    try:
        yield
    except UserError as error:
        problems.extend(error.problems)


def full_disk(folder: Path, error: BaseException | None = None) -> UserError | None:
    """Returns the user's error if the disk of `folder` is full; None if it is not.

    With `error`, only if a full disk caused it: call this before files are removed. Without, if no space is left.
    """
    disk = shutil.disk_usage(folder)
    full = disk.free < NO_ROOM_BYTES
    if error is not None:
        if isinstance(error, UserError) or not isinstance(error, Exception):
            return None
        words = f"{error} {error.strerror}" if isinstance(error, OSError) else str(error)
        full = any(word in words for word in _FULL) or (full and _PERHAPS_FULL in words)
    if not full:
        return None
    # A temporary folder that filled the disk may have been removed since.
    left = f": {disk.free // 10**6} of {disk.total // 10**6} MB are free" if disk.free < NO_ROOM_BYTES else ""
    message = (
        f"the disk is full{left}. Make room and run the same command again: finished stages are kept, and training "
        "continues from its last checkpoint."
    )
    return UserError.of(DISK, str(folder), message)


@contextlib.contextmanager
def user_code_errors(instance: object) -> Iterator[None]:
    """Raises UserError, as `user_code_error` describes, for an error from the module of the object's class."""
    try:
        yield
    except Exception as error:
        if problem := user_code_error(type(instance).__module__, error):
            raise problem from error
        raise


def user_code_error(module: str, error: BaseException) -> UserError | None:
    """Returns the user's error, with its line, if the error comes from this module of the user's; else None.

    Errors in the module and in libraries that it calls are the user's; those in code of this project that it calls,
    such as a reader of rows, are not. Errors of files and the network (OSError), of memory and of accelerators are the
    machine's: the same may be tried again.
    """
    loaded = sys.modules.get(module)
    if module.startswith("training.") or loaded is None or isinstance(error, UserError) or _is_of_machine(error):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    files = [frame.filename for frame in frames]
    ours = max((place for place, file in enumerate(files) if Path(__file__).parent in Path(file).parents), default=-1)
    place = next((frame for frame in reversed(frames[ours + 1 :]) if frame.filename == loaded.__file__), None)
    if place is None:
        return None
    cause = traceback.format_exception_only(error)[-1].strip()
    message = f"`{place.name}` failed in {place.filename} line {place.lineno}: {cause}"
    return UserError.of("recipe", "task", message)


def _is_of_machine(error: BaseException) -> bool:
    # By its name, since torch is not imported here.
    if isinstance(error, OSError | MemoryError) or "AcceleratorError" in {cls.__name__ for cls in type(error).__mro__}:
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _OF_ACCELERATOR)


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Returns ` Did you mean 'x'?` for the nearest of the allowed names; an empty text if none is near."""
    close = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def server_error(error: BaseException) -> Exception | None:
    """Returns the error with the response 5xx (server error) or 429 (too many requests) that caused an error.

    HTTP clients may raise errors of their own for it, with or without a cause.
    """
    cause: BaseException | None = error
    while isinstance(cause, Exception):
        status = getattr(getattr(cause, "response", None), "status_code", None) or getattr(cause, "status", None)
        if isinstance(status, int) and (status >= 500 or status == 429):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None
