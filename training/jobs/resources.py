"""Cores, free memory and disk of this process, by the machine and its control groups, without torch."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from training.problems import DISK, UserError

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# A control group's limit, its use, and the cache in that use: the names in versions 2 and 1.
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_LIMITS = ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData"))


def cores() -> int:
    """The number of CPU cores that this process may use: those that it may run on, or fewer if a control group, such
    as a container, has a quota of CPU time."""
    return min([len(os.sched_getaffinity(0)), *(max(1, math.ceil(quota)) for quota in _cpu_quotas())])


def _cpu_quotas() -> Iterator[float]:
    """The CPU time that each control group of this process may use at once, in cores."""
    for group in _control_groups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # the other version, or "max": no limit
            quota, period = (group / "cpu.max").read_text().split()
            yield int(quota) / int(period)
        with contextlib.suppress(OSError, ValueError):
            period_us = int((group / "cpu.cfs_period_us").read_text())
            if (quota_us := int((group / "cpu.cfs_quota_us").read_text())) > 0:
                yield quota_us / period_us


class Kills(NamedTuple):
    """Processes that Linux has killed because memory ran out."""

    number: int
    own: bool
    """Whether they are all of this process's control group, such as its container, and not of the whole machine."""


def killed_for_memory() -> Kills:
    """The processes of this process's control group that were killed; if the kernel does not count them by group, those
    of the whole machine. The count is 0 if it is unknown."""
    for group in _control_groups("memory"):
        for name in ("memory.events", "memory.oom_control"):
            if (count := _read_count(group / name)) is not None:
                return Kills(count, own=True)
    return Kills(_read_count(PROC / "vmstat") or 0, own=False)


def _read_count(file: Path) -> int | None:
    with contextlib.suppress(OSError):
        lines = file.read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
    return None


def used_bytes(field: str = "VmRSS") -> int:
    """This process's memory: VmRSS now, VmHWM at its peak, VmSize and VmData with reserved memory; 0 for a field that
    the kernel does not have, as in some sandboxes."""
    lines = (PROC / "self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def release_memory() -> None:
    """Returns memory that is free to the system."""
    with contextlib.suppress(AttributeError):  # glibc's
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> None:
    """Resets VmHWM to the memory in use, if the system allows it; freed memory is returned to the system first."""
    release_memory()
    with contextlib.suppress(OSError):
        (PROC / "self/clear_refs").write_text("5")


def memory_left(processes: int) -> int | None:
    """The bytes of main memory that each of `processes` here may still allocate, by the machine's free memory, the
    control groups' limits and this process's limits. None if none of these is known."""
    amounts = [amount // processes for amount in _shared_memory()]
    for limit, used in _LIMITS:
        maximum = resource.getrlimit(limit)[0]
        if maximum != resource.RLIM_INFINITY:
            amounts.append(maximum - used_bytes(used))
    return max(0, min(amounts)) if amounts else None


def _shared_memory() -> Iterator[int]:
    with contextlib.suppress(OSError, StopIteration):
        lines = (PROC / "meminfo").read_text().splitlines()
        yield next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    for group in _control_groups("memory"):
        for limit, used, cache in _GROUP_FILES:
            with contextlib.suppress(OSError, ValueError):  # the other version, or "max": no limit
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                in_use = int((group / used).read_text()) - int(stat.get(cache, 0))
                yield int((group / limit).read_text()) - in_use


def _control_groups(controller: str) -> Iterator[Path]:
    """The control groups of this process that may limit `controller`, and their parents."""
    lines = []
    with contextlib.suppress(OSError):
        lines = (PROC / "self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = CGROUPS / controllers
            inner = root / path.lstrip("/")
            # In a container, the process's group may be mounted as the root.
            yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root))


def require_disk(folder: Path, needed: float) -> None:
    """Raises UserError if the folder's disk has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        message = (
            f"checkpoints and the model need about {as_text(needed)}, and {as_text(free)} are free: free some space, "
            "set FINETUNE_HOME to a larger disk, or choose an optimizer with less state (training.optim)."
        )
        raise UserError.of(DISK, str(folder), message)


def as_text(amount: float) -> str:
    """Bytes in a message: `1.3 GB`, `45 MB`, `1.2 MB`."""
    if amount >= 0.9995e9:
        return f"{amount / 1e9:,.1f} GB"
    return f"{amount / 1e6:,.0f} MB" if amount >= 10e6 else f"{amount / 1e6:,.1f} MB"
