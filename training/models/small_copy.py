"""A trial of a model before it is trained: one pass in the number format of the run, and its exports.

A small copy with random weights is tried: of each kind of repeated layer the first two, so that a large model costs
seconds too.
"""

from __future__ import annotations

import copy
import importlib
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from training.models import loading
from training.models.onnx_files import example
from training.problems import Problem, UserError
from training.recipe.tables.exports import by_module

LAYERS = 2
MAX_PARAMETERS = 300_000_000
"""The largest copy that is tried. It takes three times 4 bytes of memory per parameter."""
_LAYER_COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
    *("encoder_layers", "decoder_layers", "num_decoder_layers"),
)


def find_failures(
    network: PreTrainedModel, auto_class: str, mixed_precision: str, exports: Sequence[str]
) -> Iterator[Problem]:
    """The problems of a number format that the model cannot compute in on this machine's CPU, and of exports that it
    cannot have. `network` is on the meta device; models that are too large for a trial have no problems."""
    small = _small_copy(network.config, auto_class)
    if small is None:
        return
    # A GPU has kernels of its own, and the training that runs there tries itself before its first step.
    dtype = loading.DTYPES[mixed_precision]
    is_tried = dtype != torch.float32 and not torch.cuda.is_available()
    if is_tried and _failure(small, torch.float32) is None and (error := _failure(small, dtype)):
        reason = textwrap.shorten(str(error), 200, placeholder=" …")
        message = f"{mixed_precision!r} cannot be computed by {type(small).__name__} here ({reason}): set it to no."
        yield Problem(kind="compute", where="compute.mixed_precision", message=message)
    for module in by_module(exports):
        try:
            importlib.import_module(f"training.models.{module}").try_export(small, auto_class)
        except UserError as error:
            yield from error.problems


def _failure(model: PreTrainedModel, dtype: torch.dtype) -> Exception | None:
    """The error of one pass forward and backward; None if it succeeds."""
    inputs: dict[str, Any] = dict(example(model))
    if model.config.is_encoder_decoder and model.can_generate():
        inputs["decoder_input_ids"] = inputs["input_ids"]
    try:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            outputs = model.train()(**inputs)
        outputs[0].float().sum().backward()
    except Exception as error:  # kernels fail in many ways
        return error
    finally:
        model.zero_grad(set_to_none=True)
    return None


def _small_copy(config: PreTrainedConfig, auto_class: str) -> PreTrainedModel | None:
    """The model with fewer layers; None if it is too large, or cannot be made."""
    small = copy.deepcopy(config)
    layers = getattr(config, "num_hidden_layers", None)
    build = getattr(transformers, auto_class).from_config
    try:
        for name in _LAYER_COUNTS:
            if isinstance(count := getattr(small, name, None), int) and name in {*vars(small), *small.attribute_map}:
                setattr(small, name, min(LAYERS, count))
        for name, value in vars(small).items():
            if isinstance(value, list) and layers and len(value) == layers:  # a value for each layer
                setattr(small, name, value[:LAYERS])
        if getattr(small, "pad_token_id", 0) is None:
            small.pad_token_id = 0  # training sets it to that of the tokenizer
        with torch.device("meta"):
            if build(small, trust_remote_code=False).num_parameters() > MAX_PARAMETERS:
                return None
        with torch.random.fork_rng([]):
            copied: PreTrainedModel = build(small, trust_remote_code=False)
    except Exception:  # the model itself is checked elsewhere; of this copy nothing is known
        return None
    return copied
