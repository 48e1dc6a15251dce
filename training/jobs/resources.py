"""How much memory and disk this machine has left for a training, found without torch."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from training.problems import DISK, Problem, UserError

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# How the two versions of control groups call a group's limit, what it uses, and the part of that which is cache.
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_LIMITS = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))


def used_bytes(what: str = "VmRSS") -> int:
    """This process's memory: VmRSS now, VmHWM at its peak, VmSize and VmData with what it has only reserved; 0 where
    the system does not tell."""
    with contextlib.suppress(OSError):
        for line in (PROC / "self/status").read_text().splitlines():
            if line.startswith(f"{what}:"):
                return int(line.split()[1]) * 1024
    return 0


def reset_peak() -> None:
    """Resets VmHWM to the memory in use, if the system allows it; freed memory is returned to the system first."""
    with contextlib.suppress(AttributeError):  # glibc's
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        (PROC / "self/clear_refs").write_text("5")


def memory_left(processes: int) -> int | None:
    """The bytes of main memory that each of so many processes here may still take: of the machine's, of their control
    group's, and below this process's own limits. None where nothing tells.
    """
    rooms = [room // processes for room in _shared_rooms()]
    for limit, used in _LIMITS:
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            rooms.append(most - used_bytes(used))
    return max(0, min(rooms)) if rooms else None


def _shared_rooms() -> Iterator[int]:
    with contextlib.suppress(OSError, StopIteration):
        lines = (PROC / "meminfo").read_text().splitlines()
        yield next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    for group in _groups():
        for limit, used, cache in _GROUP_FILES:
            with contextlib.suppress(OSError, ValueError):  # not of this version, or "max": no limit
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                taken = int((group / used).read_text()) - int(stat.get(cache, 0))
                yield int((group / limit).read_text()) - taken


def _groups() -> Iterator[Path]:
    """The control groups that this process is in, with those around them."""
    lines = []
    with contextlib.suppress(OSError):
        lines = (PROC / "self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = CGROUPS / controllers
            inner = root / path.lstrip("/")
            # In a container its own group may be mounted as the root.
            yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root))


def require_disk(folder: Path, needed: float) -> None:
    """Raises UserError where the disk of this folder has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        message = (
            f"checkpoints and the model need about {as_text(needed)}, and {as_text(free)} are free: make room, have "
            "FINETUNE_HOME name a larger disk, or choose an optimizer that remembers less (training.optim)."
        )
        raise UserError([Problem(kind=DISK, where=str(folder), message=message)])


def as_text(amount: float) -> str:
    """Bytes in a message: `1.3 GB`, `45 MB`, `1.2 MB`."""
    if amount >= 0.9995e9:
        return f"{amount / 1e9:,.1f} GB"
    return f"{amount / 1e6:,.0f} MB" if amount >= 10e6 else f"{amount / 1e6:,.1f} MB"
