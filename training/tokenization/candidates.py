"""Token features of rows with several candidates: a text with each of a list of others.

N rows, D candidates of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training.tokenization.features import Features, list_column

if TYPE_CHECKING:
    from training.tokenization.encoder import Encoder


def encode_candidates(
    encoder: Encoder,
    texts: Sequence[str],
    candidates: list[str],
    counts: npt.NDArray[np.int64],
    **columns: Any,
) -> Features:
    """The features of (N,) texts, each in a pair with its candidates: `input_ids` and perhaps `token_type_ids` of all
    pairs of a row, one after another; `text_lengths`, the tokens of each pair; and further columns, (N,).

    `candidates` are those of all rows, (D,), and `counts` (N,) the number of each row's. Each pair is cut at the
    encoder's longest length.
    """
    row = np.repeat(np.arange(len(texts)), counts)
    encoded = encoder.encode([texts[number] for number in row.tolist()], candidates)
    lengths = np.bincount(row, encoded.lengths, len(texts)).astype(np.int32)
    longest = np.zeros(len(texts), np.int64)
    np.maximum.at(longest, row, encoded.lengths + encoded.lost)
    of_tokens = {"input_ids": list_column(encoded.ids, lengths)}
    if encoded.types is not None:
        of_tokens["token_type_ids"] = list_column(encoded.types, lengths)
    of_tokens |= {"text_lengths": list_column(encoded.lengths, counts), "length": lengths}
    lost = np.bincount(row, encoded.lost, len(texts)).astype(np.int64)
    return Features(pa.RecordBatch.from_pydict(of_tokens | columns), lost, longest=longest)
