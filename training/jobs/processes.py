"""What the operating system knows about processes: birth, parents, and dying together.

Standard library only, so that the supervisor starts fast. Linux answers all of it; elsewhere `start_ticks`
gives 0, `descendants` gives nothing, and the calls that tie lives together do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

LINUX = sys.platform.startswith("linux")
SUPERVISOR = "FINETUNE_SUPERVISOR"
"""The environment variable by which a job's processes know their supervisor: its `identity`."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Loaded once, here: between fork and exec nothing may be imported.
_libc = ctypes.CDLL(None, use_errno=True) if LINUX else None


def die_with_parent() -> None:
    """Ask Linux to send SIGKILL to this process when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies, whatever its session."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def identity(pid: int) -> str:
    """Names one process for as long as the machine is up; the pid alone is used again."""
    return f"{pid}:{start_ticks(pid)}"


def start_ticks(pid: int) -> int:
    """When `pid` started, in clock ticks since boot, or 0 when it is gone, a zombie, or not known."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in ("Z", "X") else 0


def descendants(pid: int) -> list[int]:
    """Every descendant of `pid`, parents before children, the dead that nobody has collected included."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir() if LINUX else ():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        queue = [child for parent in queue for child in children.get(parent, [])]
        found += queue
    return found


def reading_from(path: Path) -> list[int]:
    """The processes whose standard input is this file."""
    found = []
    for entry in Path("/proc").iterdir() if LINUX else ():
        try:
            if entry.name.isdigit() and os.path.samefile(entry / "fd" / "0", path):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def variable(pid: int, name: str) -> str | None:
    """The environment variable that the process was started with; None without it, or when `pid` is gone."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    start = f"{name}=".encode()
    found = [entry for entry in environment.split(b"\0") if entry.startswith(start)]
    return found[0][len(start) :].decode() if found else None


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether `pid` has a handler for the signal (neither the default action nor ignoring it)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def send(pid: int, number: signal.Signals) -> None:
    """Send the signal; a process that is gone is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if _libc is not None and _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third (state) on; none when the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The second field is the program's name in parentheses and may itself hold spaces and parentheses.
    return text[text.rindex(")") + 2 :].split()
