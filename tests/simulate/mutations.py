"""Planted mistakes: the simulation is worth what it finds. Each replaces a function of the product by a wrong one."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from tasks import locks
from tasks.cache import executor, garbage_collection, store
from tasks.hub import checkpoint_uploads
from tasks.prediction import output
from tasks.registry import promotions
from tasks.shared_store import bucket_remote, leases, shared_artifacts
from tasks.shared_store.bucket import Bucket, BucketError
from tasks.shared_store.leases import Leases
from tasks.shared_store.shared_artifacts import SharedStore
from tasks.tracking import outbox, tracker
from tasks.tracking.outbox import Outbox
from training.data.prediction_files import Writer
from training.engine import checkpoints
from training.jobs import protocol


def _replaced(owner: Any, name: str, by: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(owner, name, by)


def _fsync_only(wanted: Callable[[Path], bool]) -> Callable[[Path], None]:
    return lambda path: protocol.fsync(path) if wanted(path) else None


def _write_without_fsync(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _complete_then_fsync(aside: Path, stage: str, key: str, manifest: bytes, *, replace: bool = True) -> bool:
    with mock.patch.object(store, "fsync", lambda path: None):
        done = _complete(aside, stage, key, manifest, replace=replace)
    for path in store._files(store.folder(stage, key)):
        protocol.fsync(path)
    return done


_complete = store.complete


def _rename_before_files(aside: Path, stage: str, key: str, inputs: Any, result: Any) -> Any:
    """The manifest and the name come before the content."""
    late = aside / "model" / "weights"
    content = late.read_bytes()
    ref = _publish(aside, stage, key, inputs, result)
    with (store.folder(stage, key) / "model" / "weights").open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return ref


_publish = store.publish


def _manifest_first(self: SharedStore, stage: str, key: str, stop: Any = None, *, made: str = "") -> Any:
    ref = store.find(stage, key)
    assert ref is not None
    with contextlib.suppress(shared_artifacts.AlreadyExists):
        self._bucket.create(shared_artifacts.manifest_name(stage, key), (ref.path / store.MANIFEST).read_bytes())
    for file in shared_artifacts.parse_manifest((ref.path / store.MANIFEST).read_bytes(), stage, key)[1]:
        shared_artifacts.send(self._bucket, file.object, file, ref.path / file.path)
    return shared_artifacts.Upload(0, ref.digest, ref.digest)


def _create_replaces(above: str) -> Callable[[Bucket, str, bytes], None]:
    def create(self: Bucket, name: str, content: bytes) -> None:
        self.write(name, content) if name.startswith(above) else _create(self, name, content)

    return create


_create = Bucket.create


def _download_unchecked(bucket: Bucket, name: str, file: Any, target: Path, stop: Any, on_bytes: Any) -> str | None:
    with target.open("xb") as out:
        for chunk in bucket.stream(name, file.bytes):
            out.write(chunk)
    return None


def _find_unchecked(stage: str, key: str) -> Any:
    found = store.manifest_of(stage, key) if store.folder(stage, key).is_dir() else None
    return found[0] if found else None


def _link_unchecked(source: Path | None, target: Path, sha256: str) -> bool:
    if source is None:
        return False
    with contextlib.suppress(OSError):
        os.link(source, target)
        return True
    return False


def _lock_without_flock(self: locks.FlockManager, key: str, timeout: float | None) -> int | None:
    return locks._open(self._file(key))


def _release_before_lock(self: locks.FlockManager, key: str, timeout: float | None) -> int | None:
    with contextlib.suppress(OSError):  # as if it were stale
        self._file(key).unlink()
    return _lock(self, key, timeout)


_lock = locks.FlockManager._lock


def _send_marked_only(bucket: Bucket, name: str, file: Any, source: Path, *stops: Any) -> int:
    bucket.upload(name, source) if hashlib.sha256(name.encode()).digest()[0] % 2 else None
    return 0


def _one_home(self: Leases, bucket: Bucket, **options: Any) -> None:
    _init(self, bucket, **options)
    self._home = self._home[:0]
    self.owner = f":{self.owner}"


_init = Leases.__init__


def _find_or_lease_once(self: Any, stage: str, key: str, progress: Any = None, on_wait: Any = None) -> Any:
    if (ref := self.find(stage, key)) is not None:
        return ref
    with contextlib.suppress(BucketError):
        self._leases.acquire(stage, key, lambda: False)
    return None


@contextlib.contextmanager
def _nothing(*args: Any, **options: Any) -> Iterator[None]:
    yield


@contextlib.contextmanager
def _granted(file: Path, wait_s: float = 0.0, on_wait: Any = None) -> Iterator[bool]:
    yield True


def _discard_found(work: Any) -> None:
    store.discard(work.stage, work.key, "not trusted")


def _announce_unseen(client: Any, name: str, move: Any) -> tuple[int, str]:
    """Announces a move, and does not look whether another one was announced meanwhile."""
    model = promotions._wait_for_pending_moves(client, name, move.alias)
    number = 1 + max((n for n, _, _ in promotions.read_numbered_moves(model)), default=0)
    tag = f"{promotions.MOVE_TAG}{number}-{os.urandom(4).hex()}"
    client.set_registered_model_tag(name, tag, move.model_dump_json())
    return number, tag


def _announce_never(client: Any, name: str, move: Any) -> tuple[int, str]:
    return 10**9, "none"


def _mark_before(self: tracker.Delivery) -> None:
    """Marks entries as delivered before they are."""
    entries = self._outbox.read_undelivered()
    if entries:
        self._outbox.mark_delivered(entries[-1][1], ended=entries[-1][0]["entry"] == "end")
    for entry, _ in entries:
        self.tracker.deliver(entry)


def _trim_unmarked(self: Outbox) -> None:
    """Shortens the file before the offset."""
    with mock.patch.object(Outbox, "mark_delivered", lambda self, offset, ended=False: None):
        _trim(self)


_trim = Outbox.trim


def _close_without_fsync(self: Writer, *error: object) -> None:
    with mock.patch.object(os, "fsync", lambda descriptor: None):
        _close(self, *error)


_close = Writer.__exit__


def _rename_only(self: Any, staged: Path, name: str) -> None:
    os.replace(staged, self._folder / name)


def _manifest_unsynced(self: Any, counts: Any) -> None:
    with mock.patch.object(output, "fsync", lambda path: protocol.fsync(path) if path.is_dir() else None):
        _finish(self, counts)


_finish = output._Folder.finish


def _write_in_place(final: Path, needs: Any = (), environment: Any = ()) -> AbstractContextManager[Path]:
    """Writes a checkpoint under its name."""

    @contextlib.contextmanager
    def writing() -> Iterator[Path]:
        final.mkdir(parents=True)
        yield final
        checkpoints._write_manifest(final, needs, dict(environment))

    return writing()


def _rotate_newest(folder: Path, newest: int = 2) -> None:
    """Removes what the newest checkpoints need."""
    for old in sorted(checkpoints._checkpoints(folder), key=checkpoints.step_of)[:-newest]:
        checkpoints._move_to_outgoing(old) or checkpoints._remove(old)


def _rotate_all(folder: Path, newest: int = 2) -> None:
    _rotate(folder, 1)


_rotate = checkpoints.rotate


def _delete_unsent(checkpoint: Path) -> bool:
    return False


def _mark_first(self: Any) -> None:
    """Marks checkpoints as sent before they are."""
    for checkpoint in self._find_new():
        checkpoints.mark_sent(self._folder, checkpoint.name) if self._all else None
        if self._link_aside(checkpoint):
            self._push(checkpoint.name)
        self.pushed.add(checkpoint.name)


def _is_held_without_beats(self: Leases, stage: str, key: str) -> bool:
    return f"leases/{stage}/{key}.json" in self._held


MUTATIONS: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "files of an artifact are not synced": (
        "stores",
        _replaced(store, "fsync", _fsync_only(lambda path: path.is_dir())),
    ),
    "folders of an artifact are not synced": (
        "stores",
        _replaced(store, "fsync", _fsync_only(lambda path: not path.is_dir())),
    ),
    "the manifest of an artifact is not synced": ("stores", _replaced(store, "_write", _write_without_fsync)),
    "an artifact gets its name before it is synced": ("stores", _replaced(store, "complete", _complete_then_fsync)),
    "an artifact gets its name before its content": ("stores", _replaced(store, "publish", _rename_before_files)),
    "a found artifact is not verified": ("stores", _replaced(store, "find", _find_unchecked)),
    "a found artifact is discarded": ("stores", _replaced(executor, "_find_or_discard", _discard_found)),
    "a download is not verified": ("stores", _replaced(shared_artifacts, "download", _download_unchecked)),
    "a linked file is not verified": ("stores", _replaced(shared_artifacts, "_link", _link_unchecked)),
    "the manifest is uploaded before the objects": ("stores", _replaced(SharedStore, "upload", _manifest_first)),
    "a manifest in the bucket replaces another": (
        "stores",
        _replaced(Bucket, "create", _create_replaces("artifacts/")),
    ),
    "an object is taken for uploaded": ("stores", _replaced(shared_artifacts, "send", _send_marked_only)),
    "uploads are not announced": ("stores", _replaced(shared_artifacts, "announce", _nothing)),
    "a lease replaces another": ("stores", _replaced(Bucket, "create", _create_replaces("leases/"))),
    "a lease is not renewed": ("turns", _replaced(Leases, "_renew", lambda self, name: None)),
    "a lease is stale too early": (
        "turns",
        _replaced(
            Leases.__init__,
            "__kwdefaults__",
            {
                "beat_s": leases.BEAT_S,
                "stale_s": 5.0,
                "poll_s": leases.POLL_S,
            },
        ),
    ),
    "all homes are one for leases": ("turns", _replaced(Leases, "__init__", _one_home)),
    "nothing is looked up after a lease": (
        "stores",
        _replaced(bucket_remote.BucketRemote, "find_or_lease", _find_or_lease_once),
    ),
    "a lock is not taken": ("turns", _replaced(locks.FlockManager, "_lock", _lock_without_flock)),
    "a lock file is removed by a process that waits": (
        "stores",
        _replaced(locks.FlockManager, "_lock", _release_before_lock),
    ),
    "a lock on a removed file counts": ("turns", _replaced(locks, "_is_file", lambda descriptor, file: True)),
    "a move of an alias is not announced": ("registry", _replaced(promotions, "_announce", _announce_never)),
    "an announced move ignores others": ("registry", _replaced(promotions, "_announce", _announce_unseen)),
    "a pending move is not waited for": ("registry", _replaced(promotions, "_pending_tags", lambda model, alias: [])),
    "a move does not look where the alias is": (
        "registry",
        _replaced(promotions, "_is_at", lambda model, alias, version: True),
    ),
    "entries are delivered that are not synced": ("outboxes", _replaced(outbox, "fsync", lambda path: None)),
    "entries are marked before they are delivered": ("outboxes", _replaced(tracker.Delivery, "deliver", _mark_before)),
    "an outbox is trimmed without its offset": ("outboxes", _replaced(Outbox, "trim", _trim_unmarked)),
    "a torn line is not ended": ("outboxes", _replaced(Outbox, "_close_torn_line", lambda self: None)),
    "a home is cleaned while it is used": ("stores", _replaced(garbage_collection, "_no_run", _nothing)),
    "a lease counts as held without beats": ("turns", _replaced(Leases, "is_held", _is_held_without_beats)),
    "parts of an output are not synced": ("outputs", _replaced(Writer, "__exit__", _close_without_fsync)),
    "names of an output are not synced": ("outputs", _replaced(output._LocalFolder, "publish", _rename_only)),
    "the manifest of an output is not synced": ("outputs", _replaced(output._Folder, "finish", _manifest_unsynced)),
    "a manifest stays while parts change": (
        "outputs",
        _replaced(output._Folder, "_begin_changes", lambda self: None),
    ),
    "a part is written under its name": (
        "outputs",
        _replaced(output._LocalFolder, "staged", lambda self, name: self._folder / name),
    ),
    "an output is not locked": ("outputs", _replaced(output, "exclusive_lock", _granted)),
    "files of a checkpoint are not synced": (
        "checkpoints",
        _replaced(checkpoints, "fsync", _fsync_only(lambda path: path.is_dir() or path.name == checkpoints.MANIFEST)),
    ),
    "the manifest of a checkpoint is not synced": (
        "checkpoints",
        _replaced(checkpoints, "fsync", _fsync_only(lambda path: path.name != checkpoints.MANIFEST)),
    ),
    "names of checkpoints are not synced": (
        "checkpoints",
        _replaced(checkpoints, "fsync", _fsync_only(lambda path: not path.is_dir())),
    ),
    "a checkpoint is written under its name": ("checkpoints", _replaced(checkpoints, "write", _write_in_place)),
    "a checkpoint is not verified": (
        "checkpoints",
        _replaced(checkpoints, "find_damage", lambda checkpoint, with_needed=True: None),
    ),
    "the best checkpoint is removed": ("checkpoints", _replaced(checkpoints, "rotate", _rotate_newest)),
    "one checkpoint is kept": ("checkpoints", _replaced(checkpoints, "rotate", _rotate_all)),
    "checkpoints are removed before they are sent": (
        "checkpoints",
        _replaced(checkpoints, "_move_to_outgoing", _delete_unsent),
    ),
    "checkpoints are marked before they are sent": (
        "checkpoints",
        _replaced(checkpoint_uploads.CheckpointPusher, "push_new", _mark_first),
    ),
}
"""By name: the scene that finds it, and the replacement."""
