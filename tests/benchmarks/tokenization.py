"""The stage tokenize against the tokenizer's own batch rate, and its memory as the rows grow.

Run as a program it is one process that tokenizes: `... rate TOKENIZER DATA` prints rows a second by the stage's
function and by the tokenizer alone, in turn; `... memory TOKENIZER DATA` prints the MiB that it held at most.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from tests.benchmarks.subject import MAX_TOKENS, Subject
from tests.benchmarks.table import Row
from training.ipc import ipc_reader, ipc_writer
from training.tokens import ROWS_AT_ONCE, load_encoder, tokenize

FEW = 20_000
ROUNDS = 11


def measure(subject: Subject) -> list[Row]:
    """The ratio of the rates, and memory for ten times the rows."""
    few, many = (_repeated(subject, count) for count in (FEW, 10 * FEW))
    tokenizer = subject.base["tokenizer"]
    rounds = _child("rate", tokenizer, few)
    ratio = statistics.median(ours / own for ours, own in rounds)
    ours, own = (statistics.median(rates) for rates in zip(*rounds, strict=True))
    small, large = (_child("memory", tokenizer, data) for data in (few, many))
    return [
        Row(
            "tokenization / the tokenizer's own batches",
            ratio,
            f"{FEW:,} rows from Arrow to Arrow, and encode_batch_fast alone, {ROUNDS} times in turn; median; "
            f"{ours:,.0f} and {own:,.0f} rows/s",
            least=0.85,
        ),
        Row(
            "tokenization: more memory for 10 times the rows",
            large - small,
            f"peak of a process that tokenizes {FEW:,} rows: {small:.0f} MiB; {10 * FEW:,} rows: {large:.0f} MiB",
            unit="MiB",
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
            writer.write_table(whole, max_chunksize=10_000)
    return out


def _child(what: str, tokenizer: Path, data: Path) -> Any:
    argv = [sys.executable, "-m", "tests.benchmarks.tokenization", what, str(tokenizer), str(data)]
    return json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _rates(tokenizer: Path, data: Path) -> list[tuple[float, float]]:
    with ipc_reader(data / "train.arrow") as reader:
        texts = reader.read_all()["text"].to_pylist()
    alone = load_encoder(tokenizer, MAX_TOKENS).tokenizer
    rates = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        with TemporaryDirectory(dir=data) as out:
            tokenize(data, tokenizer, Path(out), MAX_TOKENS)
            between = time.perf_counter()
        again = time.perf_counter()
        for start in range(0, len(texts), ROWS_AT_ONCE):
            alone.encode_batch_fast(texts[start : start + ROWS_AT_ONCE])
        rates.append((len(texts) / (between - began), len(texts) / (time.perf_counter() - again)))
    return rates


def _peak_mib(tokenizer: Path, data: Path) -> float:
    with TemporaryDirectory(dir=data) as out:
        tokenize(data, tokenizer, Path(out), MAX_TOKENS)
    # Not ru_maxrss: a child begins with its parent's.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


if __name__ == "__main__":
    what, *folders = sys.argv[1:]
    print(json.dumps({"rate": _rates, "memory": _peak_mib}[what](*map(Path, folders))))
