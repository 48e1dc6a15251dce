"""Local files that a user has named, or that lie in a folder which the user has named.

A file of rows, or of a model, may come from people who may not read everything that this user may: a link in a folder
that others fill must not hand out a file of this user's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Sequence
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from training.problems import Problem, UserError, on_one_line

_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_LINKS = 40
"""On the way to a file, as in the kernel."""
MOST_BYTES = 2**28
"""Of a file that is read as a whole. A file of nothing, which takes no disk, can be longer than the memory."""


class _Owners(NamedTuple):
    """The owners of the links on the way to a file."""

    of_folders: list[int]
    of_file: list[int]


def shown_path(file: Path | str) -> str:
    """Returns a file's name in messages, on one line: relative to the working directory if it is below it, else in
    full."""
    absolute, folder = Path(os.path.abspath(file)), Path.cwd()
    return on_one_line(str(absolute.relative_to(folder) if absolute.is_relative_to(folder) else absolute))


def open_local(file: str, home_rooms: Sequence[str] = (), kind: str = "data") -> int:
    """Opens a local file for reading. Returns its descriptor.

    Raises OSError; and UserError for a link out of its folder, or to a file of another owner than the link's, for a
    folder that another user's link names instead of the file's owner, for a pipe or a device, and for a file below the
    home, except in `home_rooms`. All is checked on what was opened, so that nothing can be put in its place.
    """
    file, owners = os.path.abspath(file), _Owners([], [])
    if "\0" in file:  # which no name has, and os.open would raise ValueError
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file)
    try:
        with contextlib.ExitStack() as opened:
            folder = _descend(os.path.dirname(file), None, owners.of_folders)
            opened.callback(os.close, folder)
            reached = _descend(os.path.basename(file), folder, owners.of_file)
            opened.callback(os.close, reached)
            if found := _find_foreign(reached, folder, owners, home_rooms):
                raise UserError.of(kind, shown_path(file), found)
            return os.open(f"/proc/self/fd/{reached}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        error.filename = file  # a part of it, or a descriptor
        raise


def open_regular(file: Path) -> BufferedReader:
    """Opens a file whose place has been checked, for reading. Raises OSError for a pipe or a device, which has been put
    there since and need not end."""
    opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "is a pipe, a socket or a device", str(file))
    return open(opened, "rb")


def read_whole(file: BufferedReader) -> bytes:
    """The content of an open file. Raises OSError if it has more than MOST_BYTES."""
    if os.fstat(file.fileno()).st_size > MOST_BYTES:
        raise OSError(errno.EFBIG, f"has more than {MOST_BYTES >> 20} MiB", str(file.name))
    return file.read()


def read_local(file: str) -> bytes:
    """The content of a file, opened by `open_local`. Raises OSError if it has more than MOST_BYTES."""
    with open(open_local(file, kind="recipe"), "rb") as opened:
        return read_whole(opened)


def find_foreign(files: Iterable[str], home_rooms: Sequence[str] = (), kind: str = "data") -> list[Problem]:
    """The problems that `open_local` would raise for local files. A missing file is none."""
    problems: list[Problem] = []
    for file in files:
        try:
            os.close(open_local(file, home_rooms, kind))
        except UserError as error:
            problems += error.problems
        except OSError:
            continue
    return problems


def _find_foreign(reached: int, folder: int, owners: _Owners, home_rooms: Sequence[str]) -> str | None:
    """Returns the reason for which an open file is refused; None if it may be read."""
    real, beside = (os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in (reached, folder))
    status = os.fstat(reached)
    if status.st_nlink == 0:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))  # removed: `real` is not its path
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    home = os.path.realpath(os.environ.get("FINETUNE_HOME") or ".finetune")
    if _is_below(real, home) and not any(_is_below(real, f"{home}/{room}") for room in home_rooms):
        return "lies in the home of finetune, which holds passwords and keys: name a file elsewhere."
    # The Hub's cache links the files of a commit to their contents, which lie in the same repository's folder.
    repository, snapshots, _ = beside.rpartition("/snapshots/")
    blobs = f"{repository}/blobs" if snapshots else beside
    if not (_is_below(real, beside) or _is_below(real, blobs)):
        return f"is a link to {real}, outside of its folder: name that file itself, or copy it here."
    others = {owner for owner in owners.of_folders if owner not in (0, os.getuid())}
    if foreign := sorted({*owners.of_file, *others} - {status.st_uid}):
        place = "is" if owners.of_file else "lies in a folder that is"
        return f"{place} a link of user {foreign[0]} to a file of user {status.st_uid}: name {real} itself, or copy it."
    if status.st_nlink > 1 and status.st_uid != os.fstat(folder).st_uid:
        return f"is one of several names of a file of user {status.st_uid}, in a folder of another: copy the file here."
    if not stat.S_ISREG(status.st_mode):
        return "is a pipe, a socket or a device: write its content to a file."
    return None


def _descend(path: str, folder: int | None, owners: list[int]) -> int:
    """Opens a path for a look at it, part by part, and adds the owners of its links: while a path is opened as a whole,
    others can put links into it, and take them out before anybody asks. Raises OSError."""
    at = os.open("/", _LOOK) if folder is None else os.dup(folder)
    parts = path.split("/")[::-1]
    try:
        while parts:
            if (part := parts.pop()) in ("", "."):
                continue
            try:
                inner = os.open(part, _LOOK | os.O_DIRECTORY, dir_fd=at)  # mounts what is mounted on demand
            except NotADirectoryError:
                inner = os.open(part, _LOOK, dir_fd=at)
            status = os.fstat(inner)
            if not stat.S_ISLNK(status.st_mode):
                os.close(at)
                at = inner
                continue
            target = os.readlink("", dir_fd=inner)
            os.close(inner)
            owners.append(status.st_uid)
            if len(owners) > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            if target.startswith("/"):
                os.close(at)
                at = os.open("/", _LOOK)
            parts += target.split("/")[::-1]
    except BaseException:
        os.close(at)
        raise
    return at


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(f"{folder.rstrip('/')}/")
