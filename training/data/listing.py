"""Listing of files in folders and by patterns, on this machine or at URLs. Imports no pyarrow."""

from __future__ import annotations

import glob
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from fnmatch import fnmatchcase
from typing import Any

from training.data.file_systems import as_user_error, display_name, filesystem, is_url, is_web, local_path, name_of
from training.problems import Problem, UserError, nearest, on_one_line
from training.recipe.tables.formats import IMAGE_SUFFIXES

# Metadata fields whose value changes with a file's content; the first one present is used.
_CONTENT = ("ETag", "etag", "md5", "md5Hash", "Content-MD5", "Digest", "checksum", "crc32c", "generation", "blob_id")
_TIMES = ("mtime", "LastModified", "last_modified", "Last-Modified", "modified", "updated", "created")

MAX_ENTRIES = 1_000
"""The entries below a folder of a folder among which a file of rows is looked for."""

TEXT_SUFFIX = ".txt"
"""The end of the names of files in a folder of texts, if one of them ends so."""
_LITTER = ("__MACOSX", "Thumbs.db", "desktop.ini")
"""Files that desktops leave in folders."""

# Some file systems store whole seconds, and clocks differ.
SETTLED_S = 3.0


@dataclass(frozen=True)
class SourceFile:
    """One file."""

    file: str
    """Its absolute path or its URL."""
    state: str | None = None
    """For a remote file: a value that changes with its content. None for a local file, or if its file system has
    none."""
    size_bytes: int | None = None
    """For a remote file, if its file system reports it."""

    @property
    def name(self) -> str:
        """`train.csv` for `s3://bucket/train.csv`."""
        return name_of(self.file)


class Listing:
    """Finds files. Each remote folder is listed once for each instance."""

    def __init__(self) -> None:
        self._folders: dict[str, list[SourceFile]] = {}
        self._inner: dict[str, list[str]] = {}
        self._names: dict[str, bool] = {}

    def find_files(self, path: str, suffixes: Sequence[str]) -> tuple[str, list[SourceFile]]:
        """Returns the base folder for names, and the files of a path: a file, the files of a folder with one of the
        suffixes, or the matches of a glob. Raises UserError if there is no such file or folder.
        """
        path = local_path(path)
        if is_url(path):
            return self._find_at_url(path, suffixes)
        path = os.path.abspath(os.path.expanduser(path))
        if os.path.isdir(path):
            with as_user_error(path):
                files = [file.path for file in os.scandir(path) if _is_no_folder(file.path)]
            return path, _with_suffixes(suffixes, map(SourceFile, files))
        if os.path.isfile(path):
            return os.path.dirname(path), [SourceFile(path)]
        if not glob.has_magic(path):
            folder = os.path.dirname(path)
            with as_user_error(folder):
                near = nearest(os.path.basename(path), os.listdir(folder) if os.path.isdir(folder) else [])
            message = f"{display_name(path)!r} does not exist ({path}): name a file, a folder or a glob.{near}"
            raise UserError.of("data", "data.path", message)
        folder = _existing_folder(path)
        base = folder if glob.has_magic(folder) else _fixed_part(path)
        return base, _with_suffixes(suffixes if path.endswith("*") else (), self.find_named(folder, path))

    def unread_folders(self, path: str, suffixes: Sequence[str]) -> list[str]:
        """Returns the names of the folders in a folder of rows, whose files `find_files` does not return: those with a
        file that has one of the suffixes, and at a URL all. Hidden ones do not count, nor names that begin with `_`."""
        path = local_path(path)
        if not is_url(path):
            place = os.path.abspath(os.path.expanduser(path))
            folders = [entry for entry in os.scandir(place) if entry.is_dir()] if os.path.isdir(place) else []
            return sorted(one.name for one in folders if one.name[0] not in "._" and _has_rows(one.path, suffixes))
        if is_web(path) or _has_magic(path) or re.search(r"\.\w+$", path):
            return []
        self._folder(path.rstrip("/"))
        return self._inner[path.rstrip("/")]

    def find_named(self, folder: str, name: str) -> list[SourceFile]:
        """Returns the file of this name in a folder; if there is none, the matches of the name as a glob. An absolute
        path or a URL needs no folder."""
        pattern = _join(folder, name)
        if not is_url(pattern):
            if os.path.isfile(pattern):
                return [SourceFile(pattern)]
            existing = _existing_folder(pattern)
            return self.find_matches(os.path.join(glob.escape(existing), os.path.relpath(pattern, existing)))
        if self._exists(pattern):
            return _as_list(stat_url(pattern))
        return self.find_matches(pattern)

    def find_matches(self, pattern: str) -> list[SourceFile]:
        """Returns the files of a path, a URL or a glob of either, sorted by name; possibly none."""
        if not is_url(pattern):
            with _bounded_depth(pattern):
                files = [file for file in glob.glob(pattern, recursive=True) if _is_no_folder(file)]
            if glob.has_magic(pattern):
                _require_inside(files, pattern)
            return _sort(map(SourceFile, files))
        if is_web(pattern) and not _has_magic(pattern):
            return _as_list(stat_url(pattern))  # web servers list no folders
        folder, _, last = pattern.rpartition("/")
        if (_has_magic(folder) and not self._exists(folder)) or "**" in last or is_web(pattern):
            return _glob_url(pattern)
        return [file for file in self._folder(folder) if fnmatchcase(file.name, last)]

    def _find_at_url(self, url: str, suffixes: Sequence[str]) -> tuple[str, list[SourceFile]]:
        parent = url.rpartition("/")[0]
        if _has_magic(url) and not self._exists(url):
            return _fixed_part(url), _with_suffixes(suffixes if url.endswith("*") else (), self.find_matches(url))
        if is_web(url):
            return parent, _as_list(stat_url(url))
        if re.search(r"\.\w+$", url):  # probably a file: one request instead of several for a folder
            file = stat_url(url)
            if file is not None:
                return parent, [file]
        return url.rstrip("/"), _with_suffixes(suffixes, self._folder(url.rstrip("/"), required=True))

    def _exists(self, url: str) -> bool:
        """Whether a URL that has brackets is the name of a file or folder, and no glob."""
        if "[" not in url or is_web(url):
            return False
        if url not in self._names:
            system, path = filesystem(url)
            with as_user_error(url):
                self._names[url] = system.exists(path)
        return self._names[url]

    def _folder(self, url: str, *, required: bool = False) -> list[SourceFile]:
        """Returns the files of a folder. A missing folder has none, or raises UserError if it is required."""
        if url not in self._folders:
            system, path = filesystem(url)
            with as_user_error(url):
                system.invalidate_cache()
                try:
                    entries = system.ls(path, detail=True)
                except FileNotFoundError:
                    if required:
                        raise
                    entries = []
            files = [info for info in entries if info["type"] == "file"]
            inner = (name_of(info["name"].rstrip("/")) for info in entries if info["type"] == "directory")
            self._inner[url] = sorted(name for name in inner if name and name[0] not in "._" and name != name_of(url))
            if [info["name"] for info in entries] == [path]:  # the path is a file
                self._folders[url] = [_source_file(url, files[0])]
            else:
                self._folders[url] = _sort(_source_file(f"{url}/{name_of(info['name'])}", info) for info in files)
        return self._folders[url]


def list_texts(folder: str) -> tuple[list[SourceFile], list[SourceFile]]:
    """Returns the files of a folder of texts or images at any depth, one of each label in turn, so that the first ones
    have all labels; and those that are not read: beside images those of other names, and if the name of one ends in
    .txt, those of other names. A folder with as many images as texts is one of images.

    Hidden ones are left out. Raises UserError for a link to a folder, whose files would be missing.
    """
    found, links = list[str](), list[str]()
    with as_user_error(folder), _bounded_depth(folder):
        for base, folders, files in os.walk(folder, onerror=_raise):
            folders[:] = [name for name in folders if _is_shown(name)]
            links += [path for name in folders if os.path.islink(path := os.path.join(base, name))]
            found += [os.path.join(base, name) for name in files if _is_shown(name)]
    if links:
        message = "is a link to a folder, whose files are not read: copy them here."
        raise UserError(Problem(kind="data", where=display_name(path), message=message) for path in links)
    texts = [path for path in found if path.lower().endswith(TEXT_SUFFIX)]
    images = [path for path in found if path.lower().endswith(IMAGE_SUFFIXES)]
    texts = images if images and len(images) >= len(texts) else texts or found
    others = sorted({*found} - {*texts})
    ranks, by_rank = Counter[str | None](), dict[str, tuple[int, str]]()
    for file in _sort(map(SourceFile, texts)):
        label = text_label(folder, file.file)
        by_rank[file.file] = (ranks[label], label or "")
        ranks[label] += 1
    return [SourceFile(path) for path in sorted(by_rank, key=by_rank.__getitem__)], [*map(SourceFile, others)]


def text_label(folder: str, file: str) -> str | None:
    """Returns the label of a file in a folder of texts: the name of the folder in it that leads to the file, or None if
    the file is directly in it."""
    first, slash, _ = os.path.relpath(file, folder).partition("/")
    return first if slash else None


def _is_shown(name: str) -> bool:
    return name[0] != "." and name not in _LITTER


def _raise(error: OSError) -> None:
    raise error


def stat_url(url: str) -> SourceFile | None:
    """Returns the file at a URL as it is now; None for a folder. Raises UserError if neither exists, or if the server
    does not respond."""
    system, path = filesystem(url)
    with as_user_error(url):
        system.invalidate_cache()
        info = system.info(path)
    return None if info["type"] == "directory" else _source_file(url, info)


def _source_file(url: str, info: Mapping[str, Any]) -> SourceFile:
    return SourceFile(url, state_of(info), info.get("size"))


def _as_list(file: SourceFile | None) -> list[SourceFile]:
    return [] if file is None else [file]


def state_of(info: Mapping[str, Any]) -> str | None:
    """Returns a value of a file's metadata that changes with its content; None if there is none.

    A very recent time is ignored: the file may change again within the same second.
    """
    for name in _CONTENT:
        if info.get(name):
            return f"{info.get('size')}:{name}:{info[name]}"
    changed_at = next((seconds for name in _TIMES if (seconds := _seconds(info.get(name))) is not None), None)
    if changed_at is None or time.time() - changed_at < SETTLED_S:
        return None
    return f"{info.get('size')}:{changed_at:.6f}"


def _seconds(value: Any) -> float | None:
    """Returns a file system's timestamp in seconds; None for other values."""
    if isinstance(value, str):
        try:
            value = parsedate_to_datetime(value)  # from a web server
        except ValueError:
            return None
    if isinstance(value, datetime):
        return value.timestamp()
    return float(value) if isinstance(value, (int, float)) else None


def _join(folder: str, name: str) -> str:
    """Returns a name relative to a folder; an absolute path or a URL as it is."""
    name = os.path.expanduser(local_path(name))
    if is_url(name):
        return name
    if is_url(folder) and not os.path.isabs(name):
        return f"{folder}/{name}"
    return os.path.join(folder, name)


def _is_no_folder(path: str) -> bool:
    """Whether the path is a file, or a pipe, socket or device, which are refused by name when they are opened. Without
    them, rows would be missing."""
    return os.path.exists(path) and not os.path.isdir(path)


def _existing_folder(path: str) -> str:
    """Returns the folder that exists and is the longest part of a path, whose characters are no wildcards then."""
    folder = os.path.dirname(path)
    while folder and not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    return folder


def _glob_url(url: str) -> list[SourceFile]:
    system, path = filesystem(url)
    start = _fixed_part(url)
    prefix_length = len(filesystem(start)[1].rstrip("/"))
    with as_user_error(url):
        system.invalidate_cache()
        matches = system.glob(path, detail=True)
    infos = [info for info in matches.values() if info["type"] == "file"]
    if is_web(url):
        return _sort(_source_file(info["name"], info) for info in infos)
    return _sort(_source_file(start + info["name"][prefix_length:], info) for info in infos)


def _require_inside(files: Iterable[str], pattern: str) -> None:
    """Raises UserError for files in a linked folder that leads out of the one in which a local glob begins."""
    base = os.path.realpath(_fixed_part(pattern))
    folders = {folder: os.path.realpath(folder) for folder in map(os.path.dirname, files)}
    problems = [
        Problem(
            kind="data",
            where=display_name(folder),
            message=f"is a link to {real}, outside of {display_name(base)}: name that folder itself, or copy it here.",
        )
        for folder, real in folders.items()
        if real != base and not real.startswith(f"{base.rstrip('/')}/")
    ]
    if problems:
        raise UserError(problems)


def _has_rows(folder: str, suffixes: Sequence[str]) -> bool:
    """Whether a file with one of the suffixes is among the first entries in and below a folder."""
    seen = 0
    with suppress(RecursionError):
        for _, folders, files in os.walk(folder):
            folders[:] = [name for name in folders if name[0] not in "._"]
            if any(name[0] != "." and name.endswith(tuple(suffixes)) for name in files):
                return True
            seen += len(folders) + len(files)
            if seen > MAX_ENTRIES:
                return False
    return False


@contextmanager
def _bounded_depth(path: str) -> Iterator[None]:
    """Turns the RecursionError of a walk through a thousand folders in one another into a UserError."""
    try:
        yield
    except RecursionError:
        message = "has too many folders in one another to be read: move them, or name those with the files."
        raise UserError.of("data", display_name(path), message) from None


def describe_unread(path: str, folders: Sequence[str]) -> str:
    """Returns the sentence on folders in a folder of rows."""
    some = ", ".join(map(on_one_line, folders[:3])) + (", …" if len(folders) > 3 else "")
    count = "1 folder in it is" if len(folders) == 1 else f"{len(folders):,} folders in it are"
    glob_of_all = f"{path.rstrip('/')}/**/*"
    return f"{display_name(path)}: {count} not read ({some}): to read all folders, give {display_name(glob_of_all)}"


def _fixed_part(pattern: str) -> str:
    """Returns the folder above the first part with a wildcard."""
    while _has_magic(pattern):
        pattern = pattern.rpartition("/")[0]
    return pattern or "/"


def _has_magic(pattern: str) -> bool:
    # In a web URL, a question mark starts the parameters.
    return "*" in pattern if is_web(pattern) else glob.has_magic(pattern)


def _with_suffixes(suffixes: Sequence[str], files: Iterable[SourceFile]) -> list[SourceFile]:
    """Returns the files with one of the suffixes (all, if there are none), sorted, without hidden ones."""
    visible = (file for file in files if not file.name.startswith("."))
    return _sort(file for file in visible if not suffixes or file.name.endswith(tuple(suffixes)))


def _sort(files: Iterable[SourceFile]) -> list[SourceFile]:
    """Returns the files sorted by name. Raises UserError for names that no text can hold, which outputs and records of
    rows would need."""
    found = sorted(files, key=lambda file: file.file)
    named = [(file, os.fsencode(file.file).decode(errors="backslashreplace")) for file in found]
    message = "its name is not in UTF-8: rename it."
    if wrong := [Problem(kind="data", where=name, message=message) for file, name in named if name != file.file]:
        raise UserError(wrong)
    return found
