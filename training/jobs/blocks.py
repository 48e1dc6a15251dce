"""Blocks of rows: the part of a program's work that is kept for later programs, for work that costs a forward pass a
row.

A block is the result for some rows, computed by itself: its content depends on nothing but its rows and the settings of
the program. It is a file in the job, whose name has a digest of the rows and one of the content:

    JOB/blocks/ROWS-CONTENT.arrow

A program that adds columns to stored rows calls `compute_files`; another one cuts and joins its blocks by itself.

A killed program leaves its finished blocks, and tasks/cache/blocks.py links those that earlier jobs have computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from training.jobs.protocol import rank, sha256, write_atomically

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
    for digest in [digest for digest in dict.fromkeys(rows) if digest not in known]:  # on every rank the same
        if (table := compute(rows.index(digest))) is None:
            continue
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table.combine_chunks())
        content = sink.getvalue()
        known[digest] = folder / f"{digest}-{hashlib.sha256(content).hexdigest()}.arrow"
        write_atomically(known[digest], content)
    return known


def compute_files(
    folder: Path,
    splits: Mapping[str, pa.Table],
    compute: Callable[[str, int, pa.Table], pa.Table | None],
    rows_in_block: int,
) -> dict[str, list[Path]]:
    """The blocks with new columns of the rows of each split, in the order of the rows; on rank 0 alone.

    Args:
        folder: Of all blocks of the job.
        splits: The rows by split. A block is named by all their columns, and is the same in any split.
        compute: Gets a split, the number of the first row of a block in it, and the rows of the block. Every rank calls
            it; it returns the block's columns on rank 0, and None on the others.
        rows_in_block: The rows of each block but the last of a split.
    """
    blocks = {
        split: [(first, rows.slice(first, rows_in_block)) for first in range(0, len(rows), rows_in_block)]
        for split, rows in splits.items()
    }
    places = [(split, *block) for split in blocks for block in blocks[split]]
    digests = [digest_of_rows(rows) for _, _, rows in places]
    files = compute_blocks(folder, digests, lambda number: compute(*places[number]))
    if rank():
        return {}
    found = {split: list[Path]() for split in splits}
    for (split, _, _), digest in zip(places, digests, strict=True):
        found[split].append(files[digest])
    return found


def digest_of_rows(rows: pa.Table) -> str:
    """Names the content of rows: names, types and values of all columns."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        # Copied: a slice would be written with values of its neighbours.
        writer.write_table(rows.take(pa.array(range(len(rows)))).combine_chunks())
    return hashlib.sha256(sink.getvalue()).hexdigest()[:40]
