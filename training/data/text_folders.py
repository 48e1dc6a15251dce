"""Rows of folders of texts or images: a file a row, whose label is the name of its folder, as the folder-based builders
of `datasets` and torchvision's `ImageFolder` have it.

The columns are `text`, without a line break at its end, or `image`; `label`, the folder below that of the split, null
for files directly in it; and `file_name`, from the folder of the split. One file of each label follows another.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from training.data.decoding import MARKS
from training.data.file_systems import as_user_error, display_name, is_url, read_pieces
from training.data.listing import SourceFile, list_texts, text_label
from training.data.readers import Block
from training.data.row_dicts import from_mappings
from training.data.row_problems import RowProblem
from training.local_files import open_local

if TYPE_CHECKING:
    from training.data.readers import ExtraColumns
    from training.recipe.source_columns import SourceColumns

LONGEST_FILE_BYTES = 16 * 2**20


def read_text_folder(
    wanted: SourceColumns, split: str, pinned: Mapping[str, Any], slices: ExtraColumns
) -> Iterator[Block]:
    """The texts of folders, and of single files, which predictions name."""
    for place in pinned[split]:
        is_folder = os.path.isdir(place)
        files = list_texts(place)[0] if is_folder else [SourceFile(place)]
        base = place if is_folder else os.path.dirname(place)
        rows = ((number, _read(number, file.file, base, wanted)) for number, file in enumerate(files, 1))
        yield from from_mappings(rows, wanted, display_name(place), slices, len(files))


def read_image_folder(
    wanted: SourceColumns, split: str, pinned: Mapping[str, Any], slices: ExtraColumns
) -> Iterator[Block]:
    """The images of folders, and single ones, which predictions name: their paths, which are read with the other
    columns."""
    for place in pinned[split]:
        is_folder = os.path.isdir(place)
        files = [one.file for one in list_texts(place)[0]] if is_folder else [place]
        base = place if is_folder else os.path.dirname(place)
        names = (os.path.relpath(file, base) for file in files)
        rows = ({"image": name, "label": text_label(base, f"{base}/{name}"), "file_name": name} for name in names)
        for block in from_mappings(enumerate(rows, 1), wanted, display_name(place), slices, len(files)):
            yield replace(block, image_folder=base)


def _read(number: int, file: str, base: str, wanted: SourceColumns) -> Any:
    """The row of a file, or its problem, which names the file."""
    name = file[len(base) :].lstrip("/")
    encoding = wanted.data.encoding
    if is_url(file):
        stored = b"".join(read_pieces(file))
    else:
        with as_user_error(file), open(open_local(file), "rb") as opened:
            stored = opened.read(LONGEST_FILE_BYTES + 1)
    if len(stored) > LONGEST_FILE_BYTES:
        return RowProblem(number, "long_text", f"has more than {LONGEST_FILE_BYTES / 2**20:g} MiB", f" ({name})")
    if codecs.lookup(encoding).name == "utf-8":  # a mark names another encoding of one file
        encoding = next((other for mark, other in MARKS.items() if stored.startswith(mark)), "utf-8-sig")
    try:
        text = stored.decode(encoding)
    except UnicodeError as error:
        description = f"is not {'UTF-8 text' if encoding == 'utf-8-sig' else f'text in {encoding}'}"
        at = f", byte 0x{stored[error.start]:02x}" if isinstance(error, UnicodeDecodeError) else ""
        return RowProblem(number, "encoding", description, f" ({name}{at})")
    if "\0" in text:
        return RowProblem(number, "encoding", "has NUL characters, which no text has", f" ({name})")
    if not text.strip():
        return RowProblem(number, "blank_text", "is an empty file", f" ({name})")
    text = text.removesuffix("\n").removesuffix("\r")
    return {"text": text, "label": text_label(base, file), "file_name": name}
