"""The columns that load_data keeps beside the rows, as it writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa


def write_kept(
    folder: Path, split: str, columns: Mapping[str, Sequence[str | None]], left_out: Mapping[str, str] | None = None
) -> None:
    """SPLIT.slices.arrow with these columns, and slices.json."""
    table = pa.table({name: pa.array(values, pa.string()).dictionary_encode() for name, values in columns.items()})
    with pa.ipc.new_file(str(folder / f"{split}.slices.arrow"), table.schema) as writer:
        writer.write_table(table)
    (folder / "slices.json").write_text(json.dumps({"kept": [*columns], "left_out": dict(left_out or {})}))
