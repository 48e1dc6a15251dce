"""Artifacts in a bucket that many machines share.

    objects/<2 hex>/<sha256>         the content of a file, once for all artifacts that have it
    artifacts/<stage>/<key>.json     the manifest of the local store, with its maker's signature: `signed_manifests`

Objects come first and the manifest last, created only if absent: a reader finds all of an artifact or none of it, and
of two machines that make the same key, the first manifest stands. A downloaded file is verified before it is used.

A run uploads in the background. A killed run leaves its pending uploads to the next run of the home, and so does a run
whose bucket does not answer:

    <home>/uploads/<stage>.<key>    an artifact that may be absent in the bucket: locked while it is uploaded. The file
                                    has its digest if this home made it, and so may sign it
    <home>/uploads/.read-only       the URL of the bucket that refused the last upload
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from pydantic import TypeAdapter, ValidationError

from tasks.cache import store
from tasks.cache.digests import Digests
from tasks.cache.results import Artifact
from tasks.home import home, with_this_home
from tasks.locks import exclusive_lock
from tasks.shared_store.bucket import AlreadyExists, Bucket, Forbidden, NotFound
from tasks.shared_store.leases import Leases, announce
from tasks.shared_store.signed_manifests import FIELD, Doubt, find_doubt, sign_manifest
from tasks.shared_store.transfers import SharedFile, Stopped, download, in_parallel, send

NEIGHBOURS = 50
"""Artifacts of the same stage in which files with the same content are looked for before they are downloaded."""


NOTE_AFTER_S = 2.0
"""Seconds after which the end of a run reports that it waits."""
RETRY_AFTER_S = 60.0
"""Seconds after which a bucket that did not answer is tried again."""
OTHER_PROCESS_S = 3600.0
"""The longest wait for another process of this home that uploads the same artifact."""


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
    """Without its signature, as the local store has it."""
    doubt: Doubt | None
    """Why it is not trusted."""
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
            content = self._bucket.read(name := manifest_name(stage, key))
        except NotFound:
            return None
        ref, files = parse_manifest(content, stage, key)
        fields = json.loads(content)
        doubt = find_doubt(name, fields, fields.pop(FIELD, None))
        here = _files_here(stage, {file.sha256 for file in files})
        return SharedArtifact(ref, files, store.to_json(fields), doubt, here)

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
            reasons = in_parallel(
                lambda file, stop: download(self._bucket, file.object, file, targets[file.sha256], stop, on_bytes),
                missing,
            )
            if damaged := {file.object: reason for file, reason in zip(missing, reasons, strict=True) if reason}:
                raise DamagedObject(ref.stage, ref.key, "; ".join(damaged.values()), list(damaged))
            for file in artifact.files:
                if targets[file.sha256] != aside / file.path:
                    shutil.copyfile(targets[file.sha256], aside / file.path)
            if not store.complete(aside, ref.stage, ref.key, artifact.manifest, replace=False):
                return None
        Digests(home()).keep_many({ref.path / file.path: file.sha256 for file in missing})
        return sum(file.bytes for file in missing)

    def upload(self, stage: str, key: str, stop: Event | None = None, *, made: str = "") -> Upload:
        """Uploads an artifact of the local store: objects that are absent, then the manifest unless one stands. The
        manifest is signed if the artifact has the digest `made`, of one that this home has made.

        Raises Stopped, before the next part of a file, if `stop` is set; `store.Damaged` or LookupError if the artifact
        is damaged or absent here; DamagedObject if the manifest in the bucket cannot be used.
        """
        ref = store.find(stage, key)
        if ref is None:
            raise LookupError(f"{stage} {key} is not in the store")
        manifest = (ref.path / store.MANIFEST).read_bytes()
        contents = {file.sha256: file for file in parse_manifest(manifest, stage, key)[1]}.values()
        name = manifest_name(stage, key)
        if made == ref.digest:
            manifest = store.to_json(sign_manifest(name, json.loads(manifest)))
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
                    self._bucket.create(name, manifest)
                    return Upload(sent_bytes, ref.digest, ref.digest)
        return Upload(sent_bytes, ref.digest, standing.ref.digest)

    def remove(self, damage: DamagedObject) -> None:
        """Removes the damaged objects, then the manifest, so that the artifact can be uploaded again."""
        # A damaged object without a manifest would be taken for whole by the next upload.
        for name in (*damage.objects, manifest_name(damage.stage, damage.key)):
            self._bucket.remove(name)


class ArtifactUploads:
    """The uploads of this process.

    Args:
        shared: where to.
        url: the bucket, for messages.
        on_end: called in the uploading thread when an artifact is in the bucket.
    """

    def __init__(self, shared: SharedStore, url: str, on_end: Callable[[str, str], None]) -> None:
        self._shared, self._url, self._on_end = shared, url, on_end
        self._folder = home() / "uploads"
        self._turn = threading.Condition()
        self._queue: dict[tuple[str, str], bool] = {}
        """Whether the artifact is of this run, whose artifacts come first."""
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._failed_at = 0.0
        self._warnings: list[str] = []

    def add(self, stage: str, key: str, made: str = "") -> None:
        """Records an artifact of this run on disk and uploads it.

        `made` is its digest if this run has made it. What the home has fetched earlier may be somebody else's.
        """
        with contextlib.suppress(OSError):  # a full disk: the artifact is uploaded unless this process is killed
            self._folder.mkdir(mode=0o700, exist_ok=True)
            mark = self._mark(stage, key)
            mark.touch(mode=0o600)
            if made:
                mark.write_text(made, encoding="utf-8")
        with self._turn:
            self._queue[stage, key] = True
            self._start()

    def add_earlier(self) -> None:
        """Uploads what earlier runs of this home left."""
        for mark in sorted(self._folder.glob("[!.]*.*")):
            stage, _, key = mark.name.partition(".")
            if store.folder(stage, key).is_dir():
                with self._turn:
                    self._queue.setdefault((stage, key), False)
                    self._start()
            else:
                mark.unlink(missing_ok=True)

    def end(self, wait: bool, note: Callable[[str], None]) -> list[str]:
        """Waits for the end of all uploads, or stops them. Returns the warnings of the run."""
        reason = "the run was interrupted"
        with contextlib.suppress(KeyboardInterrupt):  # ends the wait, not the run, whose stages have ended
            if wait:
                self._wait(note)
                reason = str(self._error)
        with self._turn:
            self._stop.set()
            self._stop = threading.Event()
            left, self._queue, error, self._error = self._queue, {}, self._error, None
            warnings, self._warnings = self._warnings, []
        if left and isinstance(error, Forbidden):
            return warnings + self._note_read_only(error)
        if left:
            names = ", ".join(f"{stage} {key[:16]}" for stage, key in left)
            warnings.append(f"Not in {self._url} yet: {names}. The next run of this home uploads them. ({reason})")
        return warnings

    def _wait(self, note: Callable[[str], None]) -> None:
        with self._turn:
            self._start()
            if not self._turn.wait_for(lambda: self._thread is None, NOTE_AFTER_S):
                count = len(self._queue)
                note(f"waiting for the upload of {count} artifact{'' if count == 1 else 's'} to {self._url}")
                self._turn.wait_for(lambda: self._thread is None)

    def _start(self) -> None:
        """Starts the thread if there is work, unless the bucket has just failed. The caller holds `_turn`."""
        if self._thread is not None or not self._queue or isinstance(self._error, Forbidden):
            return
        if self._error is None or time.monotonic() - self._failed_at >= RETRY_AFTER_S:
            self._error, stop = None, self._stop
            target = with_this_home(lambda: self._run(stop))
            self._thread = threading.Thread(target=target, name="uploads", daemon=True)
            self._thread.start()

    def _run(self, stop: threading.Event) -> None:
        while (artifact := self._next(stop)) is not None:
            try:
                self._upload(*artifact, stop)
            except Stopped:
                continue
            except BaseException as error:  # also a panic in obstore; the run ends with it as a warning
                with self._turn:
                    self._error, self._failed_at, self._thread = error, time.monotonic(), None
                    self._turn.notify_all()
                self._retry_later(stop)
                return
            with self._turn:
                self._queue.pop(artifact, None)

    def _retry_later(self, stop: threading.Event) -> None:
        """Other machines may wait for the artifact, and the next stage of this run may take hours."""

        def retry() -> None:
            with self._turn:
                if not stop.is_set():
                    self._start()

        timer = threading.Timer(RETRY_AFTER_S, with_this_home(retry))
        timer.daemon = True
        timer.start()

    def _next(self, stop: threading.Event) -> tuple[str, str] | None:
        """The next artifact, which stays in the queue until it is uploaded. Without one, the thread has ended."""
        with self._turn:
            if self._queue and not stop.is_set():
                return max(self._queue, key=lambda artifact: self._queue[artifact])  # the first of the largest
            self._thread = None
            self._turn.notify_all()
            return None

    def _upload(self, stage: str, key: str, stop: threading.Event) -> None:
        mark = self._mark(stage, key)
        with exclusive_lock(mark, OTHER_PROCESS_S if self._queue.get((stage, key)) else 0.0) as locked:
            if not locked:
                return  # the run of the other process uploads it
            try:
                end = self._send(stage, key, stop)
                (self._folder / ".read-only").unlink(missing_ok=True)
                if end.standing_digest != end.digest:
                    self._warnings.append(
                        f"{stage} {key}: two machines made different content from the same inputs: {end.digest} here, "
                        f"{end.standing_digest} in {self._url}, which keeps the first."
                    )
                self._on_end(stage, key)
            except (LookupError, store.Damaged):
                pass  # removed or damaged since: the run that needs it makes it again
            mark.unlink(missing_ok=True)

    def _send(self, stage: str, key: str, stop: threading.Event) -> Upload:
        made = self._mark(stage, key).read_text(encoding="utf-8")
        try:
            return self._shared.upload(stage, key, stop, made=made)
        except DamagedObject as damage:
            self._warnings.append(f"{damage}. It was replaced.")
            self._shared.remove(damage)
            return self._shared.upload(stage, key, stop, made=made)

    def _note_read_only(self, error: Forbidden) -> list[str]:
        """The note for a consumer, once for each home and bucket."""
        marker = self._folder / ".read-only"
        if marker.is_file() and marker.read_text(encoding="utf-8") == self._url:
            return []
        with contextlib.suppress(OSError):
            marker.write_text(self._url, encoding="utf-8")
        return [f"{self._url} may only be read, so this home uploads nothing to it: {error}"]

    def _mark(self, stage: str, key: str) -> Path:
        return self._folder / f"{stage}.{key}"


def manifest_name(stage: str, key: str) -> str:
    """The name of the manifest in the bucket."""
    return f"artifacts/{stage}/{key}.json"


def parse_manifest(manifest: bytes, stage: str, key: str) -> tuple[Artifact, tuple[SharedFile, ...]]:
    """The artifact of a manifest and its files; its signature is not verified. Raises DamagedObject."""
    try:
        fields = {name: value for name, value in json.loads(manifest).items() if name != FIELD}
        files = tuple(_FILES.validate_python(fields["files"]))  # their names first: the artifact's digests are of them
        ref, _ = store.checked_manifest(fields, stage, key, "its manifest")
        return ref, files
    except ValidationError as error:
        first = error.errors()[0]
        raise DamagedObject(stage, key, f"in its manifest, {first['input']!r}: {first['msg']}") from error
    except (store.Damaged, ValueError, LookupError, TypeError, AttributeError) as error:
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
