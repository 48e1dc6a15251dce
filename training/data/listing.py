"""What files lie in a folder or match a pattern: here, or on any file system that has URLs. Needs no pyarrow."""

from __future__ import annotations

import glob
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from fnmatch import fnmatchcase
from typing import Any

from training.data.file_systems import as_user_error, display_name, filesystem, is_url, is_web, local, name_of
from training.problems import Problem, UserError, nearest

# What file systems call a value that changes with a file's content; the first that one tells is taken.
_CONTENT = ("ETag", "etag", "md5", "md5Hash", "Content-MD5", "Digest", "checksum", "crc32c", "generation", "blob_id")
_TIMES = ("mtime", "LastModified", "last_modified", "Last-Modified", "modified", "updated", "created")

# Some file systems count in whole seconds, and clocks differ.
SETTLED_S = 3.0


@dataclass(frozen=True)
class SourceFile:
    """One file."""

    file: str
    """Its absolute path or its URL."""
    state: str | None = None
    """Of a file elsewhere: what is another as soon as its content is. None where its file system tells nothing of the
    kind, and of a file here."""
    size_bytes: int | None = None
    """Of a file elsewhere, where its file system tells."""

    @property
    def name(self) -> str:
        """`train.csv` of `s3://bucket/train.csv`."""
        return name_of(self.file)


class Listing:
    """Looks for files; each folder elsewhere is asked for once, and anew for each listing."""

    def __init__(self) -> None:
        self._folders: dict[str, list[SourceFile]] = {}

    def covered(self, path: str, suffixes: Sequence[str]) -> tuple[str, list[SourceFile]]:
        """The folder that names are seen from, and the files that a path stands for: a file, the files of a folder
        that have one of the suffixes, or what a glob matches. Raises UserError where there is no such file or folder.
        """
        path = local(path)
        if is_url(path):
            return self._covered_there(path, suffixes)
        path = os.path.abspath(os.path.expanduser(path))
        if os.path.isdir(path):
            with as_user_error(path):
                files = [file.path for file in os.scandir(path) if file.is_file()]
            return path, _of(suffixes, map(SourceFile, files))
        if os.path.isfile(path):
            return os.path.dirname(path), [SourceFile(path)]
        if not glob.has_magic(path):
            folder = os.path.dirname(path)
            with as_user_error(folder):
                near = nearest(os.path.basename(path), os.listdir(folder) if os.path.isdir(folder) else [])
            message = f"{display_name(path)!r} does not exist ({path}): name a file, a folder or a glob.{near}"
            raise UserError([Problem(kind="data", where="data.path", message=message)])
        return _fixed_part(path), _of(suffixes if path.endswith("*") else (), self.matching(path))

    def matching(self, pattern: str) -> list[SourceFile]:
        """The files that a path, a URL or a glob of either stands for, by name; none where there are none."""
        if not is_url(pattern):
            return _sorted(SourceFile(file) for file in glob.glob(pattern, recursive=True) if os.path.isfile(file))
        if is_web(pattern) and not _has_magic(pattern):
            return _some(stat_url(pattern))  # such a server lists nothing
        folder, _, last = pattern.rpartition("/")
        if _has_magic(folder) or "**" in last or is_web(pattern):
            return _globbed(pattern)
        return [found for found in self._folder(folder) if fnmatchcase(found.name, last)]

    def _covered_there(self, url: str, suffixes: Sequence[str]) -> tuple[str, list[SourceFile]]:
        parent = url.rpartition("/")[0]
        if _has_magic(url):
            return _fixed_part(url), _of(suffixes if url.endswith("*") else (), self.matching(url))
        if is_web(url):
            return parent, _some(stat_url(url))
        if re.search(r"\.\w+$", url):  # most likely a file: one question, where a folder of many would be several
            file = stat_url(url)
            if file is not None:
                return parent, [file]
        return url.rstrip("/"), _of(suffixes, self._folder(url.rstrip("/"), needed=True))

    def _folder(self, url: str, *, needed: bool = False) -> list[SourceFile]:
        """The files of a folder. Where that is missing there are none, or UserError if it is needed."""
        if url not in self._folders:
            system, path = filesystem(url)
            with as_user_error(url):
                system.invalidate_cache()
                try:
                    listed = system.ls(path, detail=True)
                except FileNotFoundError:
                    if needed:
                        raise
                    listed = []
            files = [info for info in listed if info["type"] == "file"]
            if [info["name"] for info in listed] == [path]:  # a file after all
                self._folders[url] = [_found(url, files[0])]
            else:
                self._folders[url] = _sorted(_found(f"{url}/{name_of(info['name'])}", info) for info in files)
        return self._folders[url]


def stat_url(url: str) -> SourceFile | None:
    """What a file system says now of the file at a URL; None where there is a folder. Raises UserError where there is
    neither, or no answer."""
    system, path = filesystem(url)
    with as_user_error(url):
        system.invalidate_cache()
        info = system.info(path)
    return None if info["type"] == "directory" else _found(url, info)


def _found(url: str, info: Mapping[str, Any]) -> SourceFile:
    return SourceFile(url, state_of(info), info.get("size"))


def _some(found: SourceFile | None) -> list[SourceFile]:
    return [] if found is None else [found]


def state_of(info: Mapping[str, Any]) -> str | None:
    """What of a file system's words about a file is another as soon as its content is; None where nothing is.

    A time that has only just passed does not count: the file may change again within the same second.
    """
    for name in _CONTENT:
        if info.get(name):
            return f"{info.get('size')}:{name}:{info[name]}"
    changed = next((seconds for name in _TIMES if (seconds := _seconds(info.get(name))) is not None), None)
    if changed is None or time.time() - changed < SETTLED_S:
        return None
    return f"{info.get('size')}:{changed:.6f}"


def _seconds(value: Any) -> float | None:
    """A time as file systems write it, in seconds; None for what is no time."""
    if isinstance(value, str):
        try:
            value = parsedate_to_datetime(value)  # of a web server
        except ValueError:
            return None
    if isinstance(value, datetime):
        return value.timestamp()
    return float(value) if isinstance(value, (int, float)) else None


def joined(folder: str, name: str) -> str:
    """The pattern of a name that is seen from a folder; an absolute path or a URL stays what it is."""
    name = os.path.expanduser(local(name))
    if is_url(name):
        return name
    if is_url(folder) and not os.path.isabs(name):
        return f"{folder}/{name}"
    return os.path.join(glob.escape(folder), name)


def _globbed(url: str) -> list[SourceFile]:
    system, path = filesystem(url)
    start = _fixed_part(url)
    below = len(filesystem(start)[1].rstrip("/"))
    with as_user_error(url):
        system.invalidate_cache()
        found = system.glob(path, detail=True)
    infos = [info for info in found.values() if info["type"] == "file"]
    if is_web(url):
        return _sorted(_found(info["name"], info) for info in infos)
    return _sorted(_found(start + info["name"][below:], info) for info in infos)


def _fixed_part(pattern: str) -> str:
    """The folder above the first part that stands for several."""
    while _has_magic(pattern):
        pattern = pattern.rpartition("/")[0]
    return pattern or "/"


def _has_magic(pattern: str) -> bool:
    # A question mark begins the parameters of a URL of the web.
    return "*" in pattern if is_web(pattern) else glob.has_magic(pattern)


def _of(suffixes: Sequence[str], found: Iterable[SourceFile]) -> list[SourceFile]:
    """Those with one of the suffixes (all, if there are none), in the order of their names; hidden ones never."""
    visible = (file for file in found if not file.name.startswith("."))
    return _sorted(file for file in visible if not suffixes or file.name.endswith(tuple(suffixes)))


def _sorted(found: Iterable[SourceFile]) -> list[SourceFile]:
    return sorted(found, key=lambda file: file.file)
