"""The content of the files that trackers write, as their own readers see it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CURVE = dict[str, list[tuple[int, float]]]
"""Step and value of each point, in the order of the file, by name."""
BLOCK = 32_768


def tensorboard_curves(folder: Path) -> CURVE:
    """The points in all event files of a folder, before TensorBoard leaves out those that it draws once."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    curves: CURVE = {}
    for file in sorted(folder.glob("*tfevents*")):
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    curves.setdefault(value.tag, []).append((event.step, value.tensor.float_val[0]))
    return curves


def wandb_records(folder: Path) -> Iterator[Any]:
    """The records of an offline run, which are in the format of LevelDB's log after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("run-*.wandb")
    content, offset, parts = file.read_bytes(), 7, b""
    while offset + 7 <= len(content):
        if BLOCK - offset % BLOCK < 7:
            offset += BLOCK - offset % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, offset)
        if kind == 0:
            break
        parts += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def wandb_curves(folder: Path) -> CURVE:
    """The points of an offline run."""
    curves: CURVE = {}
    for record in wandb_records(folder):
        if record.HasField("history"):
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in row.items():
                if not name.startswith("_"):
                    curves.setdefault(name, []).append((record.history.step.num, value))
    return curves
