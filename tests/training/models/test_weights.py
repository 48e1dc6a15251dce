"""The weights of a model: damaged files are refused by name, and weights of another model are not replaced silently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.raised import raised_problems
from tests.training import tiny
from training import task_types
from training.models import loading
from training.models.configurations import CODE_FIELDS
from training.models.weights import INDEX, WEIGHTS, read_shapes
from training.problems import UserError

CLASSIFIES = task_types.load("sequence-classification")


@pytest.fixture
def folder(world: Path, tmp_path: Path) -> Path:
    """The base model, which a test may change."""
    for file in (world / "base/model").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def shapes(folder: Path) -> dict[str, list[int]]:
    return read_shapes({path.name: path for path in folder.iterdir()})


def rename(folder: Path, changed: dict[str, torch.Tensor]) -> None:
    save_file(changed, folder / WEIGHTS, metadata={"format": "pt"})


def train(world: Path, folder: Path) -> loading.PreTrainedModel:
    tokenizer = loading.load_tokenizer(world / "base/tokenizer", folder)
    return loading.load_for_training(CLASSIFIES, folder, ["a", "b"], tokenizer, seed=1)


def test_headers_have_the_shapes_of_all_tensors(folder: Path) -> None:
    assert shapes(folder) == {name: list(tensor.shape) for name, tensor in load_file(folder / WEIGHTS).items()}


@pytest.mark.parametrize(
    ("bytes_left", "reason"),
    [(-100, r"is cut off: it has 9\d,\d+ of 9\d,\d+ bytes"), (500, "is cut off"), (0, "is cut off")],
)
def test_a_file_that_is_cut_off_is_refused_by_its_name(folder: Path, bytes_left: int, reason: str) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:bytes_left])
    with pytest.raises(UserError, match=rf"^model.path: {folder}/{WEIGHTS} {reason}.*: copy or download it again\.$"):
        shapes(folder)


@pytest.mark.parametrize(
    "header",
    [
        *(b"[]", b"{", b'{"a": {}}', b'{"a": {"shape": 1, "data_offsets": [0, 0]}}', b"[" * 50_000),
        b'{"a": {"shape": [1e400], "data_offsets": [0, 0]}}',
    ],
)
def test_a_file_with_a_damaged_header_is_refused_by_its_name(folder: Path, header: bytes) -> None:
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UserError, match=f"{WEIGHTS} is damaged: its header is unreadable"):
        shapes(folder)


def test_every_damaged_or_missing_part_of_divided_weights_is_named(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    first, *others = sorted(tensors)
    save_file({first: tensors[first]}, folder / "1.safetensors")
    index = {first: "1.safetensors"} | dict.fromkeys(others, "2.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    with pytest.raises(UserError, match=rf"{INDEX} names 2\.safetensors, not in its folder"):
        shapes(folder)
    save_file({name: tensors[name] for name in others[1:]}, folder / "2.safetensors")
    with pytest.raises(UserError, match=rf"{INDEX} names weights that its files lack, {others[0]}: copy"):
        shapes(folder)
    save_file({name: tensors[name] for name in others}, folder / "2.safetensors")
    assert shapes(folder).keys() == tensors.keys()
    for name in ("1.safetensors", "2.safetensors"):
        (folder / name).write_bytes(b"cut")
    assert [problem.message.partition(" is cut")[0][-13:] for problem in raised_problems(shapes, folder)] == [
        "1.safetensors",
        "2.safetensors",
    ]


@pytest.mark.parametrize("index", ["[" * 50_000, '{"weight_map": ["1.safetensors"]}', "1" * 5000])
def test_an_index_that_is_none_is_refused_by_its_name(folder: Path, index: str) -> None:
    (folder / WEIGHTS).rename(folder / "1.safetensors")
    (folder / INDEX).write_text(index)
    with pytest.raises(UserError, match=rf"{INDEX} is no index of weights"):
        shapes(folder)
    (folder / INDEX).write_text('{"weight_map": {"a": 1}}')
    with pytest.raises(UserError, match=rf"{INDEX} names 1, not in its folder"):
        shapes(folder)


def test_training_does_not_start_with_random_weights_in_place_of_those_of_the_files(world: Path, folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    rename(folder, {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()})
    with pytest.raises(UserError, match=r"none of the 37 weights of Bert.*_orig_mod\.save_pretrained"):
        train(world, folder)
    rename(folder, {name: tensor for name, tensor in tensors.items() if ".layer.1." not in name})
    with pytest.raises(UserError, match=r"its files lack 16 of the 37 weights .*\(38\.\d% of its numbers"):
        train(world, folder)
    rename(folder, {name: tensor for name, tensor in tensors.items() if "1.attention.self.key" not in name})
    train(world, folder)  # the check warns of these
    job = tiny.fit_job(world, folder / "job", num_train_epochs=1)
    (world / "partial").mkdir()
    (world / "partial/model").symlink_to(folder)
    (world / "partial/tokenizer").symlink_to(world / "base/tokenizer")
    assert tiny.task_of(tiny.fit_job(world, folder / "other", base="partial")).missing_weights == 2
    assert tiny.task_of(job).missing_weights == 0


def test_a_trained_model_that_lacks_weights_predicts_nothing(world: Path, folder: Path) -> None:
    train(world, folder).save_pretrained(folder)
    loading.load_trained(CLASSIFIES, folder)
    tensors = load_file(folder / WEIGHTS)
    rename(folder, {name: tensor for name, tensor in tensors.items() if name != "classifier.bias"})
    with pytest.raises(UserError, match=r"^model: .* lacks 1 weights of Bert.*classifier.bias\. Restore its files"):
        loading.load_trained(CLASSIFIES, folder)
    rename(folder, tensors | {"classifier.weight": torch.zeros(3, 32)})
    with pytest.raises(UserError, match=r"or has them in another shape: classifier\.weight"):
        loading.load_trained(CLASSIFIES, folder)


@pytest.mark.parametrize("name", [*CODE_FIELDS, *(f"_{name}" for name in CODE_FIELDS)])
def test_code_that_a_models_configuration_names_is_never_chosen(world: Path, folder: Path, name: str) -> None:
    loading.add_to_config(folder, {name: {"owner/kernel": True} if "fusion" in name else "owner/kernel"})
    model = train(world, folder)
    plain = train(world, world / "base/model")
    for field in ("_attn_implementation", "_experts_implementation"):
        assert getattr(model.config, field) == getattr(plain.config, field)


def test_quantized_weights_are_refused_with_the_next_step(world: Path, folder: Path) -> None:
    loading.add_to_config(folder, {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    assert AutoConfig.from_pretrained(folder).quantization_config
    with pytest.raises(UserError, match=r"^model: its weights are quantized .*gptq.*: name the model that it was made"):
        train(world, folder)
