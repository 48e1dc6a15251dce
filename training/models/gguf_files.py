"""GGUF files of trained language models, for llama.cpp and the programs that are built on it: conversion, weights of
fewer bits, and predictions by llama.cpp or by the file's weights in torch.

Another architecture is an entry of ARCHITECTURES, if `tests/training/models/test_gguf_files.py` finds the same next
tokens in llama.cpp.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from training.models import gguf_vocabulary
from training.models.loading import load_for_export, load_tokenizer
from training.problems import Problem, UserError
from training.recipe.tables.exports import EXPORTS

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter
    from transformers import PreTrainedConfig, PreTrainedModel

ARCHITECTURES: Mapping[str, str] = {"llama": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""The architectures of GGUF by the model type of transformers."""
RUNTIME = "llama_cpp"
TYPES: Mapping[str, tuple[str, str]] = {
    "gguf-f16": ("F16", "F16"),
    "gguf-q8_0": ("Q8_0", "Q8_0"),
    "gguf-q4_0": ("Q4_0", "Q8_0"),
}
"""The types of matrices by format: of all, and of the embedding and the output layer. llama.cpp makes the others."""
MADE_BY_RUNTIME: Mapping[str, str] = {"gguf-q4_k_m": "LLAMA_FTYPE_MOSTLY_Q4_K_M"}
"""llama.cpp's names of the formats that it makes from 16-bit floats."""


def export(auto_class: str, folder: Path, names: Sequence[str], out: Path) -> dict[str, Path]:
    """Writes the trained model of `folder` to `out` in each of the formats. Returns their files.

    Raises UserError if the model or its tokenizer cannot be converted.
    """
    network, files = load_for_export(auto_class, folder), {name: out / EXPORTS[name].file for name in names}
    if problems := [*_problems(network.config), *gguf_vocabulary.find_problems(folder)]:
        raise UserError(problems)
    for file in files.values():
        file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as aside:
        halves = files.get("gguf-f16", Path(aside, "f16.gguf"))
        of_runtime = [name for name in names if name in MADE_BY_RUNTIME]
        if "gguf-f16" in names or of_runtime:
            convert(network, folder, halves, "gguf-f16")
        for name in names:
            if name in of_runtime:
                _quantize(halves, files[name], MADE_BY_RUNTIME[name])
            elif name != "gguf-f16":
                convert(network, folder, files[name], name)
    return files


def open_export(name: str, exports: Path, config: PreTrainedConfig) -> Any:
    """An export of a folder of exports: run by llama.cpp where it is installed, else its weights as floats in torch."""
    file = exports / EXPORTS[name].file
    if importlib.util.find_spec(RUNTIME):
        from training.models.llama_cpp_model import LlamaCppModel

        return LlamaCppModel(file, config)
    network = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, config=config, dtype=torch.float32, local_files_only=True
    ).eval()
    network.runtime, network.is_timed = "its weights in torch", False
    return network


def try_export(network: PreTrainedModel, auto_class: str) -> None:
    """Raises UserError if a model of this configuration has no GGUF file."""
    if problems := [*_problems(network.config)]:
        raise UserError(problems)


def _problems(config: PreTrainedConfig) -> Iterator[Problem]:
    for reason in _misfits(config):
        message = f"GGUF is written for models of the types {', '.join(ARCHITECTURES)}, and {reason}: leave it out."
        yield Problem(kind="release", where="release.exports", message=message)


def _misfits(config: PreTrainedConfig) -> Iterator[str]:
    """Why llama.cpp would compute something else than the model, or nothing."""
    if config.model_type not in ARCHITECTURES:
        yield f"this is one of {config.model_type}"
        return
    is_llama, rope = config.model_type == "llama", config.rope_parameters["rope_type"]
    if config.hidden_act != "silu":
        yield f"its hidden_act is {config.hidden_act}, not silu"
    if rope not in (("default", "llama3") if is_llama else ("default",)):
        yield f"its positions are scaled by {rope}"
    if getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        yield "its layers have biases (attention_bias, mlp_bias)"
    if config.model_type == "qwen2" and _head_dim(config) * config.num_attention_heads != config.hidden_size:
        yield "the dimensions of its heads are not those of its hidden states"
    if getattr(config, "use_sliding_window", False):
        yield "it has a sliding window"


def convert(network: PreTrainedModel, folder: Path, file: Path, name: str) -> None:
    """Writes the model as `file`, with the tokenizer of `folder`."""
    import gguf

    config = network.config
    architecture = getattr(gguf.MODEL_ARCH, ARCHITECTURES[config.model_type])
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    most, edge = (getattr(gguf.GGMLQuantizationType, kind) for kind in TYPES[name])
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    _add_configuration(writer, config)
    writer.add_file_type(getattr(gguf.LlamaFileType, f"MOSTLY_{most.name}"))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    ends = network.generation_config.eos_token_id if network.generation_config else None
    ends = [ends] if isinstance(ends, int) else ends or []
    gguf_vocabulary.write(writer, load_tokenizer(folder), config.vocab_size, ends)
    for of_torch, tensor in network.state_dict().items():
        if of_torch == "lm_head.weight" and config.tie_word_embeddings:
            continue
        of_gguf = names.get_name(of_torch, try_suffixes=(".weight", ".bias"))
        assert of_gguf is not None, of_torch
        values = tensor.float().numpy()
        if config.model_type == "llama" and of_torch.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in of_torch else config.num_key_value_heads
            values = _interleave(values, heads)
        kind = edge if of_gguf in ("token_embd.weight", "output.weight") else most
        _add_tensor(writer, of_gguf, values, kind)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _rope_factors(network))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _head_dim(config: PreTrainedConfig) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _add_configuration(writer: GGUFWriter, config: PreTrainedConfig) -> None:
    heads, head_dim = config.num_attention_heads, _head_dim(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _interleave(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """(H·D, E) rows of a query or key projection in the order of llama.cpp, which rotates neighbours; transformers
    rotates row i of a head with row i + D/2."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _rope_factors(network: PreTrainedModel) -> npt.NDArray[np.float32]:
    """(D/2,) by how much the model's frequencies of positions are lower than those of its rope_theta."""
    scaled = network.get_submodule("model.rotary_emb").inv_freq.double()
    plain = network.config.rope_parameters["rope_theta"] ** -(torch.arange(len(scaled)).double() / len(scaled))
    factors: npt.NDArray[np.float32] = (plain / scaled).float().numpy()
    return factors


def _add_tensor(writer: GGUFWriter, name: str, values: npt.NDArray[np.float32], kind: GGMLQuantizationType) -> None:
    """Adds a tensor: vectors as 32-bit floats, and matrices whose rows are no multiple of a block as 16-bit ones."""
    import gguf

    if values.ndim == 1:
        kind = gguf.GGMLQuantizationType.F32
    elif values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = gguf.GGMLQuantizationType.F16
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _quantize(file: Path, out: Path, kind: str) -> None:
    """Writes a file with weights of fewer bits, by llama.cpp."""
    from training.models.llama_cpp_model import quantize

    quantize(file, out, kind)
