"""Texts are read as the writers of other programs wrote them, or refused by row: drawn by hypothesis."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.arrow import read_arrow
from tests.drawn import drawn
from tests.training.data.task_types import CLASSIFICATION
from training.data.load_rows import load
from training.problems import UserError
from training.recipe import Data

Rows = list[tuple[str, str]]
LABELS = ("good", "bad")


def by_csv(rows: Rows, file: Path, **form: object) -> None:
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.writer(opened, **form)  # type: ignore[arg-type]
        writer.writerows([("text", "label"), *rows])


def by_pandas(rows: Rows, file: Path, **form: object) -> None:
    pd.DataFrame(rows, columns=["text", "label"]).to_csv(file, index=False, **form)  # type: ignore[call-overload]


def by_pandas_json(rows: Rows, file: Path, **form: object) -> None:
    pd.DataFrame(rows, columns=["text", "label"]).to_json(file, orient="records", **form)  # type: ignore[call-overload]


def by_arrow(rows: Rows, file: Path) -> None:
    pyarrow.csv.write_csv(table(rows), file)


def by_json(rows: Rows, file: Path, **form: object) -> None:
    lines = [json.dumps({"text": text, "label": label}, **form) for text, label in rows]  # type: ignore[arg-type]
    file.write_text("\n".join(lines), encoding="utf-8")


def by_parquet(rows: Rows, file: Path) -> None:
    pq.write_table(table(rows), file)


def by_duckdb(rows: Rows, file: Path, form: str) -> None:
    written = table(rows)
    with duckdb.connect() as database:
        database.register("written", written)
        database.execute(f"copy (from written) to '{file}' ({form})")


def table(rows: Rows) -> pa.Table:
    return pa.table({"text": [text for text, _ in rows], "label": [label for _, label in rows]})


WRITERS: dict[str, tuple[str, Callable[[Rows, Path], None]]] = {
    "csv.writer": ("csv", by_csv),
    "csv.writer, all quoted": ("csv", lambda rows, file: by_csv(rows, file, quoting=csv.QUOTE_ALL)),
    "csv.writer, Unix": ("csv", lambda rows, file: by_csv(rows, file, dialect="unix")),
    "csv.writer, tabs": ("tsv", lambda rows, file: by_csv(rows, file, dialect="excel-tab")),
    "pandas": ("csv", by_pandas),
    "pandas, semicolons and a mark": ("csv", lambda rows, file: by_pandas(rows, file, sep=";", encoding="utf-8-sig")),
    "pyarrow": ("csv", by_arrow),
    "DuckDB": ("csv", lambda rows, file: by_duckdb(rows, file, "format csv, header")),
    "DuckDB, JSON": ("jsonl", lambda rows, file: by_duckdb(rows, file, "format json")),
    "DuckDB, a JSON array": ("json", lambda rows, file: by_duckdb(rows, file, "format json, array true")),
    "json": ("jsonl", by_json),
    "json, not escaped": ("jsonl", lambda rows, file: by_json(rows, file, ensure_ascii=False)),
    "pandas, JSON": ("json", by_pandas_json),
    "pandas, JSON lines": ("jsonl", lambda rows, file: by_pandas_json(rows, file, lines=True, force_ascii=False)),
    "Parquet": ("parquet", by_parquet),
}
ODD = [*"'\",;\t\n\r\\ \0\x85\u2028é🙂={[", "\r\n", "\\n", '""', "NA"]
"""Pieces that a reader may take for something else."""


def is_text(drawn: str) -> bool:
    """Whether it is more than space. A byte order mark is none: files that were joined have one at a row's start."""
    return bool(drawn.strip()) and "\ufeff" not in drawn


texts = st.lists(st.sampled_from(ODD) | st.text(max_size=4), max_size=6).map("".join).filter(is_text)


@pytest.mark.slow
@drawn
@given(writer=st.sampled_from(sorted(WRITERS)), rows=st.lists(st.tuples(texts, st.sampled_from(LABELS)), max_size=8))
def test_drawn_texts_are_read_as_they_were_written_or_their_rows_are_named(writer: str, rows: Rows) -> None:
    rows = [("first", "good"), *rows, ("last", "bad")]
    ending, write = WRITERS[writer]
    with TemporaryDirectory() as folder:
        files = {split: Path(folder) / f"{split}.{ending}" for split in ("train", "validation")}
        for file in files.values():
            write(rows, file)
        source = {"jsonl": "json", "tsv": "csv"}.get(ending, ending)
        checks = dict.fromkeys(("duplicates", "shared_rows"), "ignore")
        form = {"delimiter": ";"} if "semicolons" in writer else {}
        data = Data(source=source, path="-", text=["text"], label="label", checks=checks, **form)  # type: ignore[arg-type]
        out = Path(folder) / "out"
        try:
            load(data, CLASSIFICATION, {split: [str(file)] for split, file in files.items()}, out)
        except UserError as error:
            assert all("row" in problem.where for problem in error.problems), error
            return
        read = read_arrow(out / "train.arrow")["text"].to_pylist()
        report = json.loads((out / "log" / "report.json").read_text())
        assert read == [text for text, _ in rows], report
