"""The stage tokenize against the tokenizer's own batch rate and `datasets.map`, and its memory as the rows grow.

Run as a program it is one process that tokenizes: `... rate TOKENIZER DATA` prints rows a second by the stage's
function, by the tokenizer alone and by `datasets.map`, in turn; `... memory TOKENIZER DATA` prints the MiB that it
held at most.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from tests.benchmarks.subject import MAX_TOKENS, Subject, peak_mib
from tests.benchmarks.table import Row
from training.data.ipc_files import BLOCK_ROWS, ipc_reader, ipc_writer
from training.task_types.sequence_classification import SequenceClassification
from training.tokenization.encoder import load_fast_encoder
from training.tokenization.token_files import tokenize

FEW = 100_000
ROUNDS = 5
BATCH_ROWS = 2_000  # of the tokenizer alone: more together were no faster


def measure(subject: Subject) -> list[Row]:
    """The ratios of the rates, and of memory for ten times the rows."""
    few, many = (_repeated(subject, count) for count in (FEW, 10 * FEW))
    tokenizer = subject.base["tokenizer"]
    rounds = _child("rate", tokenizer, few)
    ours, own, mapped = (statistics.median(rates) for rates in zip(*rounds, strict=True))
    small, large = (_child("memory", tokenizer, data) for data in (few, many))
    how = f"{FEW:,} rows from Arrow to Arrow, {ROUNDS} times in turn; median"
    return [
        Row(
            "tokenization / the tokenizer's own batches",
            statistics.median(ours / own for ours, own, _ in rounds),
            f"{how}; {ours:,.0f} rows/s, and {own:,.0f} by encode_batch_fast alone",
            least=0.85,
        ),
        Row(
            "tokenization / `datasets.map`",
            statistics.median(ours / mapped for ours, _, mapped in rounds),
            f"{how}; {mapped:,.0f} rows/s by map(batched=True) with the tokenizer of transformers",
            least=1.4,
        ),
        Row(
            "tokenization: memory for 10 times the rows",
            large / small,
            f"peak of a process that tokenizes {FEW:,} rows: {small:.0f} MiB; {10 * FEW:,} rows: {large:.0f} MiB",
            most=1.10,
        ),
    ]


def _repeated(subject: Subject, count: int) -> Path:
    """The training rows again and again, `count` in all, as the stage load_data writes them."""
    out = subject.folder / f"data-{count}"
    out.mkdir(exist_ok=True)
    with ipc_reader(subject.loaded / "train.arrow") as reader:
        table = reader.read_all()
        whole = pa.concat_tables([table] * (-(-count // len(table)))).slice(0, count).combine_chunks()
        with ipc_writer(out / "train.arrow", whole.schema) as writer:
            writer.write_table(whole, max_chunksize=BLOCK_ROWS)
    return out


def _child(what: str, tokenizer: Path, data: Path) -> Any:
    argv = [sys.executable, "-m", "tests.benchmarks.tokenization", what, str(tokenizer), str(data)]
    return json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _rates(tokenizer: Path, data: Path) -> list[list[float]]:
    with ipc_reader(data / "train.arrow") as reader:
        texts = reader.read_all()["text"].to_pylist()
    alone = load_fast_encoder(tokenizer, MAX_TOKENS).tokenizer

    def by_itself() -> None:
        for start in range(0, len(texts), BATCH_ROWS):
            alone.encode_batch_fast(texts[start : start + BATCH_ROWS])

    with TemporaryDirectory(dir=data) as out:
        ways = [
            lambda: tokenize(SequenceClassification(), data, tokenizer, Path(out), MAX_TOKENS),
            by_itself,
            _map(tokenizer, data, Path(out)),
        ]
        return [[len(texts) / _seconds(way) for way in ways] for _ in range(ROUNDS)]


def _map(tokenizer: Path, data: Path, out: Path) -> Callable[[], Any]:
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    fast = AutoTokenizer.from_pretrained(tokenizer)
    with ipc_reader(data / "train.arrow") as reader:
        datasets.Dataset(reader.read_all()).save_to_disk(out / "rows")
    rows = datasets.load_from_disk(out / "rows")
    return lambda: rows.map(
        lambda batch: fast(batch["text"], truncation=True, max_length=MAX_TOKENS),
        batched=True,
        remove_columns=["text"],
        cache_file_name=str(out / "mapped.arrow"),
        load_from_cache_file=False,
    )


def _seconds(way: Callable[[], Any]) -> float:
    began = time.perf_counter()
    way()
    return time.perf_counter() - began


def _peak_mib(tokenizer: Path, data: Path) -> float:
    with TemporaryDirectory(dir=data) as out:
        tokenize(SequenceClassification(), data, tokenizer, Path(out), MAX_TOKENS)
    return peak_mib()


if __name__ == "__main__":
    what, *folders = sys.argv[1:]
    print(json.dumps({"rate": _rates, "memory": _peak_mib}[what](*map(Path, folders))))
