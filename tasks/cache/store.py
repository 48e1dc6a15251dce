"""The artifact store: a folder a key, complete and hashed, or absent.

    <home>/artifacts/<stage>/<key>/    content, manifest.json, inputs.json, record (Prefect's)
    <home>/quarantine/                 damaged artifacts, never read again

A folder is filled under a temporary name, fsynced, given its manifest and renamed, so that a reader finds all of it or
nothing. Files under `log/` (events with their times, pictures) are verified like the rest but do not count
for the content's digest: two trainings to the same bytes are the same artifact.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.cache.digests import Digests, digest_of
from tasks.cache.results import Artifact
from tasks.home import home
from training.jobs.protocol import fsync
from training.problems import full_disk

MANIFEST = "manifest.json"
INPUTS = "inputs.json"
RECORD = "record"
LOG = "log"
ABANDONED_S = 24 * 3600.0
"""Age in seconds from which an incomplete folder or an unknown job is abandoned."""


REPLACED = "replaced"
"""The reason for which an artifact that was made anew on purpose is in quarantine."""


class Damaged(Exception):
    """An artifact differs from its manifest."""


def folder(stage: str, key: str) -> Path:
    """The artifact's folder, which may not exist."""
    return home() / "artifacts" / stage / key


def find(stage: str, key: str) -> Artifact | None:
    """The artifact, verified; None if it is absent. Raises Damaged if it is incomplete or changed."""
    place = folder(stage, key)
    if not place.is_dir():
        return None
    artifact, files = checked_manifest(_read_json(place / MANIFEST), stage, key, str(place / MANIFEST))
    listed = {entry["path"]: entry for entry in files}
    present = {path.relative_to(place).as_posix() for path in _files(place)}
    if odd := sorted(present ^ set(listed)):
        raise Damaged(f"{place / odd[0]} is {'missing' if odd[0] in listed else 'not in the manifest'}")
    for path, entry in listed.items():
        if (place / path).stat().st_size != entry["bytes"]:
            raise Damaged(f"{place / path} has {(place / path).stat().st_size} bytes, not {entry['bytes']}")
    for path, digest in zip(listed, Digests(home()).of_many([place / p for p in listed]), strict=True):
        if digest != listed[path]["sha256"]:
            raise Damaged(f"{place / path} has changed")
    return artifact


def checked_manifest(
    manifest: Mapping[str, Any], stage: str, key: str, place: str
) -> tuple[Artifact, list[dict[str, Any]]]:
    """The artifact and the files of a manifest. Raises Damaged, with its place, if it has changed or is another's."""
    if manifest.keys() != {"ref", "files", "digest"} or manifest["digest"] != _digest_of_manifest(manifest):
        raise Damaged(f"{place} has changed")
    artifact = Artifact.model_validate(manifest["ref"])
    if (artifact.stage, artifact.key) != (stage, key):
        raise Damaged(f"{place} is of {artifact.stage} {artifact.key}")
    if (artifact.digest, artifact.parts) != _digest_content(manifest["files"]):
        raise Damaged(f"{place} names other digests than those of its files")
    return artifact, manifest["files"]


@contextlib.contextmanager
def filling(stage: str, key: str) -> Iterator[Path]:
    """An empty folder to fill, removed after the block unless `publish` renamed it.

    Raises UserError in place of an error that a full disk caused.
    """
    above = home() / "artifacts" / stage
    above.mkdir(parents=True, exist_ok=True)
    _sweep(above)
    aside = above / f".{key[:16]}-{uuid.uuid4().hex[:8]}"
    aside.mkdir(mode=0o700)
    lock = os.open(aside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH)  # keeps sweeps of other processes from removing the folder
    try:
        yield aside
    except Exception as error:
        if full := full_disk(above, error):
            raise full from error
        raise
    finally:
        os.close(lock)
        shutil.rmtree(aside, ignore_errors=True)


def publish(aside: Path, stage: str, key: str, inputs: Mapping[str, Any], result: Any) -> Artifact:
    """Makes the filled folder the artifact of this key and returns it. Replaces an existing artifact, as after a
    forced run. Raises OSError if the disk is full; then nothing is published."""
    _write(aside / INPUTS, to_json(inputs))
    paths = sorted(_files(aside))
    digests = Digests(home()).of_many(paths)
    files: list[dict[str, Any]] = [
        {"path": path.relative_to(aside).as_posix(), "bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    ]
    digest, parts = _digest_content(files)
    artifact = Artifact(stage=stage, key=key, digest=digest, parts=parts, result=result)
    manifest = {"ref": artifact.model_dump(), "files": files}
    complete(aside, stage, key, to_json({**manifest, "digest": _digest_of_manifest(manifest)}))
    return artifact


def _digest_content(files: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, str]]:
    """The digest of an artifact's content, and those of its parts, from the files of its manifest."""
    content = {f["path"]: f["sha256"] for f in files if f["path"] != INPUTS and f["path"].split("/")[0] != LOG}
    parts: dict[str, dict[str, str]] = {}
    for path, digest in content.items():
        parts.setdefault(path.split("/")[0], {})[path] = digest
    return digest_of(content), {name: digest_of(inside) for name, inside in parts.items()}


def complete(aside: Path, stage: str, key: str, manifest: bytes, *, replace: bool = True) -> bool:
    """Makes the filled folder the artifact of this key, with this manifest. An existing artifact is replaced; without
    `replace` it stays, and False is returned.

    Raises OSError if the disk is full; then nothing is published.
    """
    paths = list(_files(aside))
    for path in paths:
        fsync(path)
    _write(aside / MANIFEST, manifest)
    for inner in {path.parent for path in paths} | {aside}:
        fsync(inner)
    place = folder(stage, key)
    while True:
        if replace:
            discard(stage, key, REPLACED)
        try:
            aside.rename(place)
            break
        except OSError as error:  # another process has published the artifact
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            if not replace:
                return False
    fsync(place.parent)
    return True


def discard(stage: str, key: str, why: str) -> Path | None:
    """Moves an artifact to quarantine with the reason. Returns the new folder; None if there is no artifact."""
    place = folder(stage, key)
    if not place.exists():
        return None
    room = home() / "quarantine"
    room.mkdir(mode=0o700, exist_ok=True)
    kept = room / f"{time.strftime('%Y%m%dT%H%M%S')}-{stage}-{key[:16]}-{uuid.uuid4().hex[:4]}"
    place.rename(kept)
    (kept / "quarantined.txt").write_text(why + "\n", encoding="utf-8")
    return kept


def count_damaged() -> int:
    """The number of artifacts in quarantine that were found damaged."""
    reasons = (home() / "quarantine").glob("*/quarantined.txt")
    return sum(reason.read_text(encoding="utf-8").strip() != REPLACED for reason in reasons)


def inputs_of(stage: str, key: str) -> dict[str, Any] | None:
    """The inputs of an artifact; None if they are no longer known."""
    try:
        return dict(_read_json(folder(stage, key) / INPUTS))
    except Damaged:
        return None


def manifest_of(stage: str, key: str) -> tuple[Artifact, dict[str, dict[str, Any]]] | None:
    """An artifact and its files by path, each with `bytes` and `sha256`, from the manifest without verification.
    None if the manifest is missing or damaged."""
    try:
        manifest = _read_json(folder(stage, key) / MANIFEST)
        files = {file["path"]: {"bytes": file["bytes"], "sha256": file["sha256"]} for file in manifest["files"]}
        return Artifact.model_validate(manifest["ref"]), files
    except (Damaged, KeyError, TypeError, ValueError):
        return None


def _files(place: Path) -> Iterator[Path]:
    """The files of an artifact, without the manifest and Prefect's record."""
    for path in place.rglob("*"):
        if path.parent == place and path.name in (MANIFEST, RECORD):
            continue
        if not path.is_dir() or path.is_symlink():
            yield path


def _digest_of_manifest(manifest: Mapping[str, Any]) -> str:
    return digest_of({"ref": manifest["ref"], "files": manifest["files"]})


def _sweep(above: Path) -> None:
    """Removes old incomplete folders of dead processes; a living process holds a lock on its folder."""
    for aside in above.glob(".*-*"):
        with contextlib.suppress(OSError):
            if time.time() - aside.stat().st_mtime <= ABANDONED_S:
                continue
            lock = os.open(aside, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(aside, ignore_errors=True)
            finally:
                os.close(lock)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise Damaged(f"{path} is not a JSON object")
    return value


def to_json(value: Mapping[str, Any]) -> bytes:
    """The content of a file with these values, the same in every process."""
    return json.dumps(dict(value), indent=1, sort_keys=True).encode()


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def link_or_copy(source: str, target: str) -> None:
    """Links the file, or copies it on a file system without hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
