"""A disk in memory, with the guarantees of a journaling file system and no others.

After a power loss, changes of names (creation, rename, removal) survive up to one point in their order, which is not
before the last `fsync` of a folder that they touch. A file has the content of its last `fsync`, its present content, or
a torn one: some pages were written, others are zeros, whatever its size says.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulate.world import World

TICK_NS = 4_000_000
"""The kernel sets times of files in these steps."""
USER, GROUP = os.getuid(), os.getgid()
PAGE = 16
"""Bytes that are torn together: files of the simulation are small."""


class Node:
    """A file or a folder."""

    def __init__(self, number: int, mode: int, now_ns: int) -> None:
        self.number, self.mode, self.links = number, mode, 0
        self.mtime_ns = self.ctime_ns = now_ns
        self.entries: dict[str, Node] | None = {} if stat.S_ISDIR(mode) else None
        self.data, self.synced = bytearray(), b""
        self.locks: dict[OpenFile, bool] = {}
        """Holders of `flock`; whether each is exclusive."""
        self.status: tuple[object, os.stat_result] | None = None

    @property
    def is_folder(self) -> bool:
        """Whether it has entries."""
        return self.entries is not None

    @property
    def children(self) -> dict[str, Node]:
        """The entries of a folder. Raises NotADirectoryError for a file."""
        if self.entries is None:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return self.entries


class OpenFile:
    """An open file, which the kernel's `flock` belongs to."""

    def __init__(self, node: Node, path: str, flags: int) -> None:
        self.node, self.path, self.flags, self.at = node, path, flags, 0
        self.is_open = True

    def close(self) -> None:
        """Closes it and releases its lock."""
        self.is_open = False
        self.node.locks.pop(self, None)


class Disk:
    """The files below `root_path`."""

    def __init__(self, root_path: str, world: World) -> None:
        self.root_path, self._world = root_path, world
        self._next = 2
        self.root = Node(1, stat.S_IFDIR | 0o700, self._now_ns())
        self.full_until = 0.0
        self._journal: list[tuple[tuple[Node, ...], Callable[[], None]]] = []
        self._synced = 0
        self.digests: Any = None
        """The database of digests, which is not synced."""
        self.on_names: Callable[[str], None] = lambda path: None
        """Called with a path that was renamed to or removed."""

    def _now_ns(self) -> int:
        return int(self._world.now * 1e9) // TICK_NS * TICK_NS

    # --- names ---

    def find(self, path: str) -> Node:
        """The node at a path. Raises FileNotFoundError and NotADirectoryError."""
        node = self.root
        for part in _parts(path, self.root_path):
            if (below := node.children.get(part)) is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            node = below
        return node

    def split(self, path: str) -> tuple[Node, str]:
        """The folder above a path, and the name in it."""
        above, _, name = path.rstrip("/").rpartition("/")
        folder = self.find(above)
        folder.children  # noqa: B018 - a file raises
        return folder, name

    def make(self, path: str, mode: int) -> Node:
        """Creates a file or folder. Raises FileExistsError, and OSError if the disk is full."""
        folder, name = self.split(path)
        if name in folder.children:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self.need_space(path)
        self._next += 1
        node = Node(self._next, mode, self._now_ns())
        self._put(folder, name, node)
        self._log((folder,), lambda: self._drop(folder, name))
        return node

    def link(self, node: Node, path: str) -> None:
        """Gives a file another name."""
        folder, name = self.split(path)
        if name in folder.children:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._put(folder, name, node)
        node.ctime_ns = self._now_ns()
        self._log((folder,), lambda: self._drop(folder, name))

    def remove(self, path: str, *, folder: bool) -> None:
        """Removes a file, or an empty folder."""
        above, name = self.split(path)
        node = above.children.get(name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if node.is_folder != folder:
            number = errno.ENOTDIR if folder else errno.EISDIR
            raise OSError(number, os.strerror(number), path)
        if folder and node.children:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._drop(above, name)
        self._log((above,), lambda: self._put(above, name, node))
        self.on_names(path)

    def rename(self, source: str, target: str) -> None:
        """Moves a file or folder; replaces a file, or an empty folder."""
        (above, name), (to_above, to_name) = self.split(source), self.split(target)
        node = above.children.get(name)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source)
        replaced = to_above.children.get(to_name)
        if replaced is node:
            return
        if replaced is not None:
            if replaced.is_folder != node.is_folder:
                number = errno.ENOTDIR if node.is_folder else errno.EISDIR
                raise OSError(number, os.strerror(number), target)
            if replaced.is_folder and replaced.children:
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), target)
            self._drop(to_above, to_name)
        self._drop(above, name)
        self._put(to_above, to_name, node)

        def undo() -> None:
            self._drop(to_above, to_name)
            self._put(above, name, node)
            if replaced is not None:
                self._put(to_above, to_name, replaced)

        self._log((above, to_above), undo)
        self.on_names(target)

    def _put(self, folder: Node, name: str, node: Node) -> None:
        folder.children[name] = node
        node.links += 1
        folder.mtime_ns = folder.ctime_ns = self._now_ns()

    def _drop(self, folder: Node, name: str) -> None:
        folder.children.pop(name).links -= 1
        folder.mtime_ns = folder.ctime_ns = self._now_ns()

    def _log(self, folders: tuple[Node, ...], undo: Callable[[], None]) -> None:
        self._journal.append((folders, undo))

    # --- content ---

    def need_space(self, path: str) -> None:
        """Raises OSError while the disk is full."""
        if self._world.now < self.full_until:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def write(self, node: Node, at: int, content: bytes) -> int:
        """Writes the content, or a part of it if the disk becomes full. Returns the bytes written."""
        if self._world.now < self.full_until:
            if len(content) < 2 or self._world.random.random() < 0.5:
                self.need_space("")
            content = content[: self._world.random.randrange(1, len(content))]
        if at > len(node.data):
            node.data.extend(bytes(at - len(node.data)))
        node.data[at : at + len(content)] = content
        node.mtime_ns = node.ctime_ns = self._now_ns()
        return len(content)

    def truncate(self, node: Node, size: int) -> None:
        """Cuts a file, or fills it with zeros."""
        del node.data[size:]
        node.data.extend(bytes(size - len(node.data)))
        node.mtime_ns = node.ctime_ns = self._now_ns()

    def sync(self, node: Node) -> None:
        """Makes a file's content durable, or all changes of names until the last one in this folder."""
        if not node.is_folder:
            node.synced = bytes(node.data)
            return
        for index in range(len(self._journal), self._synced, -1):
            if node in self._journal[index - 1][0]:
                self._synced = index
                return

    def lose_power(self, random: Random) -> None:
        """What the disk has when the machine starts again."""
        cut = random.randint(self._synced, len(self._journal))
        for _, undo in reversed(self._journal[cut:]):
            undo()
        self._journal, self._synced, self.full_until = [], 0, 0.0
        folders = [self.root]
        while folders:
            for node in folders.pop().children.values():
                if node.is_folder:
                    folders.append(node)
                elif bytes(node.data) != node.synced:
                    node.data[:] = _torn(node, random)
                    node.synced = bytes(node.data)
        if random.random() < 0.5:
            self.digests = None

    def status(self, node: Node) -> os.stat_result:
        """What `stat` returns. The last result is kept: most calls are those that check the home's folder."""
        state = (node.mtime_ns, node.ctime_ns, node.links, len(node.data))
        if node.status is not None and node.status[0] == state:
            return node.status[1]
        seconds = (node.mtime_ns // 10**9, node.mtime_ns // 10**9, node.ctime_ns // 10**9)
        times = {
            "st_atime_ns": node.mtime_ns,
            "st_mtime_ns": node.mtime_ns,
            "st_ctime_ns": node.ctime_ns,
            "st_mtime": node.mtime_ns / 1e9,
            "st_ctime": node.ctime_ns / 1e9,
            "st_atime": node.mtime_ns / 1e9,
            "st_blocks": -(-len(node.data) // 512),
        }
        values = (node.mode, node.number, 77, max(node.links, 1), USER, GROUP, len(node.data), *seconds)
        node.status = (state, os.stat_result(values, times))
        return node.status[1]


def _torn(node: Node, random: Random) -> bytes:
    kind = random.randrange(4)
    if kind == 0:
        return node.synced
    if kind == 1:
        return bytes(node.data)
    both = zip(node.data, node.synced, strict=False)
    shorter = min(len(node.data), len(node.synced))
    kept = next((at for at, (new, old) in enumerate(both) if new != old), shorter)  # synced, and not written since
    if kind == 2:
        return bytes(node.data[: random.randint(kept, len(node.data))])
    pages = [bytes(node.data[start : start + PAGE]) for start in range(kept, len(node.data), PAGE)]
    rest = (page if random.random() < 0.5 else bytes(len(page)) for page in pages)
    return bytes(node.data[:kept]) + b"".join(rest)


def is_full(error: BaseException) -> bool:
    """Whether a full disk caused an error, as messages of the product and of libraries say it."""
    return "o space left" in str(error) or "is full" in str(error) or getattr(error, "errno", 0) == errno.ENOSPC


def _parts(path: str, root: str) -> list[str]:
    return [part for part in path[len(root) :].split("/") if part and part != "."]
