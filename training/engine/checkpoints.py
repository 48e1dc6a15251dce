"""Checkpoints that are complete or absent, and the choice of the one to go on from.

    checkpoints/checkpoint-40/            any files
    checkpoints/checkpoint-40/manifest.json   written last: every file's path, bytes and sha256, the names of
                                          the other checkpoints that this one is of no use without, and under
                                          what it was written
    checkpoints/checkpoint-40/seal        proves that the manifest was written by a training of this home
    checkpoints/quarantine/               what was found damaged; nothing reads it
    checkpoints/.writing-*, .removing-*   of a writer that lives, or died; removed by the next one's start
    outgoing/checkpoint-40/               beside checkpoints/, only in a job whose every checkpoint is sent elsewhere:
                                          rotated before it was sent; the sender removes it
    outgoing/checkpoint-40.sent, .lost    marks: of the sender, and of the rotation that had no room to keep it
    last-checkpoint/, best-checkpoint/    of a download, in place of checkpoints/: the newest, and the one that it needs

One process at a time writes to such a folder. Anything else in it (.DS_Store, .nfs…) is left alone.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from training.jobs.protocol import fsync, sha256
from training.problems import Problem, UserError, full_disk

MANIFEST = "manifest.json"
SEAL = "seal"
SEAL_KEY = "FINETUNE_SEAL_KEY"
"""Environment variable: the file with the key of the home, which only its user can read."""
QUARANTINE = "quarantine"
OUTGOING, SENT, LOST = "outgoing", ".sent", ".lost"
LAST, BEST = "last-checkpoint", "best-checkpoint"
LEAST_FREE = 0.1
"""The share of a disk that stays free of checkpoints that only wait to be sent."""
NAMED = "training.resume_from_checkpoint"
"""The field that names a checkpoint of another job to begin with."""
TRUSTED = "training.trust_checkpoint"
"""The field by which a checkpoint from elsewhere may execute code."""
_NAME = re.compile(r"checkpoint-(\d+)")


def name(step: int) -> str:
    """The name of the checkpoint made after this many optimizer steps."""
    return f"checkpoint-{step}"


@contextmanager
def writing(
    final: Path, needs: Sequence[str] = (), written_by: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[Path]:
    """Gives an empty folder to fill; on leaving, it appears as `final`, whole and on the disk.

    `needs` names the other checkpoints in the folder that it depends on, such as the best so far; `written_by` is the
    environment that must be the same to resume exactly: `Task.environment()`.
    Raises OSError if `final` exists, UserError if the disk is full; on any error `final` does not appear.
    """
    aside = place_aside(final)
    aside.mkdir(parents=True)
    try:
        yield aside
        _write_manifest(aside, needs, written_by)
        os.rename(aside, final)
    except BaseException as error:
        full = full_disk(final.parent, error)
        shutil.rmtree(aside, ignore_errors=True)
        if full:
            raise full from error
        raise
    fsync(final.parent)


def place_aside(final: Path) -> Path:
    """Where a checkpoint is filled before it appears as `final`; for the writer's helpers."""
    return final.with_name(f".writing-{final.name}")


def newest_good(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that verifies, with all that it needs; None where there is none.

    Newer ones go to quarantine and `warn` is told why. Call it before anything is written to the folder:
    it removes what dead writers left behind.
    """
    for leftover in [*folder.glob(".writing-*"), *folder.glob(".removing-*")]:
        _remove(leftover)
    for checkpoint in sorted(_checkpoints(folder), key=step_of, reverse=True):
        damage = damage_of(checkpoint)
        if damage is None:
            return checkpoint
        warn(f"{checkpoint.name} cannot be used ({damage}) and was put into {QUARANTINE}.")
        _set_aside(checkpoint)
    return None


def require_good(named: Path) -> None:
    """Raises UserError where what the recipe names is no checkpoint, is damaged, or lacks one that it needs."""
    if not _NAME.fullmatch(named.name):
        message = f"{str(named)!r} is no checkpoint: name a folder such as checkpoint-40, of a job's checkpoints/."
        raise UserError([Problem(kind="training", where=NAMED, message=message)])
    if damage := damage_of(named):
        message = f"{str(named)!r} cannot be used ({damage}): name another."
        raise UserError([Problem(kind="training", where=NAMED, message=message)])


def require_sealed(named: Path, key: Path) -> None:
    """Raises UserError unless the home with this key wrote the manifests of the checkpoint and of those that it needs.
    Reads no other file: `require_own` does, before anything is loaded."""
    for checkpoint in (named, *needed(named)):
        _refuse(_unsealed(checkpoint, key), str(named))


def require_own(named: Path, key: Path) -> None:
    """Raises UserError unless the home with this key wrote the checkpoint, with those that it needs.

    Call it where the checkpoint's format can execute code: FSDP's `.metadata` and the `.pt` files of DeepSpeed are
    pickles. A manifest alone proves nothing, for anybody can write one.
    """
    for checkpoint in (named, *needed(named)):
        _refuse(_not_own(checkpoint, key), str(named))


def _refuse(reason: str | None, shown: str) -> None:
    if reason:
        message = f"{shown!r} was not written by this home ({reason}), and loading it can execute code, for it holds "
        message += f"pickles. If you trust whoever wrote it, set {TRUSTED}: true; or name the folder of a model in "
        message += "model.path, which is safetensors."
        raise UserError([Problem(kind="training", where=NAMED, message=message)])


def _not_own(checkpoint: Path, key: Path) -> str | None:
    """Why it is not certain that the home with this key wrote all of the checkpoint's files; None where it is."""
    if reason := _unsealed(checkpoint, key):
        return reason
    files = {file["path"]: file["sha256"] for file in json.loads((checkpoint / MANIFEST).read_bytes())["files"]}
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        if (path.is_dir() and not path.is_symlink()) or name in (MANIFEST, SEAL):
            continue
        if name not in files or not path.is_file() or sha256(path) != files[name]:
            return f"{name} was added or changed"
    return None


def _unsealed(checkpoint: Path, key: Path) -> str | None:
    """Why it is not certain that the home with this key wrote the checkpoint's manifest; None where it is."""
    try:
        if hmac.compare_digest((checkpoint / SEAL).read_text(), _seal((checkpoint / MANIFEST).read_bytes(), key)):
            return None
    except (OSError, ValueError, TypeError):
        return f"it has no {SEAL}"
    return f"its {SEAL} is of another home, or its {MANIFEST} was changed"


def _seal(manifest: bytes, key: Path) -> str:
    return hmac.new(key.read_bytes(), manifest, hashlib.sha256).hexdigest()


def adopt(named: Path, folder: Path, key: Path | None = None) -> None:
    """Copy a good checkpoint that lies elsewhere, with those that it needs and that are not there yet, to a folder of
    checkpoints. With a key, raises UserError unless the home with this key wrote each of the copies."""
    for source in [*needed(named), named]:
        if (folder / source.name).exists():
            continue
        aside = place_aside(folder / source.name)
        shutil.copytree(source, aside)
        if key is not None:  # the copy, for the original may have been replaced since it was looked at
            _refuse(_not_own(aside, key), str(named))
        for path in aside.rglob("*"):
            fsync(path)
        os.rename(aside, folder / source.name)
    fsync(folder)


def step_of(checkpoint: Path) -> int:
    """The optimizer steps before it, as its name tells."""
    return int(checkpoint.name.rpartition("-")[2])


def written_by(checkpoint: Path) -> dict[str, Any]:
    """Under what it was written; empty where its writer did not say."""
    return dict(json.loads((checkpoint / MANIFEST).read_bytes()).get("written_by", {}))


def damage_of(checkpoint: Path, with_needed: bool = True) -> str | None:
    """What is wrong with a checkpoint, or with one that it needs; None where every byte is as written."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_bytes())
        for file in manifest["files"]:
            path = checkpoint / file["path"]
            if path.stat().st_size != file["bytes"] or sha256(path) != file["sha256"]:
                return f"{file['path']} changed after it was written"
        needs = needed(checkpoint) if with_needed else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    for other in needs:
        if damage := damage_of(other):
            return f"it needs {other.name}: {damage}"
    return None


def rotate(folder: Path, newest: int = 2) -> None:
    """Remove all checkpoints but the newest and those that these need.

    In a job with a folder OUTGOING, one that was not sent yet moves there, unless the disk is nearly full.
    """
    newest_first = sorted(_checkpoints(folder), key=step_of, reverse=True)
    kept = {name for checkpoint in newest_first[:newest] for name in [checkpoint.name, *_needs(checkpoint)]}
    for checkpoint in newest_first:
        if checkpoint.name not in kept and not _moved_out(checkpoint):
            _remove(checkpoint)


def _moved_out(checkpoint: Path) -> bool:
    """Whether the checkpoint waits in OUTGOING now."""
    outgoing = checkpoint.parent.with_name(OUTGOING)
    held = outgoing / checkpoint.name
    if not outgoing.is_dir() or held.exists() or held.with_suffix(SENT).exists():
        return False
    disk = shutil.disk_usage(outgoing)
    if disk.free < LEAST_FREE * disk.total:
        held.with_suffix(LOST).touch()
        return False
    os.rename(checkpoint, held)
    return True


def to_send(checkpoints: Path) -> list[Path]:
    """The checkpoints of a job with a folder OUTGOING that are still to be sent, oldest first."""
    outgoing = checkpoints.with_name(OUTGOING)
    found = [*_checkpoints(outgoing), *_checkpoints(checkpoints)]
    return sorted((one for one in found if not (outgoing / one.name).with_suffix(SENT).exists()), key=step_of)


def mark_sent(checkpoints: Path, name: str) -> None:
    """Notes that a checkpoint was sent, and removes it from OUTGOING."""
    held = checkpoints.with_name(OUTGOING) / name
    held.with_suffix(SENT).touch()
    shutil.rmtree(held, ignore_errors=True)


def lost(checkpoints: Path) -> list[Path]:
    """The checkpoints that rotation removed although they were not sent, oldest first."""
    marks = checkpoints.with_name(OUTGOING).glob(f"*{LOST}")
    return sorted((mark.with_suffix("") for mark in marks if not mark.with_suffix(SENT).exists()), key=step_of)


def _remove(folder: Path) -> None:
    """Renames the folder, so that a kill half-way through does not look like damage, then deletes what it can of it:
    NFS keeps files that a process still has open."""
    aside = folder.with_name(f".removing-{uuid.uuid4().hex[:12]}")
    os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _needs(checkpoint: Path) -> list[str]:
    return json.loads((checkpoint / MANIFEST).read_bytes())["needs"]


def needed(checkpoint: Path) -> list[Path]:
    """The checkpoints that this one depends on: its siblings, or in BEST if it is in LAST."""
    folder = checkpoint.parent.with_name(BEST) if checkpoint.parent.name == LAST else checkpoint.parent
    return [folder / other for other in _needs(checkpoint)]


def _write_manifest(folder: Path, needs: Sequence[str], written_by: Mapping[str, Any]) -> None:
    paths = sorted(folder.rglob("*"))
    with ThreadPoolExecutor(max_workers=1) as disk:
        written = disk.map(fsync, paths)  # the disk works while the digests are computed
        files = [
            {"path": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": sha256(path)}
            for path in paths
            if path.is_file()
        ]
        list(written)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"files": files, "needs": list(needs), "written_by": dict(written_by)}, indent=1))
    if key := os.environ.get(SEAL_KEY):
        (folder / SEAL).write_text(_seal(manifest.read_bytes(), Path(key)))
        fsync(folder / SEAL)
    fsync(manifest)
    fsync(folder)


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if _NAME.fullmatch(path.name)]


def _set_aside(checkpoint: Path) -> None:
    quarantine = checkpoint.parent / QUARANTINE
    quarantine.mkdir(exist_ok=True)
    os.rename(checkpoint, quarantine / f"{uuid.uuid4().hex[:8]}-{checkpoint.name}")
