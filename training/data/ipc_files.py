"""The files in which stages store rows, Arrow IPC whose bytes depend on the rows alone; and the spread of lengths.

A user's Arrow files are read by parquet_and_arrow_files.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

BLOCK_ROWS = 10_000  # rows of a record batch: fast to read, and small enough to hold several
IMAGES_IN_BLOCK = 256  # the same for rows with images

SPLITS = ("train", "validation", "test")
CORPUS = "corpus"
"""The name of further documents, in place of that of a split."""


def groups_file(split: str) -> str:
    """The file of load_data with a hash of the group of each row, in the column `group`, if rows have groups."""
    return f"{split}.groups.arrow"


def read_labels(folder: Path) -> list[str]:
    """The names of the labels in a folder of load_data, in the order of their indices; none if rows have no labels."""
    return list(json.loads((folder / "labels.json").read_text(encoding="utf-8")))


@contextmanager
def ipc_writer(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatchFileWriter]:
    """A writer of an uncompressed IPC file, which can be memory-mapped."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        yield writer


@contextmanager
def ipc_reader(path: Path, *, mapped: bool = True) -> Iterator[pa.RecordBatchFileReader]:
    """Opens an IPC file. Memory-mapped batches allocate nothing, but pages that were read count as memory of the
    process; other batches allocate their rows, and free them."""
    with pa.memory_map(str(path)) if mapped else pa.OSFile(str(path)) as file:
        yield pa.ipc.open_file(file)


def read_table(file: Path) -> pa.Table:
    """The rows of an IPC file, in a memory map."""
    return pa.ipc.open_file(pa.memory_map(str(file))).read_all()


def read_batches(path: Path, numbers: Iterable[int] | None = None, *, mapped: bool = True) -> Iterator[pa.RecordBatch]:
    """Yields the record batches of an IPC file that `ipc_reader` opens: all, or those with these numbers."""
    with ipc_reader(path, mapped=mapped) as reader:
        yield from map(reader.get_batch, range(reader.num_record_batches) if numbers is None else numbers)


def in_blocks(batches: Iterable[pa.RecordBatch], schema: pa.Schema, rows: int = BLOCK_ROWS) -> Iterator[pa.RecordBatch]:
    """Yields the same rows in batches of exactly `rows` (the last one smaller), each in its own memory.

    A slice would be written with up to 63 bytes of its neighbours in the larger buffer.
    """
    held = schema.empty_table()
    for batch in batches:
        held = pa.concat_tables([held, pa.Table.from_batches([batch], schema)])
        while held.num_rows >= rows:
            yield _copied(held.slice(0, rows))
            held = held.slice(rows)
    if held.num_rows:
        yield _copied(held)


def write_table(
    file: Path, batches: Iterable[pa.RecordBatch], schema: pa.Schema, rows_in_batch: int = BLOCK_ROWS
) -> None:
    """Stores rows as an IPC file in batches of so many rows."""
    with ipc_writer(file, schema) as writer:
        for block in in_blocks(batches, schema, rows_in_batch):
            writer.write(block)


def _copied(rows: pa.Table) -> pa.RecordBatch:
    (batch,) = rows.take(pa.array(np.arange(rows.num_rows))).combine_chunks().to_batches()
    return batch


class Spread:
    """Smallest, median and largest of many whole numbers, held as one count for each distinct number."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, numbers: np.ndarray[Any, np.dtype[Any]]) -> None:
        values, counts = np.unique(numbers, return_counts=True)
        self._counts.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))

    def join(self, other: Spread) -> None:
        """Adds the numbers of another spread."""
        self._counts.update(other._counts)

    def summary(self) -> dict[str, int]:
        """Returns `min`, `median` (of an even count the lower one) and `max`; empty if nothing was added."""
        if not self._counts:
            return {}
        return {"min": min(self._counts), "median": self._reached(0.5), "max": max(self._counts)}

    def histogram(self, most_bins: int = 40) -> dict[str, list[int]]:
        """Returns a histogram: `counts[i]` numbers from `edges[i]` up to but not including `edges[i + 1]`.

        If few numbers (one in 200) are far larger than the others, they share the last bin, which is wider.
        """
        if not self._counts:
            return {"edges": [], "counts": []}
        low, end, tail = min(self._counts), max(self._counts) + 1, self._reached(0.995) + 1
        far = [end] if end - low > 2 * (tail - low) else []
        bins = np.linspace(low, tail if far else end, most_bins + 1 - len(far))
        edges = np.unique(np.append(bins, far).astype(np.int64))
        counts, _ = np.histogram(list(self._counts), bins=edges, weights=list(self._counts.values()))
        return {"edges": edges.tolist(), "counts": counts.astype(np.int64).tolist()}

    def _reached(self, share: float) -> int:
        """Returns the least number that this share of all does not exceed."""
        ordered = sorted(self._counts)
        sums = np.cumsum([self._counts[number] for number in ordered])
        return ordered[int(np.searchsorted(sums, share * sums[-1]))]
