"""The stage process_images against the image processor alone, and its memory as the images grow.

Run as a program it is one process: `... stage FOLDER` prepares the images of a folder by the program of the stage, and
`... processor FOLDER` by the processor alone. Both print images a second, and the MiB of memory at most, without the
files that are mapped into it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from tests.benchmarks.subject import Subject
from tests.benchmarks.table import Row
from tests.training import programs_here
from tests.training.pictures import file_of, stored
from training.batching.images import ImagePreprocessor
from training.data.images import open_image
from training.data.ipc_files import IMAGES_IN_BLOCK, ipc_reader, ipc_writer
from training.programs import process_images

TASK, SIZE, GROWTH = "image-classification", 224, 4
GRAIN = 28
"""Pixels a side of the noise that is enlarged to a photograph."""


def measure(subject: Subject) -> list[Row]:
    """The ratio of the rates, and of memory for GROWTH times the images."""
    counts = subject.images, GROWTH * subject.images
    few, many = (_make_images(subject.folder / f"images-{count}", count) for count in counts)
    alone, ours, more = _child("processor", few), _child("stage", few), _child("stage", many)
    return [
        Row(
            "process_images / the image processor alone",
            ours["rate"] / alone["rate"],
            f"{counts[0]:,} JPEG images of {SIZE} × {SIZE} for ViT, decoded, from Arrow to Arrow; "  # noqa: RUF001
            f"{ours['rate']:,.0f} images/s, and {alone['rate']:,.0f} by the processor alone",
            least=0.8,
        ),
        Row(
            f"process_images: memory for {GROWTH} times the images",
            more["mib"] / ours["mib"],
            f"peak for {counts[0]:,} images: {ours['mib']:.0f} MiB; {counts[1]:,} images: {more['mib']:.0f} MiB",
            most=1.10,
        ),
    ]


def _make_images(folder: Path, count: int) -> Path:
    """A folder with data/train.arrow, as load_data writes it, and processor/."""
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    (folder / "data").mkdir(parents=True)
    ViTImageProcessorPil().save_pretrained(folder / "processor")
    draw, schema = np.random.default_rng(0), pa.schema({"image": pa.string(), "label": pa.int64()})
    with ipc_writer(folder / "data" / "train.arrow", schema) as writer:
        for start in range(0, count, IMAGES_IN_BLOCK):
            size = min(IMAGES_IN_BLOCK, count - start)
            grains = draw.integers(0, 256, (size, GRAIN, GRAIN, 3), np.uint8)
            photos = (Image.fromarray(grain).resize((SIZE, SIZE), Image.Resampling.BICUBIC) for grain in grains)
            images = [stored(file_of(photo, "JPEG")) for photo in photos]
            writer.write_batch(pa.record_batch([images, [0] * size], schema=schema))
    return folder


def _child(what: str, folder: Path) -> dict[str, float]:
    argv = [sys.executable, "-m", "tests.benchmarks.images", what, str(folder)]
    found: dict[str, float] = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found


def _of_stage(folder: Path, out: Path) -> float:
    inputs = {"data": folder / "data", "tokenizer": folder / "processor"}
    result = programs_here.run(process_images, out, inputs, task=TASK, options={})
    return float(result["rows_per_second"])


def _of_processor(folder: Path, out: Path) -> float:
    own = ImagePreprocessor(folder / "processor").processor
    count, began = 0, time.perf_counter()
    with ipc_reader(folder / "data" / "train.arrow") as reader:
        for number in range(reader.num_record_batches):
            images = [open_image(image) for image in reader.get_batch(number).column("image").to_pylist()]
            own(images=images, return_tensors="np")
            count += len(images)
    return count / (time.perf_counter() - began)


class _Memory(threading.Thread):
    """The most anonymous memory of this process, in MiB, sampled while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.mib = 0.0

    def run(self) -> None:
        while True:
            status: Any = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            self.mib = max(self.mib, int(status["RssAnon"].split()[0]) / 1024)
            time.sleep(0.02)


if __name__ == "__main__":
    what, place = sys.argv[1:]
    memory = _Memory()
    memory.start()
    with TemporaryDirectory(dir=place) as out:
        rate = {"stage": _of_stage, "processor": _of_processor}[what](Path(place), Path(out) / "job")
    print(json.dumps({"rate": rate, "mib": memory.mib}))
