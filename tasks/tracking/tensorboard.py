"""TensorBoard: a folder for each training, `<home>/tensorboard/RECIPE-KEY`, with the points of its job.

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
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from tasks.cache import settings
from tasks.tracking.tracker import Curve, Point, Run, Tracker

FOLDER = "TENSORBOARD_LOGGING_DIR"
"""The variable that names the folder of all runs, in place of `tensorboard/` of the home."""


class TensorBoard(Tracker):
    """Writes event files for TensorBoard: the curves of the programs that the run starts."""

    title: ClassVar[str] = "TensorBoard"

    def __init__(self, run: Run, warn: Callable[[str], None]) -> None:
        super().__init__(run, warn)
        self._files: dict[Curve, _EventFile] = {}

    def log_points(self, curve: Curve, points: Sequence[Point]) -> None:
        """Writes the points of a job. Those of the run itself have no folder: the machine's load, values of trials."""
        if curve.key:
            if curve not in self._files:
                root = Path(os.environ.get(FOLDER) or settings.home() / "tensorboard")
                self._files[curve] = _EventFile(root / f"{self.run.recipe}-{curve.key[:8]}", points[0].time_ms)
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
            Event(wall_time=began_s, file_version="brain.Event:2"),
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
        records = io.BytesIO()
        writer = RecordWriter(records)
        for event in events:
            writer.write(event.SerializeToString(deterministic=True))
        content = records.getvalue()
        with open(self._path, "r+b" if self._path.exists() else "w+b") as file:
            file.seek(self._offset)
            if file.read(len(content)) != content:  # new, or cut by a kill
                file.seek(self._offset)
                file.write(content)
                file.truncate()
        self._offset += len(content)
