"""A logged model is the trained one only if it has the same tensors once each, and no other files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from tasks.registry.weight_files import find_difference

ONE, TWO = struct.pack("<2f", 1, 2), struct.pack("<2f", 3, 4)
TENSORS = {"a.weight": ONE, "b.weight": TWO}


def write_tensors(file: Path, tensors: dict[str, bytes], kind: str = "F32", shape: tuple[int, ...] = (2,)) -> None:
    header, place = {}, 0
    for name, content in tensors.items():
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [place, place + len(content)]}
        place += len(content)
    text = json.dumps(header).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """A version's folder, with the weights in two files, beside the `trained` one."""
    for place in ("trained", "logged/model"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "config.json").write_text("{}")
    for place in ("trained", "logged/components/tokenizer"):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / "tokenizer.json").write_text("{}")
    write_tensors(tmp_path / "trained" / "model.safetensors", TENSORS)
    for number, (name, content) in enumerate(TENSORS.items(), 1):
        write_tensors(tmp_path / "logged" / "model" / f"model-0000{number}-of-00002.safetensors", {name: content})
    (tmp_path / "logged" / "model" / "model.safetensors.index.json").write_text("{}")
    (tmp_path / "logged" / "MLmodel").write_text("flavors: {}")
    return tmp_path / "logged"


def difference(logged: Path) -> str:
    return find_difference(logged, logged.parent / "trained")


def test_weights_that_were_written_in_other_files_are_the_same(logged: Path) -> None:
    assert difference(logged) == ""


def test_a_tensor_with_other_content_type_or_shape_is_named(logged: Path) -> None:
    file = logged / "model" / "model-00002-of-00002.safetensors"
    changed = {"b.weight": TWO[:-1] + b"\0"}
    for tensors, kind, shape in ((changed, "F32", (2,)), (dict(changed), "I32", (2,)), (dict(changed), "F32", (1, 2))):
        write_tensors(file, tensors if kind == "F32" and shape == (2,) else {"b.weight": TWO}, kind, shape)
        assert difference(logged) == "the tensor b.weight"
    file.unlink()
    assert difference(logged) == "the tensor b.weight"


def test_a_tensor_that_two_files_have_is_a_difference_whichever_would_be_loaded(logged: Path) -> None:
    write_tensors(logged / "model" / "model-00003-of-00002.safetensors", {"a.weight": TWO})
    assert difference(logged) == "model"


@pytest.mark.parametrize(
    "path",
    ["model/pytorch_model.bin", "model/code/model.py", "components/tokenizer/added_tokens.json", "model/notes.txt"],
)
def test_a_file_that_was_not_trained_is_named(logged: Path, path: str) -> None:
    (logged / path).parent.mkdir(exist_ok=True)
    (logged / path).write_text("{}")
    assert difference(logged) == path


def test_damaged_weights_are_a_difference(logged: Path) -> None:
    file = logged / "model" / "model-00002-of-00002.safetensors"
    for content in (b"", b"\xff" * 8, b"\x08\0\0\0\0\0\0\0[[[[[[[["):
        file.write_bytes(content)
        assert difference(logged) == "model"
