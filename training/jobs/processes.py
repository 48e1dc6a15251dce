"""Linux processes: start time, parents, environment and signals. Standard library only: the supervisor starts fast."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Sequence
from pathlib import Path

SUPERVISOR = "FINETUNE_SUPERVISOR"
"""Environment variable of a job's processes: the `identity` of their supervisor."""
JOB_LINK = "job"
"""In the folder of a program that waits for its job: the link to the job's directory."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)  # at import: between fork and exec nothing may be imported


def die_with_parent() -> None:
    """Makes Linux kill this process when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose parent dies, in whatever session."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def identity(pid: int) -> str:
    """A name of a process, unique until the machine restarts; a pid alone is used again."""
    return f"{pid}:{start_ticks(pid)}"


def start_ticks(pid: int) -> int:
    """The start of a process in clock ticks since boot; 0 if it has ended or is a zombie."""
    fields = _read_stat(pid)
    return int(fields[19]) if fields and fields[0] not in ("Z", "X") else 0


def descendants(pid: int) -> list[int]:
    """All descendants of a process, zombies included, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _read_stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        queue = [child for parent in queue for child in children.get(parent, [])]
        found += queue
    return found


def show_command(argv: Sequence[str]) -> None:
    """Makes `ps` show this command for this process, as far as there is room in the memory of its own command."""
    fields = _read_stat(os.getpid())
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end in man proc
    command = b"\0".join(os.fsencode(word) for word in argv)[: end - start - 1]
    ctypes.memmove(start, command.ljust(end - start, b"\0"), end - start)


def find_readers(path: Path) -> list[int]:
    """The processes whose standard input is this file."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.path.samefile(entry / "fd" / "0", path):
                found.append(int(entry.name))
    return found


def variable(pid: int, name: str) -> str | None:
    """An environment variable of a process at its start; None without it, or if the process has ended."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.partition(b"=") for entry in environment.split(b"\0"))
    return next((value.decode() for key, _, value in pairs if key == name.encode()), None)


def handles_signal(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for the signal; the default action and ignoring are none."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def send(pid: int, number: signal.Signals) -> None:
    """Sends a signal; does nothing if the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _read_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third, the state, on; empty if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The second field is the program's name in parentheses, which may contain spaces and parentheses.
    return text[text.rindex(")") + 2 :].split()
