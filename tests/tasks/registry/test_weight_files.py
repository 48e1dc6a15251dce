"""A logged model is the trained one only if it has the same tensors once each, and no other files."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from tasks.registry.weight_files import Different, TrainedModel, require_trained
from training.jobs.protocol import sha256
from training.models.weights import INDEX

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
    write_index(tmp_path / "logged", {"a.weight": 1, "b.weight": 2})
    (tmp_path / "logged" / "MLmodel").write_text("flavors: {}")
    return tmp_path / "logged"


def write_index(logged: Path, files: dict[str, int]) -> None:
    places = {name: f"model-0000{number}-of-00002.safetensors" for name, number in files.items()}
    (logged / "model" / INDEX).write_text(json.dumps({"weight_map": places}))


def digest_all(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): sha256(path) for path in folder.rglob("*") if path.is_file()}


def difference(logged: Path, known: dict[str, str] | None = None) -> str:
    """The first difference from the trained folder, whose files had the digests `known` when it was trained."""
    trained, files = logged.parent / "trained", digest_all(logged)
    try:
        assert require_trained(logged, files, TrainedModel(trained, known or digest_all(trained))) == files
    except Different as found:
        return str(found)
    return ""


def test_weights_that_were_written_in_other_files_are_the_same(logged: Path) -> None:
    assert difference(logged) == ""


def test_a_model_of_images_has_its_processor_in_another_folder(logged: Path) -> None:
    (logged / "components/tokenizer").rename(logged / "components/image_processor")
    for folder in (logged / "components/image_processor", logged.parent / "trained"):
        (folder / "tokenizer.json").rename(folder / "preprocessor_config.json")
    assert difference(logged) == ""
    (logged / "components/image_processor/preprocessor_config.json").write_text('{"size": 1}')
    assert difference(logged) == "components/image_processor/preprocessor_config.json"


def test_a_processor_of_images_beside_a_tokenizer_is_a_difference(logged: Path) -> None:
    (logged / "components/image_processor").mkdir()
    (logged / "components/image_processor/preprocessor_config.json").write_text("{}")
    assert difference(logged) == "components/image_processor/tokenizer.json"


def test_an_index_that_leaves_out_a_tensor_or_names_another_file_is_a_difference(logged: Path) -> None:
    for files in ({"a.weight": 1}, {"a.weight": 1, "b.weight": 1}):
        write_index(logged, files)
        assert difference(logged) == f"model/{INDEX}"


def test_weights_that_have_changed_since_the_training_are_named_also_where_both_are_one_file(logged: Path) -> None:
    trained = logged.parent / "trained" / "model.safetensors"
    known = digest_all(trained.parent)
    write_tensors(trained, TENSORS | {"a.weight": TWO})
    write_tensors(logged / "model" / "model-00001-of-00002.safetensors", {"a.weight": TWO})
    assert difference(logged) == "" and difference(logged, known) == "model/model.safetensors"
    for file in (logged / "model").glob("*.safetensors*"):
        file.unlink()
    os.link(trained, logged / "model" / "model.safetensors")
    assert difference(logged) == "" and difference(logged, known) == "model/model.safetensors"


def test_what_is_signed_are_the_bytes_that_were_compared(logged: Path) -> None:
    """The registry had other weights when its files were read for the first time, and has the trained ones now."""
    now, trained = digest_all(logged), logged.parent / "trained"
    before = {path: "e" * 64 if path.endswith(".safetensors") else digest for path, digest in now.items()}
    assert require_trained(logged, before, TrainedModel(trained, digest_all(trained))) == now


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
