"""Signs that rows which are held out by chance are too easy: a column that looks like a group whose rows are alike, or
like a time with which the labels change. training/data/checks.py reports them.

Only columns are looked at that are read for slices anyway, and only the first MOST_ROWS rows of a set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from training.data.readers import Block
from training.data.row_times import times_of
from training.data.slice_columns import MAX_BYTES

if TYPE_CHECKING:
    from training.recipe.column_types import Mask
    from training.recipe.source_columns import SourceColumns

MOST_ROWS = 20_000
MOST_CHARACTERS = 500  # of a text whose words are compared
MOST_PAIRS = 1000  # of texts that are compared
LEAST_VALUES = 30  # a column with fewer is a category, such as a language
LARGEST_GROUP = 0.1  # of the rows
LEAST_SHARED = 0.3  # the share of held-out rows that have a row of their group in train
LEAST_GAIN = {"labels": 0.4, "words": 0.1}
"""The least agreement over chance, as a share of all that is possible: a column such as the source of a text has some
agreement of labels, too."""
LEAST_T = 5.0  # of the agreement over chance, by groups
LEAST_DRIFT = 0.1  # the total variation of the labels of the newest rows
NEWEST = 0.2  # the share of the rows that are compared with the older ones
LARGEST_P = 1e-6

Codes = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class GroupSign:
    """A column that looks like a group."""

    column: str
    shared: float
    """The share of held-out rows that have a row of their group in train."""
    of: str
    """labels or words: what these rows share."""
    agreement: float
    """The share of labels or words that a held-out row has in common with another one of its group in train."""
    chance: float
    """The same with any row of train."""


@dataclass(frozen=True)
class TimeSign:
    """A column that looks like a time, and the label whose share changes most."""

    column: str
    label: str
    before: float
    """The share of the label among the older rows."""
    newest: float


@dataclass
class SplitSigns:
    """The first rows of a set whose held-out rows are chosen by chance."""

    _rows: int = 0
    _held_out: list[Mask] = field(default_factory=list)
    _labels: list[pa.Array] = field(default_factory=list)
    _texts: list[pa.Array] = field(default_factory=list)
    _columns: dict[str, list[pa.Array]] = field(default_factory=dict)

    def add_block(self, block: Block, wanted: SourceColumns, held_out: Mask) -> None:
        """Adds the rows of a block, if there are not enough yet."""
        if self._rows < MOST_ROWS and block.rows.num_rows:
            is_single = wanted.labels is not None and wanted.labels.form == "label"
            labels = block.rows.column(wanted.labels.name) if wanted.labels and is_single else None
            text = next((block.rows.column(one.name) for one in wanted.inputs if one.form == "text"), None)
            self.add(block.slices, labels, text, held_out)

    def add(
        self, columns: Mapping[str, pa.Array], labels: pa.Array | None, texts: pa.Array | None, held_out: Mask
    ) -> None:
        """Adds rows: the columns that may be a group or a time, and the labels and texts if they have any."""
        rows = len(held_out)
        known = {name: one for name, one in columns.items() if one.nbytes <= MAX_BYTES * rows}
        for name in known:
            self._columns.setdefault(name, [pa.nulls(len(one)) for one in self._held_out])
        for name, values in self._columns.items():
            values.append(known.get(name, pa.nulls(rows)))
        self._labels += [labels] if labels is not None else []
        self._texts += [pc.utf8_slice_codeunits(texts, 0, MOST_CHARACTERS)] if texts is not None else []
        self._held_out.append(held_out)
        self._rows += rows

    def groups(self) -> GroupSign | None:
        """Returns the column that looks most like a group; None if none does."""
        found = [sign for name, codes in self._coded() if (sign := self._group(name, codes)) is not None]
        return max(found, key=lambda sign: sign.shared * (sign.agreement - sign.chance), default=None)

    def times(self) -> TimeSign | None:
        """Returns the column that looks like a time and with which labels change most; None if there is none."""
        found = [sign for name, values in self._columns.items() if (sign := self._time(name, values)) is not None]
        return max(found, key=lambda sign: abs(sign.newest - sign.before), default=None)

    def _coded(self) -> Iterator[tuple[str, Codes]]:
        """Yields each column that may be a group, as the index of each row's value, -1 for none."""
        for name, values in self._columns.items():
            coded = _coded_texts(values)
            if coded is not None:
                yield name, coded.indices.fill_null(-1).to_numpy().astype(np.int64)

    def _group(self, name: str, codes: Codes) -> GroupSign | None:
        counts = np.bincount(codes[codes >= 0])
        if np.count_nonzero(counts) < LEAST_VALUES or counts.max() > LARGEST_GROUP * counts.sum():
            return None
        held_out = np.concatenate(self._held_out)
        in_train = np.bincount(codes[(codes >= 0) & ~held_out], minlength=len(counts))
        with_value = np.flatnonzero(held_out & (codes >= 0))
        rows = with_value[in_train[codes[with_value]] > 0]
        shared = len(rows) / len(with_value) if len(with_value) else 0.0
        if shared < LEAST_SHARED:
            return None
        for of, pairs in (("labels", self._label_agreement), ("words", self._word_agreement)):
            agreement, chance = pairs(rows, codes, held_out)
            if len(agreement) and _is_clear(agreement, chance, codes[rows[: len(agreement)]], LEAST_GAIN[of]):
                return GroupSign(name, shared, of, float(agreement.mean()), float(chance.mean()))
        return None

    def _label_agreement(self, rows: Codes, codes: Codes, held_out: Mask) -> tuple[Any, Any]:
        """Returns the share of train rows with the label of each of these rows: in its group, and in all."""
        if not self._labels:
            return np.zeros(0), np.zeros(0)
        labels: Codes = pa.chunked_array(self._labels).combine_chunks().dictionary_encode().indices.to_numpy()
        kinds = int(labels.max()) + 1
        train = (codes >= 0) & ~held_out
        in_group = np.bincount(codes[train])
        together = np.bincount(codes[train] * kinds + labels[train], minlength=(int(codes.max()) + 1) * kinds)
        agreement = together[codes[rows] * kinds + labels[rows]] / in_group[codes[rows]]
        overall = np.bincount(labels[~held_out], minlength=kinds) / int((~held_out).sum())
        return agreement, overall[labels[rows]]

    def _word_agreement(self, rows: Codes, codes: Codes, held_out: Mask) -> tuple[Any, Any]:
        """Returns the Jaccard index of the words of each of these rows and a train row: of its group, and any."""
        if not self._texts:
            return np.zeros(0), np.zeros(0)
        texts, draw = pa.chunked_array(self._texts), np.random.default_rng(0)
        train = np.flatnonzero(~held_out)
        order = train[np.argsort(codes[train], kind="stable")]
        starts = np.searchsorted(codes[order], codes[rows[:MOST_PAIRS]])
        found: tuple[list[float], list[float]] = [], []
        for row, start in zip(rows[:MOST_PAIRS].tolist(), starts.tolist(), strict=True):
            words = set(texts[row].as_py().split())
            for similarities, other in zip(found, (order[start], draw.choice(train)), strict=True):
                others = set(texts[int(other)].as_py().split())
                similarities.append(len(words & others) / max(1, len(words | others)))
        return np.array(found[0]), np.array(found[1])

    def _time(self, name: str, values: list[pa.Array]) -> TimeSign | None:
        coded = _coded_texts(values)
        if not self._labels or coded is None or len(coded.dictionary) < LEAST_VALUES:
            return None
        numbers = times_of(coded.dictionary)
        if numbers is None:
            return None
        times = numbers[coded.indices.fill_null(0).to_numpy()]
        known = coded.indices.is_valid().to_numpy(zero_copy_only=False) & np.isfinite(times)
        labels = pa.chunked_array(self._labels).combine_chunks().dictionary_encode()
        codes = labels.indices.to_numpy()[known]
        newest = times[known] >= np.quantile(times[known], 1 - NEWEST)
        counts = np.stack([np.bincount(codes[one], minlength=len(labels.dictionary)) for one in (~newest, newest)])
        counts, names = counts[:, counts.sum(0) > 0], labels.dictionary.filter(pa.array(counts.sum(0) > 0))
        if counts.sum(1).min() < LEAST_VALUES or counts.shape[1] < 2:
            return None
        from scipy.stats import chi2_contingency  # takes half a second, and few rows come here

        shares = counts / counts.sum(1, keepdims=True)
        if np.abs(shares[0] - shares[1]).sum() / 2 < LEAST_DRIFT or chi2_contingency(counts).pvalue > LARGEST_P:
            return None
        most = int(np.argmax(np.abs(shares[1] - shares[0])))
        return TimeSign(name, names[most].as_py(), float(shares[0, most]), float(shares[1, most]))


def _coded_texts(values: list[pa.Array]) -> pa.DictionaryArray | None:
    """Returns a column's values as a dictionary of texts; None without values, or with one that is no text or too
    long."""
    try:
        coded = pa.chunked_array([one.cast(pa.string()) for one in values], pa.string()).combine_chunks()
    except pa.ArrowInvalid:
        return None
    coded = coded.dictionary_encode()
    longest = pc.max(pc.binary_length(coded.dictionary)).as_py()
    return coded if longest is not None and longest <= MAX_BYTES else None


def _is_clear(agreement: Any, chance: Any, codes: Codes, least: float) -> bool:
    """Whether the agreement over chance is large, and no accident: only groups are independent, not their rows."""
    gains, group = agreement - chance, np.unique(codes, return_inverse=True)[1]
    sums, counts = np.bincount(group, gains), np.bincount(group)
    if len(sums) < LEAST_VALUES or gains.mean() < least * (1 - chance.mean()):
        return False
    error = np.sqrt(np.sum((sums - counts * gains.mean()) ** 2)) / counts.sum()
    return bool(gains.mean() >= LEAST_T * error)
