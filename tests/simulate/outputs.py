"""The scene of batch outputs: runs write the predictions of rows, which change from run to run, to one output.

The output is a folder or a single file, on the disk of a machine or in a bucket. Runs of a home may begin at once;
those of several machines follow each other, because nothing keeps two homes from writing to one URL at once. Requests
to the bucket fail and lose their answers, but none is late: the bucket cannot tell a late removal of a manifest from
one in time. Promises:

- At each instant, and after a power loss, a folder with a manifest is complete: each part that the manifest names has
  its bytes. A single file has all rows of one run.
- A run that ends without an error leaves its rows and no other ones. They are there after each fault, until the next
  run begins.
- One run of a home at a time writes to an output.
- Every process ends, without an error that is not its user's. A run without faults completes the output.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pyarrow as pa

from tasks.prediction import output as product
from tasks.prediction.input_rows import Scan, Shard
from tasks.prediction.output import MANIFEST, open_output
from tasks.registry.model_spec import ModelSpec
from tests.simulate.bucket import ObjectStore
from tests.simulate.disk import Node, is_full
from tests.simulate.world import Machine, Process, World
from training.data.prediction_files import KeptColumns
from training.data.prediction_rows import Rows, digest_all, digest_inputs
from training.problems import NETWORK, UserError
from training.recipe import BatchPrediction, parse_batch_prediction

MODEL = ModelSpec("models:/reviews/1", 32, {"task": "sequence-classification", "options": {}}, {"text": "text"},
                  name="reviews", version="1", digest="d1")  # fmt: skip
INPUTS = ([["a", "b"], ["c"]], [["a", "b"], ["c", "d"], ["e"]], [["a", "b"]], [["f"], ["c"]])
"""The rows over time, by shards."""


class Input:
    """Rows as they are at one time."""

    def __init__(self, texts: Sequence[Sequence[str]]) -> None:
        self.rows = [_rows(*shard) for shard in texts]
        self.texts = [text for shard in texts for text in shard]
        kept = functools.reduce(KeptColumns.seen, self.rows, KeptColumns())
        shards = [
            Shard("/in.jsonl", number, len(rows.numbers), len(rows.numbers), digest_inputs(rows), digest_all(rows))
            for number, rows in enumerate(self.rows)
        ]
        self.scan, self.keys = Scan(shards, kept), {shard.digest: f"k{shard.digest}" for shard in shards}


def _rows(*texts: str) -> Rows:
    return Rows([*range(1, 1 + len(texts))], [(text,) for text in texts], [None] * len(texts), {"text": [*texts]})


_INPUTS = [Input(texts) for texts in INPUTS]


class FileSystem:
    """The methods of an fsspec file system that outputs use."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def invalidate_cache(self) -> None:
        """Nothing is cached."""

    def ls(self, path: str, detail: bool) -> list[dict[str, Any]]:
        """The objects below a path."""

        def found() -> list[dict[str, Any]]:
            entries = sorted(self._objects.objects.items())
            return [
                {"name": name, "size": len(content), "type": "file"}
                for name, (content, _) in entries
                if name.startswith(f"{path}/")
            ]

        entries: list[dict[str, Any]] = self._objects.request(f"list {path}", found)
        if not entries:
            raise FileNotFoundError(path)
        return entries

    def put_file(self, file: str, name: str) -> None:
        """Uploads a file."""
        with open(file, "rb") as opened:
            content = opened.read()
        self._objects.request(f"put {name}", lambda: self._objects.put(name, content, False))

    def cat_file(self, name: str) -> bytes:
        """The content of an object."""
        return bytes(self._objects.request(f"get {name}", lambda: self._objects.get(name))[0])

    def rm_file(self, name: str) -> None:
        """Removes an object."""
        self._objects.request(f"delete {name}", lambda: self._objects.delete(name))


class Outputs:
    """The scene."""

    def __init__(self, world: World) -> None:
        self.world, draw = world, world.random
        world.faults.late = 0.0
        self.is_remote, self.is_file = draw.random() < 0.4, draw.random() < 0.3
        self.objects = ObjectStore(world, on_change=self.look)
        machines = draw.choice((1, 2)) if self.is_remote else 1
        self.machines = [world.add_machine(f"m{number}") for number in range(machines)]
        self.at_once = draw.random() < 0.3
        """Whether runs of a home may begin at once."""
        self.writer: Process | None = None
        self.done: Input | None = None
        """The rows of the last run that ended without an error, until another one begins."""
        for machine in self.machines:
            machine.on_start.append(functools.partial(self._begin, machine))
            machine.on_power_loss.append(self._check_done)
            machine.disk.on_names = self._names_changed
        for number in range(draw.choice((2, 3, 5))):
            machine = draw.choice(self.machines)
            world.call_later(number * draw.choice((0.0, 1.0, 30.0)), functools.partial(self._begin, machine))

    def _begin(self, machine: Machine) -> None:
        """Starts a run; later, if one is running, unless the scene has runs at once."""
        if any(process.is_alive for one in self.machines for process in one.processes) and not (
            self.at_once and len(self.machines) == 1
        ):
            self.world.call_later(5.0, functools.partial(self._begin, machine))
            return
        given = self.world.random.choice(_INPUTS)
        self.world.start(machine, "predict", functools.partial(self._predict, machine, given))

    def location(self, machine: Machine) -> str:
        """The path or the URL of the output."""
        folder = "s3://simulated/out" if self.is_remote else f"{machine.disk.root_path}/out/predictions"
        return f"{folder}/all.jsonl" if self.is_file else folder

    # --- a run ---

    def _predict(self, machine: Machine, given: Input) -> None:
        world, process = self.world, self.world.process
        try:
            with open_output(self._prediction(machine), MODEL, given.scan, given.keys) as output:
                if self.writer is not None and self.writer.is_alive:
                    raise world.broken(f"{process.name} and {self.writer.name} write to one output at once")
                self.writer, self.done = process, None
                for shard, rows in zip(given.scan.shards, given.rows, strict=True):
                    if output.lacks(shard):
                        world.sleep(world.random.choice((0.0, 0.1, 1.0)))
                        predictions = pa.table({"label": [values[0] for values in rows.usable()]})
                        output.write(shard, rows, predictions, int(world.now))
                        world.count("shards written")
                output.finish({"rows": given.scan.rows})
                self.done, self.writer = given, None
                self._check_done()
                world.count("runs completed")
        except UserError as error:
            if "another run writes" in str(error):
                world.count("runs refused")
            elif NETWORK in {problem.kind for problem in error.problems}:
                world.count("runs without the network")
            elif not is_full(error):
                raise
        except OSError as error:
            if not is_full(error):
                raise
        finally:
            self.writer = None if self.writer is process else self.writer

    def _prediction(self, machine: Machine) -> BatchPrediction:
        form = {} if self.is_file else {"format": "jsonl"}
        output = self.location(machine)
        return parse_batch_prediction({"model": "reviews", "input": ["in.jsonl"], "output": output, **form})

    # --- promises ---

    def _names_changed(self, path: str) -> None:
        if "/out/" in path:
            self.look()

    def files(self) -> dict[str, bytes]:
        """The files of the output now, without hidden ones."""
        if self.is_remote:
            return {name.rpartition("/")[2]: content for name, (content, _) in self.objects.objects.items()}
        disk = self.machines[0].disk
        try:
            folder: Node = disk.find(f"{disk.root_path}/out/predictions")
        except OSError:
            return {}
        return {name: bytes(node.data) for name, node in folder.children.items() if not name.startswith(".")}

    def look(self) -> None:
        """Checks that what the output has is whole."""
        files = self.files()
        if self.is_file:
            if "all.jsonl" in files and _texts(files["all.jsonl"]) not in [given.texts for given in _INPUTS]:
                raise self.world.broken(f"the file is not that of one run: {files['all.jsonl']!r}")
        elif MANIFEST in files:
            for part in self._parts(files):
                content = files.get(part["name"])
                if content is None or hashlib.sha256(content).hexdigest() != part["sha256"]:
                    found = "absent" if content is None else "other bytes"
                    raise self.world.broken(f"the manifest names {part['name']}, which is {found}")

    def _check_done(self) -> None:
        """Checks what the output has, and that the rows of the last run are there if it has ended."""
        self.look()
        if self.done is None:
            return
        files = self.files()
        wanted = {"all.jsonl"} if self.is_file else {MANIFEST, *(part["name"] for part in self._parts(files))}
        if {*files} != wanted:
            raise self.world.broken(f"a run ended without an error, and the output has {sorted(files)}")
        found = [text for name in sorted(wanted - {MANIFEST}) for text in _texts(files[name])]
        if sorted(found) != sorted(self.done.texts):
            raise self.world.broken(f"a run with the rows {self.done.texts} ended, and the output has {found}")

    def _parts(self, files: dict[str, bytes]) -> list[dict[str, Any]]:
        try:
            manifest: dict[str, Any] = json.loads(files.get(MANIFEST, b'{"parts": []}'))
        except ValueError:
            raise self.world.broken(f"the manifest is torn: {files[MANIFEST]!r}") from None
        return list(manifest["parts"])

    def check_end(self) -> None:
        """Completes the output without faults, when nothing runs any more, and cuts the power once more."""
        self.world.faults.budget, self.world.faults.network_s = 0, 0.0
        machine, given = self.machines[-1], self.world.random.choice(_INPUTS)
        machine.disk.full_until = machine.partitioned_until = 0.0
        self.world.start(machine, "predict", functools.partial(self._predict, machine, given))
        self.world.run()
        if self.done is not given:
            raise self.world.broken("a run without faults did not complete the output")
        for one in self.machines:
            one.disk.lose_power(self.world.random)
        self._check_done()


def _texts(content: bytes) -> list[str]:
    """The texts of a file of predictions. Each has its own prediction."""
    try:
        rows = [json.loads(line) for line in content.splitlines()]
    except ValueError:
        return [f"a torn file: {content!r}"]
    return [row["text"] if row["text"] == row["label"] and row["error"] is None else repr(row) for row in rows]


def play(world: World) -> None:
    """One seed."""
    scene = Outputs(world)
    files = FileSystem(scene.objects)
    with mock.patch.object(product, "filesystem", lambda url: (files, url.removeprefix("s3://simulated/"))):
        world.run()
        scene.check_end()
