"""The fork server of a run: it imports what programs need, once, and starts each program as a fork of itself.

    python -m training.jobs.fork_server MODULE ... ROOM

It imports the modules in this order and prints the name of each. ROOM is a text of spaces, in whose memory a fork shows
its own command. The standard input is a socket, from which it reads requests, also between two imports. A request is
the length of a JSON object in DIGITS digits, with two open files, and then the object:

    {"folder": "/…/jobs/KEY", "argv": ["…/python", "-m", "MODULE", …], "env": {…}, "grace_s": 20}

The answer is the pid of the job's supervisor in DIGITS digits, or 0 if the file of an imported module has changed: then
only a new process runs the code that the artifact's key names. The supervisor is a fork with the two files as its
standard input and output. It waits there for BEGIN: if the answer is lost, its starter starts another one. The program
is a fork of the supervisor. If that is the launcher of a single process, this process is a fork as well. A job
outlives this process, which ends when the other end of its socket is closed.

Nothing here starts a thread of Python's, uses a GPU or draws random numbers. OpenBLAS and jemalloc start threads when
numpy and pyarrow are imported, and handle forks themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from training.jobs.processes import die_with_parent, show_command
from training.jobs.search_path import files_changed, hide_package, imported_files, use_search_path
from training.jobs.supervise import STOPPED_BEFORE_START, Supervisor

DIGITS = 10
"""Of a length or a pid in a message."""
BEGIN = b"\n"
"""What a supervisor reads from its standard input before it begins."""
_new_process = subprocess.Popen
LAUNCHER = "training.programs.accelerate_launch"
HIDDEN = ("deepspeed", "peft")
"""Packages that few programs need: see `restart_with`. Libraries import them where they are installed, which takes
seconds."""


def main() -> None:
    """Imports the modules of the command line and serves requests. In a fork, runs the program."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the starter
    use_search_path()
    connection = socket.socket(fileno=os.dup(0))
    statuses: list[int] = []
    atexit.register(_exit_at_once, statuses)  # before all imports: the first one that is registered is called last
    gc.disable()
    argv = _import_and_serve(connection, sys.argv[1:-1])
    gc.enable()
    try:
        _run(argv)
        statuses.append(0)
    except SystemExit as ended:
        if isinstance(ended.code, int):
            statuses.append(ended.code)
        raise


def _run(argv: list[str]) -> None:
    """Runs a program; if it is the launcher, also the program that is a fork of it."""
    if argv[0] == LAUNCHER:
        subprocess.Popen = _start_program  # type: ignore[assignment, misc]
    sys.modules.pop(argv[0], None)  # else runpy warns that it runs twice
    sys.argv = argv
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    except _Program as program:
        subprocess.Popen = _new_process  # type: ignore[misc]
        sys.argv = program.argv
        runpy.run_module(program.argv[0], run_name="__main__", alter_sys=True)


def _exit_at_once(statuses: list[int]) -> None:
    """Ends a program after its exit handlers. To free all objects, Python would need half a second, and the memory of
    this process a second time."""
    if statuses:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(statuses[0])


def _import_and_serve(connection: socket.socket, modules: Sequence[str]) -> list[str]:
    """Returns in the process of a program alone: its module and arguments."""
    imported = cache(imported_files)
    with contextlib.ExitStack() as hidden:
        for package in HIDDEN:
            hidden.enter_context(hide_package(package))
        for module in modules:
            importlib.import_module(module)
            print(module, flush=True)
            imported.cache_clear()  # there are no other imports in this process
            while select.select([connection], [], [], 0)[0]:
                if program := _serve(connection, imported):
                    return program
    os.dup2(2, 1)  # the reader of the names finds their end
    while True:
        if program := _serve(connection, imported):
            return program


def _serve(connection: socket.socket, imported: Callable[[], str]) -> list[str] | None:
    """Answers the next request. In the process of the program, returns its module and arguments."""
    header, files, _, _ = socket.recv_fds(connection, DIGITS, 2)
    if not header:
        sys.exit(0)
    request = json.loads(connection.recv(int(header), socket.MSG_WAITALL))
    changed = files_changed(imported())
    gc.freeze()  # a garbage collection in a fork would copy the memory of all these objects
    supervisor = 0 if changed else os.fork()
    if supervisor or changed:
        for file in files:
            os.close(file)
        connection.sendall(b"%*d" % (DIGITS, supervisor))
        return None
    connection.close()
    os.setsid()
    for descriptor, file in ((0, files[0]), (1, files[1]), (2, files[1])):
        os.dup2(file, descriptor)
    for file in files:
        os.close(file)
    if os.read(0, len(BEGIN)) != BEGIN:
        os._exit(STOPPED_BEFORE_START)
    os.environ.clear()
    os.environ.update(request["env"])
    folder, argv = Path(request["folder"]), request["argv"]
    show_command([sys.executable, "-m", "training.jobs.supervise", str(folder), "--", *argv])
    status = Supervisor(folder, argv, request["grace_s"], forks=True).run()
    if status is not None:
        os._exit(status)
    show_command(argv)
    return list(argv[argv.index("-m") + 1 :])


class _Program(BaseException):
    """Leaves the frames of the launcher, in the fork that becomes the program."""

    def __init__(self, argv: list[str]) -> None:
        super().__init__()
        self.argv = argv


class _ForkedProgram:
    """A program with the part of Popen's interface that accelerate's launcher needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _start_program(argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> Any:
    """Popen in the launcher: a program of ours is a fork of it."""
    if [*argv[:2]] != [sys.executable, "-m"] or options:
        return _new_process(argv, env=env, **options)
    if pid := os.fork():
        return _ForkedProgram(pid)
    os.environ.clear()
    os.environ.update(env or {})
    show_command(argv)
    raise _Program([*argv[2:]])


if __name__ == "__main__":
    main()
