"""The formats in which a trained model is exported for other runtimes, and the models that have such exports.

Another format is a line in EXPORTS and its function in training/models/onnx_files.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence

EXPORTS: Mapping[str, str] = {
    "onnx": "onnx/model.onnx",
    "onnx-int8": "onnx/model_quantized.onnx",
}
"""The file of each format, where Transformers.js and Optimum look for it beside a model's config.json. onnx: 32-bit
floats. onnx-int8: weights in 8 bits, multiplied in whole numbers."""

OUTPUTS: Mapping[str, Sequence[str]] = {
    "AutoModelForSequenceClassification": ("logits",),
    "AutoModelForTokenClassification": ("logits",),
    "AutoModelForMaskedLM": ("logits",),
    "AutoModelForQuestionAnswering": ("start_logits", "end_logits"),
    "AutoModel": ("last_hidden_state",),
}
"""The outputs of an exported model by its class of transformers. Models of other classes generate text in a loop over
their own output, which a single graph does not hold. Embeddings are pooled outside of the graph, as the folder's files
of sentence-transformers say, whose ONNX backend reads this output."""

PACKAGES: Sequence[str] = ("onnx", "onnxscript", "onnxruntime")
INSTALL = "pip install 'finetune-flows[export]'"


def missing_packages() -> list[str]:
    """The packages of the extra `export` that are not installed here."""
    return [package for package in PACKAGES if importlib.util.find_spec(package) is None]
