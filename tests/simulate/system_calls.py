"""The calls of the operating system that code under simulation makes, on the simulated world.

The product's code runs unchanged: the standard library's functions that call the system (`os`, `open`, `fcntl`, `time`,
`threading`, `secrets`, `random`, `concurrent.futures`) are replaced by ones that go to the simulated disk for paths
below `/simulated`, and to the simulated clock and scheduler for threads of simulated processes; all others go to the
system. pathlib, shutil and json need no replacement, because they call these. The alternative, a disk and a clock as
parameters of all functions of the store, would be a second way to write files beside the one that users' machines run,
and what the simulation must find are the mistakes in the one that runs.

A module under simulation uses the replaced functions by their module (`time.sleep`), not by a name of its own.
"""

from __future__ import annotations

import builtins
import concurrent.futures
import contextlib
import errno
import fcntl
import io
import os
import random
import secrets
import socket
import sqlite3
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from tasks import home
from tests.simulate.disk import Disk, Node, OpenFile
from tests.simulate.threads import Condition, Lock, Pool, Thread, Timer
from tests.simulate.world import Killed, OfProcess, World, is_simulated, process, world

ROOT = "/simulated"
FIRST_DESCRIPTOR = 1_000_000
"""Smaller numbers are files of the system."""
OPEN_FILES = "/proc/self/fd/"
REAL = {name: getattr(os, name) for name in dir(os)}
_next_descriptor = [FIRST_DESCRIPTOR]


# --- files ---


def _place(path: Any, dir_fd: int | None = None) -> str | None:
    """The path, if it is simulated."""
    if type(path) is int:
        return process().files[path].path if path >= FIRST_DESCRIPTOR else None
    text = path if isinstance(path, str) else os.fspath(path)
    if isinstance(text, bytes):
        return None
    if text.startswith(OPEN_FILES) and int(text[len(OPEN_FILES) :]) >= FIRST_DESCRIPTOR:
        return process().files[int(text[len(OPEN_FILES) :])].path
    if dir_fd is not None and dir_fd >= FIRST_DESCRIPTOR and not text.startswith("/"):
        return f"{process().files[dir_fd].path}/{text}"
    return text if text.startswith(ROOT) else None


def _disk(path: str) -> Disk:
    name = path.split("/", 3)[2] if path.count("/") > 1 else ""
    machine = world().machines.get(name)
    if machine is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return machine.disk


def _step(call: str, path: str) -> None:
    if is_simulated():
        if path.count("/") > 3:  # below the home
            world().step(f"{call} {path.split('/', 4)[-1]}")
        elif not process().is_alive:
            raise Killed


_ABOVE = os.stat("/")


def _stat(path: str) -> os.stat_result:
    if path.rstrip("/") == ROOT:
        return _ABOVE
    disk = _disk(path)
    return disk.status(disk.find(path))


def _replace_by_path(name: str, simulated: Callable[..., Any]) -> Callable[..., Any]:
    real = REAL[name]

    def call(path: Any, *args: Any, **options: Any) -> Any:
        if World.current is None:
            return real(path, *args, **options)
        if (place := _place(path, options.get("dir_fd"))) is None:
            return real(path, *args, **options)
        options.pop("dir_fd", None)
        _step(name, place)
        return simulated(place, *args, **options)

    return call


def _os_stat(path: str, *, follow_symlinks: bool = True) -> os.stat_result:
    return _stat(path)


def _access(path: str, mode: int, **options: Any) -> bool:
    with contextlib.suppress(OSError):
        _stat(path)
        return True
    return False


def _mkdir(path: str, mode: int = 0o777) -> None:
    if path == ROOT or path.count("/") < 3:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    _disk(path).make(path, stat.S_IFDIR | (mode & ~0o022))


def _rename(source: str, target: Any, **options: Any) -> None:
    _disk(source).rename(source, os.fspath(target))


def _link(source: str, target: Any, **options: Any) -> None:
    disk = _disk(source)
    disk.link(disk.find(source), os.fspath(target))


class Entry:
    """An entry of `os.scandir`."""

    def __init__(self, folder: str, name: str, node: Node, disk: Disk) -> None:
        self.path, self.name, self._node, self._disk = f"{folder.rstrip('/')}/{name}", name, node, disk

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a folder."""
        return self._node.is_folder

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Whether it is a file."""
        return not self._node.is_folder

    def is_symlink(self) -> bool:
        """There are no links."""
        return False

    def inode(self) -> int:
        """The number of the inode."""
        return self._node.number

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """The status at the time of the call. Raises FileNotFoundError if it is gone."""
        if not self._node.links:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
        return self._disk.status(self._node)


class Scan(list[Entry]):
    """The result of `os.scandir`: an iterator that can be closed."""

    def __enter__(self) -> Iterator[Entry]:
        return iter(self)

    def __exit__(self, *error: object) -> None: ...

    def close(self) -> None: ...


def _names(path: str) -> list[tuple[str, Node]]:
    names = list(_disk(path).find(path).children.items())
    world().random.shuffle(names)  # the order of a file system is none
    return names


def _scandir(path: str) -> Scan:
    return Scan(Entry(path, name, node, _disk(path)) for name, node in _names(path))


def _listdir(path: str) -> list[str]:
    return [name for name, _ in _names(path)]


def _utime(path: str, times: Any = None, **options: Any) -> None:
    node = _disk(path).find(path)
    node.mtime_ns = node.ctime_ns = int(world().now * 1e9)


def _statvfs(path: str) -> os.statvfs_result:
    free = 0 if world().now < _disk(path).full_until else 2**30
    return os.statvfs_result((4096, 4096, 2**30, free, free, 2**20, 2**20, 2**20, 0, 255))


def _open_descriptor(path: str, flags: int, mode: int = 0o777) -> int:
    disk = _disk(path)
    try:
        node = disk.find(path)
        if flags & os.O_CREAT and flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
        node = disk.make(path, stat.S_IFREG | (mode & ~0o022))
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    if node.is_folder and writes:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if flags & os.O_DIRECTORY and not node.is_folder:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if flags & os.O_TRUNC and writes:
        disk.truncate(node, 0)
    _next_descriptor[0] += 1
    process().files[_next_descriptor[0]] = OpenFile(node, path, flags)
    return _next_descriptor[0]


def _replace_by_descriptor(name: str, simulated: Callable[..., Any], *, is_step: bool = True) -> Callable[..., Any]:
    real = REAL[name]

    def call(descriptor: Any, *args: Any, **options: Any) -> Any:
        if type(descriptor) is not int or descriptor < FIRST_DESCRIPTOR:
            return real(descriptor, *args, **options)
        if not process().is_alive:
            raise Killed
        file = process().files.get(descriptor)
        if file is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if is_step:
            _step(name, file.path)
        return simulated(descriptor, file, *args, **options)

    return call


def _close(descriptor: int, file: OpenFile) -> None:
    process().files.pop(descriptor).close()


def _write(descriptor: int, file: OpenFile, content: Any) -> int:
    disk, content = _disk(file.path), bytes(content)
    if file.flags & os.O_APPEND:
        file.at = len(file.node.data)
    # A process that is killed during a write has written a part of it.
    half = len(content) // 2 if len(content) > 1 and world().random.random() < 0.3 else 0
    if half:
        done = disk.write(file.node, file.at, content[:half])
        file.at += done
        if done < half:
            return done
        _step("write (second half)", file.path)
        if file.flags & os.O_APPEND:
            file.at = len(file.node.data)
    try:
        done = disk.write(file.node, file.at, content[half:])
    except OSError:
        if half:
            return half
        raise
    file.at += done
    return half + done


def _read(descriptor: int, file: OpenFile, count: int) -> bytes:
    content = bytes(file.node.data[file.at : file.at + count])
    file.at += len(content)
    return content


def _fstat(descriptor: int, file: OpenFile) -> os.stat_result:
    return _disk(file.path).status(file.node)


def _fsync(descriptor: int, file: OpenFile) -> None:
    _disk(file.path).sync(file.node)


def _sendfile(target: int, source: int, offset: int, count: int) -> int:
    if target < FIRST_DESCRIPTOR:
        return REAL["sendfile"](target, source, offset, count)
    content = bytes(process().files[source].node.data[offset : offset + count])
    return os.write(target, content) if content else 0


def _flock(descriptor: int, operation: int) -> None:
    if descriptor < FIRST_DESCRIPTOR:
        return _REAL_FLOCK(descriptor, operation)
    file = process().files[descriptor]
    _step("flock", file.path)
    locks, exclusive = file.node.locks, bool(operation & fcntl.LOCK_EX)
    if operation & fcntl.LOCK_UN:
        locks.pop(file, None)
        return None

    def is_free() -> bool:
        return not any(other is not file and (exclusive or held) for other, held in locks.items())

    if not is_free():
        if operation & fcntl.LOCK_NB:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
        world().wait(is_free)
    locks[file] = exclusive
    return None


_REAL_FLOCK = fcntl.flock


class RawFile(io.RawIOBase):
    """What `open` returns, without its buffer."""

    def __init__(self, descriptor: int, mode: str, path: Any) -> None:
        self._descriptor, self._mode, self.name = descriptor, mode, path
        self._process = process()

    def fileno(self) -> int:
        return self._descriptor

    def readable(self) -> bool:
        return "r" in self._mode or "+" in self._mode

    def writable(self) -> bool:
        return self._mode[0] in "wax" or "+" in self._mode

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = os.read(self._descriptor, len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def write(self, content: Any) -> int:
        if not self._is_mine():
            return len(content)  # the buffer of a killed process, which nothing writes
        return os.write(self._descriptor, content)

    def seek(self, offset: int, whence: int = 0) -> int:
        file = self._process.files[self._descriptor]
        file.at = offset + (0, file.at, len(file.node.data))[whence]
        return file.at

    def tell(self) -> int:
        return self.seek(0, 1)

    def truncate(self, size: int | None = None) -> int:
        file = self._process.files[self._descriptor]
        _step("truncate", file.path)
        size = file.at if size is None else size
        _disk(file.path).truncate(file.node, size)
        return size

    def close(self) -> None:
        if not self.closed:
            if self._is_mine() and self._descriptor in self._process.files:
                self._process.files.pop(self._descriptor).close()
            super().close()

    def _is_mine(self) -> bool:
        return self._process.is_alive and is_simulated() and process() is self._process


_REAL_OPEN = open


def _open(
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Any = None,
) -> Any:
    if isinstance(file, int) and not isinstance(file, bool):
        is_ours = file >= FIRST_DESCRIPTOR
    else:
        is_ours = _place(file) is not None
    if not is_ours:
        return _REAL_OPEN(file, mode, buffering, encoding, errors, newline, closefd, opener)
    kind = mode.replace("b", "").replace("t", "")
    if isinstance(file, int):
        descriptor = file
    else:
        flags = {"r": 0, "w": os.O_CREAT | os.O_TRUNC, "a": os.O_CREAT | os.O_APPEND, "x": os.O_CREAT | os.O_EXCL}
        access = os.O_RDWR if "+" in kind else (os.O_RDONLY if kind[0] == "r" else os.O_WRONLY)
        wanted = flags[kind[0]] | access | os.O_CLOEXEC
        descriptor = opener(os.fspath(file), wanted) if opener else os.open(os.fspath(file), wanted, 0o666)
    raw = RawFile(descriptor, kind, file)
    if "b" in mode and buffering == 0:
        return raw
    buffered: Any
    if "+" in kind:
        buffered = io.BufferedRandom(raw)  # type: ignore[arg-type]
    else:
        buffered = io.BufferedReader(raw) if kind[0] == "r" else io.BufferedWriter(raw)  # type: ignore[arg-type]
    return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)


# --- clocks, threads, names ---


def _by_thread(real: Callable[..., Any], simulated: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        return simulated(*args, **options) if is_simulated() else real(*args, **options)

    return call


def _time() -> float:
    return world().now + process().machine.wall_skew_s


def _monotonic() -> float:
    return world().now - process().machine.monotonic_start_s


def _sleep(seconds: float) -> None:
    world().sleep(seconds)


def _temporary_names() -> Iterator[str]:
    while True:
        yield world().random.randbytes(4).hex()


class Memory:
    """The database of digests of a machine: its connections share one, which a power loss empties."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, *args: Any) -> Any:
        """As of a connection."""
        return self._connection.execute(*args)

    def executemany(self, *args: Any) -> Any:
        """As of a connection."""
        return self._connection.executemany(*args)

    def close(self) -> None:
        """The database stays."""


_REAL_CONNECT = sqlite3.connect


def _connect(database: Any, *args: Any, **options: Any) -> Any:
    if _place(database) is None:
        return _REAL_CONNECT(database, *args, **options)
    disk = _disk(_place(database) or "")
    if disk.digests is None:
        disk.digests = _REAL_CONNECT(":memory:", isolation_level=None)
    return Memory(disk.digests)


_BY_PATH: dict[str, Callable[..., Any]] = {
    "stat": _os_stat,
    "lstat": _os_stat,
    "access": _access,
    "chmod": lambda path, mode, **options: None,
    "mkdir": _mkdir,
    "rmdir": lambda path: _disk(path).remove(path, folder=True),
    "unlink": lambda path: _disk(path).remove(path, folder=False),
    "remove": lambda path: _disk(path).remove(path, folder=False),
    "rename": _rename,
    "replace": _rename,
    "link": _link,
    "scandir": _scandir,
    "listdir": _listdir,
    "utime": _utime,
    "statvfs": _statvfs,
    "open": _open_descriptor,
    "listxattr": lambda path, **options: [],
}
_BY_DESCRIPTOR = {"write": _write, "read": _read, "fsync": _fsync}
_NO_STEPS = {"close": _close, "fstat": _fstat}


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """Replaces the calls in the block."""
    patches = [
        *(mock.patch.object(os, name, _replace_by_path(name, call)) for name, call in _BY_PATH.items()),
        *(mock.patch.object(os, name, _replace_by_descriptor(name, call)) for name, call in _BY_DESCRIPTOR.items()),
        *(
            mock.patch.object(os, name, _replace_by_descriptor(name, call, is_step=False))
            for name, call in _NO_STEPS.items()
        ),
        mock.patch.object(os, "sendfile", _sendfile),
        mock.patch.object(os, "urandom", _by_thread(os.urandom, lambda count: world().random.randbytes(count))),
        mock.patch.object(os, "getpid", _by_thread(os.getpid, lambda: process().number)),
        mock.patch.object(builtins, "open", _open),
        mock.patch.object(io, "open", _open),
        mock.patch.object(fcntl, "flock", _flock),
        mock.patch.object(time, "time", _by_thread(time.time, _time)),
        mock.patch.object(time, "time_ns", _by_thread(time.time_ns, lambda: int(_time() * 1e9))),
        mock.patch.object(time, "monotonic", _by_thread(time.monotonic, _monotonic)),
        mock.patch.object(time, "sleep", _by_thread(time.sleep, _sleep)),
        mock.patch.object(time, "strftime", _by_thread(time.strftime, lambda *args: f"{world().now - 1.8e9:.0f}")),
        mock.patch.object(threading, "Thread", _by_thread(threading.Thread, Thread)),
        mock.patch.object(threading, "Timer", _by_thread(threading.Timer, Timer)),
        mock.patch.object(threading, "Lock", _by_thread(threading.Lock, Lock)),
        mock.patch.object(threading, "Condition", _by_thread(threading.Condition, Condition)),
        mock.patch.object(threading, "get_ident", _by_thread(threading.get_ident, lambda: process().number)),
        mock.patch.object(
            concurrent.futures, "ThreadPoolExecutor", _by_thread(concurrent.futures.ThreadPoolExecutor, Pool)
        ),
        mock.patch.object(socket, "gethostname", _by_thread(socket.gethostname, lambda: process().machine.name)),
        mock.patch.object(
            secrets, "token_hex", _by_thread(secrets.token_hex, lambda count=32: world().random.randbytes(count).hex())
        ),
        mock.patch.object(random, "uniform", _by_thread(random.uniform, lambda a, b: world().random.uniform(a, b))),
        mock.patch.object(sqlite3, "connect", _connect),
        mock.patch.object(
            tempfile, "gettempdir", _by_thread(tempfile.gettempdir, lambda: process().machine.disk.root_path)
        ),
        mock.patch.object(
            tempfile,
            "_get_candidate_names",
            _by_thread(tempfile._get_candidate_names, _temporary_names),  # type: ignore[attr-defined]
        ),
        mock.patch.object(home, "_marked", OfProcess("tasks.home._marked", set)),
    ]
    _next_descriptor[0] = FIRST_DESCRIPTOR
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield
