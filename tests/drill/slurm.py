"""A training through Slurm's queue: two hosts of one allocation, one of which dies and comes back.

Slurm's own programs run here: the controller beside the drill, a node's daemon on each host (tests/drill/hosts.py). The
batch script is that of infra/slurm.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.drill import hosts
from tests.drill.fires import UNREGISTERED
from tests.drill.ground import ROOT, SETTINGS, Ground
from tests.drill.hosts import DRILL, Host
from tests.drill.promises import Skipped, require
from tests.drill.watch import Watch
from tests.s3 import BUCKET, KEYS, S3
from training.jobs.processes import die_with_parent

OWN = ("compute.num_processes=2", "training.num_train_epochs=300", UNREGISTERED)
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged")
END_WITHIN_S = 400.0
START_S = 1.0
"""For a daemon to open its socket."""
AWAY_S = 30.0
"""Longer than SlurmdTimeout."""
CONFIGURATION = """
ClusterName=drill
SlurmctldHost={controller}({address})
SlurmctldPort=16817
SlurmdPort=16818
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdTimeout=20
ReturnToService=2
SlurmUser=root
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=host1 NodeAddr=10.77.0.1 CPUs=2
NodeName=host2 NodeAddr=10.77.0.2 CPUs=2
PartitionName=main Nodes=host1,host2 Default=YES State=UP MaxTime=INFINITE
"""


def why_not() -> str | None:
    """Why no Slurm can run here; None where it can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"there is no {missing[0]}: apt-get install slurmctld slurmd slurm-client munge"
    return hosts.why_not()


def play(ground: Ground, watch: Watch) -> str:
    """Plays it to its end. Returns what was found. Raises Broken or Skipped."""
    if reason := why_not():
        raise Skipped(reason)
    alone = ground.folder / "alone"
    run = ground.start(alone, *OWN)
    require(watch.exit_status(run, END_WITHIN_S) == 0, run.ending())
    weights = run.result()["model"]["sha256"]
    with ExitStack() as closing:
        closing.enter_context(hosts.switch())
        slurm = Slurm(ground.folder, closing)
        undisturbed = slurm.submit(ground.folder / "undisturbed.json")
        slurm.until(lambda: slurm.state(undisturbed) == "COMPLETED", undisturbed)
        found = json.loads((ground.folder / "undisturbed.json").read_text())["model"]["sha256"]
        require(found == weights, f"undisturbed: the weights are {found}, not {weights}")
        slurm.forget()
        job = slurm.submit(ground.folder / "out.json")
        slurm.until(slurm.has_checkpoint, job)
        slurm.take_down(1)
        began = time.monotonic()
        slurm.until(lambda: slurm.state(job) == "PENDING", job)
        again = time.monotonic() - began
        time.sleep(max(0.0, AWAY_S - again))
        slurm.bring_back(1)
        slurm.until(lambda: slurm.state(job) == "COMPLETED", job)
        printed = slurm.printed(job)
        require("resuming from checkpoint-" in printed, f"it did not resume: {printed[-2000:]}")
        result = json.loads((ground.folder / "out.json").read_text())
        require(result["state"] == "completed", f"the job is COMPLETED, and its run {result['state']}")
        require(result["model"]["sha256"] == weights, f"the weights are {result['model']['sha256']}, not {weights}")
        left = [pid for host in slurm.hosts for pid in host.job_pids()]
        require(not left, f"left on the hosts: {left}")
    return f"queued again {again:.0f} s after a host died; COMPLETED, the weights are {weights[:16]}, as undisturbed"


class Slurm:
    """Controller, two nodes and a bucket, until `closing` is closed."""

    def __init__(self, folder: Path, closing: ExitStack) -> None:
        self.hosts: list[Host] = []
        self._folder, self._closing = folder, closing
        self._s3 = S3(DRILL)
        closing.callback(self._s3.stop)
        for name in ("state", "spool-host1", "spool-host2", "disk"):
            (folder / name).mkdir()
        configuration = folder / "slurm.conf"
        names = {"controller": socket.gethostname(), "address": DRILL, "folder": folder}
        configuration.write_text(CONFIGURATION.format(**names))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._token = folder / "ray-token"
        self._token.write_text("d" * 64)
        self._token.chmod(0o600)
        venv = Path(shutil.which("finetune", path=f"{ROOT}/.venv/bin") or "finetune").parent
        self._env = {**os.environ, "SLURM_CONF": str(configuration), "PATH": f"{venv}:{os.environ['PATH']}"}
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        folder.chmod(0o755)
        munge = [f"--{name}={folder}/munge.{name}" for name in ("socket", "log-file", "pid-file", "seed-file")]
        self._start(["munged", "--foreground", "--force", f"--key-file={key}", *munge])
        self._start(["slurmctld", "-D", "-i"])
        for number in (1, 2):
            host = Host(number, folder / "disk", None)
            closing.callback(host.close)
            self.hosts.append(host)
            self.bring_back(number - 1)

    def submit(self, out: Path) -> str:
        """Submits the batch script; gives the job's number."""
        sets = [word for setting in (*SETTINGS, *OWN) for word in ("--set", setting)]
        script = str(ROOT / "infra/slurm/finetune.sbatch")
        run = [str(self._folder / "project" / "small.yaml"), "--json", str(out), *sets]
        store = {"FINETUNE_STORE": f"s3://{BUCKET}/slurm", **self._s3.environment(), **KEYS}
        more = {"FINETUNE_HOME": str(self._folder / "disk"), "RAY_AUTH_TOKEN_PATH": str(self._token), **store}
        argv = ["sbatch", "--parsable", "--nodes=2", f"--chdir={ROOT}", f"--output={self._folder}/slurm-%j.out", script]
        done = subprocess.run([*argv, *run], env={**self._env, **more}, capture_output=True, text=True, check=False)
        require(done.returncode == 0, f"sbatch: {done.stderr}")
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """The job's state, such as RUNNING."""
        shown = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", job], env=self._env, capture_output=True, text=True, check=False
        ).stdout
        return next((word.partition("=")[2] for word in shown.split() if word.startswith("JobState=")), "")

    def printed(self, job: str) -> str:
        """The job's output."""
        file = self._folder / f"slurm-{job}.out"
        return file.read_text() if file.exists() else ""

    def until(self, condition: Callable[[], object], job: str) -> None:
        """Waits. Raises Broken if the job fails or that takes too long."""
        began = time.monotonic()
        while not condition():
            require(self.state(job) != "FAILED", f"the job failed: {self.printed(job)[-4000:]}")
            took = time.monotonic() - began
            require(took < END_WITHIN_S, f"waited in vain, job {self.state(job)}: {self.printed(job)[-4000:]}")
            time.sleep(0.3)

    def has_checkpoint(self) -> bool:
        """Whether a checkpoint is in the bucket."""
        return any("/checkpoints/" in name and name.endswith(".json") for name in self._s3.names())

    def forget(self) -> None:
        """Empties bucket and disks."""
        for name in self._s3.names():
            self._s3.remove(name)
        for host in self.hosts:
            self._empty(host)

    def take_down(self, index: int) -> None:
        """All processes of a host end, its disk is lost."""
        self.hosts[index].send(signal.SIGKILL)
        self._empty(self.hosts[index])

    def bring_back(self, index: int) -> None:
        """Starts the node's daemon."""
        host = self.hosts[index]
        self._start([*host.inside, "slurmd", "-D", "-N", f"host{index + 1}"])

    def _empty(self, host: Host) -> None:
        host.call("find", str(host.home), "-mindepth", "1", "-delete")

    def _start(self, argv: list[str]) -> None:
        with (self._folder / "slurm.log").open("ab") as log:
            process = subprocess.Popen(argv, env=self._env, stdout=log, stderr=log, preexec_fn=die_with_parent)
        self._closing.callback(process.wait)
        self._closing.callback(process.kill)
        time.sleep(START_S)
