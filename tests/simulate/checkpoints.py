"""The scene of checkpoints: a training writes them, prunes them and resumes from them, and a pusher sends them.

The training is a loop over steps in which each checkpoint has a few small files in place of weights, and needs the best
one before it. A killed training starts again, as `training/engine/training_task.py` starts it; some go on from a named
checkpoint of another job. The pusher is that of `tasks/hub/checkpoint_uploads.py`, with a list in place of the Hub. Now
and then, while nothing runs, a bad disk changes a byte of the newest checkpoint. Promises:

- A training resumes from the newest whole checkpoint. The checkpoints that this one needs are whole too. This home
  wrote them all. None is damaged unless the disk has changed it.
- A checkpoint whose write has returned is there after every fault, until there are two newer ones and none of these
  needs it.
- A training ends with its best checkpoint whole.
- A checkpoint that is sent is whole. If all are to be sent, each one that was written is sent, or is reported
  as lost or left.
- Every process ends, without an error that is not its user's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

from tasks.home import home, named_lock, signing_key
from tasks.hub.checkpoint_uploads import CheckpointPusher
from tests.simulate.disk import Node, is_full
from tests.simulate.threads import Pool
from tests.simulate.world import World
from training.engine import checkpoints as product
from training.engine.checkpoints import LOST, OUTGOING
from training.problems import UserError

FILES = ("model.safetensors", "optimizer/state.bin", "trainer_state.json")
NAMED_STEP = 3


def content_of(path: str, step: int, best: int) -> bytes:
    """The bytes of a file of the checkpoint after a step."""
    return json.dumps({"path": path, "step": step, "best": best, "values": f"{step} " * 12}).encode()


class Checkpoints:
    """The scene."""

    def __init__(self, world: World) -> None:
        self.world, draw = world, world.random
        self.last_step = draw.choice((4, 6, 9))
        self.scores = [draw.random() for _ in range(self.last_step + 1)]
        """Of the checkpoints, by step."""
        self.has_damage = draw.random() < 0.3
        self.is_named = draw.random() < 0.3
        """Whether the training begins with a named checkpoint of another job."""
        self.pushes_all = draw.random() < 0.5
        self.saved = 0
        """The newest checkpoint whose write has returned."""
        self.written: set[int] = set()
        self.sent: set[int] = set()
        self.is_done = False
        self.machine = world.add_machine("m0")
        self.machine.on_start.append(self._begin)
        self._start("prepare", self._prepare)
        world.run()
        self.pushes = draw.random() < 0.5
        world.call_later(0.0, self._begin)

    # --- processes ---

    def _start(self, name: str, program: Any) -> None:
        def main() -> None:
            try:
                program()
            except (UserError, OSError) as error:
                if not is_full(error):
                    raise
                self.world.count("ended by a full disk")
                self.world.call_later(5.0, self._begin)

        self.world.start(self.machine, name, main)

    def _begin(self) -> None:
        """Starts the training and its pusher, unless they run or have ended."""
        names = {process.name.split(".")[1] for process in self.machine.processes if process.is_alive}
        if "train" not in names and not self.is_done:
            if not names:  # a checkpoint that is being sent was whole when it was looked at
                self._damage_newest()
            self._start("train", self._train)
        if self.pushes and "push" not in names:
            self._start("push", self._push)

    def _prepare(self) -> None:
        """The checkpoints of another job, whole and on the disk."""
        faults = self.world.faults
        faults.budget, budget = 0, faults.budget
        signing_key()
        if self.is_named:
            other = self.folder("other")
            for step in range(1, NAMED_STEP + 1):
                self._write(other, step)
        if self.pushes_all:
            self.folder("fit").with_name(OUTGOING).mkdir(parents=True)
            product.fsync(self.folder("fit").parent)
        faults.budget = budget

    def folder(self, job: str) -> Path:
        """The checkpoints of a job."""
        return Path(self.machine.home) / "jobs" / job / "checkpoints"

    def _best(self, step: int) -> int:
        """The best step so far."""
        return max(range(1, step + 1), key=lambda one: self.scores[one])

    def _write(self, folder: Path, step: int) -> None:
        best = self._best(step)
        needs = [product.name(best)] if best != step else []
        with product.write(folder / product.name(step), needs, {"threads": 1}) as staging:
            for path in FILES:
                (staging / path).parent.mkdir(exist_ok=True)
                (staging / path).write_bytes(content_of(path, step, best))

    def _train(self) -> None:
        world, folder = self.world, self.folder("fit")
        with named_lock("fit-record"):
            start = self._resume(folder)
            for step in range(start + 1, self.last_step + 1):
                world.sleep(world.random.choice((0.0, 0.1, 5.0)))
                product.rotate(folder)
                if not self.has_damage and (lost := {step - 2, step - 1} & self.written - {*self.whole_steps()}):
                    raise world.broken(f"before step {step} is written, {lost} are not whole or lack what they need")
                self._write(folder, step)
                self.written.add(step)
                self.saved = step
                world.count("checkpoints")
                if lacking := {max(step - 1, 1), step}.difference(whole := self.whole_steps()):
                    raise world.broken(f"after step {step}, {lacking} are not whole or lack what they need: {whole}")
            best = folder / product.name(self._best(self.last_step))
            if not self.has_damage and (damage := product.find_damage(best)):
                raise world.broken(f"the best checkpoint, {best.name}, is damaged at the end: {damage}")
            self.is_done = True

    def _resume(self, folder: Path) -> int:
        world, named = self.world, self.folder("other") / product.name(NAMED_STEP)
        whole = self.whole_steps()
        found = product.find_newest_intact(folder, self._warn)
        step = 0 if found is None else product.step_of(found)
        if step != max(whole, default=0):
            raise world.broken(f"a training resumes from step {step}, and these are whole: {whole}")
        if step < self.saved:
            raise world.broken(f"a training resumes from step {step}, and step {self.saved} was saved")
        if found is not None:
            product.require_own(found, signing_key())
            world.count("resumes")
        if self.is_named and step < NAMED_STEP:
            product.require_intact(named)
            product.adopt(named, folder, signing_key())
            if NAMED_STEP not in self.whole_steps():
                raise world.broken(f"{named.name} was adopted, and is not whole")
            step = self.saved = NAMED_STEP
        return step

    def _warn(self, text: str) -> None:
        if not self.has_damage:
            raise self.world.broken(f"{text} Nothing has damaged it.")

    def _push(self) -> None:
        pusher = _Pusher(self)
        while True:
            is_last = self.is_done
            pusher.push_new()
            if is_last:
                return
            self.world.sleep(self.world.random.choice((0.1, 1.0, 5.0)))

    # --- the disk ---

    def _damage_newest(self) -> None:
        """A bad disk changes a byte of the newest checkpoint. The training writes that checkpoint again later."""
        steps = self.whole_steps()
        if not self.has_damage or len(steps) < 2 or self.world.random.random() < 0.5:
            return
        file = self._files(steps[-1])[self.world.random.choice(FILES)]
        file.data[self.world.random.randrange(len(file.data))] ^= 1
        file.synced = bytes(file.data)
        self.saved = max(self.whole_steps(), default=0)
        self.world.count("damages")

    def whole_steps(self) -> list[int]:
        """The steps of whole checkpoints on the disk whose needed checkpoints are whole too."""
        try:
            folder = self._find(str(self.folder("fit")))
        except OSError:
            return []
        names = [name for name in folder.children if name.startswith("checkpoint-")]
        own = {step for step in map(int, (name.rpartition("-")[2] for name in names)) if self._is_whole(step)}
        return sorted(step for step in own if self._best(step) in own)

    def _is_whole(self, step: int) -> bool:
        files = self._files(step)
        wanted = {path: content_of(path, step, self._best(step)) for path in FILES}
        return all(path in files and files[path].data == content for path, content in wanted.items())

    def _files(self, step: int) -> dict[str, Node]:
        """The files of a checkpoint, by path."""
        found: dict[str, Node] = {}
        folders = [("", self._find(f"{self.folder('fit')}/{product.name(step)}"))]
        while folders:
            above, folder = folders.pop()
            for name, node in folder.children.items():
                folders.append((f"{above}{name}/", node)) if node.is_folder else found.update({above + name: node})
        return found

    def _find(self, path: str) -> Node:
        return self.machine.disk.find(path)

    # --- promises at the end ---

    def check_end(self) -> None:
        """After a last power loss, when nothing runs any more."""
        self.world.faults.budget = 0
        self.machine.disk.lose_power(self.world.random)
        newest = self.whole_steps()
        if max(newest, default=0) < self.saved:
            raise self.world.broken(f"step {self.saved} was saved, and these are whole: {newest}")
        if not self.is_done:
            raise self.world.broken("the training has not ended")
        if self.pushes and self.pushes_all:
            marks = self._find(str(self.folder("fit").with_name(OUTGOING))).children
            names = {*marks, *self._find(str(self.folder("fit"))).children}
            reported = {step for step in self.written if names & {product.name(step), product.name(step) + LOST}}
            if missing := self.written - self.sent - reported:
                raise self.world.broken(f"not sent, and not reported: {sorted(missing)}; marks {sorted(marks)}")


class _Pusher(CheckpointPusher):
    """Sends to the scene."""

    def __init__(self, scene: Checkpoints) -> None:
        self.pushed, self._scene = set(), scene
        self._folder, self._aside = scene.folder("fit"), home() / "jobs" / "push" / "aside"
        self._all = scene.pushes_all

    def _push(self, name: str) -> None:
        scene, step = self._scene, product.step_of(Path(name))
        scene.world.sleep(scene.world.random.choice((0.01, 1.0)))
        last = self._aside / product.LAST / name
        contents = {path: (last / path).read_bytes() for path in FILES}
        if contents != {path: content_of(path, step, scene._best(step)) for path in FILES}:
            raise scene.world.broken(f"{name} was sent with other bytes")
        scene.sent.add(step)
        scene.world.count("sent")


def play(world: World) -> None:
    """One seed."""
    with (
        mock.patch.dict(os.environ, {product.SIGNING_KEY: "/simulated/m0/home/signing.key"}),
        mock.patch.object(product, "ThreadPoolExecutor", Pool),
        # The product also looks whether links lead elsewhere: there are none here.
        mock.patch.object(product, "open_local", lambda file, rooms, kind: os.open(file, os.O_RDONLY)),
    ):
        scene = Checkpoints(world)
        world.run()
        scene.check_end()
