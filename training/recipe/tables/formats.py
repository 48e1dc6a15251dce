"""The sources of rows: files of several formats, data sets of the Hub, and Python code.

A new file format is a line here and a module with its reader.
"""

from __future__ import annotations

from dataclasses import dataclass

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""The ends of the names of images, in lower or upper case."""

PACKED = {".gz": "gzip", ".zst": "zstd"}
"""Suffixes of packed files, and their compression."""


@dataclass(frozen=True)
class RowSource:
    """A kind of source: its reader, and for files their names."""

    reader: str
    """The module and name of a function `(wanted, split, pinned, slices) -> Iterator[Block]`: see
    training/data/readers.py."""
    suffixes: tuple[str, ...] = ()
    """The ends of its files' names."""
    predicted: tuple[str, ...] = ()
    """The suffixes of the files that `finetune predict` writes in this format."""
    fields: tuple[str, ...] = ()
    """Fields of `data` that are for this format, or for this one and others that name them too."""
    libraries: tuple[str, ...] = ("pyarrow",)
    """The libraries that shape the rows."""
    is_folder: bool = False
    """Whether a row is a whole file, and a split is a folder."""


def _also_packed(*suffixes: str) -> tuple[str, ...]:
    return tuple(suffix + packed for packed in ("", *PACKED) for suffix in suffixes)


SOURCES: dict[str, RowSource] = {
    "hub": RowSource("training.data.hub_datasets:read_hub", libraries=("pyarrow", "datasets")),
    "csv": RowSource(
        "training.data.csv_files:read_csv",
        _also_packed(".csv", ".tsv"),
        predicted=(".csv", ".tsv"),
        fields=("delimiter", "maxsplit", "quoting", "header", "encoding"),
    ),
    "json": RowSource(
        "training.data.json_files:read_json",
        _also_packed(".jsonl", ".ndjson", ".json"),
        predicted=(".jsonl",),
        fields=("encoding",),
        libraries=("pyarrow", "ijson"),
    ),
    "conll": RowSource(
        "training.data.conll_files:read_conll",
        _also_packed(".conll", ".conllu", ".iob", ".iob2", ".bio"),
        fields=("delimiter", "header", "encoding"),
    ),
    "parquet": RowSource("training.data.parquet_and_arrow_files:read_parquet", (".parquet", ".pq"), (".parquet",)),
    "arrow": RowSource("training.data.parquet_and_arrow_files:read_arrow", (".arrow", ".feather", ".ipc")),
    "textfolder": RowSource("training.data.text_folders:read_text_folder", fields=("encoding",), is_folder=True),
    "imagefolder": RowSource(
        "training.data.text_folders:read_image_folder",
        (*IMAGE_SUFFIXES, *(suffix.upper() for suffix in IMAGE_SUFFIXES)),
        libraries=("pyarrow", "pillow"),
        is_folder=True,
    ),
    "python": RowSource("training.data.python_objects:read_object"),
}
"""The values of data.source."""

FORMATS = {name: source for name, source in SOURCES.items() if source.suffixes or source.is_folder}
"""The values of data.source that stand for files."""
