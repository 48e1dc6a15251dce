"""The formats in which a trained model is exported for other runtimes, and the models that have such exports.

Another format is a line in EXPORTS and a module with the functions of `onnx_files.py`:

    export(auto_class, folder, names, out)    writes the model of `folder` to `out` in some of the module's formats
    open_export(name, exports, config)        an export of the folder `exports`, called like a model of transformers of
                                              this configuration; its `judge` names the runtime
    try_export(network, auto_class)           raises UserError if such a model cannot be exported
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ExportFormat:
    """A format of exports."""

    file: str
    """The file with the weights. Those beside it whose names begin with its name belong to it."""
    module: str
    """In training.models: it writes the format and opens its files."""
    classes: Sequence[str]
    """The classes of transformers whose models have this format."""
    packages: Mapping[str, str]
    """The packages that it needs: the distribution by the name that is imported."""
    extra: str
    """The extra of this project that installs them."""
    tag: str
    """Of the Hub's repositories that have such files."""
    description: str
    for_known_tokenizers: bool = False
    """Whether its runtime has tokenizers of its own: training.models.gguf_vocabulary."""
    runtimes: Mapping[str, str] = field(default_factory=dict)
    """Packages that need not be installed, in the same form: the runtime that judges the exports."""
    is_folder: bool = False
    """Whether the folder of the file is a model of its own, with config.json and tokenizer."""

    def files_in(self, exports: Path) -> list[Path]:
        """The files of this format in a folder of exports."""
        file = exports / self.file
        return sorted(file.parent.glob("*" if self.is_folder else f"{file.name}*"))

    def size_in(self, exports: Path) -> int:
        """The bytes of these files."""
        return sum(file.stat().st_size for file in self.files_in(exports))


OUTPUTS: Mapping[str, Sequence[str]] = {
    "AutoModelForSequenceClassification": ("logits",),
    "AutoModelForTokenClassification": ("logits",),
    "AutoModelForMaskedLM": ("logits",),
    "AutoModelForQuestionAnswering": ("start_logits", "end_logits"),
    "AutoModelForImageClassification": ("logits",),
    "AutoModel": ("last_hidden_state",),
}
"""The outputs of an ONNX model by its class of transformers. Models of other classes generate text in a loop over their
own output, which a single graph does not hold. Embeddings are pooled outside of the graph, as the folder's files of
sentence-transformers say, whose ONNX backend reads this output."""

_ONNX_PACKAGES = {"onnx": "onnx", "onnx_ir": "onnx-ir", "onnxruntime": "onnxruntime", "onnxscript": "onnxscript"}
_ONNX: Mapping[str, Any] = {
    "module": "onnx_files",
    "classes": [*OUTPUTS],
    "packages": _ONNX_PACKAGES,
    "extra": "export",
    "tag": "onnx",
}

_LLAMA_CPP = {"llama_cpp": "llama_cpp_python"}
_GGUF: Mapping[str, Any] = {
    "module": "gguf_files",
    "classes": ["AutoModelForCausalLM"],
    "packages": {"gguf": "gguf"},
    "extra": "gguf",
    "tag": "gguf",
    "for_known_tokenizers": True,
    "runtimes": _LLAMA_CPP,
}
_OF_RUNTIME = {**_GGUF, "packages": {**_GGUF["packages"], **_LLAMA_CPP}, "extra": "llama-cpp"}
_WHOLE_NUMBERS: Mapping[str, Any] = {
    "module": "whole_number_weights",
    "classes": ["AutoModelForCausalLM", "AutoModelForSeq2SeqLM"],
    "packages": {"compressed_tensors": "compressed-tensors"},
    "extra": "compressed",
    "tag": "compressed-tensors",
    "is_folder": True,
}

EXPORTS: Mapping[str, ExportFormat] = {
    # Transformers.js and Optimum look for these files beside a model's config.json.
    "onnx": ExportFormat("onnx/model.onnx", **_ONNX, description="32-bit floats"),
    "onnx-int8": ExportFormat("onnx/model_quantized.onnx", **_ONNX, description="weights in 8 bits, for CPUs"),
    "gguf-f16": ExportFormat("gguf/model-F16.gguf", **_GGUF, description="for llama.cpp, 16-bit floats"),
    "gguf-q8_0": ExportFormat("gguf/model-Q8_0.gguf", **_GGUF, description="for llama.cpp, weights in 8 bits"),
    "gguf-q4_0": ExportFormat("gguf/model-Q4_0.gguf", **_GGUF, description="for llama.cpp, weights in 4 bits"),
    "gguf-q4_k_m": ExportFormat(
        "gguf/model-Q4_K_M.gguf", **_OF_RUNTIME, description="for llama.cpp, weights in 4 to 6 bits"
    ),
    "int8": ExportFormat(
        "int8/model.safetensors", **_WHOLE_NUMBERS, description="for transformers and vLLM, weights in 8 bits"
    ),
    "int4": ExportFormat(
        "int4/model.safetensors", **_WHOLE_NUMBERS, description="for transformers and vLLM, weights in 4 bits"
    ),
}


def by_module(names: Iterable[str]) -> dict[str, list[str]]:
    """Formats by the module that writes them."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(EXPORTS[name].module, []).append(name)
    return found


def missing_packages(names: Iterable[str]) -> dict[str, list[str]]:
    """The packages of formats that are not installed here, by the command that installs them."""
    missing: dict[str, list[str]] = {}
    for name in names:
        for package, distribution in EXPORTS[name].packages.items():
            if importlib.util.find_spec(package) is None:
                of_extra = missing.setdefault(f"pip install 'finetune-flows[{EXPORTS[name].extra}]'", [])
                of_extra += [] if distribution in of_extra else [distribution]
    return missing


def libraries_of(names: Iterable[str]) -> list[str]:
    """The distributions that make exports of these formats, and those that are installed here and run them."""
    found = {distribution for name in names for distribution in EXPORTS[name].packages.values()}
    found |= {
        distribution
        for name in names
        for package, distribution in EXPORTS[name].runtimes.items()
        if importlib.util.find_spec(package)
    }
    return sorted(found)
