"""The Python of the tests: a program of ours is a fork of a process with the libraries imported, which it asks of the
server of forks and follows to its end.

Tests start it thousands of times, so it imports little: typing, pathlib and subprocess would take half of its time.
"""

from __future__ import annotations

import array
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time

FOLDER = "FINETUNE_TESTS_FORK_SERVER"
"""Environment variable: the server's folder."""
WORKER = "import sys;exec(eval(sys.stdin.readline()))"
"""The code of a worker process of pytest-xdist."""
COMMANDS, PROGRAMS, SERVERS = "commands", "programs", "servers"
"""The three levels of the server."""
FORKED = {
    **dict.fromkeys(("prefect", "tests.flows.forked", "tests.hub.stages", "tasks.serving.server"), COMMANDS),
    **dict.fromkeys(("training.jobs.fork_server", "tests.flows.scarce_memory"), PROGRAMS),
    **dict.fromkeys(("tasks.services.prefect_server", "tasks.services.mlflow_server", "uvicorn"), SERVERS),
}
OWN = ("training.programs.", "tasks.registry.", "tasks.prediction.")
PASSED_FILE = "--fd="
"""The option that names an open file for a program besides its standard streams."""
LENGTH = struct.Struct("!I")
STATUS = struct.Struct("!i")


def python(*words: str) -> None:
    """Runs the command line `python [-u] -m MODULE ...` in a fork, or all others in a new Python."""
    arguments = [word for word in words if word != "-u"]
    kind, name, *_ = [*arguments, "", ""]
    rest = arguments[2:]
    level = level_of(name) if kind == "-m" else None
    if (kind, name) == ("-c", WORKER):
        connection, pid = start("run_code", [name], PROGRAMS, [0, 1, 2])
    elif level is not None:
        passed = [word for word in rest if word.startswith(PASSED_FILE)]
        files = [0, 1, 2, *(int(word.removeprefix(PASSED_FILE)) for word in passed)]
        rest = [f"{PASSED_FILE}{3 + passed.index(word)}" if word in passed else word for word in rest]
        connection, pid = start("run_module", [name, *rest], level, files)
    else:
        os.execv(sys.executable, [sys.executable, *words])
    code = _follow(connection, pid)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def level_of(module: str) -> str | None:
    """The level of a program that is forked; None for one that a new Python runs."""
    return FORKED.get(module, PROGRAMS if module.startswith(OWN) else None)


def start(function: str, args: list[str], level: str, files: list[int]) -> tuple[socket.socket, int]:
    """Starts a fork that calls this function of the server's module. It looks for modules where the server does."""
    request = (pickle.dumps((function, args)), dict(os.environ), os.getcwd(), [], False)
    connection = connect(level)
    return connection, send_request(connection, request, files)


def connect(level: str) -> socket.socket:
    """The connection to a level of the server, which may have begun to start a moment ago."""
    folder, deadline = os.environ[FOLDER], time.monotonic() + 300
    while not os.path.exists(f"{folder}/{level}"):
        if os.path.exists(f"{folder}/failed") or time.monotonic() > deadline:
            with open(f"{folder}/server.log") as log:
                raise RuntimeError(f"the server of forks does not start: {log.read()}")
        time.sleep(0.02)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(f"{folder}/{level}")
    return connection


def send_request(connection: socket.socket, request: tuple[object, ...], files: list[int]) -> int:
    """Sends the values of a fork_server.Request. Returns the pid of the fork."""
    message, descriptors = pickle.dumps(request), array.array("i", files)
    connection.sendmsg([LENGTH.pack(len(message))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    connection.sendall(message)
    return int(STATUS.unpack(read(connection, STATUS.size))[0])


def ended(connection: socket.socket, timeout_s: float | None) -> int | None:
    """The exit code of a fork, negative after a signal; None if it still runs."""
    if not select.select([connection], [], [], timeout_s)[0]:
        return None
    with connection:
        return int(STATUS.unpack(read(connection, STATUS.size))[0])


def read(connection: socket.socket, size: int) -> bytes:
    """So many bytes. Raises EOFError if the server has ended."""
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise EOFError("the server of forks has ended")
        found += part
    return found


def _follow(connection: socket.socket, pid: int) -> int:
    """Passes signals on, as soon as the fork or processes below it have a handler: as the supervisor does."""
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: received.append(number))
    while (code := ended(connection, 0.05)) is None:  # a signal does not end a longer wait
        if received and _pass_on(signal.Signals(received[0]), pid):
            del received[0]
    return code


def _pass_on(number: signal.Signals, pid: int) -> bool:
    """Sends a signal to the processes, from this one down, that have a handler. Returns whether there was one."""
    from training.jobs.processes import descendants, handles_signal, send

    below: set[int] = set()
    for one in [pid, *descendants(pid)]:
        if one not in below and handles_signal(one, number):
            below |= {one, *descendants(one)}
            send(one, number)
    return bool(below)
