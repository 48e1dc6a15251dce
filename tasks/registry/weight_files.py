"""Comparison of a logged model with the folder that was trained, by the digests in the manifest of its artifact."""

from __future__ import annotations

import json
import mmap
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tasks.registry.versions import LOGGED_BY_CODE, LOGGED_IMAGE_PROCESSOR, LOGGED_PARTS, logged_parts
from training.evaluation.stored_calibration import FILE as CALIBRATION
from training.jobs.protocol import sha256
from training.models.repository_files import part_of
from training.models.weights import INDEX

WEIGHTS = ".safetensors"
ADDED = {CALIBRATION}
"""Files of a version's model and tokenizer that the trained folder does not have."""


class Different(Exception):
    """A version whose files are not the trained ones, with the first file or tensor that differs."""


class TrainedModel(NamedTuple):
    """A model as it was trained."""

    folder: Path
    """MLflow's files may be links to its weights, so these may change with them."""
    files: Mapping[str, str]
    """sha256 by path, from the manifest of the artifact."""


class _Tensor(NamedTuple):
    file: str
    kind: str
    shape: list[int]
    mapped: mmap.mmap
    start: int
    end: int

    def content(self) -> memoryview:
        return memoryview(self.mapped)[self.start : self.end]


def require_trained(logged: Path, files: Mapping[str, str], trained: TrainedModel) -> dict[str, str]:
    """The sha256 of a version's files by path, those that a signature may name. Raises Different.

    A version has the files of both parts, or the trained folder itself, with its calibration. MLflow may have written
    the weights anew, in other files with the same tensors.

    Args:
        logged: the version's folder.
        files: sha256 of its files, by path.
    """
    is_code = any(path.startswith(f"{LOGGED_BY_CODE}/") for path in files)
    has_images = any(path.startswith(f"{LOGGED_IMAGE_PROCESSOR}/") for path in files)
    places = logged_parts(images=has_images)
    if is_code:
        places = dict.fromkeys(places, LOGGED_BY_CODE)
    for name, digest in sorted(trained.files.items()):
        if "/" in name or not (part := part_of(name)) or (WEIGHTS in name and not is_code):
            continue
        if files.get(path := f"{places[part]}/{name}") != digest:
            raise Different(path)
    for folder in sorted({*places.values()}):
        inside = {path.removeprefix(f"{folder}/") for path in files if path.startswith(f"{folder}/")}
        if added := sorted(name for name in inside - trained.files.keys() - ADDED if not _is_weights(name, is_code)):
            raise Different(f"{folder}/{added[0]}")
    if is_code:
        return dict(files)
    return {**files, **_require_weights(logged / places["model"], files, trained)}


def _is_weights(name: str, is_code: bool) -> bool:
    return not is_code and "/" not in name and WEIGHTS in name


def _require_weights(folder: Path, files: Mapping[str, str], trained: TrainedModel) -> dict[str, str]:
    """The sha256 of the weights in the folder of a version's model, by path in the version. Raises Different."""
    above = LOGGED_PARTS["model"]
    inside = {path.removeprefix(f"{above}/"): digest for path, digest in files.items() if path.startswith(f"{above}/")}
    here = {name: digest for name, digest in inside.items() if _is_weights(name, False)}
    wanted = {name: digest for name, digest in trained.files.items() if _is_weights(name, False)}
    if here == wanted:
        return {}
    with tempfile.TemporaryDirectory(prefix="finetune-") as aside:
        # Copies, which nobody changes between the comparison and the digest.
        copied = _copy(folder, here, Path(aside, "logged"))
        same = _copy(trained.folder, wanted, Path(aside, "trained"))
        if changed := sorted(name for name, digest in same.items() if digest != wanted[name]):
            raise Different(f"{above}/{changed[0]}")
        try:
            difference = _find_other_tensor(Path(aside, "logged"), Path(aside, "trained"))
        except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
            raise Different(above) from error
        if difference:
            raise Different(difference)
    return {f"{above}/{name}": digest for name, digest in copied.items()}


def _copy(folder: Path, names: Mapping[str, str], out: Path) -> dict[str, str]:
    """Copies files, and returns the sha256 of the copies by name."""
    out.mkdir()
    for name in names:
        shutil.copyfile(folder / name, out / name)
    return {name: sha256(out / name) for name in names}


def _find_other_tensor(logged: Path, trained: Path) -> str:
    ours, theirs = _read_tensors(logged), _read_tensors(trained)
    if odd := sorted(ours.keys() ^ theirs.keys()):
        return f"the tensor {odd[0]}"
    for name, tensor in ours.items():
        other = theirs[name]
        if (tensor.kind, tensor.shape) != (other.kind, other.shape) or tensor.content() != other.content():
            return f"the tensor {name}"
    places = {name: tensor.file for name, tensor in ours.items()}
    if (index := logged / INDEX).is_file() and json.loads(index.read_bytes())["weight_map"] != places:
        return f"{LOGGED_PARTS['model']}/{INDEX}"
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
            yield name, _Tensor(file.name, entry["dtype"], entry["shape"], content, begin + start, begin + end)
