"""Models whose weights are whole numbers of 8 or 4 bits in safetensors, in the form of compressed-tensors: transformers
and vLLM load them by their config.json.

The layers compute with 16-bit floats; embeddings and the output layer keep such weights.

Source: https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from training.models.loading import load_for_export
from training.models.repository_files import part_of
from training.problems import UserError
from training.recipe.tables.exports import EXPORTS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SCALES: Mapping[str, tuple[int, int | None]] = {"int8": (8, None), "int4": (4, 32)}
"""The bits of a weight by format, and how many neighbours in a row share a scale; None: the whole row."""


def export(auto_class: str, folder: Path, names: Sequence[str], out: Path) -> dict[str, Path]:
    """Writes the trained model of `folder` to `out` in each of the formats, as folders with its tokenizer. Returns
    their files. Raises UserError if the model has no such layers."""
    files = {name: out / EXPORTS[name].file for name in names}
    for name, file in files.items():
        network = load_for_export(auto_class, folder).to(torch.bfloat16)
        try_export(network, auto_class)
        _write(network, file.parent, *SCALES[name])
        for other in sorted(folder.iterdir()):
            if part_of(other.name) == "tokenizer" and not (file.parent / other.name).exists():
                shutil.copyfile(other, file.parent / other.name)
    return files


def open_export(name: str, exports: Path, config: PreTrainedConfig) -> Any:
    """An export of a folder of exports, as transformers loads it."""
    auto_class = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
    network = getattr(transformers, auto_class).from_pretrained(
        (exports / EXPORTS[name].file).parent, dtype="auto", local_files_only=True, trust_remote_code=False
    )
    network.runtime = "transformers"
    return network.eval()


def try_export(network: PreTrainedModel, auto_class: str) -> None:
    """Raises UserError if the model has no layers whose weights these formats can hold."""
    if not [*_layers(network, None)]:
        message = f"int8 and int4 are weights of torch.nn.Linear, and the layers of {type(network).__name__} are none: "
        raise UserError.of("release", "release.exports", f"{message}leave them out.")


def _layers(network: PreTrainedModel, group: int | None) -> Iterator[tuple[str, torch.nn.Linear]]:
    """The layers with weights of fewer bits, by name: not the output layer, whose rows are those of the vocabulary, and
    none whose rows are no multiple of a group."""
    head = network.get_output_embeddings()
    for name, layer in network.named_modules():
        if isinstance(layer, torch.nn.Linear) and layer is not head and not layer.in_features % (group or 1):
            yield name, layer


def _write(network: PreTrainedModel, out: Path, bits: int, group: int | None) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    weights = QuantizationArgs(
        num_bits=bits, type="int", symmetric=True, strategy="group" if group else "channel", group_size=group
    )
    chosen = dict(_layers(network, group))
    kept = [n for n, one in network.named_modules() if isinstance(one, torch.nn.Linear) and n not in chosen]
    apply_quantization_config(
        network,
        QuantizationConfig(
            config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=weights)},
            ignore=kept,
            quantization_status=QuantizationStatus.FROZEN,
        ),
    )
    for layer in chosen.values():
        parts = layer.weight.data.unflatten(1, (-1, group or layer.in_features))  # (rows, groups, columns of a group)
        scale, _ = calculate_qparams(parts.amin(-1), parts.amax(-1), weights)
        layer.get_parameter("weight_scale").data.copy_(scale.reshape(len(scale), -1))
    compressor = ModelCompressor.from_pretrained_model(network)
    compressor.compress_model(network)
    network.save_pretrained(out)
    compressor.update_config(str(out))
