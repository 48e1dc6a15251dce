"""The run's side of its fork server (training/jobs/fork_server.py), from which the supervisors of jobs are forked."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from tasks.environment_variables import added_environment, environment
from training.jobs.fork_server import BEGIN, DIGITS

TRAINING = (
    *("accelerate.commands.launch", "training.engine.inference", "training.models.loading"),
    *("training.task_types.task_type", "training.engine.task_setup", "training.evaluation.metrics.labels"),
    "training.engine.trainer",
)
MODULES = (
    *TRAINING,
    *("training.evaluation.bootstrap", "training.evaluation.plots"),
    *("mlflow", "mlflow.transformers", "tasks.tracking.connection"),
)
"""What the stages' programs import that takes long, in the order in which a run needs it."""

ROOM = " " * 2000
"""A last argument, whose memory is used to show the commands of forks."""

# Of this process: programs of all threads are forks of one fork server.
_allowed = False
_current: ForkServer | None = None


class ForkServer:
    """A process that has imported MODULES, and what it starts."""

    def __init__(self) -> None:
        self._environment = environment({})
        self._connection, theirs = socket.socketpair()
        self._turn = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "training.jobs.fork_server", *MODULES, ROOM],
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                # Without this, libraries that look for a GPU would start CUDA, which does not survive a fork.
                env=self._environment | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def fork(self, request: Mapping[str, Any], stdin: int, lifeline: int, log: IO[bytes]) -> int:
        """Starts a supervisor and returns its pid; 0 if it has to be started as a process of its own.

        A supervisor whose pid is lost, because the fork server is killed, ends without starting its job when
        `lifeline` is closed.

        Args:
            request: as in training.jobs.fork_server.
            stdin: the supervisor's standard input.
            lifeline: the other end of its standard input.
            log: the supervisor's output.
        """
        if not self._can_run(request["argv"], request["env"]):
            return 0
        body = json.dumps(request).encode()
        try:
            with self._turn:
                socket.send_fds(self._connection, [b"%*d" % (DIGITS, len(body))], [stdin, log.fileno()])
                self._connection.sendall(body)
                pid = int(self._connection.recv(DIGITS, socket.MSG_WAITALL) or 0)
        except OSError:  # it was killed
            return 0
        if pid:
            os.write(lifeline, BEGIN)
        return pid

    def _can_run(self, argv: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether a fork does the same as a new process: libraries read some variables when they are imported."""
        same = all(env.get(name) == self._environment.get(name) for name in added_environment({}))
        return same and list(argv[:2]) == [sys.executable, "-m"]

    def wait_for(self, module: str) -> None:
        """Waits until the process has imported the module, or all of its modules, or has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.rstrip() == module:
                return

    def close(self) -> None:
        """Ends the process. Its jobs go on."""
        self._connection.close()
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()  # last: a thread may still read it


@contextlib.contextmanager
def forked_programs() -> Iterator[None]:
    """Inside, programs are forks of a fork server, which starts when it is first needed and ends with the block."""
    global _allowed, _current
    outer, _allowed = _allowed, True
    try:
        yield
    finally:
        _allowed = outer
        if not outer and _current is not None:
            _current.close()
            _current = None


def start() -> None:
    """Starts the fork server: inside `forked_programs`, as soon as a program will be needed."""
    global _current
    if _allowed and _current is None:
        _current = ForkServer()


def wait_for(module: str) -> None:
    """Waits until the fork server has imported one of MODULES, if there is a fork server."""
    if _current is not None:
        _current.wait_for(module)


def fork(request: Mapping[str, Any], stdin: int, lifeline: int, log: IO[bytes]) -> int:
    """Starts a supervisor as a fork of the fork server and returns its pid; 0 outside `forked_programs`. See
    ForkServer.fork."""
    start()
    return _current.fork(request, stdin, lifeline, log) if _current else 0
