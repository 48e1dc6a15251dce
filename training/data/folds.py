"""Folds of the training rows, for predictions by models that have not seen the row (evaluation.folds).

A hash of a row's inputs, or of its group (row_groups.py), modulo the number of folds is its fold. So a row stays in its
fold when others arrive, and equal texts, the answers to a prompt, and the rows of a group are in one fold.

    folds.arrow    the fold of each training row, from 1, in the column `fold`: row for row with train.arrow

N rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training.data.duplicates import Hashes, hash_rows
from training.data.ipc_files import groups_file, ipc_writer, read_batches
from training.jobs.protocol import Result
from training.problems import UserError
from training.recipe.source_columns import StoredColumn

FIELD = "evaluation.folds"
Folds = npt.NDArray[np.int32]


class FoldsResult(Result):
    """The sizes of the folds."""

    rows: list[int]
    """Of each fold."""


class OutOfFoldResult(Result):
    """The predictions of all folds together."""

    rows: int


def assign(data: Path, inputs: Sequence[str], folds: int) -> Folds:
    """(N,) the fold of each training row in the folder of load_data; `inputs` are the columns that the model reads.

    Raises UserError if a fold is empty.
    """
    by_group = (data / groups_file("train")).is_file()
    if by_group:
        blocks = [block.column("group").to_numpy() for block in read_batches(data / groups_file("train"))]
    else:
        columns = [StoredColumn(name, name, "text", FIELD) for name in inputs]
        blocks = [hash_rows(block, columns) for block in read_batches(data / "train.arrow")]
    hashes = np.concatenate([np.zeros(0, np.uint64), *blocks])
    found = _draw(hashes, folds)
    if empty := sorted({*range(1, folds + 1)} - {*found.tolist()}):
        unit = "groups" if by_group else "different texts"
        message = f"{folds} leaves fold {empty[0]} without rows: a hash draws the fold of each of the "
        message += f"{len(np.unique(hashes)):,} {unit} in train. "
        fewer = (number for number in range(folds - 1, 1, -1) if len(np.unique(_draw(hashes, number))) == number)
        most = next(fewer, None)
        raise UserError.of("data", FIELD, message + (f"Choose at most {most}." if most else "Leave it out."))
    return found


def _draw(hashes: Hashes, folds: int) -> Folds:
    return (hashes % np.uint64(folds)).astype(np.int32) + 1


def write(folds: Folds, file: Path) -> None:
    """Stores the fold of each row."""
    schema = pa.schema([("fold", pa.int32())])
    with ipc_writer(file, schema) as writer:
        writer.write(pa.RecordBatch.from_arrays([pa.array(folds)], schema=schema))


def find_lone_labels(data: Path, folds: Folds, labels: Sequence[str]) -> Iterator[str]:
    """Yields a sentence about each label whose training rows are all in one fold."""
    blocks = [block.column("label") for block in read_batches(data / "train.arrow") if "label" in block.schema.names]
    if not labels or not blocks:
        return
    if pa.types.is_list(blocks[0].type):
        lengths = np.concatenate([block.value_lengths().to_numpy() for block in blocks])
        blocks, folds = [block.flatten() for block in blocks], np.repeat(folds, lengths)
    values = np.concatenate([block.to_numpy() for block in blocks])
    for place, name in enumerate(labels):
        of_label = np.unique(folds[values == place])
        if len(of_label) == 1:
            yield f"all rows of label {name!r} are in fold {of_label[0]}: their predictions never saw the label."
