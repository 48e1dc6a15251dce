"""TensorBoard: a folder for each training, `<home>/tensorboard/RECIPE-KEY`, with the points of its job and the recipe.

The file of the curves is a function of the job's events. A resumed training finds the records that an earlier try has
written, and goes on after the last one: whoever reads the folder meanwhile sees one curve, without doubled points.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from tasks.home import home
from tasks.tracking.tracker import RECIPE, Curve, Point, Run, Tracker
from training.jobs.protocol import write_atomically

FOLDER = "TENSORBOARD_LOGGING_DIR"
"""The variable that names the folder of all runs, in place of `tensorboard/` of the home."""
VERSION = "brain.Event:2"


class TensorBoard(Tracker):
    """Writes event files for TensorBoard: the curves of the programs that the run starts."""

    title: ClassVar[str] = "TensorBoard"

    def __init__(self, run: Run, warn: Callable[[str], None]) -> None:
        super().__init__(run, warn)
        self._files: dict[Curve, _EventFile] = {}
        self._recipe = ""

    def log_text(self, name: str, content: str) -> None:
        """Keeps the recipe for the folder of the training."""
        if name == RECIPE:
            self._recipe = content

    def log_points(self, curve: Curve, points: Sequence[Point]) -> None:
        """Writes the points of a job. Those of the run itself have no folder: the machine's load, values of trials."""
        if curve.key:
            if curve not in self._files:
                root = Path(os.environ.get(FOLDER) or home() / "tensorboard")
                folder = root / f"{self.run.recipe}-{curve.key[:8]}"
                self._files[curve] = _EventFile(folder, points[0].time_ms)
                write_atomically(folder / "events.out.tfevents.0.recipe", _text_file("recipe", self._recipe))
            self._files[curve].write(points)


class _EventFile:
    """The event file of a job, named by the time of the job's first point: a training that was forced to begin again
    has another name, and replaces the file of the earlier one."""

    def __init__(self, folder: Path, began_ms: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"events.out.tfevents.{began_ms}.finetune"
        for other in folder.glob("events.out.tfevents.*.finetune"):
            if other != self._path:
                other.unlink()
        self._offset = 0
        began_s = began_ms / 1000
        self._write(
            Event(wall_time=began_s, file_version=VERSION),
            # A TensorBoard that has read the file of an earlier training forgets its points from this step on.
            Event(wall_time=began_s, step=0, session_log=SessionLog(status=SessionLog.START)),
        )

    def write(self, points: Sequence[Point]) -> None:
        """Appends points, unless the file has them at this place."""
        values = ([Summary.Value(tag=point.name, simple_value=point.value)] for point in points)
        self._write(
            *(
                Event(wall_time=point.time_ms / 1000, step=point.step, summary=Summary(value=value))
                for point, value in zip(points, values, strict=True)
            )
        )

    def _write(self, *events: Event) -> None:
        content = _serialize(*events)
        with open(self._path, "r+b" if self._path.exists() else "w+b") as file:
            file.seek(self._offset)
            if file.read(len(content)) != content:  # new, or cut by a kill
                file.seek(self._offset)
                file.write(content)
                file.truncate()
        self._offset += len(content)


def _text_file(name: str, text: str) -> bytes:
    """The content of an event file with one text."""
    tensor = TensorProto(
        dtype=DT_STRING, tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]), string_val=[_block(text)]
    )
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    value = Summary.Value(tag=name, metadata=metadata, tensor=tensor)
    return _serialize(Event(file_version=VERSION), Event(summary=Summary(value=[value])))


def _block(text: str) -> bytes:
    """The text as a block of Markdown."""
    return "".join(f"    {line}\n" for line in text.splitlines()).encode()


def _serialize(*events: Event) -> bytes:
    records = io.BytesIO()
    writer = RecordWriter(records)
    for event in events:
        writer.write(event.SerializeToString(deterministic=True))
    return records.getvalue()
