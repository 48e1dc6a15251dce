"""A simulated object store with the semantics of S3, in place of obstore's functions: `tasks.shared_store.bucket` runs
as it is.

Reads, writes and listings are consistent; a long listing is not one instant. `mode="create"` writes only if the name is
absent. As obstore does, the client repeats a request that a server error or a lost answer ended, until 20 seconds have
passed; but not `create` after a lost answer, which may have had an effect. A request that its client has given up may
reach the store later, after its repetition.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any
from unittest import mock

import obstore
from obstore.exceptions import AlreadyExistsError, GenericError

from tests.simulate.world import World

RETRY_S, IDLE_S, LATE_S = 20.0, 15.0, 40.0


@dataclass
class ObjectStore:
    """The objects of a bucket: content and time of the last write."""

    world: World
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    on_write: Callable[[str, bytes, bool], None] = lambda name, content, created: None
    """Called when a write takes effect, before the object changes."""
    on_change: Callable[[], None] = lambda: None
    """Called after a write or a removal."""

    # --- what the store does at one instant ---

    def put(self, name: str, content: bytes, create: bool) -> None:
        """Writes an object."""
        if create and name in self.objects:
            raise AlreadyExistsError(f"Object at location {name} already exists")
        self.on_write(name, content, create)
        self.objects[name] = (content, self.world.now)
        self.on_change()

    def get(self, name: str) -> tuple[bytes, float]:
        """The object. Raises FileNotFoundError, as obstore does."""
        if name not in self.objects:
            raise FileNotFoundError(f"Object at location {name} not found")
        return self.objects[name]

    def delete(self, name: str) -> None:
        """Removes an object, which may be absent."""
        self.objects.pop(name, None)
        self.on_change()

    # --- a client's request ---

    def request(self, what: str, effect: Callable[[], Any], *, repeats: bool = True, changes: bool = False) -> Any:
        """Sends a request until it is answered."""
        world, faults = self.world, self.world.faults
        ends = world.now + RETRY_S
        pause = 0.2
        while True:
            world.step(f"bucket {what}")
            machine = world.process.machine
            draw = world.random.random() if world.network_is_bad else 1.0
            world.sleep(world.random.choice((0.01, 0.05, 0.3)))
            if machine.partitioned_until > world.now:
                world.sleep(5.0)
            elif draw < faults.server_error:
                world.note(world.process.name, "    503")
            elif draw < faults.server_error + faults.lost_answer:
                world.note(world.process.name, "    the answer is lost")
                self._ignore(effect)
                world.sleep(IDLE_S)
                if not repeats:
                    raise GenericError("Generic S3 error: no answer in time")
            elif draw < faults.server_error + faults.lost_answer + faults.late:
                if changes:
                    world.note(world.process.name, "    the request comes late")
                    world.call_later(world.random.uniform(0, LATE_S), lambda: self._arrive(what, effect))
                world.sleep(IDLE_S)
                if not repeats:
                    raise GenericError("Generic S3 error: no answer in time")
            else:
                result = effect()
                world.sleep(world.random.choice((0.0, 0.01)))
                return result
            if world.now >= ends:
                raise GenericError("Generic S3 error: no answer")
            world.sleep(pause)
            pause *= 2

    def _arrive(self, what: str, effect: Callable[[], Any]) -> None:
        self.world.note("network", f"late: {what}")
        self._ignore(effect)

    def _ignore(self, effect: Callable[[], Any]) -> None:
        with contextlib.suppress(GenericError, AlreadyExistsError, FileNotFoundError):
            effect()


@dataclass
class Answer:
    """The result of `obstore.get`."""

    content: bytes

    @property
    def meta(self) -> dict[str, Any]:
        """Its size."""
        return {"size": len(self.content)}

    def bytes(self) -> bytes:
        """The whole content."""
        return self.content

    def stream(self, chunk_bytes: int) -> Iterator[bytes]:
        """The content in two chunks."""
        half = len(self.content) // 2
        yield from (chunk for chunk in (self.content[:half], self.content[half:]) if chunk)


@contextlib.contextmanager
def as_obstore(store: ObjectStore) -> Iterator[None]:
    """Replaces obstore's functions in the block."""

    def put(_: Any, name: str, content: Any, *, mode: str = "overwrite", **options: Any) -> None:
        whole = bytes(content) if isinstance(content, bytes | bytearray) else content.read()
        create = mode == "create"
        what = f"{mode} {name}"
        store.request(what, lambda: store.put(name, whole, create), repeats=not create, changes=True)

    def head(_: Any, name: str) -> dict[str, Any]:
        content, time_s = store.request(f"head {name}", lambda: store.get(name))
        return {"path": name, "size": len(content), "last_modified": datetime.fromtimestamp(time_s, UTC)}

    def get(_: Any, name: str) -> Answer:
        return Answer(store.request(f"get {name}", lambda: store.get(name))[0])

    def delete(_: Any, name: str) -> None:
        store.request(f"delete {name}", lambda: store.delete(name), changes=True)

    def list_(_: Any, prefix: str | None = None) -> Iterator[list[dict[str, Any]]]:
        after = ""
        while True:  # pages, between which objects come and go
            page = store.request(f"list {prefix or ''} after {after!r}", partial(names, prefix or "", after))
            yield page
            if len(page) < 4:
                return
            after = page[-1]["path"]

    def names(prefix: str, after: str) -> list[dict[str, Any]]:
        return [
            {"path": name, "size": len(content), "last_modified": datetime.fromtimestamp(time_s, UTC)}
            for name, (content, time_s) in sorted(store.objects.items())
            if name.startswith(prefix) and name > after
        ][:4]

    replaced = {"put": put, "head": head, "get": get, "delete": delete, "list": list_}
    with contextlib.ExitStack() as stack:
        for name, call in replaced.items():
            stack.enter_context(mock.patch.object(obstore, name, call))
        yield
