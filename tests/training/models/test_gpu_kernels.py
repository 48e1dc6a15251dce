"""Kernels for GPUs, with stand-ins that compute the same on a CPU: packed documents stay apart, and models that are
loaded later are untouched. `make gpu` runs the true ones."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, modeling_flash_attention_utils

from tests.training import kernels
from training.batching.batches import IGNORED
from training.batching.causal_batches import disable_cache, require_causal, require_separate_documents
from training.models import gpu_kernels
from training.problems import UserError
from training.task_types.losses.token_likelihood import TokenLoss

SIZE = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
BATCH = {
    "input_ids": torch.arange(24).reshape(3, 8),
    "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 2, 3, 0, 1, 2]]),
}
"""Three packed rows, the second of one document."""


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of the package flash_attn that a CPU can run."""
    loaded = kernels.flash_functions()
    monkeypatch.setattr(modeling_flash_attention_utils, "lazy_import_flash_attention", lambda *_: loaded)


def model_of(model_type: str, implementation: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZE, num_key_value_heads=2, max_position_embeddings=64)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.config._attn_implementation = implementation
    disable_cache(model)
    return model


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "gpt_neox"])
def test_documents_of_packed_rows_stay_apart_with_flash_attention(model_type: str, flash: None) -> None:
    expected = model_of(model_type)(**BATCH).logits
    crossing = model_of(model_type, "flash_attention_2")
    assert not torch.allclose(crossing(**BATCH).logits, expected, atol=1e-4)
    with pytest.raises(UserError, match=r"attention of .* crosses from one to the next"):
        require_separate_documents(crossing)
    model = model_of(model_type, "flash_attention_2")
    gpu_kernels.flatten_packed_rows(model)
    logits = model(**BATCH).logits
    assert logits.shape == (3, 8, 50) and torch.allclose(logits, expected, atol=1e-5)
    require_separate_documents(model)
    require_causal(model)
    unpacked = {"input_ids": BATCH["input_ids"]}
    assert torch.allclose(model(**unpacked).logits, model_of(model_type)(**unpacked).logits, atol=1e-5)


def test_a_model_or_machine_without_flash_attention_is_refused_by_the_field() -> None:
    with pytest.raises(UserError) as refused:
        gpu_kernels.use_attention(model_of("llama"), "flash_attention_2")
    (problem,) = refused.value.problems
    assert problem.where == "model.attn_implementation" and "'flash_attention_2' cannot be used" in problem.message
    t5 = AutoConfig.for_model("t5", vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    model = transformers.AutoModelForSeq2SeqLM.from_config(t5)
    ((problem,), none) = (gpu_kernels.find_unsupported(model, name, False) for name in ("flash_attention_2", None))
    assert problem.message == "'flash_attention_2' does not exist for T5ForConditionalGeneration: leave it out."
    assert none == []
    with pytest.raises(UserError, match=r"'flash_attention_3' has no dropout, and the model's attn_pdrop is 0\.1: "):
        gpu_kernels.use_attention(model_of("gpt2"), "flash_attention_3")


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in of the package; gives the settings of each call."""
    calls: list[dict[str, Any]] = []
    for name, module in kernels.liger_modules(calls).items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_liger_leaves_models_that_are_loaded_later_untouched(liger: list[dict[str, Any]]) -> None:
    gpu_kernels.use_liger(model_of("llama"), fuses_loss=False)
    assert liger == [{"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}]
    model_of("llama")(**BATCH)


def test_the_fused_loss_is_the_mean_over_the_targets_and_0_without_any(liger: list[dict[str, Any]]) -> None:
    labels = BATCH["input_ids"].masked_fill(BATCH["position_ids"] == 0, IGNORED)
    expected = TokenLoss(causal=True, smoothing=0.0)(model_of("llama")(**BATCH).logits, labels)
    model = model_of("llama")
    gpu_kernels.use_liger(model, fuses_loss=True)
    assert torch.allclose(model(**BATCH, labels=labels)["loss"], expected)
    assert model(**BATCH, labels=torch.full_like(labels, IGNORED))["loss"] == 0
    gpu_kernels.flatten_packed_rows(model)
    assert torch.allclose(model(**BATCH, labels=labels)["loss"], expected)


def test_a_model_that_liger_does_not_know_is_refused_by_the_field(liger: list[dict[str, Any]]) -> None:
    with pytest.raises(UserError) as refused:
        gpu_kernels.use_liger(model_of("gpt2"), fuses_loss=True)
    assert str(refused.value) == (
        "training.use_liger_kernel: Liger has no kernels for 'gpt2': set it to false, or choose a model of a type "
        "such as llama."
    )
