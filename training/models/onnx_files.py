"""ONNX files of trained models: conversion, 8-bit weights, and predictions by ONNX Runtime on the CPU.

B rows of a batch, T tokens of its longest row; C channels, H and W pixels of an image.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import tempfile
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import ModelOutput

from training.models.loading import load_for_export
from training.problems import UserError
from training.recipe.tables.exports import EXPORTS, OUTPUTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OPSET = 20
"""The version of ONNX's operators: the first with Gelu as one operator. ONNX Runtime has it since 1.17."""
MAX_BYTES_IN_ONE_FILE = 1_900_000_000
"""ONNX files are protocol buffers of at most 2 GB: the weights of larger models are in a file beside."""
EXAMPLE_ROWS, EXAMPLE_TOKENS = 2, 8
PIXELS, USUAL_IMAGE_SIZE = "pixel_values", 224


def convert(network: PreTrainedModel, auto_class: str, file: Path) -> None:
    """Writes the model as `file`: 32-bit floats, the outputs of its class, (B, T) int64 inputs of any size, or (B, C,
    H, W) float32 images of any number.

    Raises UserError if torch cannot convert it.
    """
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    outputs, inputs = OUTPUTS[auto_class], example(network)
    names = {0: "batch_size", 1: "sequence_length"}
    if PIXELS in inputs:  # models with an image size take no other one
        names = {0: "batch_size", **({} if hasattr(network.config, "image_size") else {2: "height", 3: "width"})}
    # A named size would have to be free of bounds, such as the number of positions.
    any_size = {"inputs": {name: dict.fromkeys(names, torch.export.Dim.AUTO) for name in inputs}}
    named = {"inputs": dict.fromkeys(inputs, names)}
    given = {"inputs": inputs}
    with _quiet():
        try:
            graph = torch.export.export(
                _Tuple(network, outputs), (), kwargs=given, dynamic_shapes=any_size, strict=False
            )
            program = torch.onnx.export(
                graph,
                kwargs=given,
                dynamo=True,
                dynamic_shapes=named,
                input_names=list(inputs),
                output_names=list(outputs),
                opset_version=OPSET,
                verbose=False,
            )
        except Exception as error:  # the exporter fails in many ways
            raise _conversion_error(network, error) from error
    assert program is not None
    ClearMetadataAndDocStringPass()(program.model)  # lines of code with the paths of this machine
    file.parent.mkdir(parents=True, exist_ok=True)
    weights = sum(tensor.nbytes for tensor in network.state_dict().values())
    program.save(str(file), external_data=weights > MAX_BYTES_IN_ONE_FILE)


def quantize(file: Path, out: Path) -> None:
    """Writes a copy of an ONNX model whose weights are in 8 bits. Activations are quantized when it runs."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.registry import IntegerOpsRegistry
    from onnxruntime.quantization.shape_inference import quant_pre_process

    is_large = file.stat().st_size > MAX_BYTES_IN_ONE_FILE or file.with_name(f"{file.name}.data").exists()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder, _quiet():
        plain = Path(folder, "plain.onnx")
        # Turns transposed weights into constants: others would stay in 32 bits.
        quant_pre_process(file, plain, skip_symbolic_shape=True, save_as_external_data=is_large)
        quantize_dynamic(
            plain,
            out,
            per_channel=True,
            # 7 bits of the weights: in 8, sums overflow on processors without the instructions for them (VNNI).
            reduce_range=True,
            weight_type=QuantType.QInt8,
            # ONNX Runtime cannot compute convolutions with signed weights.
            op_types_to_quantize=[name for name in IntegerOpsRegistry if name != "Conv"],
            use_external_data_format=is_large,
        )


def export(auto_class: str, folder: Path, exports: Sequence[str], out: Path) -> dict[str, Path]:
    """Writes the trained model of `folder` to `out` in each of the formats. Returns their files.

    Raises UserError if the model cannot be converted.
    """
    files = {name: out / EXPORTS[name].file for name in exports}
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as aside:
        plain = files.get("onnx", Path(aside, "model.onnx"))
        convert(load_for_export(auto_class, folder, eager=True), auto_class, plain)
        if "onnx-int8" in files:
            quantize(plain, files["onnx-int8"])
    return files


def open_export(name: str, exports: Path, config: Any) -> OnnxModel:
    """An export of a folder of exports, to be run by ONNX Runtime."""
    return OnnxModel(exports / EXPORTS[name].file, config)


def try_export(network: PreTrainedModel, auto_class: str) -> None:
    """Raises UserError if torch cannot convert the model, whose attention becomes that of exports."""
    network.set_attn_implementation("eager")
    with tempfile.TemporaryDirectory(prefix="finetune-") as folder:
        convert(network.eval(), auto_class, Path(folder) / "model.onnx")


class OnnxModel:
    """An ONNX file that is called like a model of transformers: tensors by name, to outputs by name.

    Args:
        file: the ONNX file.
        config: the configuration of the model that it was made from.
        threads: of a forward pass; those of torch by default.
    """

    device = torch.device("cpu")
    runtime = "ONNX Runtime"

    def __init__(self, file: Path, config: Any, threads: int | None = None) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        options.log_severity_level = 3  # errors
        # Threads that wait would take the processor from other programs, and from each other where these are many.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.config = config
        self._session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self._inputs = [one.name for one in self._session.get_inputs()]
        self._outputs = [one.name for one in self._session.get_outputs()]

    def __call__(self, **inputs: torch.Tensor) -> ModelOutput:
        """The outputs for a batch. Without token types, all tokens are of the first."""
        absent = torch.zeros_like(next(iter(inputs.values())))
        given = {name: inputs.get(name, absent).numpy() for name in self._inputs}
        found = self._session.run(self._outputs, given)
        return ModelOutput(zip(self._outputs, map(torch.from_numpy, found), strict=True))


class _Tuple(torch.nn.Module):
    """The model with its named outputs as a tuple."""

    def __init__(self, network: PreTrainedModel, outputs: Any) -> None:
        super().__init__()
        self.network, self.outputs = network, outputs

    def forward(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        found = self.network(**inputs, return_dict=True)
        return tuple(found[name] for name in self.outputs)


def example(network: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Inputs of the model: images; or rows of padded tokens, and token types if the model distinguishes them."""
    taken = inspect.signature(network.forward).parameters
    if PIXELS in taken:
        size = getattr(network.config, "image_size", None) or USUAL_IMAGE_SIZE
        height, width = (size, size) if isinstance(size, int) else size
        return {PIXELS: torch.zeros(EXAMPLE_ROWS, network.config.num_channels, height, width)}
    ids = torch.ones(EXAMPLE_ROWS, EXAMPLE_TOKENS, dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[0, EXAMPLE_TOKENS // 2 :] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if "token_type_ids" in taken and getattr(network.config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return inputs


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the exporter's reports for developers out of the log."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _conversion_error(network: PreTrainedModel, error: BaseException) -> UserError:
    reason = textwrap.shorten(str(error.__cause__ or error) or type(error).__name__, 200, placeholder=" …")
    message = f"torch cannot convert {type(network).__name__} to ONNX ({reason}): remove the field."
    return UserError.of("release", "release.exports", message)
