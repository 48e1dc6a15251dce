"""Dropout with cheap masks is dropout."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from training.models.dropout import LaneDropout, disable_dropout, replace_dropout


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
