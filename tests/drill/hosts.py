"""Hosts on this machine: each has a network, a process table, a small disk and a Ray node of its own.

A host is a set of Linux namespaces. Its network is one cable to a switch; the drill itself is at the switch too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.processes import argv
from training.jobs.processes import die_with_parent

SWITCH = "finetune-drill"
DRILL = "10.77.0.254"
"""The drill's own address."""
HEAD = "10.77.0.1:6379"
DISK_MB = 400
INIT = """
import os, time
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.1)
"""
"""The first process of a host, which takes the ends of those whose parents have ended."""
NODE = {"raylet": "raylet", "head": "gcs_server"}
"""The programs of a Ray node; only the first host has the head."""


def why_not() -> str | None:
    """Why no hosts can be made here; None where they can."""
    if os.geteuid() != 0:
        return "only root may make networks"
    if importlib.util.find_spec("ray") is None:
        return "without the extra ray"
    missing = [tool for tool in ("ip", "unshare", "nsenter", "mount") if shutil.which(tool) is None]
    return f"there is no {missing[0]}" if missing else None


@contextlib.contextmanager
def switch() -> Iterator[None]:
    """The network between hosts."""
    subprocess.run(["ip", "link", "del", SWITCH], stderr=subprocess.DEVNULL)  # of a drill that was killed
    _ip("link", "add", SWITCH, "type", "bridge")
    _ip("address", "add", f"{DRILL}/24", "dev", SWITCH)
    _ip("link", "set", SWITCH, "up")
    try:
        yield
    finally:
        _ip("link", "del", SWITCH)


class Host:
    """One host, from its start to `close`.

    Args:
        number: 1 for the host of the cluster's head.
        home: an empty folder, which becomes a disk that only this host sees.
        env: variables of its Ray node; None for no such node.
    """

    def __init__(self, number: int, home: Path, env: dict[str, str] | None) -> None:
        self.address, self.home = f"10.77.0.{number}", home
        self._log = home.parent / f"host{number}.ray.log"
        self._cable, self._is_head = f"{SWITCH[:8]}{number}", number == 1
        self._closed = threading.Event()
        self._node: subprocess.Popen[bytes] | None = None
        Path("/tmp/ray").mkdir(exist_ok=True)
        script = (
            f"hostname host{number}; mount -t tmpfs tmpfs /tmp/ray; ip link set lo up;"
            f"mount -t tmpfs -o size={DISK_MB}m,mode=700 tmpfs {home}; echo; exec {sys.executable} -c '{INIT}'"
        )
        namespaces = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
        self._holder = subprocess.Popen(
            ["unshare", *namespaces, "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        assert self._holder.stdout is not None
        self._holder.stdout.readline()
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
        first = int(children)
        self.inside = ("nsenter", "--target", str(first), "--net", "--uts", "--ipc", "--mount", "--pid")
        """Goes before a command, to run it on the host."""
        self.seen = Path(f"/proc/{first}/root{home}")
        """Its home, from outside."""
        self._table = os.stat(f"/proc/{first}/ns/pid").st_ino
        self._first = first
        inner = f"{self._cable}i"
        subprocess.run(["ip", "link", "del", self._cable], stderr=subprocess.DEVNULL)  # of a drill that was killed
        _ip("link", "add", self._cable, "type", "veth", "peer", "name", inner, "netns", str(first))
        _ip("link", "set", self._cable, "master", SWITCH, "up")
        self.call("ip", "address", "add", f"{self.address}/24", "dev", inner)
        self.call("ip", "link", "set", inner, "up")
        if env is not None:
            threading.Thread(target=self._keep_node, args=(env,), daemon=True).start()

    def call(self, *words: str) -> None:
        """Runs a command on the host. Raises subprocess.CalledProcessError."""
        subprocess.run([*self.inside, *words], check=True, stdout=subprocess.DEVNULL)

    def link(self, state: str) -> None:
        """Plugs the cable: `up` or `down`."""
        _ip("link", "set", self._cable, state)

    def fill(self) -> None:
        """Leaves no byte of the disk free."""
        self.call("mount", "-o", f"remount,size={max(4096, shutil.disk_usage(self.seen).used)}", str(self.home))

    def clear(self) -> None:
        """Gives the disk its room again."""
        self.call("mount", "-o", f"remount,size={DISK_MB}m", str(self.home))

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to all processes of the host."""
        keeper = [self._node.pid] if self._node is not None else []  # nsenter stops with its child
        for pid in [*self.pids(), *(keeper if number == signal.SIGCONT else [])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def pids(self) -> list[int]:
        """The host's processes, without the first, which keeps it."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                is_ours = entry.name.isdigit() and os.stat(entry / "ns/pid").st_ino == self._table
                if is_ours and int(entry.name) != self._first:
                    found.append(int(entry.name))
        return found

    def node(self, part: str) -> int | None:
        """The pid of the Ray node's `raylet` or `head`."""
        return next((pid for pid in self.pids() if Path((argv(pid) or [""])[0]).name == NODE[part]), None)

    def jobs(self) -> dict[str, list[int]]:
        """The processes of jobs by part: actor, supervisor, launcher, rank."""
        found: dict[str, list[int]] = {}
        for pid in self.pids():
            words = argv(pid)
            if words and words[0].startswith("ray::Machine"):
                found.setdefault("actor", []).append(pid)
            elif words and words[-1].startswith((f"{self.home}/cluster/", f"{self.home}/waiting/")):
                launches = "training.programs.accelerate_launch" in words
                part = "supervisor" if "training.jobs.supervise" in words else "launcher" if launches else "rank"
                found.setdefault(part, []).append(pid)
        return found

    def job_pids(self) -> list[int]:
        """The processes of jobs."""
        return [pid for pids in self.jobs().values() for pid in pids]

    def close(self) -> None:
        """Ends the host and everything on it."""
        self._closed.set()
        self._holder.kill()
        self._holder.wait()

    def _keep_node(self, variables: dict[str, str]) -> None:
        """Runs the Ray node, again whenever it ends: what a service manager does."""
        role = ("--head", "--port", HEAD.rpartition(":")[2]) if self._is_head else ("--address", HEAD)
        ray = (sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", *role)
        options = ("--node-ip-address", self.address, "--num-cpus", "2", "--block", "--disable-usage-stats")
        options += ("--include-dashboard", "false") if self._is_head else ()
        while not self._closed.is_set():
            with self._log.open("ab") as log:
                env = {**os.environ, **variables}
                self._node = subprocess.Popen([*self.inside, *ray, *options], env=env, stdout=log, stderr=log)
                self._node.wait()
            self._closed.wait(1.0)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
