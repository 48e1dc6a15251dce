"""Comparison of a logged model with the folder that was trained: MLflow writes the weights anew, in other files."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tasks.registry.versions import LOGGED_PARTS
from training.models.repository_files import part_of

WEIGHTS = ".safetensors"


class _Tensor(NamedTuple):
    kind: str
    shape: list[int]
    file: mmap.mmap
    start: int
    end: int

    def content(self) -> memoryview:
        return memoryview(self.file)[self.start : self.end]


def find_difference(logged: Path, trained: Path) -> str:
    """The first file or tensor in which a version's folder differs from the trained one; empty if there is none.

    A version has the files of both parts, or the trained folder itself, with its calibration.
    """
    code = logged / "artifacts" / "model"
    whole = code if code.is_dir() else None
    for file in sorted(trained.iterdir()):
        if not (part := part_of(file.name)) or (WEIGHTS in file.name and whole is None):
            continue
        other = (whole or logged / LOGGED_PARTS[part]) / file.name
        if not other.is_file() or other.read_bytes() != file.read_bytes():
            return other.relative_to(logged).as_posix()
    if whole is not None:
        return ""
    try:
        return _find_other_tensor(_read_tensors(logged / LOGGED_PARTS["model"]), _read_tensors(trained))
    except (ValueError, LookupError, TypeError):
        return LOGGED_PARTS["model"]


def _find_other_tensor(logged: dict[str, _Tensor], trained: dict[str, _Tensor]) -> str:
    if odd := sorted(logged.keys() ^ trained.keys()):
        return f"the tensor {odd[0]}"
    for name, tensor in logged.items():
        other = trained[name]
        if (tensor.kind, tensor.shape) != (other.kind, other.shape) or tensor.content() != other.content():
            return f"the tensor {name}"
    return ""


def _read_tensors(folder: Path) -> dict[str, _Tensor]:
    """The tensors of all safetensors files of a folder, by name, without a library that would load torch."""
    return dict(tensor for file in sorted(folder.glob(f"*{WEIGHTS}")) for tensor in _read_file(file))


def _read_file(file: Path) -> Iterator[tuple[str, _Tensor]]:
    with file.open("rb") as opened:
        content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    begin = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:begin])
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield name, _Tensor(entry["dtype"], entry["shape"], content, begin + start, begin + end)
