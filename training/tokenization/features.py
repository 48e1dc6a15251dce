"""Token features of rows as Arrow: what most task types make of texts, and what they are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

if TYPE_CHECKING:
    from training.tokenization.encoder import Encoded, Encoder


@dataclass(frozen=True)
class Features:
    """The token features of some rows."""

    rows: pa.RecordBatch
    """`length` (int32), the tokens of each, by which rows are batched; lists as long as that, such as `input_ids`
    (list<int32>); `label`, where there is one; and whatever else the task type's collator takes. Where there may be
    several a row of the data, `row` (int64): the number of that row among those given, from 0, in their order."""
    lost: npt.NDArray[np.int64]
    """(N,), of each of the N rows of `rows`: the tokens that did not fit."""
    lost_of_targets: npt.NDArray[np.int64] | None = None
    """(N,), the same of the texts that the model shall write; how many did is the column `targets`."""

    def numbered(self, before: int) -> pa.RecordBatch:
        """`rows`, where so many rows of the data came before those that these are of."""
        place = self.rows.schema.get_field_index("row")
        if place < 0:
            return self.rows
        return self.rows.set_column(place, "row", pa.array(self.rows.column(place).to_numpy() + before))


def of_texts(encoder: Encoder, rows: pa.RecordBatch) -> Features:
    """Of `text`, or of the pair of it and `text_pair`: input_ids, for pairs token_type_ids (list<int8>), length; and
    the label as the rows have it, where they have one."""
    pairs = rows.column("text_pair").to_pylist() if "text_pair" in rows.schema.names else None
    encoded = encoder.encode(rows.column("text").to_pylist(), pairs)
    columns: dict[str, Any] = {"input_ids": lists(encoded, encoded.ids)}
    if encoded.types is not None:
        columns["token_type_ids"] = lists(encoded, encoded.types)
    columns["length"] = encoded.lengths
    if "label" in rows.schema.names:
        columns["label"] = rows.column("label")
    return Features(pa.RecordBatch.from_pydict(columns), encoded.lost)


def lists(encoded: Encoded, values: npt.NDArray[Any]) -> pa.ListArray:
    """Values of all tokens, (T,), as a list a row."""
    return of_lengths(values, encoded.lengths)


def of_lengths(values: npt.NDArray[Any], lengths: npt.NDArray[np.integer[Any]]) -> pa.ListArray:
    """Values, (T,), as lists of these lengths, (N,)."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
