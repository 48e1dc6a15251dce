"""A disk that is really full: a tmpfs of some megabytes in a mount namespace of its own."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
TRIES = 50


def why_not() -> str | None:
    """Why no such disk can be made here; None where it can."""
    if missing := [tool for tool in ("unshare", "nsenter", "mount") if shutil.which(tool) is None]:
        return f"there is no {missing[0]}"
    tried = subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/tmp"], capture_output=True, text=True)
    return f"nothing can be mounted in a namespace: {tried.stderr.strip()}" if tried.returncode else None


class SmallDisk:
    """A disk at `place` with the files of that folder, for a process started with `inside` before its command.

    Args:
        place: a folder.
        megabytes: what fits.
    """

    def __init__(self, place: Path, megabytes: float) -> None:
        self._place, self._megabytes = place, megabytes

    def __enter__(self) -> SmallDisk:
        self._holder = subprocess.Popen(
            [*NAMESPACE, "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        self._holder.stdout.readline()  # it lives in its namespaces now
        pid = self._holder.pid
        self.inside = ("nsenter", "--target", str(pid), "--user", "--mount", "--preserve-credentials")
        self.seen = Path(f"/proc/{pid}/root{self._place}")
        """The same folder from outside."""
        size = f"size={int(self._megabytes * 1e6)},mode=700"
        with tempfile.TemporaryDirectory() as kept:
            shutil.copytree(self._place, kept, dirs_exist_ok=True)
            self._call("mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self._place))
            self._call("cp", "-a", f"{kept}/.", str(self._place))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._holder.kill()
        self._holder.wait()

    @property
    def holder(self) -> int:
        """The process that keeps it; see `enter`."""
        return self._holder.pid

    def fill(self) -> None:
        """Leaves no byte free. What others write between the look at it and its change makes the change fail."""
        for further in range(TRIES - 1, -1, -1):
            try:
                return self.resize(shutil.disk_usage(self.seen).used / 1e6)
            except subprocess.CalledProcessError:
                if not further:
                    raise

    def resize(self, megabytes: float) -> None:
        """Makes it larger or, down to what lies on it, smaller."""
        self._call("mount", "-o", f"remount,size={int(megabytes * 1e6)}", str(self._place))

    def _call(self, *argv: str) -> None:
        subprocess.run([*self.inside, *argv], check=True, stdout=subprocess.DEVNULL)


def enter(holder: int) -> None:
    """Lets this process, which must have but one thread, see the disk that another holds. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    for namespace in ("user", "mnt"):
        with open(f"/proc/{holder}/ns/{namespace}") as place:
            if libc.setns(place.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
