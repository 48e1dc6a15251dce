"""A disk that is really full: a tmpfs of some megabytes in a mount namespace of its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import TracebackType

NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
BALLAST = "ballast"


def why_not() -> str | None:
    """Why no such disk can be made here; None where it can."""
    if missing := [tool for tool in ("unshare", "nsenter", "mount") if shutil.which(tool) is None]:
        return f"there is no {missing[0]}"
    tried = subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "tmpfs", "/tmp"], capture_output=True, text=True)
    return f"nothing can be mounted in a namespace: {tried.stderr.strip()}" if tried.returncode else None


class SmallDisk:
    """A disk at `place` for whoever is started with `inside` before its command, empty but for what lay there.

    Args:
        place: a folder.
        megabytes: what fits.
    """

    def __init__(self, place: Path, megabytes: int) -> None:
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
        kept = shutil.copytree(self._place, self._place.with_name(f"{self._place.name}-kept"))
        self._call("mount", "-t", "tmpfs", "-o", f"size={self._megabytes}m,mode=700", "tmpfs", str(self._place))
        self._call("cp", "-a", f"{kept}/.", str(self._place))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._holder.kill()
        self._holder.wait()

    def fill(self) -> None:
        """Leaves no byte free."""
        self._call("sh", "-c", f"cat /dev/zero > {self._place}/{BALLAST} 2>/dev/null || true")

    def make_room(self) -> None:
        """Takes away again what filled it."""
        self._call("rm", f"{self._place}/{BALLAST}")

    def _call(self, *argv: str) -> None:
        subprocess.run([*self.inside, *argv], check=True, stdout=subprocess.DEVNULL)
