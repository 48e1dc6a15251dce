"""Groups of rows by the column of data.split: all rows of a customer, ticket or document are in one split.

Memory: some 30 bytes a row to find groups that are in several splits. Their names are on disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from training.data.duplicates import HashedRows, Hashes, hash_texts
from training.data.ipc_files import ipc_writer
from training.data.label_indices import whole_number
from training.data.readers import Block, Numbers
from training.data.row_problems import RowProblems
from training.problems import UserError
from training.recipe.source_columns import SourceColumns, StoredColumn

_NAMES = pa.schema([("group", pa.string())])
_HASHES = pa.schema([("group", pa.uint64())])


class RowGroups(HashedRows):
    """The groups of all splits. The name of each row's group is in a file of `folder`, for examples in messages."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        super().__init__(folder, StoredColumn("group", "", "text", "data.split.column"))
        self._files = files
        self._writers: dict[str, pa.RecordBatchFileWriter] = {}
        self.without: Counter[str] = Counter()
        """The rows of each split that have no group."""
        self._drawn: dict[str, list[Hashes]] = {}
        """The hash of the group of each row, also of rows without one, by split."""

    def draw(self, block: Block, wanted: SourceColumns, texts: Hashes, problems: RowProblems) -> tuple[Block, Hashes]:
        """Returns the block with the names of groups, and the hash of each row's group: that of its text if it has
        none, which is a problem."""
        names = group_names(block, wanted)
        missing = names.is_null().to_numpy(zero_copy_only=False)
        description = f"has no value in column {wanted.split_column!r}"
        problems.add(block.where, "missing_group", description, block.numbers[missing].tolist())
        hashes = hash_texts([name or "" for name in names.dictionary.to_pylist()] or [""])
        drawn = hashes[names.indices.fill_null(0).to_numpy()]
        return replace(block, split_values=names), np.where(missing, texts, drawn)

    def add_block(self, split: str, block: Block, drawn: Hashes) -> None:
        """Adds the rows of a block that `draw` returned, with their hashes."""
        if split not in self._writers:
            self._folder.mkdir(exist_ok=True)
            self._writers[split] = self._files.enter_context(ipc_writer(self._folder / split, _NAMES))
        present = block.split_values.is_valid().to_numpy(zero_copy_only=False)
        self.without[split] += int(np.count_nonzero(~present))
        grouped = block.filter(present)
        self._writers[split].write(pa.RecordBatch.from_arrays([grouped.split_values.cast(pa.string())], schema=_NAMES))
        self.add(split, grouped, drawn[present])
        self.add_drawn(split, drawn)

    def add_drawn(self, split: str, drawn: Hashes) -> None:
        """Adds rows by the hashes of their groups; those of a set without groups by the hashes of their texts."""
        self._drawn.setdefault(split, []).append(drawn)

    def write(self, split: str, file: Path, left_out: Numbers) -> None:
        """Stores the hashes of the groups of a split's rows, without the rows at these positions. Writes nothing for a
        split of which no rows were added."""
        if split in self._drawn:
            hashes = np.delete(np.concatenate(self._drawn[split]), left_out)
            with ipc_writer(file, _HASHES) as writer:
                writer.write(pa.RecordBatch.from_arrays([pa.array(hashes, pa.uint64())], schema=_HASHES))

    def count(self, split: str) -> int:
        """Returns the number of groups in a split."""
        return len(np.unique(self._sort_hashes(split)[0]))

    def count_shared(self, earlier: str, later: str) -> int:
        """Returns the number of groups in both splits."""
        return len(np.intersect1d(self._sort_hashes(earlier)[0], self._sort_hashes(later)[0]))


def group_names(block: Block, wanted: SourceColumns) -> pa.DictionaryArray:
    """Returns the name of each row's group, null for a missing value. Whole numbers have one name in all types, as
    texts too: `3`, `3.0` and `+3`. Raises UserError for a column of lists or objects."""
    values = require_single_values(block, wanted)
    if pa.types.is_floating(values.type):  # as Python spells them in JSON
        numbers = values.cast(pa.float64()).to_pylist()
        texts = pa.array([None if one is None or one != one else repr(one) for one in numbers], pa.string())
    else:
        texts = values.cast(pa.string())
    coded = pc.utf8_trim_whitespace(texts).dictionary_encode()
    names = pa.array([whole_number(name) or name or None for name in coded.dictionary.to_pylist()], pa.string())
    return names.take(coded.indices).dictionary_encode()


def require_single_values(block: Block, wanted: SourceColumns) -> pa.Array:
    """Returns the values of the column of data.split. Raises UserError for lists and objects."""
    values = block.split_values
    if pa.types.is_nested(values.type):
        message = (
            f"column {wanted.split_column!r} of {block.where} is of type {values.type}: it must hold single values, "
            "such as names, numbers or dates."
        )
        raise UserError.of("data", "data.split.column", message)
    return values


def describe_groups(groups: RowGroups, splits: Sequence[str]) -> dict[str, dict[str, int]]:
    """Returns the number of groups, and of rows without one, by split."""
    return {
        "groups": {split: groups.count(split) for split in splits},
        "without_group": {split: groups.without[split] for split in splits},
    }
