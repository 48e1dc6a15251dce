"""Exports to ONNX: the same predictions as the model, for batches of any size; smaller files with 8-bit weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageClassification, AutoModelForSequenceClassification, BertConfig

from tests.task_types import VIT
from tests.training import tiny
from training.evaluation.stored_calibration import Calibration
from training.models import onnx_files
from training.problems import UserError

pytestmark = pytest.mark.slow

EXPORTS = ["onnx", "onnx-int8"]
IMAGE_MODELS = {"vit": VIT, "resnet": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8], "depths": [1]}}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Path]]:
    """A tiny classifier, and its exports."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    config = BertConfig(**{**tiny.CONFIG, "num_hidden_layers": 1, "num_labels": 3})  # each layer takes a second
    network = AutoModelForSequenceClassification.from_config(config).eval()
    network.save_pretrained(folder)
    return network, onnx_files.export("AutoModelForSequenceClassification", folder, EXPORTS, folder / "out")


def batch(rows: int, tokens: int, **more: Any) -> dict[str, torch.Tensor]:
    """Random tokens, every other row padded to the half."""
    ids = torch.randint(5, 120, (rows, tokens), generator=torch.Generator().manual_seed(rows * tokens))
    mask = torch.ones_like(ids)
    mask[1::2, (tokens + 1) // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, **more}


def test_an_export_predicts_as_its_model_for_batches_of_any_size(exported: tuple[Any, dict[str, Path]]) -> None:
    network, files = exported
    models = {name: onnx_files.OnnxModel(file, network.config) for name, file in files.items()}
    pair = {"token_type_ids": torch.tensor([[0] * 5 + [1] * 4] * 3)}
    for given in (batch(1, 1), batch(1, 30), batch(7, 12), batch(3, 9, **pair)):
        with torch.inference_mode():
            expected = network(**given)["logits"].numpy()
        for name, rounding in (("onnx", 1e-5), ("onnx-int8", 0.05)):
            found = models[name](**given)["logits"].numpy()
            assert found.shape == expected.shape
            assert np.abs(found - expected).max() < rounding


def test_an_export_gives_the_calibrated_probabilities_of_its_model(exported: tuple[Any, dict[str, Path]]) -> None:
    network, files = exported
    logits = [
        model(**batch(5, 9))["logits"].detach().numpy()
        for model in (network, onnx_files.OnnxModel(files["onnx"], network.config))
    ]
    labels = [str(label) for label in range(logits[0].shape[1])]
    calibration = Calibration(function="softmax", labels=labels, scale=[0.4], offset=[0.0])
    expected, given = map(calibration.probabilities, logits)
    assert np.abs(expected - given).max() < 1e-6


def test_a_model_that_lacks_weights_or_has_them_in_another_shape_is_not_exported_with_random_ones(
    exported: tuple[Any, dict[str, Path]], tmp_path: Path
) -> None:
    network, _ = exported
    network.save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    bias = "classifier.bias"
    for changed in ({bias: torch.zeros(7)}, {}):
        kept = {name: tensor for name, tensor in whole.items() if name != bias}
        save_file(kept | changed, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(
            UserError, match=r"lacks 1 weights of Bert\w+, or has them in another shape: classifier\.bias"
        ):
            onnx_files.export("AutoModelForSequenceClassification", tmp_path, ["onnx"], tmp_path / "out")


def test_the_weights_of_an_8_bit_export_are_in_8_bits(exported: tuple[Any, dict[str, Path]]) -> None:
    import onnx

    network, files = exported
    graph = onnx.load(files["onnx-int8"]).graph
    in_floats = sum(np.prod(one.dims) for one in graph.initializer if one.data_type == onnx.TensorProto.FLOAT)
    matrices = sum(weights.numel() for name, weights in network.state_dict().items() if weights.ndim == 2)
    assert in_floats < network.num_parameters() - 0.9 * matrices


def test_an_export_has_no_path_of_the_machine_that_made_it_and_the_same_bytes_elsewhere(
    exported: tuple[Any, dict[str, Path]], tmp_path: Path
) -> None:
    network, files = exported
    network.save_pretrained(tmp_path / "model")
    again = onnx_files.export("AutoModelForSequenceClassification", tmp_path / "model", EXPORTS, tmp_path / "out")
    for name, file in files.items():
        content = file.read_bytes()
        assert content == again[name].read_bytes()
        assert not any(part in content for part in (b'File "', b"site-packages", str(Path.cwd()).encode()))


def test_inputs_and_outputs_have_the_names_that_other_tools_expect(exported: tuple[Any, dict[str, Path]]) -> None:
    import onnxruntime

    for file in exported[1].values():
        session = onnxruntime.InferenceSession(file)
        inputs = {one.name: (one.type, len(one.shape)) for one in session.get_inputs()}
        assert inputs == dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), ("tensor(int64)", 2))
        assert [one.name for one in session.get_outputs()] == ["logits"]


@pytest.mark.parametrize(("name", "sizes"), [("vit", (16,)), ("resnet", (32, 48))])
def test_an_export_of_a_model_of_images_predicts_as_its_model(
    name: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    settings = IMAGE_MODELS[name]
    torch.manual_seed(1)
    network = AutoModelForImageClassification.from_config(AutoConfig.for_model(**settings, num_labels=3)).eval()
    network.save_pretrained(tmp_path)
    files = onnx_files.export("AutoModelForImageClassification", tmp_path, EXPORTS, tmp_path / "out")
    for kind, rounding in (("onnx", 1e-5), ("onnx-int8", 0.05)):
        model = onnx_files.OnnxModel(files[kind], network.config)
        for rows, size in ((rows, size) for rows in (1, 3) for size in sizes):
            images = torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(rows))
            with torch.inference_mode():
                expected = network(pixel_values=images)["logits"]
            assert (model(pixel_values=images)["logits"] - expected).abs().max() < rounding


def test_a_model_that_torch_cannot_convert_is_refused_by_its_class(tmp_path: Path) -> None:
    class Unpredictable(torch.nn.Module):
        config = BertConfig()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, return_dict: bool) -> Any:
            return {"logits": input_ids.numpy()}

    with pytest.raises(UserError, match=r"^release\.exports: torch cannot convert Unpredictable to ONNX \("):
        onnx_files.convert(Unpredictable(), "AutoModelForSequenceClassification", tmp_path / "model.onnx")  # type: ignore[arg-type]
