"""Artifacts in a bucket that many machines share.

    objects/<2 hex>/<sha256>         the content of a file, once for all artifacts that have it
    artifacts/<stage>/<key>.json     the manifest of the local store, byte for byte

Objects come first and the manifest last, created only if absent: a reader finds all of an artifact or none of it, and
of two machines that make the same key, the first manifest stands. A downloaded file is verified before it is used.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from pydantic import TypeAdapter, ValidationError

from tasks.cache import store
from tasks.cache.digests import Digests
from tasks.cache.results import Artifact
from tasks.home import home
from tasks.shared_store.announcements import announce
from tasks.shared_store.bucket import AlreadyExists, Bucket, NotFound
from tasks.shared_store.leases import Leases
from tasks.shared_store.transfers import SharedFile, download, in_parallel, send

NEIGHBOURS = 50
"""Artifacts of the same stage in which files with the same content are looked for before they are downloaded."""


class DamagedObject(Exception):
    """An artifact whose manifest or objects cannot be used. After `SharedStore.remove` it can be uploaded again."""

    def __init__(self, stage: str, key: str, reason: str, objects: Sequence[str] = ()) -> None:
        super().__init__(f"{stage} {key[:16]} in the shared store is damaged: {reason}")
        self.stage, self.key, self.objects = stage, key, tuple(objects)


_FILES = TypeAdapter(list[SharedFile])


@dataclass(frozen=True)
class SharedArtifact:
    """An artifact that can be fetched."""

    ref: Artifact
    files: tuple[SharedFile, ...]
    manifest: bytes
    here: Mapping[str, Path]
    """Files of this home that had the same content when they were made, by sha256."""

    @property
    def missing_bytes(self) -> int:
        """Bytes to download."""
        return sum({file.sha256: file.bytes for file in self.files if file.sha256 not in self.here}.values())


@dataclass(frozen=True)
class Upload:
    """The end of an upload."""

    sent_bytes: int
    digest: str
    """Of the content here."""
    standing_digest: str
    """Of the content in the bucket: another one if another machine was first, and its content differs."""


class SharedStore:
    """The artifacts of a bucket.

    Args:
        bucket: the bucket.
        leases: by which an upload sees a removal.

    All methods raise `bucket.BucketError` if the bucket does not answer or refuses.
    """

    def __init__(self, bucket: Bucket, leases: Leases | None = None) -> None:
        self._bucket, self._leases = bucket, leases or Leases(bucket)

    def look_up(self, stage: str, key: str) -> SharedArtifact | None:
        """The artifact; None if it is absent. Raises DamagedObject if its manifest cannot be used."""
        try:
            manifest = self._bucket.read(manifest_name(stage, key))
        except NotFound:
            return None
        ref, files = parse_manifest(manifest, stage, key)
        return SharedArtifact(ref, files, manifest, _files_here(stage, {file.sha256 for file in files}))

    def fetch(self, artifact: SharedArtifact, on_bytes: Callable[[int], None] = lambda count: None) -> int | None:
        """Publishes the artifact in the local store. Returns the bytes that were downloaded; None, and publishes
        nothing, if a process of this home has published it meanwhile.

        `on_bytes` is called with the bytes of each chunk, in several threads. Raises DamagedObject, and publishes
        nothing, if objects are absent or have other bytes.
        """
        ref, by_content = artifact.ref, {file.sha256: file for file in artifact.files}
        with store.filling(ref.stage, ref.key) as aside:
            targets = {sha256: aside / file.path for sha256, file in by_content.items()}
            for file in artifact.files:
                (aside / file.path).parent.mkdir(parents=True, exist_ok=True)
            linked = {sha256 for sha256, path in targets.items() if _link(artifact.here.get(sha256), path, sha256)}
            missing = [file for sha256, file in by_content.items() if sha256 not in linked]
            faults = in_parallel(
                lambda file, stop: download(self._bucket, file.object, file, targets[file.sha256], stop, on_bytes),
                missing,
            )
            if damaged := {file.object: fault for file, fault in zip(missing, faults, strict=True) if fault}:
                raise DamagedObject(ref.stage, ref.key, "; ".join(damaged.values()), list(damaged))
            for file in artifact.files:
                if targets[file.sha256] != aside / file.path:
                    shutil.copyfile(targets[file.sha256], aside / file.path)
            if not store.complete(aside, ref.stage, ref.key, artifact.manifest, replace=False):
                return None
        Digests(home()).keep_many({ref.path / file.path: file.sha256 for file in missing})
        return sum(file.bytes for file in missing)

    def upload(self, stage: str, key: str, stop: Event | None = None) -> Upload:
        """Uploads an artifact of the local store: objects that are absent, then the manifest unless one stands.

        Raises Stopped, before the next part of a file, if `stop` is set; `store.Damaged` or LookupError if the artifact
        is damaged or absent here; DamagedObject if the manifest in the bucket cannot be used.
        """
        ref = store.find(stage, key)
        if ref is None:
            raise LookupError(f"{stage} {key} is not in the store")
        manifest = (ref.path / store.MANIFEST).read_bytes()
        contents = {file.sha256: file for file in parse_manifest(manifest, stage, key)[1]}.values()
        sent_bytes, stops = 0, [stop] if stop else []
        while (standing := self.look_up(stage, key)) is None:
            with announce(self._bucket, self._leases, stage, key, manifest, *stops):
                sent_bytes += sum(
                    in_parallel(
                        lambda file, failed: send(
                            self._bucket, file.object, file, ref.path / file.path, failed, *stops
                        ),
                        contents,
                    )
                )
                with contextlib.suppress(AlreadyExists):
                    self._bucket.create(manifest_name(stage, key), manifest)
                    return Upload(sent_bytes, ref.digest, ref.digest)
        return Upload(sent_bytes, ref.digest, standing.ref.digest)

    def remove(self, damage: DamagedObject) -> None:
        """Removes the damaged objects, then the manifest, so that the artifact can be uploaded again."""
        # A damaged object without a manifest would be taken for whole by the next upload.
        for name in (*damage.objects, manifest_name(damage.stage, damage.key)):
            self._bucket.remove(name)


def manifest_name(stage: str, key: str) -> str:
    """The name of the manifest in the bucket."""
    return f"artifacts/{stage}/{key}.json"


def parse_manifest(manifest: bytes, stage: str, key: str) -> tuple[Artifact, tuple[SharedFile, ...]]:
    """The artifact of a manifest and its files. Raises DamagedObject."""
    try:
        ref, entries = store.checked_manifest(json.loads(manifest), stage, key, "its manifest")
        return ref, tuple(_FILES.validate_python(entries))
    except ValidationError as error:
        first = error.errors()[0]
        raise DamagedObject(stage, key, f"in its manifest, {first['input']!r}: {first['msg']}") from error
    except (store.Damaged, ValueError, AttributeError) as error:
        raise DamagedObject(stage, key, str(error)) from error


def _files_here(stage: str, digests: set[str]) -> dict[str, Path]:
    """Files of the newest artifacts of a stage in the local store that have these digests in their manifests."""
    above = home() / "artifacts" / stage
    newest: list[tuple[float, str]] = []
    with contextlib.suppress(FileNotFoundError), os.scandir(above) as entries:
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    newest.append((entry.stat().st_mtime, entry.name))
    found: dict[str, Path] = {}
    for _, key in sorted(newest, reverse=True)[:NEIGHBOURS]:
        _, files = store.manifest_of(stage, key) or (None, {})
        found |= {entry["sha256"]: above / key / path for path, entry in files.items() if entry["sha256"] in digests}
    return found


def _link(source: Path | None, target: Path, sha256: str) -> bool:
    """Links the file if it still has this digest."""
    if source is None:
        return False
    with contextlib.suppress(OSError):
        os.link(source, target)
        if Digests(home()).of(target) == sha256:
            return True
    target.unlink(missing_ok=True)
    return False
