"""Stand-ins for the packages of kernels for GPUs that compute the same on a CPU."""

from __future__ import annotations

import sys
from types import MethodType, ModuleType
from typing import Any

import torch
from transformers import PreTrainedModel, modeling_flash_attention_utils
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.training.forks import run_fit
from training.batching.batches import IGNORED


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, **_: Any) -> torch.Tensor:
    """flash_attn_func: (B, T, heads, width), without a mask."""
    given = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(*given, is_causal=causal).transpose(1, 2)


def attention_by_length(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, **named: Any
) -> torch.Tensor:
    """flash_attn_varlen_func: (tokens, heads, width), cut at cu_seqlens."""
    cuts = cu_seqlens_q[1:-1].tolist()
    parts = (torch.tensor_split(tensor, cuts) for tensor in (q, k, v))
    return torch.cat([attention(*(one[None] for one in part), **named)[0] for part in zip(*parts, strict=True)])


def flash_functions() -> tuple[Any, Any]:
    """The result of transformers' lazy_import_flash_attention."""
    define = modeling_flash_attention_utils._lazy_define_process_function
    return (attention, attention_by_length, None, None, None), (define(attention_by_length), dict)


def liger_modules(calls: list[dict[str, Any]]) -> dict[str, ModuleType]:
    """The package liger_kernel with kernels for llama alone; each call's settings are added to `calls`."""
    from transformers.models.llama import modeling_llama

    def apply(model: PreTrainedModel, **settings: Any) -> None:
        calls.append(settings)
        modeling_llama.LlamaRMSNorm = None
        if settings["fused_linear_cross_entropy"]:
            model.forward = MethodType(_fused_forward, model)

    package = ModuleType("liger_kernel")
    kernels = ModuleType("liger_kernel.transformers")
    kernels._apply_liger_kernel_to_instance = apply  # type: ignore[attr-defined]
    types = ModuleType("liger_kernel.transformers.monkey_patch")
    types.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply}  # type: ignore[attr-defined]
    return {module.__name__: module for module in (package, kernels, types)}


def _fused_forward(
    self: PreTrainedModel, labels: Any = None, num_items_in_batch: Any = None, **inputs: Any
) -> CausalLMOutputWithPast:
    """Liger's lce_forward: no logits in training."""
    logits = self.lm_head(self.model(**inputs)[0])
    if labels is None:
        return CausalLMOutputWithPast(logits=logits)
    targets = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum")
    return CausalLMOutputWithPast(loss=total / num_items_in_batch, logits=None if self.training else logits)


def run_fit_with_kernels(job_dir: str, rank: dict[str, str]) -> None:
    """forks.run_fit where both packages seem to be installed."""
    matrix: Any = modeling_flash_attention_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX
    matrix[2] |= {"general_availability_check": lambda: True, "supported_devices": ((lambda: True, "cpu"),)}
    functions = flash_functions()
    for module in (modeling_flash_attention_utils, sys.modules["transformers.modeling_utils"]):
        module.lazy_import_flash_attention = lambda *_, **__: functions  # type: ignore[attr-defined]
    sys.modules.update(liger_modules([]))
    run_fit(job_dir, rank)
