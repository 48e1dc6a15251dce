"""Digests of input files, local or at URLs. A file is read only if it may have changed."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tasks.cache.digests import Digests, digest_of
from tasks.cache.results import PinnedFile
from tasks.home import home
from training.data.file_systems import PIECE_BYTES, as_user_error, display_name, is_url, read_pieces
from training.data.listing import SourceFile, list_texts, stat_url
from training.local_files import find_foreign, open_local
from training.models.repository_files import HOME_ROOMS
from training.problems import Problem, UserError
from training.recipe.tables.formats import IMAGE_SUFFIXES

Progress = Callable[[int, int], None]
CHANGED = "has changed since this run began: start another one."


def digests_of(files: Iterable[SourceFile], progress: Progress = lambda done, total: None) -> dict[str, str]:
    """The sha256 of each file, hex, by path or URL; that of a folder of texts is of their names and digests. Raises
    UserError for a file that cannot be read.

    `progress` is called while files at URLs are read, with the bytes read and the total.
    """
    files = list(files)
    folders = {file.file: list_texts(file.file)[0] for file in files if os.path.isdir(file.file)}
    if folders:
        inner = digests_of((text for texts in folders.values() for text in texts), progress)
        named = {
            folder: sorted((os.path.relpath(text.file, folder), inner[text.file]) for text in texts)
            for folder, texts in folders.items()
        }
        others = digests_of((file for file in files if file.file not in folders), progress)
        return others | {folder: digest_of(pairs) for folder, pairs in named.items()}
    local = [Path(file.file) for file in files if not is_url(file.file)]
    if foreign := find_foreign(map(str, local)):
        raise UserError(foreign)
    try:
        found = dict(zip(map(str, local), Digests(home()).of_many(local), strict=True))
    except OSError as error:
        with as_user_error(str(error.filename)):
            raise
    return found | _digest_urls([file for file in files if is_url(file.file)], progress)


def pin_files(files: Iterable[SourceFile]) -> list[PinnedFile]:
    """The files with their digests. Raises UserError for a file that cannot be read."""
    return [PinnedFile(path=path, sha256=digest) for path, digest in digests_of(files).items()]


def pin_images(folder: str | None) -> PinnedFile | None:
    """The folder with the digest of the names and contents of all images in it and below; None if it has none. Raises
    UserError for an image that cannot be read."""
    if folder is None:
        return None
    images = [one for one in list_texts(folder)[0] if one.file.lower().endswith(IMAGE_SUFFIXES)]
    digests = digests_of(images)
    pairs = sorted((os.path.relpath(file, folder), digest) for file, digest in digests.items())
    return PinnedFile(path=folder, sha256=digest_of(pairs)) if pairs else None


@contextlib.contextmanager
def unchanged_images(pins: Iterable[PinnedFile]) -> Iterator[None]:
    """Raises UserError after the block if an image has changed since its folder was pinned."""
    yield
    changed = [pin.path for pin in pins if pin_images(pin.path) != pin]
    if changed:
        raise UserError(Problem(kind="data", where=display_name(path), message=CHANGED) for path in changed)


@contextlib.contextmanager
def unchanged(lock: Iterable[PinnedFile]) -> Iterator[None]:
    """Raises UserError after the block if a file has changed since it was pinned: its rows would be stored under the
    key of other content. Another file that was in its place meanwhile counts, too."""
    pinned = {pin.path: pin.sha256 for pin in lock}
    before = {path: _states(path) for path in pinned}
    yield
    there = [stat_url(path) if is_url(path) else SourceFile(path) for path in pinned]
    now = digests_of(found for found in there if found is not None)
    problems = [
        Problem(kind="data", where=display_name(path), message=CHANGED)
        for path, digest in pinned.items()
        if now.get(path) != digest or _states(path) != before[path]
    ]
    if problems:
        raise UserError(problems)


def copy_pinned(pin: PinnedFile, place: Path) -> None:
    """Copies a file of a model. Raises UserError if its content is not the pinned one, and as `open_local` does."""
    digest = hashlib.sha256()
    try:
        opened = open_local(pin.path, HOME_ROOMS, "model")
    except FileNotFoundError as error:
        raise UserError.of("model", display_name(pin.path), CHANGED) from error
    with open(opened, "rb") as source, place.open("wb") as target:
        while piece := source.read(PIECE_BYTES):
            digest.update(piece)
            target.write(piece)
    if digest.hexdigest() != pin.sha256:
        raise UserError.of("model", display_name(pin.path), CHANGED)


def _states(path: str) -> list[tuple[int, ...]]:
    """The states of a local file, or of those of a folder of texts. The kernel sets the last number at each change of
    a file or its name."""
    files = [text.file for text in list_texts(path)[0]] if os.path.isdir(path) else [path]
    found = [os.stat(file) for file in files if os.path.exists(file)]  # a URL has none
    return [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in found]


def _digest_urls(files: list[SourceFile], progress: Progress) -> dict[str, str]:
    """The sha256 of each URL's bytes. A file that its file system reports as unchanged is not read."""
    memory = Digests(home())
    known = {file.file: memory.recalled(file.file, file.state) for file in files if file.state}
    unknown = [file for file in files if not known.get(file.file)]
    total, done = sum(file.size_bytes or 0 for file in unknown), 0
    digests = {name: digest for name, digest in known.items() if digest}
    for file in unknown:
        digest = hashlib.sha256()
        for piece in read_pieces(file.file):
            digest.update(piece)
            done += len(piece)
            progress(done, max(done, total))
        digests[file.file] = digest.hexdigest()
        after = stat_url(file.file)
        if file.state and after and after.state == file.state:
            memory.remember(file.file, file.state, digests[file.file])
    return digests
