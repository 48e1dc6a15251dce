"""Processes of the tests that are forks of one process with the libraries imported: an import costs more than most
tests do.

`call(function, ...)` runs a function in a fork and returns its result; `Fork(function, ...)` starts one. In tests,
`sys.executable` is a Python whose programs are forks (`forked_python.py`), and so are worker processes of pytest-xdist.
A test of a process that has to import its libraries itself, such as one that looks at `sys.modules`, uses NEW_PYTHON.

A fork has the environment, the search path, the folder and the files of the process that asks for it, and ends with it.
The server starts when it is first needed and ends with the tests. It has three levels: commands are forks of a process
with Prefect and MLflow, Prefect's servers of one with the modules of its server as well, and all others of one with
torch and transformers, so that a command has the modules of a real one.
"""

from __future__ import annotations

import array
import base64
import contextlib
import fcntl
import io
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from tests.forked_python import COMMANDS as COMMANDS
from tests.forked_python import FOLDER as FOLDER
from tests.forked_python import LENGTH, PROGRAMS, SERVERS, STATUS, connect, ended, level_of, read, send_request

OWNER = "FINETUNE_TESTS_PID"
"""Environment variable: the process that the server ends with."""
PAUSE = "FINETUNE_TESTS_PAUSE_S"
"""Environment variable: seconds to wait after each step of a training, for a test that stops it in its middle."""
ROOT = Path(__file__).resolve().parents[1]
NEW_PYTHON = sys.executable
"""A Python that imports nothing."""
PACKAGES = {COMMANDS: ("flows", "tasks.cache", "tasks.services", "tasks.prefect"), PROGRAMS: ("training",), SERVERS: ()}
"""By level: the packages of this project whose modules are all imported."""
LIBRARIES = {
    COMMANDS: (
        *("mlflow", "mlflow.store.tracking.sqlalchemy_store", "mlflow.store.model_registry.sqlalchemy_store"),
        *("prefect.cli._app", "prefect.cli.flow_run", "prefect.cli.deployment", "prefect.flow_engine", "tests.warm"),
    ),
    PROGRAMS: (
        *("transformers.models.bert.modeling_bert", "peft", "accelerate.commands.launch", "sklearn.metrics"),
        *("deepspeed.runtime.zero.muon.muon_optimizer", "mlflow.pyfunc", "mlflow.transformers", "pytest"),
        *("torch.utils.serialization.config", "tests.training.warm"),
    ),
    SERVERS: ("uvicorn", "prefect.server.api.server", "mlflow.server.fastapi_app"),
}
"""By level: the libraries that the forks of the tests need."""
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A picture in the format PNG, in base64."""
_search_path: list[str] = []


def prepare(folder: str) -> None:
    """Makes this process, pytest's, the owner of a server in this folder, which starts later."""
    os.environ |= {FOLDER: folder, OWNER: str(os.getpid())}
    begin = f"#!{NEW_PYTHON} -S\nimport sys; sys.path.insert(0, {str(ROOT)!r}); from tests.forked_python import python"
    for name, arguments in (("python", ""), ("finetune", "'-m', 'tests.flows.forked', ")):
        file = Path(folder, name)
        file.write_text(f"{begin}; python({arguments}*sys.argv[1:])\n")
        file.chmod(0o700)


def search_path_of_shell() -> str:
    """PATH with the `python` and `finetune` of the environment; in a test, the two that fork come first."""
    forks = [os.environ[FOLDER]] if FOLDER in os.environ else []
    return os.pathsep.join([*forks, str(Path(NEW_PYTHON).parent), os.environ["PATH"]])


def forked_python() -> str:
    """The path of a Python whose programs are forks."""
    return f"{os.environ[FOLDER]}/python"


class Request(NamedTuple):
    """A fork to start. Its standard streams, and perhaps a pipe for its result, come as open files."""

    function: bytes
    """The pickled function, or the name of one of this module, and its arguments."""
    environment: dict[str, str]
    folder: str
    search_path: list[str]
    own_session: bool


class Fork:
    """A function in a process of its own, with the methods of multiprocessing.Process and subprocess.Popen.

    Args:
        target: A function that a new process can import.
        args: Its arguments.
        env: The process's environment; by default that of this process.
        files: Its standard input, output and error; by default those of this process.
        level: COMMANDS for a process without torch and transformers.
        own_session: Whether it has a session of its own, as a command of a shell.
        search_path: Where it looks for modules; by default where this process does. Empty: where the server does.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        args: Sequence[Any] = (),
        *,
        env: Mapping[str, str] | None = None,
        files: Sequence[int | IO[Any]] = (0, 1, 2),
        level: str = PROGRAMS,
        own_session: bool = False,
        search_path: Sequence[str] | None = None,
    ) -> None:
        self._search_path = search_path
        self._target, self._args, self._env, self._files = target, args, env, files
        self._level, self._own_session = level, own_session
        self.exitcode: int | None = None
        self.pid = 0

    def start(self) -> Fork:
        request = Request(
            pickle.dumps((self._target, self._args)),
            dict(os.environ if self._env is None else self._env),
            os.getcwd(),
            [*sys.path] if self._search_path is None else [*self._search_path],
            self._own_session,
        )
        start_server()
        self._connection = connect(self._level)
        files = [file if isinstance(file, int) else file.fileno() for file in self._files]
        self.pid = send_request(self._connection, tuple(request), files)
        return self

    def join(self, timeout: float | None = None) -> int | None:
        """Waits for the end of the process; returns the exit code, negative after a signal, None if it still runs."""
        if self.exitcode is None:
            self.exitcode = ended(self._connection, timeout)
        return self.exitcode

    def is_alive(self) -> bool:
        return self.join(0) is None

    def poll(self) -> int | None:
        return self.join(0)

    def wait(self, timeout: float | None = None) -> int | None:
        return self.join(timeout)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.is_alive():
            os.kill(self.pid, number)


def call(function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> Any:
    """The result of the function in a fork; the exception that it raised is raised here."""
    import tempfile

    with tempfile.TemporaryFile() as answer:
        process = Fork(_answer, (function, args), files=(0, 1, 2, answer)).start()
        if process.join(timeout_s) is None:
            process.kill()
        assert process.join() == 0, f"{function.__name__} ended with {process.exitcode}"
        answer.seek(0)
        result, error = pickle.load(answer)
    if error is not None:
        raise error
    return result


def _answer(function: Callable[..., Any], args: Sequence[Any]) -> None:
    result = error = None
    try:
        result = function(*args)
    except Exception as raised:
        error = raised
    with open(3, "wb") as answer:
        pickle.dump((result, error), answer)


def start_server() -> None:
    """Starts the server, once in all processes of the tests."""
    folder = os.environ[FOLDER]
    with open(f"{folder}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(f"{folder}/server.log"):
            return
        # The models of tests are too small for more threads.
        env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
        with open(f"{folder}/server.log", "wb") as log:
            subprocess.Popen(
                [NEW_PYTHON, "-m", "tests.fork_server"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                cwd=ROOT,
                start_new_session=True,
            )


# The server.


def main() -> int:
    """Imports the libraries and serves requests. In a fork, runs its function and returns its exit code."""
    import gc

    gc.disable()  # until all is imported: nothing of it is ever garbage
    _search_path[:] = [path for path in sys.path if path not in ("", str(ROOT))]
    owner = os.pidfd_open(int(os.environ[OWNER]))
    level = COMMANDS
    _import_all(level)
    for more in (PROGRAMS, SERVERS):
        if not os.fork():
            level = more
            _import_all(level)
            break
    else:  # while the others import
        import tests.flows.warm  # noqa: F401

        assert not {"torch", "transformers", "huggingface_hub"} & sys.modules.keys()
    return _serve(f"{os.environ[FOLDER]}/{level}", owner)


def _import_all(level: str) -> None:
    import importlib
    import pkgutil

    modules = [*LIBRARIES[level]]
    for package in map(importlib.import_module, PACKAGES[level]):
        modules += [name for _, name, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    for module in modules:
        with contextlib.suppress(ImportError):  # of a package that is not installed
            importlib.import_module(module)


def _serve(path: str, owner: int) -> int:
    import gc
    import weakref

    gc.collect()
    gc.freeze()  # a collection in a fork would copy the memory of all these objects
    gc.enable()
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # a fork that ends would take torch's libraries of operators apart
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"{path}.aside")
        listener.listen(64)
        os.rename(f"{path}.aside", path)
        running: dict[int, tuple[int, socket.socket]] = {}  # descriptor of a process: its pid and who waits for it
        waiting: dict[int, int] = {}  # descriptor of who waits: the pid
        while True:
            ready = select.select([owner, listener, *running, *waiting], [], [])[0]
            if owner in ready:
                for pid in waiting.values():
                    os.kill(pid, signal.SIGKILL)
                return 0
            for descriptor in ready:
                if descriptor in running:
                    pid, connection = running.pop(descriptor)
                    waiting.pop(connection.fileno(), None)
                    os.close(descriptor)
                    _report(pid, connection)
                elif descriptor in waiting:  # the one who waits has ended: nothing is ever sent
                    os.kill(waiting.pop(descriptor), signal.SIGKILL)
            if listener in ready:
                connection = listener.accept()[0]
                started = _fork(connection)
                if not started:
                    connection.close()
                    continue
                if not isinstance(started, int):
                    listener.close()
                    for descriptor, (_, other) in running.items():
                        os.close(descriptor)
                        other.close()
                    os.close(owner)
                    return _run(*started)
                running[os.pidfd_open(started)] = (started, connection)
                waiting[connection.fileno()] = started


def _report(pid: int, connection: socket.socket) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with connection, contextlib.suppress(OSError):
        connection.sendall(STATUS.pack(code))


def _fork(connection: socket.socket) -> int | tuple[Request, array.array[int]]:
    """Starts a process. Returns its pid, 0 if who asked was killed before; in the process, the request and its
    files."""
    files = array.array("i")
    try:
        header, ancillary, _, _ = connection.recvmsg(LENGTH.size, socket.CMSG_SPACE(8 * 4))
        for _, _, data in ancillary:
            files.frombytes(data)
        request = Request(*pickle.loads(read(connection, LENGTH.unpack(header)[0])))
    except (EOFError, OSError, struct.error):
        for file in files:
            os.close(file)
        return 0
    if pid := os.fork():
        for file in files:
            os.close(file)
        with contextlib.suppress(OSError):
            connection.sendall(STATUS.pack(pid))
        return pid
    from training.jobs.processes import die_with_parent

    die_with_parent()
    connection.close()
    return request, files


def _run(request: Request, files: array.array[int]) -> int:
    """Runs the function of a fork. Returns the exit code."""
    # Above all the numbers that they get.
    high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 100) for file in files]
    for number, file in enumerate(high):
        os.dup2(file, number)
        os.close(file)
    for file in files:
        if file >= len(files):
            os.close(file)
    if request.own_session:
        os.setsid()
    changed = os.environ.keys() ^ request.environment.keys()
    changed |= {name for name, value in request.environment.items() if os.environ.get(name) != value}
    os.environ.update(request.environment)  # first: at no moment it has no home of its own
    for name in os.environ.keys() - request.environment.keys():
        del os.environ[name]
    os.chdir(request.folder)
    sys.path[:] = request.search_path or sys.path
    sys.argv = [sys.argv[0]]
    sys.executable = forked_python()
    sys.stdin, sys.stdout, sys.stderr = (
        io.TextIOWrapper(open(number, mode, closefd=False), encoding="utf-8", line_buffering=mode == "wb")  # noqa: SIM115
        for number, mode in ((0, "rb"), (1, "wb"), (2, "wb"))
    )
    function, args = pickle.loads(request.function)
    function = globals()[function] if isinstance(function, str) else function
    uses_prefect = function is not run_module or level_of(args[0]) != PROGRAMS
    if uses_prefect and any(name.startswith("PREFECT_") for name in changed):
        refresh_prefect_settings(logging=any(name.startswith("PREFECT_LOGGING_") for name in changed))
    if "torch" in sys.modules and "OMP_NUM_THREADS" in changed:
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    try:
        function(*args)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else 1 if ended.code else 0
    return 0


def refresh_prefect_settings(logging: bool = True) -> None:
    """Prefect reads the environment again, which it does only at its import; logging costs twice as much as the rest
    and depends on few of the variables."""
    if context := sys.modules.get("prefect.context"):
        from prefect.logging.configuration import setup_logging

        context.GLOBAL_SETTINGS_CONTEXT = context.root_settings_context()
        if logging:
            setup_logging(incremental=False)


def _end(code: int) -> None:
    """As at the end of Python, without giving back a hundred thousand objects."""
    import atexit
    import threading

    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


# Functions that forks run.


def run_code(code: str, *arguments: str) -> None:
    """As `python -c CODE`."""
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})


def draw_nothing(figure: object, file: str | Path, **options: object) -> None:
    """In place of `Figure.savefig`, which takes a quarter of the time of a small run: writes one pixel."""
    Path(file).write_bytes(base64.b64decode(PIXEL))


def run_module(name: str, *arguments: str) -> None:
    """As `python -m NAME`."""
    import runpy
    import warnings

    sys.path[:] = new_search_path()
    sys.argv = [name, *arguments]
    if (pause_s := os.environ.get(PAUSE)) and "torch" in sys.modules:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda *step: time.sleep(float(pause_s)))
    if "torch" in sys.modules:
        from matplotlib.figure import Figure

        Figure.savefig = draw_nothing
    warnings.filterwarnings("ignore", message=".*found in sys.modules", module="runpy")
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def new_search_path() -> list[str]:
    """The search path of a new Python."""
    here = [] if os.environ.get("PYTHONSAFEPATH") else [os.getcwd()]
    return [*here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *_search_path]


if __name__ == "__main__":
    from tests import fork_server  # by its name, which the pickled functions have

    code = 1
    try:
        code = fork_server.main()
    except BaseException:
        import traceback

        traceback.print_exc()
        Path(os.environ[FOLDER], "failed").touch()
    finally:
        _end(code)
