"""Token rows in a memory map, batches grouped by length, and their padding.

The order of the rows is a pure function of (lengths, seed, epoch, global batch size): checkpoints need no state of it,
every rank computes the same one, and halving the micro-batch while doubling the accumulation keeps the rows of each
optimizer step.

N rows, E rows of an optimizer step over all ranks (global batch), B rows of a micro-batch on one rank, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.trainer_pt_utils import BatchRebalanceSampler

from training.batching.random_states import SeededBatch
from training.data.ipc_files import read_table
from training.problems import UserError

Batch = dict[str, torch.Tensor]
"""Tensors by name; the first dimension is the rows."""
IGNORED = -100
"""The label of tokens that are no targets; cross entropy ignores it."""
MEGABATCH = 50
"""The optimizer steps whose rows are sorted together. More steps need less padding and mix lengths less."""


class TokenRows(Dataset[dict[str, Any]]):
    """Token features by row, from a table or from a split's Arrow file, which is memory-mapped.

    A row has all columns but `length` and texts: {"input_ids": (length,) int32, "label": int}, for pairs also
    {"token_type_ids": (length,) int8}. Lists are views of the file and must not be written to.
    """

    def __init__(self, rows: Path | pa.Table, only: npt.NDArray[np.bool_] | None = None) -> None:
        """`only` (N,): the rows to take; None for all. Their lists stay where they are."""
        self._whole = rows if isinstance(rows, pa.Table) else read_table(rows)
        self._places = None if only is None else np.flatnonzero(only)
        """(N,) the place of each row in the whole table; None if it has no others."""
        chunks = self._whole.to_batches()
        self._starts = np.cumsum([0, *(chunk.num_rows for chunk in chunks)])
        self._lists: dict[str, list[tuple[npt.NDArray[np.int32], npt.NDArray[Any]]]] = {}
        """The offsets and values of each chunk, by column."""
        self._values: dict[str, npt.NDArray[Any]] = {}
        for name, kind in zip(self._whole.column_names, self._whole.schema.types, strict=True):
            if pa.types.is_list(kind):
                columns = [chunk.column(name) for chunk in chunks]
                self._lists[name] = [(column.offsets.to_numpy(), column.values.to_numpy()) for column in columns]
            elif not pa.types.is_string(kind):
                self._values[name] = self._column(name).to_numpy()
        self.lengths: npt.NDArray[np.int32] = self._values.pop("length")

    @cached_property
    def table(self) -> pa.Table:
        """The rows with all columns, copied unless they are all rows."""
        columns = self._whole.column_names
        return self._whole if self._places is None else pa.table({name: self._column(name) for name in columns})

    def _column(self, name: str) -> pa.ChunkedArray:
        """A column of the rows. The numbers in `row` count from 0 again."""
        column = self._whole[name]
        if self._places is None:
            return column
        column = column.take(pa.array(self._places))
        if name != "row":
            return column
        _, numbers = np.unique(column.to_numpy(), return_inverse=True)
        return pa.chunked_array([pa.array(numbers, column.type)])

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def count_targets(self) -> bool:
        return "targets" in self._values

    @property
    def targets(self) -> npt.NDArray[np.int32]:
        """(N,) the number of targets of each row; 1 if there is no column `targets`."""
        return self._values.get("targets", np.ones(len(self), np.int32))

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """(N,) the number of tokens of each row of the data, which may have several feature rows."""
        row = self._values.get("row")
        return self.lengths if row is None else np.bincount(row, weights=self.lengths).astype(np.int32)

    @property
    def labels(self) -> npt.NDArray[Any]:
        """(N,) the label or number of each row."""
        return self._values["label"]

    def __getitem__(self, row: int) -> dict[str, Any]:
        place = row if self._places is None else int(self._places[row])
        chunk = int(np.searchsorted(self._starts, place, side="right")) - 1
        within = place - self._starts[chunk]
        features: dict[str, Any] = {name: values[row] for name, values in self._values.items()}
        for name, columns in self._lists.items():
            offsets, values = columns[chunk]
            features[name] = values[offsets[within] : offsets[within + 1]]
        return features

    def with_labels(self, predictions: pa.Table) -> pa.Table:
        """The predictions of all rows, with `label` as the first column if rows have one: their `reference`, a text for
        metrics, or else their `label`."""
        name = next((name for name in ("reference", "label") if name in self._whole.column_names), None)
        return predictions if name is None else predictions.add_column(0, "label", self._column(name))

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        features = [self[row] for row in rows]
        return SeededBatch(features, rows.seeds, rows) if isinstance(rows, SeededBatch) else features


def rows_of_fold(tokens: Path | TokenRows, folds: Path, fold: int, *, held_out: bool) -> TokenRows:
    """The token rows, or those of a file, that are in the fold, or with `held_out` false, all others. `folds` is the
    file of training/data/folds.py. Raises UserError if a token row is not one row of the data, or a part of one."""
    of_row: npt.NDArray[np.int32] = read_table(folds)["fold"].to_numpy()
    whole = tokens if isinstance(tokens, TokenRows) else TokenRows(tokens)
    if len(whole.tokens) != len(of_row):
        message = f"leaves rows of train out, and some of its {len(whole.tokens):,} token rows hold several rows: "
        raise UserError.of("recipe", "evaluation.folds", f"{message}set it to null.")
    if "row" in whole.table.column_names:
        of_row = of_row[whole.table["row"].to_numpy()]
    return TokenRows(whole.table, (of_row == fold) == held_out)


class PadToLongest:
    """Token features of B rows to tensors (B, T) int64, T the longest row rounded up to a multiple.

    A multiple of 8 uses a GPU's tensor cores and limits the number of shapes; a CPU is fastest with no padding. Pads
    with the tokenizer's pad token on the tokenizer's side. Returns input_ids, attention_mask (1 for tokens), and, if
    the features have them, token_type_ids and labels: (B,) int64; or (B,) float32 for numbers; or (B, P) int64 for
    lists of up to P labels, padded with -1. Raises UserError if the tokenizer has no pad token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> None:
        if tokenizer.pad_token_id is None:
            message = (
                "pad_token=null in tokenizer_config.json, but rows of unequal length share a batch: "
                "name a token for padding, such as the tokenizer's eos_token."
            )
            raise UserError.of("model", "tokenizer", message)
        self.multiple = multiple
        self.left = tokenizer.padding_side == "left"
        self.fill = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
        """The columns with a value for each token, with their padding. A task type may add columns."""

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        lengths = [len(row["input_ids"]) for row in rows]
        width = -(-max(1, *lengths) // self.multiple) * self.multiple
        mask = np.zeros((len(rows), width), dtype=np.int64)
        for line, length in zip(mask, lengths, strict=True):
            line[self._place(length, width)] = 1
        batch = {"attention_mask": torch.from_numpy(mask)}
        for name, fill in self.fill.items():
            if name in rows[0]:
                batch[name] = torch.from_numpy(self.padded([row[name] for row in rows], width, fill))
        if (labels := self.labels(rows, width)) is not None:
            batch["labels"] = torch.from_numpy(labels)
        return batch

    def labels(self, rows: Sequence[dict[str, Any]], width: int) -> npt.NDArray[Any] | None:
        """The labels of a batch of this width; None for rows without labels."""
        if "label" not in rows[0]:
            return None
        labels = [row["label"] for row in rows]
        if isinstance(labels[0], np.ndarray):
            width = max(map(len, labels))
            return np.stack([np.pad(row, (0, width - len(row)), constant_values=-1) for row in labels])
        values = np.array(labels)
        return values.astype(np.float32 if values.dtype.kind == "f" else np.int64)

    def padded(self, rows: Sequence[npt.NDArray[Any]], width: int, fill: int) -> npt.NDArray[np.int64]:
        """(B, T) the values of each row's tokens, padded to the width of the batch."""
        padded = np.full((len(rows), width), fill, dtype=np.int64)
        for line, row in zip(padded, rows, strict=True):
            line[self._place(len(row), width)] = row
        return padded

    def _place(self, length: int, width: int) -> slice:
        return slice(width - length, width) if self.left else slice(length)


class PadTags(PadToLongest):
    """PadToLongest for rows of words. Labels are (B, T): the tag of each word at its first token, IGNORED at others.

    Rows without tags get the label 0, so that labels mark the tokens with predictions.
    """

    def labels(self, rows: Sequence[dict[str, Any]], width: int) -> npt.NDArray[np.int64]:
        by_token = []
        for row in rows:
            labels = np.full(len(row["input_ids"]), IGNORED, dtype=np.int64)
            has_token = row["first"] >= 0
            labels[row["first"][has_token]] = row["label"][has_token] if "label" in row else 0
            by_token.append(labels)
        return self.padded(by_token, width, IGNORED)


class PadSourceAndTarget(PadToLongest):
    """PadToLongest for rows whose labels are texts: labels (B, S) int64, S the longest target rounded up to the
    multiple, padded on the right with IGNORED, because decoders start on the left."""

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = super().__call__([{name: row[name] for name in row if name != "label"} for row in rows])
        if "label" in rows[0]:
            width = -(-max(len(row["label"]) for row in rows) // self.multiple) * self.multiple
            labels = np.full((len(rows), width), IGNORED, dtype=np.int64)
            for line, row in zip(labels, rows, strict=True):
                line[: len(row["label"])] = row["label"]
            batch["labels"] = torch.from_numpy(labels)
        return batch


class PadTexts(PadToLongest):
    """PadToLongest for rows of several texts: a line for each text, (M, T), the texts of a row one after another.

    `input_ids` of a row are the tokens of all of its texts, and `text_lengths` the number of tokens of each. `labels`
    are (B, F) float64: the row's `label`, nan without one, then the number of each of its texts, `text_ids`, and -1
    where other rows have more texts. M texts of all rows.
    """

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        parts = (np.split(row["input_ids"], np.cumsum(row["text_lengths"])[:-1]) for row in rows)
        batch = super().__call__([{"input_ids": part} for of_row in parts for part in of_row])
        facts = np.full((len(rows), 1 + max(len(row["text_ids"]) for row in rows)), -1.0)
        for line, row in zip(facts, rows, strict=True):
            line[0] = row.get("label", np.nan)
            line[1 : 1 + len(row["text_ids"])] = row["text_ids"]
        return {**batch, "labels": torch.from_numpy(facts)}


class PadCandidates(PadToLongest):
    """PadToLongest for rows of several texts, such as a query with each of its documents: a line for each text, (D, T),
    the texts of a row one after another.

    The tokens of a row are those of all its texts, and `text_lengths` the number of tokens of each. `documents` (B,)
    int64 are the texts of each row; `labels` (B, L) float32 a number for each of up to L texts, nan where a row has
    fewer. Only with the tokenizer's own inputs: token_type_ids of others are words to some models, such as GPT-2.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> None:
        super().__init__(tokenizer, multiple)
        self.fill = {name: fill for name, fill in self.fill.items() if name in tokenizer.model_input_names}

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        cuts = [np.cumsum(row["text_lengths"])[:-1] for row in rows]
        columns = {
            name: [part for row, cut in zip(rows, cuts, strict=True) for part in np.split(row[name], cut)]
            for name in self.fill
            if name in rows[0]
        }
        texts = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        batch = super().__call__(texts)
        batch["documents"] = torch.tensor([len(row["text_lengths"]) for row in rows])
        if "label" in rows[0]:
            labels = np.full((len(rows), max(len(row["label"]) for row in rows)), np.nan, np.float32)
            for line, row in zip(labels, rows, strict=True):
                line[: len(row["label"])] = row["label"]
            batch["labels"] = torch.from_numpy(labels)
        return batch


class LengthGroupedBatches(BatchRebalanceSampler):
    """This rank's batches of row numbers, of similar lengths; each row once an epoch over all ranks.

    A random order is cut into parts of MEGABATCH optimizer steps; each part is sorted by length and cut into steps of E
    rows. The steps are shuffled; the one with the longest row is first, so that too little memory fails at once, and
    the remaining rows are the last step, or join the step before if they are fewer than the ranks. A step is cut into
    micro-batches, whose rows are dealt to the ranks one by one, so that all ranks pad to a similar width.

    Rows with equal `partners` are drawn in twos, of an odd number of them three together, which stay together in the
    order by length. So nearly every row finds one of its partners in its step, however many there are of others.

    A subclass of BatchRebalanceSampler, because the Trainer passes that class to the DataLoader unsharded. Raises
    UserError if there are fewer rows than ranks.
    """

    def __init__(
        self,
        lengths: npt.NDArray[np.int32],
        global_batch_size: int,
        *,
        accumulation: int = 1,
        world: int = 1,
        rank: int = 0,
        seed: int = 0,
        targets: npt.NDArray[np.int32] | None = None,
        partners: npt.NDArray[np.int64] | None = None,
    ) -> None:
        require_row_per_rank(len(lengths), world)
        super().__init__(lengths.tolist(), global_batch_size, world, accumulation, seed=seed, rank=rank)
        self._lengths = lengths
        self._targets = np.ones(len(lengths), np.int32) if targets is None else targets
        self._partners = partners
        self._targets_of_epoch: tuple[int, list[int]] = (-1, [])
        self._micro = -(-global_batch_size // accumulation)  # rows of a micro-batch over all ranks
        self.steps = steps_per_epoch(len(lengths), global_batch_size, world)
        """Optimizer steps of an epoch."""
        self._last = len(lengths) - (self.steps - 1) * global_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        micros = (micro for step in self._steps(self.epoch) for micro in np.array_split(step, self._pieces(len(step))))
        for number, micro in enumerate(micros):
            yield SeededBatch(micro[self.rank :: self.dp_size].tolist(), (self.seed, self.epoch, self.rank, number))

    def __len__(self) -> int:
        """Micro-batches of an epoch, the same number on every rank."""
        return (self.steps - 1) * self.grad_accum + self._pieces(self._last)

    def rows_of_step(self, step: int) -> int:
        """The rows of an optimizer step over all ranks; `step` counts from 0 through all epochs."""
        return self._last if (step + 1) % self.steps == 0 else self.effective_batch_size

    def targets_of_step(self, step: int) -> int:
        """The targets of such a step over all ranks, at least 1, because means are divided by it."""
        epoch, place = divmod(step, self.steps)
        if self._targets_of_epoch[0] != epoch:
            self._targets_of_epoch = epoch, [max(1, int(self._targets[rows].sum())) for rows in self._steps(epoch)]
        return self._targets_of_epoch[1][place]

    def tokens_of_steps(self, epoch: int) -> tuple[list[int], list[int]]:
        """The tokens of each optimizer step of an epoch over all ranks, and the pairs of tokens within its rows."""
        lengths = [self._lengths[rows].astype(np.int64) for rows in self._steps(epoch)]
        return [int(step.sum()) for step in lengths], [int((step * step).sum()) for step in lengths]

    def _pieces(self, rows: int) -> int:
        """The micro-batches of a step: as few as possible, each with a row for every rank."""
        return min(self.grad_accum, -(-rows // self._micro), rows // self.dp_size)

    def _steps(self, epoch: int) -> list[npt.NDArray[np.int64]]:
        """The row numbers of each optimizer step of an epoch, the longest row first."""
        random = np.random.default_rng([self.seed, epoch])
        order, lengths = random.permutation(len(self._lengths)), self._lengths
        if self._partners is not None:
            order, sizes = _in_twos(order, self._partners)
            starts = np.cumsum(sizes) - sizes
            lengths = np.empty_like(lengths)
            lengths[order] = np.repeat(np.maximum.reduceat(self._lengths[order], starts), sizes)
        for part in _cut(order, MEGABATCH * self.effective_batch_size):
            part[:] = part[np.argsort(-lengths[part], kind="stable")]
        *full, last = _cut(order, self.effective_batch_size, least=self.dp_size)
        shuffled = [full[i] for i in random.permutation(len(full))]
        if shuffled:
            longest = int(np.argmax([self._lengths[rows].max() for rows in shuffled]))
            shuffled[0], shuffled[longest] = shuffled[longest], shuffled[0]
        return [*shuffled, last]


def require_row_per_rank(rows: int, world: int) -> None:
    """Raises UserError if there are fewer rows than ranks."""
    if rows < world:
        message = f"{rows} rows cannot be shared by {world} processes: give more rows, or fewer processes."
        raise UserError.of("compute", "compute.num_processes", message)


def steps_per_epoch(rows: int, global_batch_size: int, world: int) -> int:
    """Optimizer steps of an epoch. Remaining rows that are fewer than the ranks join the last step."""
    full, rest = divmod(rows, global_batch_size)
    return full + (rest >= world or not full)


def _in_twos(
    order: npt.NDArray[np.int64], partners: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows in this order, but each followed by the next one with equal partners, and the size of each group: two, three
    at the end of an odd number, one without a partner."""
    _, kind, counts = np.unique(partners[order], return_inverse=True, return_counts=True)
    by_kind = np.argsort(kind, kind="stable")
    place = np.empty(len(order), np.int64)  # among those with equal partners
    place[by_kind] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    group = np.minimum(place // 2, np.maximum(counts // 2 - 1, 0)[kind])
    _, first, number = np.unique(group * len(counts) + kind, return_index=True, return_inverse=True)
    sizes = np.bincount(number)[np.argsort(first)]
    return order[np.argsort(first[number], kind="stable")], sizes


def _cut(rows: npt.NDArray[np.int64], size: int, least: int = 1) -> list[npt.NDArray[np.int64]]:
    """Views of `size` rows each; a last one of fewer than `least` rows joins the one before."""
    starts = list(range(0, len(rows), size))
    if len(starts) > 1 and len(rows) - starts[-1] < least:
        starts.pop()
    return np.split(rows, starts[1:])


class EvaluationBatches(BatchRebalanceSampler):
    """This rank's batches of row numbers for an evaluation: each row once over all ranks, the longest first, so that
    too little memory fails at once.

    The batches are dealt to the ranks one by one. Ranks without a last batch repeat the first one after their `own`,
    because all ranks must compute together. For BatchRebalanceSampler see above.
    """

    def __init__(self, lengths: npt.NDArray[np.int32], rows_a_batch: int, *, world: int = 1, rank: int = 0) -> None:
        super().__init__(lengths.tolist(), rows_a_batch * world, world, 1, rank=rank)
        self._batches = _cut(np.argsort(-lengths, kind="stable"), rows_a_batch)
        self.batches = len(self._batches)
        """The batches of all ranks together."""
        self.sizes = [len(rows) for rows in self._batches]
        """The rows of each of them."""
        self._done = np.cumsum([0, *self.sizes])
        self.own = len(self._batches[rank::world])
        """The number of this rank's batches, without the repeated one."""

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.rank, len(self) * self.dp_size, self.dp_size):
            yield self._batches[number if number < self.batches else 0].tolist()

    def __len__(self) -> int:
        return -(-self.batches // self.dp_size)

    def done(self, number: int) -> int:
        """The rows of all ranks that are done after so many batches on each rank."""
        return int(self._done[min(number * self.dp_size, self.batches)])

    def order_of_shares(self) -> npt.NDArray[np.int64]:
        """The row numbers of the ranks' own batches, one rank after another."""
        return np.concatenate([rows for rank in range(self.dp_size) for rows in self._batches[rank :: self.dp_size]])
