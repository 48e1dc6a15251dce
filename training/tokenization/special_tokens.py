"""Special tokens that are spelt in texts.

A tokenizer reads the text "[SEP]" or "<|im_end|>" as its own mark and not as text: such a text can end a turn of a
conversation, or add a speaker. Those in the messages of a conversation are therefore encoded as text: `mark_spelt`
marks them before a chat template writes them between its own, and `Encoder.encode_located` reads the marks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

MARK = "\ufdd0"
"""Stands before a special token that is text. A noncharacter of Unicode, for use within a program."""
SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
"""Those of a tokenizer that is trained on rows."""
SENTINELS = 100
"""The tokens `<extra_id_0>`, `<extra_id_1>`, … of a T5, each in the place of a span of a text."""
MOST_TOKENS = 1000
"""The special tokens that are searched for; some tokenizers reserve thousands that nothing uses."""


def sentinel(number: int) -> str:
    """The sentinel of this number, from 0."""
    return f"<extra_id_{number}>"


def mark_spelt(value: Any, tokens: Sequence[str]) -> Any:
    """The messages or declarations of tools, with MARK before each special token in their texts."""
    texts = [*_strings(value)]
    spelt = sorted({token for token in tokens for text in texts if token in text}, key=len, reverse=True)
    if not spelt and not any(MARK in text for text in texts):
        return value
    pattern = re.compile("|".join(map(re.escape, spelt))) if spelt else None

    def mark(text: str) -> str:
        text = text.replace(MARK, "")
        return text if pattern is None else pattern.sub(lambda match: MARK + match.group(), text)

    return _map_strings(mark, value)


def _strings(value: Any) -> Iterator[str]:
    """All texts in lists and objects, the names in objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _strings(name)
            yield from _strings(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _strings(one)


def _map_strings(convert: Callable[[str], str], value: Any) -> Any:
    if isinstance(value, str):
        return convert(value)
    if isinstance(value, Mapping):
        return {_map_strings(convert, name): _map_strings(convert, one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(convert, one) for one in value]
    return value


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
