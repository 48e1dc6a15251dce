"""Special tokens that are spelt in texts.

A tokenizer reads the text "[SEP]" or "<|im_end|>" as its own mark and not as text: such a text can end a turn of a
conversation, or add a speaker. Those in the messages of a conversation are therefore encoded as text: `mark_spelt`
marks them before a chat template writes them between its own, and `Encoder.encode_located` reads the marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

MARK = "\ufdd0"
"""Stands before a special token that is text. A noncharacter of Unicode, for use within a program."""
MOST_TOKENS = 1000
"""The special tokens that are searched for; some tokenizers reserve thousands that nothing uses."""


def mark_spelt(messages: Sequence[Mapping[str, Any]], tokens: Sequence[str]) -> list[Mapping[str, Any]]:
    """The messages, with MARK before each special token in their contents."""
    contents = [message["content"].replace(MARK, "") for message in messages]
    spelt = sorted({token for token in tokens for content in contents if token in content}, key=len, reverse=True)
    if spelt:
        pattern = re.compile("|".join(map(re.escape, spelt)))
        contents = [pattern.sub(lambda match: MARK + match.group(), content) for content in contents]
    return [{**message, "content": content} for message, content in zip(messages, contents, strict=True)]


def find_spelt(rows: pa.RecordBatch, tokens: Sequence[str]) -> tuple[npt.NDArray[np.bool_], str]:
    """(N,) whether a text of the row spells one of these special tokens, and the first of them that is spelt."""
    found, first = np.zeros(rows.num_rows, np.bool_), ""
    pattern = "|".join(re.escape(token) for token in tokens[:MOST_TOKENS] if token.strip())
    if not pattern:
        return found, first
    for column in rows.columns:
        for texts, row in _texts(column, np.arange(rows.num_rows)):
            mask = pc.fill_null(pc.match_substring_regex(texts, pattern), False).to_numpy(zero_copy_only=False)
            found[row[mask]] = True
            if not first and mask.any() and (match := re.search(pattern, texts[int(mask.argmax())].as_py())):
                first = match.group()
    return found, first


def _texts(column: pa.Array, row: npt.NDArray[np.int64]) -> Iterator[tuple[pa.Array, npt.NDArray[np.int64]]]:
    """The texts of a column, also within lists and structures, and the row of each."""
    kind: Any = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        yield column, row
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        yield from _texts(column.flatten(), np.repeat(row, lengths))
    elif pa.types.is_struct(kind):
        for part in column.flatten():
            yield from _texts(part, row)
