"""The rows of a split in groups: by a column that load_data kept, by label, or by number of tokens.

N rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from training.data.ipc_files import read_table
from training.evaluation.predictions import Predictions, Rows

NO_VALUE = "none"


def of_label(references: Rows, labels: Sequence[str]) -> dict[str, Rows]:
    """The rows (N,) of each label that occurs, by its name, in the labels' order."""
    return _grouped(references, labels)


def of_length(tokens: npt.NDArray[np.integer]) -> dict[str, Rows]:
    """A quarter of the rows (N,) each, short ones first, by between which numbers of tokens they lie: `3-12 tokens`.

    There are fewer groups where so many rows are equally long that a quarter begins with what the one before ends with.
    """
    if not len(tokens):
        return {}
    ends = np.unique(np.quantile(tokens, (0.25, 0.5, 0.75, 1.0), method="inverted_cdf"))
    starts = [int(tokens.min()), *(int(end) + 1 for end in ends[:-1])]
    spans = [f"{start}-{end}" if start < end else f"{end}" for start, end in zip(starts, map(int, ends), strict=True)]
    return _grouped(np.searchsorted(ends, tokens), [f"{span} token{'' if span == '1' else 's'}" for span in spans])


def of_column(file: Path, name: str) -> dict[str, Rows]:
    """The rows (N,) of each value of a column in SPLIT.slices.arrow, those of most rows first; `none` where it is
    null. No groups where the split has no such column."""
    kept = read_table(file) if file.is_file() else pa.table({})
    if name not in kept.column_names:
        return {}
    column = kept[name].cast(pa.large_string())
    encoded = column.fill_null(NO_VALUE).combine_chunks().dictionary_encode()
    found = _grouped(encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist())
    return dict(sorted(found.items(), key=lambda group: (-len(group[1]), group[0])))


def of_entries(groups: Mapping[str, Rows], predicted: Predictions) -> dict[str, Rows]:
    """The groups of rows as groups of the entries of predictions, without those that have none."""
    rows = predicted.rows_of(np.arange(len(predicted)))
    by_row = np.full(max((int(group.max()) + 1 for group in groups.values()), default=0), -1)
    for number, group in enumerate(groups.values()):
        by_row[group] = number
    found = _grouped(by_row[rows], [*groups]) if groups else {}
    return {name: found[name] for name in groups if name in found}


def largest(groups: Mapping[str, Rows], most: int, named: Iterable[str]) -> dict[str, Rows]:
    """At most so many groups, those of most rows, and whichever are named; in the order in which they were."""
    by_rows = sorted(groups, key=lambda name: -len(groups[name]))
    kept = {*by_rows[:most], *named}
    return {name: rows for name, rows in groups.items() if name in kept}


def _grouped(codes: npt.NDArray[np.integer], names: Sequence[str]) -> dict[str, Rows]:
    """The rows of each code that occurs, ascending, by the code's name."""
    if not len(codes):
        return {}
    order = np.argsort(codes, kind="stable")
    there, starts = np.unique(codes[order], return_index=True)
    return {names[code]: rows for code, rows in zip(there, np.split(order, starts[1:]), strict=True)}
