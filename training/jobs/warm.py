"""The warm process of a run: it imports what programs need, once, and starts each program as a fork of itself.

    python -m training.jobs.warm MODULE ... ROOM

It imports the modules in this order. ROOM is a text of spaces, in whose memory a fork shows its own command. The
standard input is a socket, from which it reads requests, also between two imports. A request is the length of a JSON
object in DIGITS digits, with two open files, and then the object:

    {"folder": "/…/jobs/KEY", "argv": ["…/python", "-m", "MODULE", …], "env": {…}, "grace_s": 20}

The answer is the pid of the job's supervisor in DIGITS digits, or 0 if the file of an imported module has changed: then
only a new process runs the code that the artifact's key names. The supervisor is a fork with the two files as its
standard input and output, and the program is a fork of the supervisor. A job outlives this process, which ends when the
other end of its socket is closed.

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
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from training.jobs.processes import die_with_parent, show_command
from training.jobs.search_path import hide_package, use_search_path
from training.jobs.supervise import Supervisor

DIGITS = 10
"""Of a length or a pid in a message."""
_STARTED = time.time()
HIDDEN = ("deepspeed", "peft")
"""Packages that no forked program needs. Libraries import them where they are installed, which takes seconds."""


def main() -> None:
    """Imports the modules of the command line and serves requests. In a fork, runs the program."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the starter
    use_search_path()
    connection = socket.socket(fileno=os.dup(0))
    statuses: list[int] = []
    atexit.register(_exit_at_once, statuses)  # before all imports: the first one that is registered is called last
    gc.disable()
    sys.argv = _import_and_serve(connection, sys.argv[1:-1])
    gc.enable()
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        statuses.append(0)
    except SystemExit as ended:
        if isinstance(ended.code, int):
            statuses.append(ended.code)
        raise


def _exit_at_once(statuses: list[int]) -> None:
    """Ends a program after its exit handlers. To free all objects, Python would need half a second, and the memory of
    this process a second time."""
    if statuses:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(statuses[0])


def _import_and_serve(connection: socket.socket, modules: Sequence[str]) -> list[str]:
    """Returns in the process of a program alone: its module and arguments."""
    with contextlib.ExitStack() as hidden:
        for package in HIDDEN:
            hidden.enter_context(hide_package(package))
        for module in modules:
            importlib.import_module(module)
            while select.select([connection], [], [], 0)[0]:
                if program := _serve(connection):
                    return program
    gc.freeze()  # a garbage collection in a fork would copy the memory of all these objects
    while True:
        if program := _serve(connection):
            return program


def _serve(connection: socket.socket) -> list[str] | None:
    """Answers the next request. In the process of the program, returns its module and arguments."""
    header, files, _, _ = socket.recv_fds(connection, DIGITS, 2)
    if not header:
        sys.exit(0)
    request = json.loads(connection.recv(int(header), socket.MSG_WAITALL))
    changed = _modules_changed()
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
    os.environ.clear()
    os.environ.update(request["env"])
    folder, argv = Path(request["folder"]), request["argv"]
    show_command([sys.executable, "-m", "training.jobs.supervise", str(folder), "--", *argv])
    status = Supervisor(folder, argv, request["grace_s"], forks=True).run()
    if status is not None:
        os._exit(status)
    show_command(argv)
    return list(argv[argv.index("-m") + 1 :])


def _modules_changed() -> bool:
    """Whether the file of an imported module has changed since this process started."""
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    try:
        return any(os.stat(spec.origin).st_ctime >= _STARTED for spec in specs if spec and spec.has_location)
    except OSError:  # it was removed
        return True


if __name__ == "__main__":
    main()
