"""Dropout with cheap masks is dropout. Kernels for GPUs, with stand-ins that compute the same on a CPU, keep packed
documents apart, and models that are loaded later are untouched. `make gpu` runs the true ones."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, modeling_flash_attention_utils

from tests.raised import raised_problems
from tests.training import kernels
from training.batching.batches import IGNORED
from training.batching.causal_batches import disable_cache, require_causal, require_separate_documents
from training.models import layers
from training.models.layers import LaneDropout, disable_dropout, replace_dropout
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
    layers.flatten_packed_rows(model)
    logits = model(**BATCH).logits
    assert logits.shape == (3, 8, 50) and torch.allclose(logits, expected, atol=1e-5)
    require_separate_documents(model)
    require_causal(model)
    unpacked = {"input_ids": BATCH["input_ids"]}
    assert torch.allclose(model(**unpacked).logits, model_of(model_type)(**unpacked).logits, atol=1e-5)


def test_a_model_or_machine_without_flash_attention_is_refused_by_the_field() -> None:
    (problem,) = raised_problems(layers.use_attention, model_of("llama"), "flash_attention_2")
    assert problem.where == "model.attn_implementation" and "'flash_attention_2' cannot be used" in problem.message
    t5 = AutoConfig.for_model("t5", vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    model = transformers.AutoModelForSeq2SeqLM.from_config(t5)
    ((problem,), none) = (layers.find_unsupported(model, name, False) for name in ("flash_attention_2", None))
    assert problem.message == "'flash_attention_2' does not exist for T5ForConditionalGeneration: leave it out."
    assert none == []
    with pytest.raises(UserError, match=r"'flash_attention_3' has no dropout, and the model's attn_pdrop is 0\.1: "):
        layers.use_attention(model_of("gpt2"), "flash_attention_3")


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A stand-in of the package; gives the settings of each call."""
    calls: list[dict[str, Any]] = []
    for name, module in kernels.liger_modules(calls).items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_liger_leaves_models_that_are_loaded_later_untouched(liger: list[dict[str, Any]]) -> None:
    layers.use_liger(model_of("llama"), fuses_loss=False)
    assert liger == [{"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}]
    model_of("llama")(**BATCH)


def test_the_fused_loss_is_the_mean_over_the_targets_and_0_without_any(liger: list[dict[str, Any]]) -> None:
    labels = BATCH["input_ids"].masked_fill(BATCH["position_ids"] == 0, IGNORED)
    expected = TokenLoss(causal=True, smoothing=0.0)(model_of("llama")(**BATCH).logits, labels)
    model = model_of("llama")
    layers.use_liger(model, fuses_loss=True)
    assert torch.allclose(model(**BATCH, labels=labels)["loss"], expected)
    assert model(**BATCH, labels=torch.full_like(labels, IGNORED))["loss"] == 0
    layers.flatten_packed_rows(model)
    assert torch.allclose(model(**BATCH, labels=labels)["loss"], expected)


def test_a_model_that_liger_does_not_know_is_refused_by_the_field(liger: list[dict[str, Any]]) -> None:
    with pytest.raises(UserError) as refused:
        layers.use_liger(model_of("gpt2"), fuses_loss=True)
    assert str(refused.value) == (
        "training.use_liger_kernel: Liger has no kernels for 'gpt2': set it to false, or choose a model of a type "
        "such as llama."
    )


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_elements_are_dropped_with_the_probability_and_the_rest_scaled(p: float) -> None:
    torch.manual_seed(0)
    ones = torch.ones(1000, 1001, requires_grad=True)
    out = LaneDropout(p)(ones)
    assert (out == 0).float().mean().item() == pytest.approx(p, abs=0.002)
    assert out[out > 0].unique().tolist() == [pytest.approx(1 / (1 - p), rel=1e-4)]
    assert out.mean().item() == pytest.approx(1.0, abs=0.004)
    out.sum().backward()
    assert torch.equal(ones.grad, out)  # the gradient goes where the value went


def test_neighbours_are_dropped_independently() -> None:
    torch.manual_seed(0)
    dropped = (LaneDropout(0.5)(torch.ones(400_000)) == 0).float().view(-1, 4)
    correlation = torch.corrcoef(dropped.T) - torch.eye(4)
    assert correlation.abs().max().item() < 0.01


def test_same_seed_draws_the_same_mask() -> None:
    masks = []
    for _ in range(2):
        torch.manual_seed(3)
        masks.append(LaneDropout(0.3)(torch.ones(7, 13)))
    assert torch.equal(*masks)


def test_nothing_is_dropped_when_predicting_or_with_probability_zero() -> None:
    row = torch.randn(50)
    assert torch.equal(LaneDropout(0.5).eval()(row), row)
    assert torch.equal(LaneDropout(0.0)(row), row)
    assert torch.equal(LaneDropout(1.0)(row), torch.zeros(50))


def test_cheapen_changes_every_plain_dropout_and_no_weight() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.2), nn.Sequential(nn.Dropout(0.3)), nn.Dropout1d(0.4))
    names = list(model.state_dict())
    replace_dropout(model)
    assert [type(module) for module in model.modules() if hasattr(module, "p")] == [
        LaneDropout,
        LaneDropout,
        nn.Dropout1d,
    ]
    assert [module.p for module in model.modules() if hasattr(module, "p")] == [0.2, 0.3, 0.4]
    assert list(model.state_dict()) == names


def test_disabled_dropout_makes_a_training_model_deterministic_and_keeps_its_config() -> None:
    for model_type in ("gpt2", "llama", "opt"):
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
        config = AutoConfig.for_model(model_type, **sizes, attention_dropout=0.5)
        model, ids = AutoModelForCausalLM.from_config(config).train(), torch.tensor([[1, 2, 3, 4]])
        disable_dropout(model)
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
        assert model.config.attention_dropout == 0.5
