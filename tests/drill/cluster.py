"""Faults of a cluster: while a training runs on two hosts with a Ray node each, one part after another fails.

The hosts (tests/drill/hosts.py) share no disk, but a bucket. An undisturbed training on them must end with the bytes of
two processes on this machine. After each fault, every process of that try must end within `ENDED_WITHIN_S`, the
training must end with the same bytes, and nothing of it may be left on either host.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.drill import hosts
from tests.drill.compare import Left, left_by
from tests.drill.fires import UNREGISTERED
from tests.drill.ground import Ground, Run
from tests.drill.hosts import Host
from tests.drill.promises import Broken, judge, require
from tests.drill.watch import Watch
from tests.s3 import BUCKET, KEYS, S3

SETTINGS = ("compute.num_processes=2", "training.num_train_epochs=60", UNREGISTERED)
ON_CLUSTER = (*SETTINGS, "compute.cluster=ray", "compute.num_machines=2")
ENDED_WITHIN_S = 20.0
END_WITHIN_S = 400.0
AWAY_S = 30.0
"""Longer than a machine may be silent."""


class ClusterFaults:
    """Two hosts, and the faults that come over them. Used in a `with` statement.

    Args:
        ground: where runs take place.
        watch: looks at what runs leave.
        seed: draws where a fault strikes.
    """

    def __init__(self, ground: Ground, watch: Watch, seed: int) -> None:
        self.results: dict[str, str] = {}
        self.hosts: list[Host] = []
        self._ground, self._watch, self._seed = ground, watch, seed
        self._closing = ExitStack()

    def __enter__(self) -> ClusterFaults:
        with ExitStack() as closing:
            closing.enter_context(hosts.switch())
            self._s3 = S3(hosts.DRILL)
            closing.callback(self._s3.stop)
            token = self._ground.folder / "ray.token"
            token.parent.mkdir(parents=True, exist_ok=True)
            token.write_text(secrets.token_hex(32))
            login = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
            self._shared = {"FINETUNE_STORE": f"s3://{BUCKET}/cluster", **self._s3.environment(), **KEYS, **login}
            for number in (1, 2):
                home = self._ground.folder / f"host{number}"
                home.mkdir(parents=True)
                self.hosts.append(Host(number, home, {"FINETUNE_HOME": str(home), **self._shared}))
                closing.callback(self.hosts[-1].close)
            self._closing = closing.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def undisturbed(self) -> None:
        """Trains on this machine and on the hosts. Raises Broken if the results differ."""
        alone, home = self._ground.folder / "alone", self._ground.folder / "undisturbed"
        run = self._ground.start(alone, *SETTINGS)
        require(self.status(run) == 0, f"two processes of one machine: {run.ending()}")
        local = left_by(alone, run.result())
        run = self.start(home)
        require(self.status(run) == 0, f"undisturbed: {run.ending()}")
        self._whole: Left = left_by(home, run.result())
        for name in ("model", "metrics", "curve"):
            require(getattr(local, name) == getattr(self._whole, name), f"{name} of two hosts is not that of one")
        self.require_empty()
        print(f"undisturbed, two hosts and one: sha256 of the weights {self._whole.model}", flush=True)

    def play(self, name: str) -> None:
        """Plays one fault to its end, and compares."""
        draw, home = random.Random(f"{self._seed}-{name}"), self._ground.folder / name
        for key in self._s3.names():
            self._s3.remove(key)
        for host in self.hosts:
            shutil.rmtree(host.seen / "cluster", ignore_errors=True)

        def fault() -> str:
            run = self.start(home)
            self.until(self.at_work, run)
            about = FAULTS[name](self, draw, run)
            if run.process.poll() is not None:
                self._watch.condemn(run)
                run = self.start(home)
            require(self.status(run) == 0, f"exit status {run.process.returncode}: {run.ending()}")
            require("Traceback" not in run.printed(), f"a traceback: {run.ending()}")
            differences = self._whole.differences(left_by(home, run.result()))
            require(not differences, f"{'; '.join(differences)}: {run.ending()}")
            self.require_empty()
            return about

        self.results[name] = judge(f"cluster  {name}", fault)

    def start(self, home: Path) -> Run:
        """Starts a run on the first host that trains on both."""
        return self._ground.start(
            home, *ON_CLUSTER, embedded=True, inside=self.hosts[0].inside, RAY_ADDRESS=hosts.HEAD, **self._shared
        )

    def status(self, run: Run) -> int:
        """Watches the run to its end; nothing of it may be left soon after. Returns its exit status."""
        return self._watch.exit_status(run, END_WITHIN_S, flow)

    def at_work(self) -> bool:
        """Whether both hosts train, and a checkpoint exists."""
        has_checkpoint = any(any(host.seen.glob("cluster/*/checkpoints/checkpoint-*")) for host in self.hosts)
        return has_checkpoint and all("rank" in host.jobs() for host in self.hosts)

    def until(self, condition: Callable[[], object], run: Run | None, within_s: float = 200.0) -> float:
        """Waits, while the run goes on if one is given. Returns the seconds. Raises Broken."""
        began = time.monotonic()
        while not condition():
            waited = time.monotonic() - began
            is_over = run is not None and run.process.poll() is not None
            require(waited < within_s and not is_over, f"waited in vain: {run.ending() if run else self.left()}")
            time.sleep(0.1)
        return time.monotonic() - began

    def left(self) -> list[int]:
        """The processes of jobs on all hosts."""
        return [pid for host in self.hosts for pid in host.job_pids()]

    def ended(self, pids: list[int]) -> float:
        """Waits for these processes to end. Returns the seconds that took. Raises Broken."""
        return self.until(lambda: not any(map(is_alive, pids)), None, ENDED_WITHIN_S)

    def require_empty(self) -> None:
        """Nothing of a job is on the hosts. Raises Broken."""
        with suppress(Broken):
            self.until(lambda: not self.left(), None, ENDED_WITHIN_S)
        require(not self.left(), f"left on the hosts: {self.left()}")


def flow(run: Run) -> int:
    """The process of the flow, which nsenter started."""
    return int(Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text())


def is_alive(pid: int) -> bool:
    """Whether the process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _kill(part: str) -> Callable[[ClusterFaults, random.Random, Run], str]:
    def fault(faults: ClusterFaults, draw: random.Random, run: Run) -> str:
        host, try_ = draw.choice(faults.hosts), faults.left()
        os.kill(draw.choice(host.jobs()[part]), signal.SIGKILL)
        return f"on {host.address}; the try has ended everywhere after {faults.ended(try_):.1f} s"

    return fault


def _kill_node(part: str, number: int) -> Callable[[ClusterFaults, random.Random, Run], str]:
    def fault(faults: ClusterFaults, draw: random.Random, run: Run) -> str:
        pid, try_ = faults.hosts[number - 1].node(part), faults.left()
        require(pid is not None, f"host {number} has no {part}")
        os.kill(pid or 0, signal.SIGKILL)
        after = f"the try has ended everywhere after {faults.ended(try_):.1f} s"
        return f"{after}{', the flow too' if run.process.poll() is not None else ''}"

    return fault


def killed_flow(faults: ClusterFaults, draw: random.Random, run: Run) -> str:
    """The flow is killed, and run again."""
    try_ = faults.left()
    os.kill(flow(run), signal.SIGKILL)
    run.process.wait()
    return f"the try has ended everywhere after {faults.ended(try_):.1f} s"


def cancelled(faults: ClusterFaults, draw: random.Random, run: Run) -> str:
    """Ctrl-C: a checkpoint is saved, and the run says how to go on."""
    try_, began = faults.left(), time.monotonic()
    os.kill(flow(run), signal.SIGINT)
    require(faults.status(run) == 130, f"exit status {run.process.returncode}: {run.ending()}")
    took = time.monotonic() - began
    faults.ended(try_)
    require("Run the same command again" in run.printed(), f"it does not say what to do: {run.ending()}")
    return f"the run has ended after {took:.1f} s"


def unplugged(faults: ClusterFaults, draw: random.Random, run: Run) -> str:
    """The second host is cut off for a time."""
    try_ = faults.left()
    faults.hosts[1].link("down")
    try:
        after = faults.ended(try_)
        time.sleep(AWAY_S - after)
    finally:
        faults.hosts[1].link("up")
    return f"the try has ended everywhere after {after:.1f} s"


def frozen(faults: ClusterFaults, draw: random.Random, run: Run) -> str:
    """The second host stands still for a time."""
    here, there = (host.job_pids() for host in faults.hosts)
    faults.hosts[1].send(signal.SIGSTOP)
    try:
        after = faults.ended(here)
        time.sleep(AWAY_S - after)
    finally:
        faults.hosts[1].send(signal.SIGCONT)
    return f"the try has ended on the other after {after:.1f} s, and on this one {faults.ended(there):.1f} s after it"


def full_disk(faults: ClusterFaults, draw: random.Random, run: Run) -> str:
    """A host's disk fills up; when it has room again, the run is started again."""
    host, try_ = draw.choice(faults.hosts), faults.left()
    host.fill()
    try:
        require(faults.status(run) == 1, f"exit status {run.process.returncode}: {run.ending()}")
        faults.ended(try_)
        lines = [line for line in run.printed().splitlines() if str(host.home) in line]
        name = f"host{1 + faults.hosts.index(host)}:"
        is_told = len(lines) == 1 and lines[0].startswith(name) and "Traceback" not in run.printed()
        require(is_told, f"not one message that names host and folder: {run.ending()}")
    finally:
        host.clear()
    return f"on {host.address}"


def burned(faults: ClusterFaults, draw: random.Random, run: Run) -> str:
    """A host loses all processes and its disk."""
    host, try_ = faults.hosts[1], faults.left()
    host.send(signal.SIGKILL)
    shutil.rmtree(host.seen / "cluster")
    return f"the try has ended everywhere after {faults.ended(try_):.1f} s"


FAULTS: dict[str, Callable[[ClusterFaults, random.Random, Run], str]] = {
    "rank": _kill("rank"),
    "launcher": _kill("launcher"),
    "supervisor": _kill("supervisor"),
    "actor": _kill("actor"),
    "raylet of host 1": _kill_node("raylet", 1),
    "raylet of host 2": _kill_node("raylet", 2),
    "head": _kill_node("head", 1),
    "flow": killed_flow,
    "cancelled": cancelled,
    "unplugged": unplugged,
    "frozen": frozen,
    "full disk": full_disk,
    "burned": burned,
}
