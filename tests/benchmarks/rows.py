"""Large files, checked and tokenized: rows a second, and the memory that it takes, for ten times the rows.

Run as a program it is one process that does it: `... SOURCE FILE TOKENIZER` prints what it took.
"""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.benchmarks.subject import MAX_TOKENS, Subject, peak_mib
from tests.benchmarks.table import Row
from training.data.load_rows import load
from training.recipe import Data
from training.task_types.sequence_classification import SequenceClassification
from training.tokenization.token_files import tokenize

PARQUET_ROWS = 1_000_000
CSV_BYTES = 300_000_000
TENTH = 10


def measure(subject: Subject) -> list[Row]:
    """A Parquet of a million rows and a CSV of 300 MB, and a tenth of each."""
    found = []
    for source, what, write in (
        ("parquet", f"{PARQUET_ROWS:,} rows of Parquet", _write_parquet),
        ("csv", f"{CSV_BYTES // 10**6} MB of CSV", _write_csv),
    ):
        took = {}
        for part in (TENTH, 1):
            file = subject.folder / f"train-{part}.{source}"
            write(file, part)
            took[part] = _child(source, file, subject.base["tokenizer"])
            file.unlink()
        small, large = took[TENTH], took[1]
        found += [
            Row(
                f"{what}: checked",
                large["check_s"],
                f"{large['rows']:,} rows of {large['bytes'] // 10**6} MB read, checked and held out, "
                f"{large['rows'] / large['check_s']:,.0f} rows/s",
                unit="s",
            ),
            Row(
                f"{what}: tokenized",
                large["tokens_s"],
                f"{large['tokens']:,} tokens, {large['rows'] / large['tokens_s']:,.0f} rows/s",
                unit="s",
            ),
            Row(
                f"{what}: memory, to that for a tenth",
                large["peak_mib"] / small["peak_mib"],
                f"peak of the process: {large['peak_mib']:.0f} and {small['peak_mib']:.0f} MiB",
            ),
        ]
    return found


def _rows(seed: int) -> Iterator[tuple[int, str, str]]:
    """Numbered texts of up to sixty words, and their labels."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(20_000)]
    number = 0
    while True:
        yield number, " ".join(draw.choices(words, k=draw.randint(5, 60))), draw.choice("abc")
        number += 1


def _write_parquet(file: Path, part: int) -> None:
    schema = pa.schema([("text", pa.string()), ("label", pa.string())])
    rows = _rows(1)
    with pq.ParquetWriter(file, schema) as writer:
        for _ in range(PARQUET_ROWS // part // 10_000):
            _, texts, labels = zip(*(next(rows) for _ in range(10_000)), strict=True)
            writer.write_table(pa.table([pa.array(texts), pa.array(labels)], schema=schema))


def _write_csv(file: Path, part: int) -> None:
    with file.open("w", newline="") as out:
        table = csv.writer(out)
        table.writerow(["number", "text", "label"])
        for row in _rows(2):
            table.writerow(row)
            if row[0] % 1000 == 0 and out.tell() > CSV_BYTES // part:
                return


def _child(source: str, file: Path, tokenizer: Path) -> dict[str, Any]:
    argv = [sys.executable, "-m", "tests.benchmarks.rows", source, str(file), str(tokenizer)]
    took: dict[str, Any] = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return took


def _took(source: str, file: Path, tokenizer: Path) -> dict[str, Any]:
    data = Data(source=source, path=str(file), text=["text"], label="label")  # type: ignore[arg-type]
    with TemporaryDirectory(dir=file.parent) as out:
        began = time.perf_counter()
        loaded = load(data, SequenceClassification(), {"train": [str(file)]}, Path(out, "rows"))
        checked = time.perf_counter()
        tokens = tokenize(SequenceClassification(), Path(out, "rows"), tokenizer, Path(out, "tokens"), MAX_TOKENS)
        return {
            "rows": sum(loaded.rows.values()),
            "bytes": file.stat().st_size,
            "check_s": checked - began,
            "tokens": tokens.tokens,
            "tokens_s": time.perf_counter() - checked,
            "peak_mib": peak_mib(),
        }


if __name__ == "__main__":
    print(json.dumps(_took(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))))
