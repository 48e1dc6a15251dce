"""Jobs on this machine, each under training.jobs.supervise. A job stops when this process ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tasks.environment import environment
from tasks.jobs import early_launch
from tasks.jobs.supervisors import Handle, poll, start_supervisor, stop, wait
from training.jobs.protocol import LOGS, OUTCOMES

__all__ = ["Handle", "logs", "poll", "start", "stop", "wait"]


def start(job: Path, argv: Sequence[str], env: Mapping[str, str]) -> Handle:
    """Starts `argv` with the job's folder as its last argument, under a supervisor.

    `env` has precedence over this process's environment; secrets belong there and not into argv.
    """
    job = job.resolve()
    (job / LOGS).mkdir(parents=True, exist_ok=True)
    for outcome in job.glob(OUTCOMES):
        outcome.unlink()  # of an earlier try: this one may be killed before it writes its own
    (job / LOGS / "supervisor.log").touch()  # a log of each try, also of one that is killed before it takes the job
    return early_launch.take(job, argv, env) or start_supervisor(job, [*argv, str(job)], environment(env))


def logs(handle: Handle) -> Path:
    """The output of the job's last try."""
    tries = (Path(handle.job) / LOGS).glob("[!r]*.log")  # ranks above 0 have files of their own
    return max(tries, key=lambda path: path.stat().st_mtime_ns)
