"""Token features of rows as Arrow columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training.problems import UserError

if TYPE_CHECKING:
    from training.tokenization.encoder import Encoded, Encoder


class RefusedRows(UserError):
    """Rows that have no features, with the problems of the first, in words that follow "it"."""

    rows: Sequence[int] = (0,)
    """Their places among the given rows."""
    reasons: Sequence[str] = ("",)
    """The reason of each, a clause that quotes nothing of the row, so that equal reasons can be counted."""

    @classmethod
    def from_rows(cls, by_row: Mapping[int, RefusedRows]) -> RefusedRows:
        """The error of several rows, by the errors of each."""
        error = cls(by_row[min(by_row)].problems)
        error.rows = sorted(by_row)
        error.reasons = [by_row[row].reasons[0] for row in error.rows]
        return error


@dataclass(frozen=True)
class Features:
    """The token features of some rows."""

    rows: pa.RecordBatch
    """`length` (int32), the number of tokens, by which rows are batched; lists of that length, such as `input_ids`
    (list<int32>); `label`, if any; and other columns for the task type's collator. If there may be several feature
    rows for a row of the data, `row` (int64) is that row's number among the given rows, from 0, in order."""
    lost: npt.NDArray[np.int64]
    """(N,) the truncated tokens of each of the N rows of `rows`."""
    lost_of_targets: npt.NDArray[np.int64] | None = None
    """(N,) the truncated tokens of each target text; the column `targets` counts those that are kept."""
    longest: npt.NDArray[np.int64] | None = None
    """(N,) the tokens of each row's longest text before truncation, if a row has several texts of up to max_length."""
    remarks: Mapping[str, int] = field(default_factory=dict)
    """The numbers of rows that the user should know of, by the names of `token_files.REMARKS`."""

    wordless: Sequence[str] = ()
    """The words without a token in rows that are not truncated."""

    unwritable: int = 0
    """The targets with a token for what the tokenizer cannot write."""

    def numbered(self, before: int) -> pa.RecordBatch:
        """`rows` with the column `row` raised by `before`, the number of rows of the data in earlier blocks."""
        place = self.rows.schema.get_field_index("row")
        if place < 0:
            return self.rows
        return self.rows.set_column(place, "row", pa.array(self.rows.column(place).to_numpy() + before))


def read_ids(features: pa.RecordBatch) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]]:
    """(T,) the tokens of each column with tokens, and the feature row of each."""
    for name, column in zip(features.schema.names, features.columns, strict=True):
        if name.endswith("input_ids") and pa.types.is_list(column.type):
            lengths = column.value_lengths().to_numpy(zero_copy_only=False)
            yield column.flatten().to_numpy(zero_copy_only=False), np.repeat(np.arange(len(lengths)), lengths)


def find_beyond(features: pa.RecordBatch, vocab_size: int | None) -> npt.NDArray[np.int64]:
    """The rows of the data, some of them several times, with tokens that a model of `vocab_size` tokens does not
    have."""
    if vocab_size is None:
        return np.zeros(0, np.int64)
    found = [row[ids >= vocab_size] for ids, row in read_ids(features)]
    rows = np.concatenate([np.zeros(0, np.int64), *found])
    place = features.schema.get_field_index("row")
    return rows if place < 0 else features.column(place).to_numpy()[rows]


def encode_texts(encoder: Encoder, rows: pa.RecordBatch) -> Features:
    """The features of `text`, or of its pair with `text_pair`: input_ids, for pairs token_type_ids (list<int8>),
    length, and the rows' label, if any."""
    pairs = rows.column("text_pair").to_pylist() if "text_pair" in rows.schema.names else None
    encoded = encoder.encode(rows.column("text").to_pylist(), pairs)
    columns: dict[str, Any] = {"input_ids": list_column(encoded.ids, encoded.lengths)}
    if encoded.types is not None:
        columns["token_type_ids"] = list_column(encoded.types, encoded.lengths)
    columns["length"] = encoded.lengths
    if "label" in rows.schema.names:
        columns["label"] = rows.column("label")
    return Features(pa.RecordBatch.from_pydict(columns), encoded.lost)


_LOSSES = {"lost_lines": r"\S\s*\n\s*\S", "lost_spaces": r"\S(\t|  )\s*\S", "lost_capitals": r"[A-Z]"}
"""Patterns of texts that lose something to some tokenizers, by their names in `token_files.REMARKS`."""
_PROBES = {"lost_lines": ("a\nb", "a b"), "lost_spaces": ("a  b", "a b"), "lost_capitals": ("A b", "a b")}
"""Two texts each whose tokens are the same if it is lost."""


def count_lost(encode: Callable[[list[str]], Encoded], texts: Sequence[str]) -> dict[str, int]:
    """The numbers of these texts that a model writes otherwise, because the tokens do not have their line breaks, runs
    of spaces or capital letters; by names of `token_files.REMARKS`."""
    probed = encode([text for pair in _PROBES.values() for text in pair])
    tokens = [ids.tolist() for ids in np.split(probed.ids, np.cumsum(probed.lengths)[:-1])]
    lost = [name for name, one, other in zip(_PROBES, tokens[::2], tokens[1::2], strict=True) if one == other]
    return {name: sum(re.search(_LOSSES[name], text) is not None for text in texts) for name in lost}


def list_column(values: npt.NDArray[Any], lengths: npt.NDArray[np.integer[Any]]) -> pa.ListArray:
    """(T,) values as lists of these (N,) lengths."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
