"""Texts to token ids, through the `tokenizers` library alone, with the ids that AutoTokenizer would give."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from training.ipc import Spread, in_blocks, ipc_reader, ipc_writer
from training.problems import Problem, UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROWS_AT_ONCE = 2_000  # enough to keep all cores busy; an encoding takes some 100 bytes a token

Progress = Callable[[int, int], None]


def tokenize(
    data: Path, tokenizer: Path, out: Path, max_length: int, progress: Progress = lambda done, total: None
) -> dict[str, int]:
    """Writes the token ids of every split of the folder `data` (made by `training.rows.load.load`) to `out`; gives
    the rows, tokens and truncated rows of all splits.

    `tokenizer` is a folder with tokenizer.json. `max_length` counts tokens, special ones included; of a pair
    the longer text is cut first. `progress` gets rows done and rows in all, of all splits.

    `out` gets `<split>.arrow` with columns `input_ids` (list of int32), for pairs `token_type_ids` (list of
    int8), `length` (int32) and `label` (int64), unpadded; and `report.json` (rows, tokens, truncated rows and
    lengths a split). Raises UserError where there is no usable tokenizer.json, or no room for any text.
    """
    out.mkdir(parents=True, exist_ok=True)
    encoder = load_tokenizer(tokenizer, max_length)
    files = [path for split in ("train", "validation", "test") if (path := data / f"{split}.arrow").is_file()]
    total, done = sum(map(_count_rows, files)), 0
    tallies: dict[str, Tally] = {}
    for path in files:
        tally = tallies[path.stem] = Tally()
        with ipc_reader(path) as reader:
            pairs = "text_pair" in reader.schema.names
            _need_room(encoder, max_length, pairs)
            with ipc_writer(out / path.name, _schema(pairs)) as writer:
                for block in in_blocks(_encoded(encoder, reader, tally, max_length), _schema(pairs)):
                    writer.write(block)
                    done += block.num_rows
                    progress(done, total)
    report = {
        "rows": {split: tally.rows for split, tally in tallies.items()},
        "tokens": {split: tally.tokens for split, tally in tallies.items()},
        "truncated": {split: tally.truncated for split, tally in tallies.items()},
        "length": {split: tally.lengths.summary() for split, tally in tallies.items()},
    }
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return {
        "rows": total,
        "tokens": sum(tally.tokens for tally in tallies.values()),
        "truncated": sum(tally.truncated for tally in tallies.values()),
    }


@dataclass
class Tally:
    """What became of the rows of a split."""

    rows: int = 0
    tokens: int = 0
    truncated: int = 0
    lengths: Spread = field(default_factory=Spread)


def load_tokenizer(folder: Path, max_length: int) -> Tokenizer:
    """The tokenizer of the folder, cutting at `max_length`, on AutoTokenizer's side, and never padding.

    Raises UserError where tokenizer.json is missing or not understood.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        have = ", ".join(sorted(file.name for file in folder.glob("*"))) or "nothing"
        message = f"there is no tokenizer.json: there is {have}. Save the tokenizer with save_pretrained()."
        raise UserError([Problem(kind="tokens", where=str(folder), message=message)])
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for whatever it cannot read
        message = f"tokenizer.json is not readable: {error}. Save the tokenizer again."
        raise UserError([Problem(kind="tokens", where=str(path), message=message)]) from error
    settings: dict[str, Any] = {}
    if (config := folder / "tokenizer_config.json").is_file():
        settings = json.loads(config.read_text(encoding="utf-8"))
    # What the file itself says of lengths is of some earlier use, except for the side.
    side = settings.get("truncation_side") or (tokenizer.truncation or {}).get("direction", "right")
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length, strategy="longest_first", direction=side)
    tokenizer.encode_special_tokens = bool(settings.get("split_special_tokens", False))
    return tokenizer


def _need_room(tokenizer: Tokenizer, max_length: int, pairs: bool) -> None:
    special = tokenizer.num_special_tokens_to_add(pairs)
    if max_length <= special:
        message = f"{max_length} leaves no room beside the {special} special tokens of each row: choose more."
        raise UserError([Problem(kind="tokens", where="tokens.max_length", message=message)])


def _encoded(
    tokenizer: Tokenizer, reader: pa.RecordBatchFileReader, tally: Tally, max_length: int
) -> Iterator[pa.RecordBatch]:
    """The token ids of all rows, ROWS_AT_ONCE at a time."""
    for number in range(reader.num_record_batches):
        block = reader.get_batch(number)
        for start in range(0, block.num_rows, ROWS_AT_ONCE):
            rows = block.slice(start, ROWS_AT_ONCE)
            texts = rows.column("text").to_pylist()
            pairs = "text_pair" in rows.schema.names
            if pairs:
                texts = list(zip(texts, rows.column("text_pair").to_pylist(), strict=True))
            # Without offsets into the text, which nobody needs here, it is faster.
            encodings = tokenizer.encode_batch_fast(texts)
            lengths = np.fromiter(map(len, encodings), np.int32, len(encodings))
            tally.rows += rows.num_rows
            tally.tokens += int(lengths.sum())
            tally.lengths.add(lengths)
            # Only a full row can have lost something; asking is costly.
            full = np.flatnonzero(lengths == max_length).tolist()
            tally.truncated += sum(bool(encodings[place].overflowing) for place in full)
            columns = [_lists((encoding.ids for encoding in encodings), lengths, np.int32)]
            if pairs:
                columns.append(_lists((encoding.type_ids for encoding in encodings), lengths, np.int8))
            columns += [pa.array(lengths), rows.column("label")]
            yield pa.RecordBatch.from_arrays(columns, schema=_schema(pairs))


def _lists(rows: Iterator[list[int]], lengths: np.ndarray[Any, Any], kind: type[np.integer[Any]]) -> pa.Array:
    """An Arrow column of lists, built from two flat arrays."""
    values = np.fromiter(chain.from_iterable(rows), kind, int(lengths.sum()))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _schema(pairs: bool) -> pa.Schema:
    ids = [("input_ids", pa.list_(pa.int32()))]
    types = [("token_type_ids", pa.list_(pa.int8()))] if pairs else []
    return pa.schema([*ids, *types, ("length", pa.int32()), ("label", pa.int64())])


def _count_rows(path: Path) -> int:
    with ipc_reader(path) as reader:
        return sum(reader.get_batch(number).num_rows for number in range(reader.num_record_batches))
