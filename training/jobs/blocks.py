"""Blocks of rows: the part of a program's work that is kept for later programs, for work that costs a forward pass a
row.

A block is the result for some rows, computed by itself: its content depends on nothing but its rows and the settings of
the program. It is a file in the job, whose name has a digest of the rows and one of the content:

    JOB/blocks/ROWS-CONTENT.arrow

A killed program leaves its finished blocks, and tasks/cache/blocks.py links those that earlier jobs have computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa

from training.jobs.protocol import sha256, write_atomically

BLOCKS = "blocks"
ROWS_IN_BLOCK = 4096


def find_blocks(folder: Path) -> dict[str, Path]:
    """The blocks in a folder, by the digest of their rows."""
    return {path.name.partition("-")[0]: path for path in sorted(folder.glob("*-*.arrow"))}


def is_intact(block: Path) -> bool:
    """Whether the file has the sha256 in its name."""
    return sha256(block) == block.stem.partition("-")[2]


def compute_blocks(folder: Path, rows: Sequence[str], compute: Callable[[int], pa.Table | None]) -> dict[str, Path]:
    """Computes the blocks that the folder lacks, one after another. Returns all by the digest of their rows; those of
    this call only on ranks that store them.

    Args:
        folder: Of all blocks of the job.
        rows: The digest of the rows of each block.
        compute: Gets the number of a block. Every rank calls it; it returns None on ranks that do not store the block.
    """
    folder.mkdir(exist_ok=True)
    known = find_blocks(folder)
    for number, digest in enumerate(rows):
        if digest in known or (table := compute(number)) is None:
            continue
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table.combine_chunks())
        content = sink.getvalue()
        known[digest] = folder / f"{digest}-{hashlib.sha256(content).hexdigest()}.arrow"
        write_atomically(known[digest], content)
    return known


def read_block(block: Path) -> pa.Table:
    """The rows of a block, in a memory map."""
    return pa.ipc.open_file(pa.memory_map(str(block))).read_all()
