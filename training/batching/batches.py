"""Token rows from a memory map, batches grouped by length, and the padding of a batch.

The order of the rows is a pure function of (lengths, seed, epoch, rows an optimizer step): it needs no state
in a checkpoint, every rank computes the same one, and halving the micro-batch while doubling the accumulation
leaves each optimizer step its rows.

N rows, E rows an optimizer step over all ranks, B rows of one micro-batch on one rank, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.trainer_pt_utils import BatchRebalanceSampler

from training.batching.random_states import Numbered
from training.problems import Problem, UserError

Batch = dict[str, torch.Tensor]
"""Tensors by name, with the rows in the first dimension."""
IGNORED = -100
"""The label of a token that is no target; cross entropy ignores it."""
MEGABATCH = 50
"""Optimizer steps' worth of random rows that are sorted together. More pads less and mixes lengths less."""


class TokenRows(Dataset[dict[str, Any]]):
    """Token features by row: of one split's Arrow file, read where they lie in the memory map, or of a table.

    `lengths` is (N,) int32, the column `length`. A row has the others: {"input_ids": (length,) int32, "label": int},
    for pairs also {"token_type_ids": (length,) int8}. Lists are views of the file and must not be written to. Texts
    stay in the file; of these `reference` is what the label says in words, for metrics.
    Raises pyarrow.ArrowInvalid where the file is not an Arrow file.
    """

    def __init__(self, rows: Path | pa.Table) -> None:
        table = rows if isinstance(rows, pa.Table) else pa.ipc.open_file(pa.memory_map(str(rows))).read_all()
        self.table: pa.Table = table
        """The rows as the file has them."""
        chunks = table.to_batches()
        self.lengths: npt.NDArray[np.int32] = table["length"].to_numpy()
        self._starts = np.cumsum([0, *(chunk.num_rows for chunk in chunks)])
        listed = [field.name for field in table.schema if pa.types.is_list(field.type)]
        self._lists = {name: [_flat(chunk.column(name)) for chunk in chunks] for name in listed}
        texts = [field.name for field in table.schema if pa.types.is_string(field.type)]
        single = [name for name in table.column_names if name not in ("length", *texts, *listed)]
        self._values: dict[str, npt.NDArray[Any]] = {name: table[name].to_numpy() for name in single}

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def count_targets(self) -> bool:
        """Whether rows have a column `targets`."""
        return "targets" in self._values

    @property
    def targets(self) -> npt.NDArray[np.int32]:
        """(N,) the number of targets of each row, the column `targets`; 1 for each row without the column."""
        return self._values.get("targets", np.ones(len(self), np.int32))

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """The number of tokens of each row of the data, which may have several feature rows."""
        row = self._values.get("row")
        return self.lengths if row is None else np.bincount(row, weights=self.lengths).astype(np.int32)

    @property
    def labels(self) -> npt.NDArray[Any]:
        """(N,) the label of each row, for rows with one label or number."""
        return self._values["label"]

    def __getitem__(self, row: int) -> dict[str, Any]:
        chunk = int(np.searchsorted(self._starts, row, side="right")) - 1
        within = row - self._starts[chunk]
        features: dict[str, Any] = {name: values[row] for name, values in self._values.items()}
        for name, columns in self._lists.items():
            offsets, values = columns[chunk]
            features[name] = values[offsets[within] : offsets[within + 1]]
        return features

    def labelled(self, predictions: pa.Table) -> pa.Table:
        """The predictions of all rows, in order, with `label` as the first column if rows have one: the column
        `reference` (a text), or else `label`."""
        name = next((name for name in ("reference", "label") if name in self.table.column_names), None)
        return predictions if name is None else predictions.add_column(0, "label", self.table[name])

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        """The rows of a batch, Numbered where their numbers are."""
        features = [self[row] for row in rows]
        return Numbered(features, rows.draws_from, rows) if isinstance(rows, Numbered) else features


def _flat(column: pa.ListArray) -> tuple[npt.NDArray[np.int32], npt.NDArray[Any]]:
    """A list column as the offsets of its rows in one array of values, nothing copied."""
    return column.offsets.to_numpy(), column.values.to_numpy()


class PadToLongest:
    """Token features of B rows to tensors (B, T) int64, T the longest row rounded up to a multiple.

    On a GPU a multiple of 8 fills its tensor cores and keeps shapes few; a CPU is fastest with no padding.
    Pads with the tokenizer's pad token on the tokenizer's side. Gives input_ids, attention_mask (1 where
    there is a token), and, where the features have them, token_type_ids and labels: (B,) int64, or float32 where
    they are numbers, or (B, P) int64 where rows have lists of up to P of them, -1 where one has fewer. Raises
    UserError where the tokenizer has no pad token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> None:
        if tokenizer.pad_token_id is None:
            message = (
                "pad_token=null in tokenizer_config.json, but rows of unequal length share a batch: "
                "name a token to fill up with, such as the tokenizer's eos_token."
            )
            raise UserError([Problem(kind="model", where="tokenizer", message=message)])
        self.multiple = multiple
        self.left = tokenizer.padding_side == "left"
        self.fill = {"input_ids": tokenizer.pad_token_id, "token_type_ids": tokenizer.pad_token_type_id}
        """The columns with a value for each token, and their padding values. A task type may add columns."""

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
        """The labels of a batch of this width, one for each row; None for rows without labels."""
        return _labels([row["label"] for row in rows]) if "label" in rows[0] else None

    def padded(self, rows: Sequence[npt.NDArray[Any]], width: int, fill: int) -> npt.NDArray[np.int64]:
        """(B, T) the values of each row's tokens, padded to the width of the batch."""
        padded = np.full((len(rows), width), fill, dtype=np.int64)
        for line, row in zip(padded, rows, strict=True):
            line[self._place(len(row), width)] = row
        return padded

    def _place(self, length: int, width: int) -> slice:
        return slice(width - length, width) if self.left else slice(length)


class PadTags(PadToLongest):
    """The same, for rows of words: labels are (B, T), the tag of a word at its first token, IGNORED at all others.

    Rows without tags get the label 0 there, which marks the tokens that have predictions.
    """

    def labels(self, rows: Sequence[dict[str, Any]], width: int) -> npt.NDArray[np.int64]:
        return self.padded([self._of_tokens(row) for row in rows], width, IGNORED)

    def _of_tokens(self, row: dict[str, Any]) -> npt.NDArray[np.int64]:
        labels = np.full(len(row["input_ids"]), IGNORED, dtype=np.int64)
        seen = row["first"] >= 0
        labels[row["first"][seen]] = row["label"][seen] if "label" in row else 0
        return labels


def _labels(labels: list[Any]) -> npt.NDArray[Any]:
    """As PadToLongest gives them."""
    if not isinstance(labels[0], np.ndarray):
        values = np.array(labels)
        return values.astype(np.float32 if values.dtype.kind == "f" else np.int64)
    places = np.full((len(labels), max(map(len, labels))), -1, dtype=np.int64)
    for line, row in zip(places, labels, strict=True):
        line[: len(row)] = row
    return places


class PadSourceAndTarget(PadToLongest):
    """The same, for rows whose label is a text: labels (B, S) int64, S the longest target rounded up to the multiple,
    filled up on the right with IGNORED, whatever the side of the tokenizer: a decoder begins at the left."""

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = super().__call__([{name: row[name] for name in row if name != "label"} for row in rows])
        if "label" in rows[0]:
            width = -(-max(len(row["label"]) for row in rows) // self.multiple) * self.multiple
            labels = np.full((len(rows), width), IGNORED, dtype=np.int64)
            for line, row in zip(labels, rows, strict=True):
                line[: len(row["label"])] = row["label"]
            batch["labels"] = torch.from_numpy(labels)
        return batch


class LengthGroupedBatches(BatchRebalanceSampler):
    """This rank's batches of row numbers: like lengths together, each row once an epoch over all ranks.

    A random order is cut into stretches of MEGABATCH optimizer steps, each stretch sorted by length and cut
    into steps of E rows; the steps come in random order, the one with the longest row first (what does not
    fit into memory fails at once) and what is left over last. A step's rows are cut into micro-batches, and
    each of these is dealt out to the ranks one by one, so that all ranks pad to about the same width.
    Left-over rows that are fewer than the ranks join the step before.

    A BatchRebalanceSampler by name, for the Trainer passes that class through to the DataLoader unsharded.
    Raises UserError where there are fewer rows than ranks.
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
    ) -> None:
        require_a_row_each(len(lengths), world)
        super().__init__(lengths.tolist(), global_batch_size, world, accumulation, seed=seed, rank=rank)
        self._lengths = lengths
        self._targets = np.ones(len(lengths), np.int32) if targets is None else targets
        self._targets_of_epoch: tuple[int, list[int]] = (-1, [])
        self._micro = -(-global_batch_size // accumulation)  # the most rows of a micro-batch on all ranks together
        self.steps = steps_per_epoch(len(lengths), global_batch_size, world)
        """Optimizer steps an epoch."""
        self._last = len(lengths) - (self.steps - 1) * global_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        micros = (micro for step in self._steps(self.epoch) for micro in np.array_split(step, self._pieces(len(step))))
        for number, micro in enumerate(micros):
            yield Numbered(micro[self.rank :: self.dp_size].tolist(), (self.seed, self.epoch, self.rank, number))

    def __len__(self) -> int:
        """Micro-batches an epoch on this rank, the same on every rank."""
        return (self.steps - 1) * self.grad_accum + self._pieces(self._last)

    def rows_of_step(self, step: int) -> int:
        """The rows of an optimizer step, counted from 0 and on through the epochs, over all ranks."""
        return self._last if (step + 1) % self.steps == 0 else self.effective_batch_size

    def targets_of_step(self, step: int) -> int:
        """The targets of the loss in such a step; 1 where it has none, for means are divided by it."""
        epoch, place = divmod(step, self.steps)
        if self._targets_of_epoch[0] != epoch:
            self._targets_of_epoch = epoch, [max(1, int(self._targets[rows].sum())) for rows in self._steps(epoch)]
        return self._targets_of_epoch[1][place]

    def tokens_of_steps(self, epoch: int) -> tuple[list[int], list[int]]:
        """The tokens of each of an epoch's optimizer steps over all ranks, and the pairs of tokens within its rows."""
        lengths = [self._lengths[rows].astype(np.int64) for rows in self._steps(epoch)]
        return [int(step.sum()) for step in lengths], [int((step * step).sum()) for step in lengths]

    def _pieces(self, rows: int) -> int:
        """The micro-batches of a step: no more than needed, and a row for every rank in each."""
        return min(self.grad_accum, -(-rows // self._micro), rows // self.dp_size)

    def _steps(self, epoch: int) -> list[npt.NDArray[np.int64]]:
        """An epoch's optimizer steps, each the numbers of its rows, longest row first."""
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(len(self._lengths))
        for stretch in _cut(order, MEGABATCH * self.effective_batch_size):
            stretch[:] = stretch[np.argsort(-self._lengths[stretch], kind="stable")]
        *full, last = _cut(order, self.effective_batch_size, least=self.dp_size)
        shuffled = [full[i] for i in random.permutation(len(full))]
        if shuffled:
            longest = int(np.argmax([self._lengths[rows[0]] for rows in shuffled]))
            shuffled[0], shuffled[longest] = shuffled[longest], shuffled[0]
        return [*shuffled, last]


def require_a_row_each(rows: int, world: int) -> None:
    """Raises UserError where there are fewer rows than ranks."""
    if rows < world:
        message = f"{rows} rows cannot be shared by {world} processes: give more rows, or fewer processes."
        raise UserError([Problem(kind="compute", where="compute.num_processes", message=message)])


def steps_per_epoch(rows: int, global_batch_size: int, world: int) -> int:
    """Optimizer steps; a tail with fewer rows than ranks joins the step before it."""
    full, tail = divmod(rows, global_batch_size)
    return full + (tail >= world or not full)


def _cut(rows: npt.NDArray[np.int64], size: int, least: int = 1) -> list[npt.NDArray[np.int64]]:
    """Views of `size` rows each; a last one of fewer than `least` rows joins the one before."""
    starts = list(range(0, len(rows), size))
    if len(starts) > 1 and len(rows) - starts[-1] < least:
        starts.pop()
    return np.split(rows, starts[1:])


class EvaluationBatches(BatchRebalanceSampler):
    """This rank's batches of row numbers for an evaluation: each row once over all ranks, by falling length, so that
    what does not fit into memory fails at once.

    The batches are dealt out to the ranks one by one. Where they do not come out even, the ranks without one take the
    first batch again, for all must compute together: these come last, beyond `own`. A BatchRebalanceSampler by name, as
    above.
    """

    def __init__(self, lengths: npt.NDArray[np.int32], rows_a_batch: int, *, world: int = 1, rank: int = 0) -> None:
        super().__init__(lengths.tolist(), rows_a_batch * world, world, 1, rank=rank)
        self._batches = _cut(np.argsort(-lengths, kind="stable"), rows_a_batch)
        self.batches = len(self._batches)
        """Those of all ranks together."""
        self.sizes = [len(rows) for rows in self._batches]
        """The rows of each of them."""
        self._done = np.cumsum([0, *self.sizes])
        self.own = len(self._batches[rank::world])
        """How many are this rank's own."""

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.rank, len(self) * self.dp_size, self.dp_size):
            yield self._batches[number if number < self.batches else 0].tolist()

    def __len__(self) -> int:
        return -(-self.batches // self.dp_size)

    def done(self, number: int) -> int:
        """The rows of all ranks that are done when each has done so many batches."""
        return int(self._done[min(number * self.dp_size, self.batches)])

    def order_of_shares(self) -> npt.NDArray[np.int64]:
        """The row numbers as the ranks' own batches have them, one rank after the other."""
        return np.concatenate([rows for rank in range(self.dp_size) for rows in self._batches[rank :: self.dp_size]])
