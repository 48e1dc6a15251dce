"""Token files: the token features of every split, as Arrow files with a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from training.data.arrow_files import BLOCK_ROWS, ipc_reader, ipc_writer
from training.data.plain_types import text_sizes
from training.problems import Problem, UserError, mistakes_told
from training.tokenization.encoder import Encoder, load_encoder
from training.tokenization.token_statistics import TokenStatistics, truncation_problems, write_report

if TYPE_CHECKING:
    from training.recipe.tables.checks import Level
    from training.tokenization.features import Features

BYTES_AT_ONCE = 2**19
"""Bytes of text that are encoded together: enough for all cores. Encodings take about 100 bytes a token."""
SPLITS = ("train", "validation", "test")

Progress = Callable[[int, int], None]


class Featurizer(Protocol):
    """The part of a task type that turns rows into token features: see training.task_types.task_type."""

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
    """Runs `write_tokens` with the tokenizer.json of the folder `tokenizer`. Raises UserError if it cannot be read."""
    return write_tokens(task_type, data, load_encoder(tokenizer, max_length), out, level, progress)


def write_tokens(
    task_type: Featurizer,
    data: Path,
    encoder: Encoder,
    out: Path,
    level: Level,
    progress: Progress,
    splits: Sequence[str] = SPLITS,
) -> dict[str, int]:
    """Writes the token features of the splits in the folder `data` (see training.data.load_rows) to `out`; returns the
    numbers of rows, tokens, truncated rows and lost tokens of all splits.

    The encoder's `max_length` includes special tokens; of a pair the longer text is cut first. `progress` gets the rows
    done and the rows in total. `out` gets `<split>.arrow`, the task type's features without padding, and
    `log/report.json`, the statistics of each split and the warnings. Raises UserError if max_length leaves no room for
    a text, or if rows are truncated and `level` is error.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = [path for split in splits if (path := data / f"{split}.arrow").is_file()]
    total, done = sum(map(_count_rows, files)), 0
    by_split: dict[str, TokenStatistics] = {}
    for path in files:
        statistics = by_split[path.stem] = TokenStatistics()
        # Not mapped: mapped pages count as memory of this process and grow with the rows.
        with mistakes_told(task_type), ipc_reader(path, mapped=False) as reader:
            _need_room(encoder, "text_pair" in reader.schema.names)
            features = (_tokens(task_type, encoder, block, statistics) for block in _blocks(reader))
            blocks = task_type.token_rows(path.stem, encoder.max_length, features)
            first = next(blocks)
            with ipc_writer(out / path.name, first.schema) as writer:
                for block in chain([first], blocks):
                    writer.write(block)
                    progress(done + statistics.rows, total)
        done += statistics.rows
    problems = [] if level == "ignore" else list(truncation_problems(by_split, encoder.max_length, level))
    if level == "error" and problems:
        raise UserError(problems)
    write_report(out / "log" / "report.json", by_split, problems)
    names = ("rows", "tokens", "truncated", "lost")
    return {name: sum(getattr(statistics, name) for statistics in by_split.values()) for name in names}


def _need_room(encoder: Encoder, pairs: bool) -> None:
    special = encoder.special_tokens(pairs)
    if encoder.max_length <= special:
        message = f"{encoder.max_length} leaves no room for a text and its {special} special tokens: choose more."
        raise UserError([Problem(kind="tokens", where="tokens.max_length", message=message)])


def _blocks(reader: pa.RecordBatchFileReader) -> Iterator[pa.RecordBatch]:
    for number in range(reader.num_record_batches):
        batch = reader.get_batch(number)
        for start in range(0, batch.num_rows, BLOCK_ROWS):
            yield batch.slice(start, BLOCK_ROWS)


def _tokens(
    task_type: Featurizer, encoder: Encoder, block: pa.RecordBatch, statistics: TokenStatistics
) -> pa.RecordBatch:
    """The token features of a block, copied: a slice would be written with up to 63 bytes of its neighbours in the
    larger buffer."""
    pieces = []
    for start, stop in _pieces(block):
        features = task_type.features(encoder, block.slice(start, stop - start))
        pieces.append(features.numbered(statistics.rows))
        statistics.add(features, stop - start)
    return pa.concat_batches(pieces)


def _pieces(block: pa.RecordBatch) -> Iterator[tuple[int, int]]:
    """Ranges of rows, start and end, of about BYTES_AT_ONCE of text."""
    sizes = sum(text_sizes(column) for column in block.columns)
    ends = np.flatnonzero(np.diff(np.cumsum(sizes) // BYTES_AT_ONCE)) + 1
    bounds = [0, *ends.tolist(), block.num_rows]
    return pairwise(bounds)


def _count_rows(path: Path) -> int:
    # Mapped: only the metadata of each batch is read.
    with ipc_reader(path) as reader:
        return sum(reader.get_batch(number).num_rows for number in range(reader.num_record_batches))
