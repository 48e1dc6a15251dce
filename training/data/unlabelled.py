"""Rows without labels, which a teacher labels: read as rows to predict are, without those that a training must not see
or sees already."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

from training.data.casting import TaskColumns, Values, to_batch
from training.data.ipc_files import ipc_reader, write_table
from training.data.near_duplicates import find_like
from training.data.near_images import find_like_images
from training.data.prediction_rows import RowReader
from training.jobs.protocol import Result
from training.problems import UserError
from training.recipe.column_types import RowSpecification
from training.recipe.reading_rules import ReadingRules

FIELD = "data.unlabelled"


class UnlabelledResult(Result):
    """Numbers of rows without labels."""

    rows: int
    """That are trained on."""
    evaluated: int
    """Left out, because their inputs are those of a row of validation or test."""
    near: int
    """Left out, because they are nearly equal to one; 0 if data.checks.near_duplicates is ignore."""
    repeated: int
    """Left out, because their inputs are those of a training row or of another row without a label."""
    unusable: int
    """Left out, because training would refuse them."""


def load_unlabelled(
    task_type: RowSpecification,
    columns: Mapping[str, str],
    rules: ReadingRules,
    files: Iterable[str],
    data: Path,
    out: Path,
    *,
    compares_nearly: bool,
) -> UnlabelledResult:
    """Writes out/train.arrow, the rows of the files with the model's inputs, in their order.

    Args:
        columns: The rows' names of the inputs, by role.
        rules: How the files are read.
        data: The folder of load_data, with the rows of all splits.
        compares_nearly: Whether rows that are nearly equal to evaluated ones are left out too.

    Raises UserError for a file that cannot be read, or if no row is left.
    """
    reader, rows = RowReader(cast(TaskColumns, task_type), columns, rules=rules), list[Values]()
    unusable = 0
    for file in files:
        for part in reader.read(file):
            unusable += sum(problem is not None for problem in part.errors)
            rows += [values for values in part.like_training_rows() if values is not None]
    roles = [*columns]
    evaluated = [row for split in ("validation", "test") for row in _read(data / f"{split}.arrow", roles)]
    own = {_plain(row) for row in _read(data / "train.arrow", roles)}
    others = {_plain(row) for row in evaluated}
    kept, counts = list[Values](), {"evaluated": 0, "repeated": 0, "near": 0}
    for row in rows:
        plain = _plain(row)
        if plain in others or plain in own:
            counts["evaluated" if plain in others else "repeated"] += 1
            continue
        own.add(plain)
        kept.append(row)
    if compares_nearly and kept and evaluated:
        if task_type.reads_images():
            like = find_like_images(*((image for (image,) in rows) for rows in (kept, evaluated)))
        else:
            like = find_like([_plain(row) for row in kept], others)
        counts["near"] = int(like.sum())
        kept = [row for row, is_like in zip(kept, like.tolist(), strict=True) if not is_like]
    if not kept:
        message = (
            f"none of {len(rows) + unusable:,} rows is left: {counts['evaluated'] + counts['near']:,} are those of "
        )
        message += f"validation or test, {counts['repeated']:,} are there already, {unusable:,} cannot be used. Name "
        raise UserError.of("data", FIELD, f"{message}other rows, or set it to null.")
    batch = to_batch(cast(TaskColumns, task_type), roles, kept)
    write_table(out / "train.arrow", [batch], batch.schema)
    return UnlabelledResult(rows=len(kept), unusable=unusable, **counts)


def _read(file: Path, names: Sequence[str]) -> list[Values]:
    """The inputs of stored rows; none without the file."""
    if not file.is_file():
        return []
    with ipc_reader(file, mapped=False) as reader:
        table = reader.read_all()
    columns = [table[name].to_pylist() if name in table.column_names else [None] * len(table) for name in names]
    return [tuple(values) for values in zip(*columns, strict=True)]


def _plain(row: Values) -> str:
    """The inputs as one text, without case and with single spaces."""
    texts = (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in row)
    return "\n".join(" ".join(text.casefold().split()) for text in texts)
