"""Checkpoints: written atomically, verified, rotated and quarantined.

    checkpoints/checkpoint-40/            any files
    checkpoints/checkpoint-40/manifest.json   written last: path, size and sha256 of every file, the names of the other
                                          checkpoints that this one needs, and the environment that wrote it
    checkpoints/checkpoint-40/signature   proves that a training of this home wrote the manifest
    checkpoints/quarantine/               damaged checkpoints; nothing reads them
    checkpoints/.writing-*, .removing-*   unfinished work of a writer; the next writer removes it at its start, and the
                                          supervisor removes .writing-* when the job ends
    outgoing/checkpoint-40/               only in a job that uploads all checkpoints: rotated before its upload; the
                                          uploader removes it
    outgoing/checkpoint-40.sent, .lost    marks: uploaded; removed without an upload because the disk was nearly full
    last-checkpoint/, best-checkpoint/    in a download, instead of checkpoints/: the newest, and the one that it needs

One process at a time writes to such a folder. Other files in it (.DS_Store, .nfs…) are left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from training import distributed
from training.jobs.protocol import fsync, sha256
from training.local_files import open_local
from training.models.repository_files import HOME_ROOMS
from training.problems import UserError, full_disk
from training.recipe.tables.engines import ENGINES

if TYPE_CHECKING:
    from training.recipe import Compute, Training

MANIFEST = "manifest.json"
SIGNATURE = "signature"
SIGNING_KEY = "FINETUNE_SIGNING_KEY"
"""Environment variable: the file with the home's key, which only its user can read."""
QUARANTINE = "quarantine"
OUTGOING, SENT, LOST = "outgoing", ".sent", ".lost"
LAST, BEST = "last-checkpoint", "best-checkpoint"
MIN_FREE_SHARE = 0.1
"""The share of the disk that checkpoints in OUTGOING leave free."""
NAMED = "training.resume_from_checkpoint"
TRUSTED = "training.trust_checkpoint"
_NAME = re.compile(r"checkpoint-(\d+)")


def name(step: int) -> str:
    """The name of the checkpoint after `step` optimizer steps."""
    return f"checkpoint-{step}"


@contextmanager
def write(
    final: Path, needs: Sequence[str] = (), environment: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[Path]:
    """Yields an empty folder for the files of a checkpoint; afterwards it appears as `final`, complete and on the disk.

    `needs` names other checkpoints in the folder that this one depends on, such as the best so far; `environment` must
    be the same to resume exactly: `Task.environment()`.
    Raises OSError if `final` exists, UserError if the disk is full; after any error, `final` does not appear.
    """
    with open_staging(final) as staging:
        yield staging
    complete(final, needs, environment)


@contextmanager
def open_staging(final: Path) -> Iterator[Path]:
    """Yields the empty staging folder for the files of a checkpoint, which `complete` makes `final`."""
    staging = staging_folder(final)
    staging.mkdir(parents=True)
    with _removed_on_error(staging):
        yield staging


def complete(final: Path, needs: Sequence[str], environment: Mapping[str, Any]) -> None:
    """Syncs the files of the staging folder to the disk, writes their manifest, and renames the folder to `final`. The
    arguments and errors are those of `write`."""
    staging = staging_folder(final)
    with _removed_on_error(staging):
        _write_manifest(staging, needs, environment)
        os.rename(staging, final)
    fsync(final.parent)


@contextmanager
def _removed_on_error(staging: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        full = full_disk(staging.parent, error)
        shutil.rmtree(staging, ignore_errors=True)
        if full:
            raise full from error
        raise


class BackgroundCall:
    """One call at a time in a thread, while training goes on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._call: Future[None] | None = None

    def start(self, call: Callable[[], None]) -> None:
        """Starts the call, after the one before has ended."""
        self.wait()
        self._call = self._thread.submit(call)

    @property
    def has_failed(self) -> bool:
        """Whether the call has ended with an error, which `wait` raises."""
        return self._call is not None and self._call.done() and self._call.exception() is not None

    def wait(self) -> None:
        """Waits until the call has ended. Raises its error, once."""
        call, self._call = self._call, None
        if call is not None:
            call.result()


def staging_folder(final: Path) -> Path:
    """The folder that becomes `final`; other ranks write to it too."""
    return final.with_name(f".writing-{final.name}")


def find_newest_intact(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose files, and those that it needs, are intact; None if there is none.

    Moves newer ones to quarantine and calls `warn` with the reason. Removes unfinished work, so call it before anything
    is written to the folder.
    """
    for leftover in [*folder.glob(".writing-*"), *folder.glob(".removing-*")]:
        _remove(leftover)
    for checkpoint in sorted(_checkpoints(folder), key=step_of, reverse=True):
        damage = find_damage(checkpoint)
        if damage is None:
            return checkpoint
        warn(f"{checkpoint.name} cannot be used ({damage}) and was moved to {QUARANTINE}.")
        quarantine = folder / QUARANTINE
        quarantine.mkdir(exist_ok=True)
        os.rename(checkpoint, quarantine / f"{uuid.uuid4().hex[:8]}-{checkpoint.name}")
    return None


def require_intact(named: Path) -> None:
    """Raises UserError if the path is no checkpoint, is damaged, or lacks a checkpoint that it needs."""
    if not _NAME.fullmatch(named.name):
        message = f"{str(named)!r} is no checkpoint: name a folder such as checkpoint-40 in a job's checkpoints/."
        raise UserError.of("training", NAMED, message)
    if damage := find_damage(named):
        message = f"{str(named)!r} cannot be used ({damage}): name another."
        raise UserError.of("training", NAMED, message)


def require_signed(named: Path, key: Path) -> None:
    """Raises UserError unless the home with this key wrote the manifests of the checkpoint and of those that it needs.
    Reads no other file; `require_own` does, before anything is loaded."""
    for checkpoint in (named, *list_needed(named)):
        _refuse(_unsigned(checkpoint, key), str(named))


def needs_own_checkpoint(training: Training, compute: Compute) -> bool:
    """Whether checkpoints of other homes are refused: FSDP and DeepSpeed unpickle theirs, and a user's engine may."""
    loads_safely = training.engine in ENGINES and not distributed.load(compute.strategy).UNPICKLES
    return not loads_safely and not training.trust_checkpoint


def key_of(training: Training, compute: Compute) -> Path | None:
    """The key that recognizes this home's checkpoints, if those of other homes are refused; else None."""
    if not needs_own_checkpoint(training, compute):
        return None
    # Without the variable there is no key, and every checkpoint counts as another home's.
    return Path(os.environ.get(SIGNING_KEY, os.devnull + "/none"))


def require_own(named: Path, key: Path) -> None:
    """Raises UserError unless the home with this key wrote all files of the checkpoint and of those that it needs.

    Call it if the checkpoint's format can execute code: FSDP's `.metadata` and DeepSpeed's `.pt` files are pickles. A
    manifest alone proves nothing, because anybody can write one.
    """
    for checkpoint in (named, *list_needed(named)):
        _refuse(_not_own(checkpoint, key), str(named))


def _refuse(reason: str | None, shown: str) -> None:
    if reason:
        message = (
            f"{shown!r} was not written by this home ({reason}), and loading its pickles can execute code. If you "
            f"trust its author, set {TRUSTED}: true; or set model.path to a folder with safetensors."
        )
        raise UserError.of("training", NAMED, message)


def _not_own(checkpoint: Path, key: Path) -> str | None:
    """The reason to doubt that the home with this key wrote all files of the checkpoint; None if it did."""
    if reason := _unsigned(checkpoint, key):
        return reason
    files = {file["path"]: file["sha256"] for file in json.loads((checkpoint / MANIFEST).read_bytes())["files"]}
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        if (path.is_dir() and not path.is_symlink()) or name in (MANIFEST, SIGNATURE):
            continue
        if name not in files or not path.is_file() or sha256(path) != files[name]:
            return f"{name} was added or changed"
    return None


def _unsigned(checkpoint: Path, key: Path) -> str | None:
    """The reason to doubt that the home with this key wrote the manifest; None if it did."""
    try:
        if hmac.compare_digest(
            (checkpoint / SIGNATURE).read_text(), _compute_signature((checkpoint / MANIFEST).read_bytes(), key)
        ):
            return None
    except (OSError, ValueError, TypeError):
        return f"it has no {SIGNATURE}"
    return f"its {SIGNATURE} belongs to another home, or its {MANIFEST} was changed"


def sign(checkpoint: Path, key: Path) -> None:
    """Signs a checkpoint as one of the home with this key. Its files must come from a writer that is trusted."""
    (checkpoint / SIGNATURE).write_text(_compute_signature((checkpoint / MANIFEST).read_bytes(), key))
    fsync(checkpoint / SIGNATURE)


def _compute_signature(manifest: bytes, key: Path) -> str:
    return hmac.new(key.read_bytes(), manifest, hashlib.sha256).hexdigest()


def adopt(named: Path, folder: Path, key: Path | None = None) -> None:
    """Copies an intact checkpoint, and those that it needs, to a folder of checkpoints, unless they exist there. With a
    key, raises UserError unless the home with this key wrote each of the copies. Raises UserError for links to files
    elsewhere, because checkpoints may be shared, and for pipes."""
    for source in [*list_needed(named), named]:
        if (folder / source.name).exists():
            continue
        staging = staging_folder(folder / source.name)
        shutil.copytree(source, staging, copy_function=_copy_local)
        if key is not None:  # the copy, because the original may have been replaced since its check
            _refuse(_not_own(staging, key), str(named))
        for path in staging.rglob("*"):
            fsync(path)
        os.rename(staging, folder / source.name)
    fsync(folder)


def _copy_local(source: str, target: str) -> None:
    opened = open_local(source, HOME_ROOMS, "training")
    try:
        shutil.copyfile(f"/proc/self/fd/{opened}", target)
    finally:
        os.close(opened)


def step_of(checkpoint: Path) -> int:
    """The optimizer steps before the checkpoint, by its name."""
    return int(checkpoint.name.rpartition("-")[2])


def read_environment(checkpoint: Path) -> dict[str, Any]:
    """The environment in which the checkpoint was written; empty if the engine gave none."""
    return dict(json.loads((checkpoint / MANIFEST).read_bytes()).get("written_by", {}))


def read_manifest(checkpoint: Path) -> bytes | None:
    """The checkpoint's manifest, which identifies its content; None if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return (checkpoint / MANIFEST).read_bytes()
    return None


def find_damage(checkpoint: Path, with_needed: bool = True) -> str | None:
    """The damage of a checkpoint, or of one that it needs; None if every byte is as written."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_bytes())
        for file in manifest["files"]:
            path = checkpoint / file["path"]
            if path.stat().st_size != file["bytes"] or sha256(path) != file["sha256"]:
                return f"{file['path']} changed after it was written"
        needs = list_needed(checkpoint) if with_needed else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    for other in needs:
        if damage := find_damage(other):
            return f"it needs {other.name}: {damage}"
    return None


def rotate(folder: Path, newest: int = 2) -> None:
    """Removes all checkpoints but the newest and those that these need.

    In a job with a folder OUTGOING, it moves those without an upload there, unless the disk is nearly full.
    """
    newest_first = sorted(_checkpoints(folder), key=step_of, reverse=True)
    kept = set[str]()
    for checkpoint in newest_first[:newest]:
        kept.add(checkpoint.name)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # damaged: nothing resumes from it
            kept.update(_needs(checkpoint))
    for checkpoint in newest_first:
        if checkpoint.name not in kept and not _move_to_outgoing(checkpoint):
            _remove(checkpoint)


def _move_to_outgoing(checkpoint: Path) -> bool:
    """Moves the checkpoint to OUTGOING if it is still to be uploaded. Returns whether it did."""
    outgoing = checkpoint.parent.with_name(OUTGOING)
    target = outgoing / checkpoint.name
    if not outgoing.is_dir() or target.exists() or target.with_suffix(SENT).exists():
        return False
    disk = shutil.disk_usage(outgoing)
    if disk.free < MIN_FREE_SHARE * disk.total:
        target.with_suffix(LOST).touch()
        return False
    os.rename(checkpoint, target)
    return True


def list_unsent(checkpoints: Path) -> list[Path]:
    """The checkpoints of a job with a folder OUTGOING that are still to be uploaded, oldest first."""
    outgoing = checkpoints.with_name(OUTGOING)
    paths = [*_checkpoints(outgoing), *_checkpoints(checkpoints)]
    return sorted((path for path in paths if not (outgoing / path.name).with_suffix(SENT).exists()), key=step_of)


def mark_sent(checkpoints: Path, name: str) -> None:
    """Marks a checkpoint as uploaded, and removes it from OUTGOING."""
    sent = checkpoints.with_name(OUTGOING) / name
    sent.with_suffix(SENT).touch()
    shutil.rmtree(sent, ignore_errors=True)


def list_lost(checkpoints: Path) -> list[Path]:
    """The checkpoints that rotation removed before their upload, oldest first."""
    marks = checkpoints.with_name(OUTGOING).glob(f"*{LOST}")
    return sorted((mark.with_suffix("") for mark in marks if not mark.with_suffix(SENT).exists()), key=step_of)


def _remove(folder: Path) -> None:
    """Renames the folder, so that a kill does not leave a damaged checkpoint, and then deletes it. NFS keeps files that
    a process still has open."""
    removed = folder.with_name(f".removing-{uuid.uuid4().hex[:12]}")
    os.rename(folder, removed)
    shutil.rmtree(removed, ignore_errors=True)


def _needs(checkpoint: Path) -> list[str]:
    return json.loads((checkpoint / MANIFEST).read_bytes())["needs"]


def list_needed(checkpoint: Path) -> list[Path]:
    """The checkpoints that this one needs: its siblings, or in BEST if it is in LAST."""
    folder = checkpoint.parent.with_name(BEST) if checkpoint.parent.name == LAST else checkpoint.parent
    return [folder / other for other in _needs(checkpoint)]


def _write_manifest(folder: Path, needs: Sequence[str], environment: Mapping[str, Any]) -> None:
    paths = sorted(folder.rglob("*"))
    with ThreadPoolExecutor(max_workers=1) as disk:
        synced = disk.map(fsync, paths)  # the disk works while the digests are computed
        files = [
            {"path": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": sha256(path)}
            for path in paths
            if path.is_file()
        ]
        list(synced)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"files": files, "needs": list(needs), "written_by": dict(environment)}, indent=1))
    if key := os.environ.get(SIGNING_KEY):
        sign(folder, Path(key))
    fsync(manifest)
    fsync(folder)


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if _NAME.fullmatch(path.name)]
