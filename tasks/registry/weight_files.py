"""Comparison of a logged model with the folder that was trained: MLflow writes the weights anew, in other files."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tasks.registry.versions import LOGGED_PARTS
from training.evaluation.stored_calibration import FILE as CALIBRATION
from training.models.repository_files import part_of

WEIGHTS = ".safetensors"
ADDED = {CALIBRATION}
"""Files of a version's model and tokenizer that the trained folder does not have."""


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
    if added := _find_added(logged, trained, whole):
        return added
    if whole is not None:
        return ""
    try:
        return _find_other_tensor(_read_tensors(logged / LOGGED_PARTS["model"]), _read_tensors(trained))
    except (ValueError, LookupError, TypeError, AttributeError):
        return LOGGED_PARTS["model"]


def _find_added(logged: Path, trained: Path, whole: Path | None) -> str:
    """The first file of the logged model or tokenizer, by path, that the trained folder does not have."""
    known = {file.relative_to(trained).as_posix() for file in trained.rglob("*")} | ADDED
    for folder in [whole] if whole else [logged / inner for inner in LOGGED_PARTS.values()]:
        for file in sorted(folder.rglob("*")):
            is_weights = whole is None and file.parent == folder and WEIGHTS in file.name
            if not file.is_dir() and not is_weights and file.relative_to(folder).as_posix() not in known:
                return file.relative_to(logged).as_posix()
    return ""


def _find_other_tensor(logged: dict[str, _Tensor], trained: dict[str, _Tensor]) -> str:
    if odd := sorted(logged.keys() ^ trained.keys()):
        return f"the tensor {odd[0]}"
    for name, tensor in logged.items():
        other = trained[name]
        if (tensor.kind, tensor.shape) != (other.kind, other.shape) or tensor.content() != other.content():
            return f"the tensor {name}"
    return ""


def _read_tensors(folder: Path) -> dict[str, _Tensor]:
    """The tensors of all safetensors files of a folder, by name, without a library that would load torch. Raises
    ValueError if a name occurs twice."""
    tensors: dict[str, _Tensor] = {}
    for file in sorted(folder.glob(f"*{WEIGHTS}")):
        for name, tensor in _read_file(file):
            if name in tensors:
                raise ValueError(f"{file.name} has the tensor {name}, as another file")
            tensors[name] = tensor
    return tensors


def _read_file(file: Path) -> Iterator[tuple[str, _Tensor]]:
    with file.open("rb") as opened:
        content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    begin = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:begin])
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield name, _Tensor(entry["dtype"], entry["shape"], content, begin + start, begin + end)
