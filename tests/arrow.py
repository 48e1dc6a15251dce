"""Arrow files of tests: tables, and the columns that load_data keeps with the rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa


def write_arrow(file: Path, table: pa.Table) -> Path:
    """The file, with the table in it; its folder is made where it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_file(str(file), table.schema) as writer:
        writer.write_table(table)
    return file


def read_arrow(file: Path) -> pa.Table:
    """All rows of the file."""
    return pa.ipc.open_file(str(file)).read_all()


def write_kept(
    folder: Path, split: str, columns: Mapping[str, Sequence[str | None]], left_out: Mapping[str, str] | None = None
) -> None:
    """SPLIT.slices.arrow with these columns, and slices.json."""
    table = {name: pa.array(values, pa.string()).dictionary_encode() for name, values in columns.items()}
    write_arrow(folder / f"{split}.slices.arrow", pa.table(table))
    (folder / "slices.json").write_text(json.dumps({"kept": [*columns], "left_out": dict(left_out or {})}))


def group(name: str, rows: int, **figures: float | None) -> dict[str, Any]:
    """A group as training.programs.score writes it, with intervals of a tenth."""
    ends = {"low": None, "high": None}
    metrics = {
        metric: {"value": value, **(ends if value is None else {"low": value - 0.05, "high": value + 0.05})}
        for metric, value in figures.items()
    }
    return {"group": name, "rows": rows, "metrics": metrics}
