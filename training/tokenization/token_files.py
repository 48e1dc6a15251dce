"""Token files: the token features of every split, as Arrow files with a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from training.data.arrow_files import BLOCK_ROWS, ipc_reader, ipc_writer
from training.data.plain_types import as_bytes, row_sizes
from training.problems import Problem, UserError, mistakes_told
from training.tokenization.encoder import Encoder, load_encoder
from training.tokenization.token_statistics import Tally, problems_of, write_report

if TYPE_CHECKING:
    from training.recipe.tables.checks import Level
    from training.tokenization.features import Features

BYTES_AT_ONCE = 2**19
"""Of text that are encoded together: enough to keep all cores busy. An encoding takes some 100 bytes a token."""
SPLITS = ("train", "validation", "test")

Progress = Callable[[int, int], None]


class Featurizer(Protocol):
    """The part of a task type that makes token features of rows: see training.task_types.task_type."""

    def features(self, encoder: Encoder, rows: pa.RecordBatch) -> Features: ...

    def token_rows(
        self, split: str, max_length: int, features: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]: ...


def tokenize(
    task_type: Featurizer,
    data: Path,
    tokenizer: Path,
    out: Path,
    max_length: int,
    level: Level = "warning",
    progress: Progress = lambda done, total: None,
) -> dict[str, int]:
    """Writes the token ids of every split of the folder `data` (made by `training.data.load_rows.load`) to `out`, as
    `write` does, with the tokenizer.json of the folder `tokenizer`.

    Raises UserError where there is no usable tokenizer.json, and as `write` does.
    """
    return write(task_type, data, load_encoder(tokenizer, max_length), out, level, progress)


def write(
    task_type: Featurizer,
    data: Path,
    encoder: Encoder,
    out: Path,
    level: Level,
    progress: Progress,
    splits: Sequence[str] = SPLITS,
) -> dict[str, int]:
    """Writes the token ids of the splits that `data` has to `out`; gives the rows, tokens, truncated rows and lost
    tokens of all of them.

    The encoder's `max_length` counts tokens, special ones included; of a pair the longer text is cut first. `level`
    says what it is that rows are cut. `progress` gets rows done and rows in all, of all splits.

    `out` gets `<split>.arrow` with the columns of the task type's features, unpadded; and `log/report.json` (rows,
    tokens, truncated rows, lost tokens and lengths a split, the same of `targets` where rows have such, and the
    problems that are warnings). Raises UserError where there is no room for any text, or where rows are cut and that
    is an error.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = [path for split in splits if (path := data / f"{split}.arrow").is_file()]
    total, done = sum(map(_count_rows, files)), 0
    tallies: dict[str, Tally] = {}
    for path in files:
        tally = tallies[path.stem] = Tally()
        # Not mapped: the pages of a map count as memory of this process, and there are as many as rows.
        with mistakes_told(task_type), ipc_reader(path, mapped=False) as reader:
            _need_room(encoder, "text_pair" in reader.schema.names)
            features = (_tokens(task_type, encoder, block, tally) for block in _blocks(reader))
            blocks = task_type.token_rows(path.stem, encoder.max_length, features)
            first = next(blocks)
            with ipc_writer(out / path.name, first.schema) as writer:
                for block in chain([first], blocks):
                    writer.write(block)
                    progress(done + tally.rows, total)
        done += tally.rows
    problems = [] if level == "ignore" else list(problems_of(tallies, encoder.max_length, level))
    if level == "error" and problems:
        raise UserError(problems)
    write_report(out / "log" / "report.json", tallies, problems)
    return {
        "rows": total,
        "tokens": sum(tally.tokens for tally in tallies.values()),
        "truncated": sum(tally.truncated for tally in tallies.values()),
        "lost": sum(tally.lost for tally in tallies.values()),
    }


def _need_room(encoder: Encoder, pairs: bool) -> None:
    special = encoder.special_tokens(pairs)
    if encoder.max_length <= special:
        message = f"{encoder.max_length} leaves no room beside the {special} special tokens of each row: choose more."
        raise UserError([Problem(kind="tokens", where="tokens.max_length", message=message)])


def _blocks(reader: pa.RecordBatchFileReader) -> Iterator[pa.RecordBatch]:
    """All rows, at most BLOCK_ROWS at a time."""
    for number in range(reader.num_record_batches):
        batch = reader.get_batch(number)
        for start in range(0, batch.num_rows, BLOCK_ROWS):
            yield batch.slice(start, BLOCK_ROWS)


def _tokens(task_type: Featurizer, encoder: Encoder, block: pa.RecordBatch, tally: Tally) -> pa.RecordBatch:
    """The token features of a block, in memory of its own: a slice of a larger one would be written with up to 63
    bytes of whatever follows it there."""
    pieces = []
    for start, stop in _pieces(block):
        features = task_type.features(encoder, block.slice(start, stop - start))
        pieces.append(features.numbered(tally.rows))
        tally.add(features, stop - start)
    return pa.concat_batches(pieces)


def _pieces(block: pa.RecordBatch) -> Iterator[tuple[int, int]]:
    """Stretches of rows, from one up to another, of about BYTES_AT_ONCE of text."""
    sizes = sum(row_sizes(as_bytes(column)) for column in block.columns)
    ends = np.flatnonzero(np.diff(np.cumsum(sizes) // BYTES_AT_ONCE)) + 1
    bounds = [0, *ends.tolist(), block.num_rows]
    return pairwise(bounds)


def _count_rows(path: Path) -> int:
    # Mapped, only what describes each batch is read.
    with ipc_reader(path) as reader:
        return sum(reader.get_batch(number).num_rows for number in range(reader.num_record_batches))
