"""Local files that a user has named, or that lie in a folder which the user has named.

A file of rows, or of a model, may come from people who may not read everything that this user may: a link in a folder
that others fill must not hand out a file of this user's.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from training.problems import Problem, UserError


def shown_path(file: Path | str) -> str:
    """Returns a file's name in messages: relative to the working directory if it is below it, else in full."""
    absolute, folder = Path(os.path.abspath(file)), Path.cwd()
    return str(absolute.relative_to(folder)) if absolute.is_relative_to(folder) else str(absolute)


def open_local(file: str, home_rooms: Sequence[str] = (), kind: str = "data") -> int:
    """Opens a local file for reading. Returns its descriptor.

    Raises OSError; and UserError for a link out of its folder, or to a file of another owner than the link's, and for a
    file below the home, except in `home_rooms`. All is checked on the open file, so that none can be put in its place.
    """
    file = os.path.abspath(file)
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for a writer
    try:
        if found := _find_foreign(file, descriptor, home_rooms):
            raise UserError([Problem(kind=kind, where=shown_path(file), message=found)])
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_local(file: str) -> bytes:
    """The content of a file, opened by `open_local`."""
    with open(open_local(file, kind="recipe"), "rb") as opened:
        return opened.read()


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


def _find_foreign(file: str, descriptor: int, home_rooms: Sequence[str]) -> str | None:
    real, folder = os.readlink(f"/proc/self/fd/{descriptor}"), os.path.realpath(os.path.dirname(file))
    status, named = os.fstat(descriptor), os.lstat(file)
    if status.st_nlink == 0:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file)  # removed: `real` is not its path
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), file)
    home = os.path.realpath(os.environ.get("FINETUNE_HOME") or ".finetune")
    if _is_below(real, home) and not any(_is_below(real, f"{home}/{room}") for room in home_rooms):
        return "lies in the home of finetune, which holds passwords and keys: name a file elsewhere."
    # The Hub's cache links the files of a commit to their contents, which lie in the same repository's folder.
    repository, snapshots, _ = folder.rpartition("/snapshots/")
    blobs = f"{repository}/blobs" if snapshots else folder
    if not (_is_below(real, folder) or _is_below(real, blobs)):
        return f"is a link to {real}, outside of its folder: name that file itself, or copy it here."
    if stat.S_ISLNK(named.st_mode) and named.st_uid != status.st_uid:
        return f"is a link of user {named.st_uid} to a file of user {status.st_uid}: copy the file here."
    if status.st_nlink > 1 and status.st_uid != os.stat(folder).st_uid:
        return f"is one of several names of a file of user {status.st_uid}, in a folder of another: copy the file here."
    return None


def _is_below(path: str, folder: str) -> bool:
    return path.startswith(f"{folder.rstrip('/')}/")
