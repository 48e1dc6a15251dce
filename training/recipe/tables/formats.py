"""The sources of rows: files of several formats, data sets of the Hub, and Python code.

A new file format is a line here and its reader in training/data/readers.py.
"""

from __future__ import annotations

from dataclasses import dataclass

PACKED = {".gz": "gzip", ".zst": "zstd"}
"""Suffixes of packed files, and their compression."""


@dataclass(frozen=True)
class Format:
    """A format of files, as the rules of a recipe see it."""

    suffixes: tuple[str, ...]
    """The ends of its files' names."""
    fields: tuple[str, ...] = ()
    """Fields of `data` that are for this format, or for this one and others that name them too."""


def _also_packed(*suffixes: str) -> tuple[str, ...]:
    return tuple(suffix + packed for packed in ("", *PACKED) for suffix in suffixes)


FORMATS: dict[str, Format] = {
    "csv": Format(_also_packed(".csv", ".tsv"), ("delimiter", "quoting", "header", "encoding")),
    "json": Format(_also_packed(".jsonl", ".ndjson", ".json"), ("encoding",)),
    "parquet": Format((".parquet", ".pq")),
    "arrow": Format((".arrow", ".feather", ".ipc")),
}
"""The values of data.source that stand for files."""

SOURCES = ("hub", *FORMATS, "python")
"""All values of data.source."""
