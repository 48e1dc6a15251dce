"""Faster layers in place of a model's own: dropout on CPUs; on GPUs FlashAttention, also for packed rows, and Liger's
kernels.

torch's dropout draws a uniform number for each element, which takes an eighth of a training step on a CPU. Here 64
random bits serve four elements, at a third of the cost, so the probability is rounded to a multiple of 1/65536; the
scale is that of the rounded probability.

FlashAttention finds the documents of a packed row by position_ids, but only in a batch of one row; in larger batches
attention would silently cross documents (modeling_flash_attention_utils._is_packed_sequence, transformers 5.23). So
the packed rows of a batch reach the model as one row.

B rows of a batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from training.problems import Problem, UserError
from training.recipe.tables.kernels import ATTENTION

_LANE = 2**16  # values of the 16 bits of an element


class LaneDropout(nn.Dropout):
    """nn.Dropout with masks drawn four elements at a time from torch's CPU generator."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        dropped = round(self.p * _LANE)
        if not self.training or not 0 < dropped < _LANE or self.inplace:
            return super().forward(input)
        count = input.numel()
        draws = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
        lanes = draws.view(torch.int16)[:count].view(input.shape)
        mask = torch.empty(input.shape, dtype=input.dtype)
        torch.ge(lanes, dropped - _LANE // 2, out=mask)
        return input * mask.mul_(_LANE / (_LANE - dropped))


def disable_dropout(model: nn.Module) -> None:
    """Sets all dropout probabilities of a model to 0: those of its layers, and those that attention reads from
    attributes such as `attention_dropout`. The model's config, which is exported, stays unchanged."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if name.endswith("dropout") and isinstance(value, float):
                setattr(module, name, 0.0)


def replace_dropout(model: nn.Module) -> None:
    """Replaces every plain nn.Dropout of a model by LaneDropout."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Dropout:
            model.set_submodule(name, LaneDropout(module.p, module.inplace).train(module.training))


_BY_TOKEN = ("input_ids", "position_ids", "labels")
_ATTENTION_DROPOUT = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
"""The settings of models for the dropout of attention."""


def find_unsupported(model: PreTrainedModel, attn_implementation: str | None, use_liger_kernel: bool) -> list[Problem]:
    """The problems of a model for which the requested kernels do not exist. Liger's are known if it is installed."""
    problems = []
    if attn_implementation is not None:
        dropout = next((name for name in _ATTENTION_DROPOUT if getattr(model.config, name, 0)), None)
        message = None
        if not model._supports_flash_attn:
            message = f"{attn_implementation!r} does not exist for {type(model).__name__}: leave it out."
        elif dropout and not ATTENTION[attn_implementation].drops:
            message = f"{attn_implementation!r} has no dropout, and the model's {dropout} is "
            message += f"{getattr(model.config, dropout):g}: choose flash_attention_2, or leave it out."
        if message:
            problems.append(_problem("model.attn_implementation", message))
    if use_liger_kernel and (known := _liger_model_types()) and model.config.model_type not in known:
        message = f"Liger has no kernels for {model.config.model_type!r}: set it to false, or choose a model of a type "
        problems.append(_problem("training.use_liger_kernel", f"{message}such as {', '.join(known[:6])}."))
    return problems


def use_attention(model: PreTrainedModel, implementation: str) -> None:
    """Switches the model's attention, and passes packed rows to it as one row. Raises UserError if the model or the
    installed package does not support it."""
    field = "model.attn_implementation"
    if problems := find_unsupported(model, implementation, False):
        raise UserError(problems)
    try:
        model.set_attn_implementation(implementation)
    except (ValueError, ImportError) as error:
        raise UserError([_problem(field, f"{implementation!r} cannot be used: {error}")]) from error
    if (used := model.config._attn_implementation) != implementation:
        message = f"{implementation!r} does not exist for {type(model).__name__}, which uses {used}: leave it out."
        raise UserError([_problem(field, message)])
    flatten_packed_rows(model)


def flatten_packed_rows(model: PreTrainedModel) -> None:
    """Passes batches with position_ids to the model as one row; the logits have the shape of the batch again."""
    takes_lengths = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD
        for parameter in inspect.signature(model.forward).parameters.values()
    )
    shape: list[torch.Size] = []

    def flatten(_: Any, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        shape.clear()
        if (positions := inputs.get("position_ids")) is None or inputs.get("attention_mask") is not None:
            return args, inputs
        shape.append(positions.shape)
        flat = {name: inputs[name].reshape(1, -1) for name in _BY_TOKEN if inputs.get(name) is not None}
        if takes_lengths:  # else every layer finds them in position_ids, and the GPU waits for each
            starts, longest = prepare_fa_kwargs_from_position_ids(flat["position_ids"])
            flat |= {"cu_seq_lens_q": starts[0], "cu_seq_lens_k": starts[1]}
            flat |= dict.fromkeys(("max_length_q", "max_length_k"), int(longest[0]))
        return args, {**inputs, **flat}

    def restore(_: Any, args: Any, outputs: Any) -> Any:
        if shape and outputs.get("logits") is not None:
            outputs["logits"] = outputs["logits"].reshape(*shape.pop(), -1)  # (1, B * T, V) to (B, T, V)
        return outputs

    model.register_forward_pre_hook(flatten, with_kwargs=True)
    model.register_forward_hook(restore)


@contextmanager
def switched_attention(model: PreTrainedModel, implementation: str, dtype: torch.dtype) -> Iterator[None]:
    """Switches the model's attention, for good. Inside, the model is on this process's GPU and computes in `dtype`, so
    that it can be tested with this attention. Raises UserError as use_attention does."""
    use_attention(model, implementation)
    device = model.device
    # The ranks have not chosen their GPUs yet.
    gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else device
    with torch.autocast(gpu.type, dtype) if dtype != torch.float32 else nullcontext():
        try:
            if device != gpu:
                model.to(gpu)
            yield
        finally:
            if device != gpu:
                model.to(device)


def use_liger(model: PreTrainedModel, *, fuses_loss: bool) -> None:
    """Replaces the model's norms and gated layers by Liger's kernels; with `fuses_loss` also its output layer and loss,
    which then never hold the logits (B, T, V) of a training batch. Raises UserError if Liger does not know the model.

    Liger also replaces names in the model's module. These are restored: models that are loaded later, such as the one
    that adapters are merged into, run on the CPU. So the kernel for rotary positions is not used.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    if problems := find_unsupported(model, None, True):
        raise UserError(problems)
    module = vars(sys.modules[type(model).__module__])
    names = dict(module)
    try:
        _apply_liger_kernel_to_instance(
            model=model, rope=False, cross_entropy=False, fused_linear_cross_entropy=fuses_loss
        )
    except (TypeError, ValueError, AttributeError, AssertionError) as error:
        message = f"Liger cannot replace the layers of {type(model).__name__} ({error}): set it to false."
        raise UserError([_problem("training.use_liger_kernel", message)]) from error
    finally:
        module.update(names)
    if fuses_loss:
        model.register_forward_pre_hook(_add_target_count, with_kwargs=True)


def _add_target_count(_: Any, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Makes the model's loss the sum over the targets divided by their number, or 0 without targets; its own mean would
    be NaN."""
    if (labels := inputs.get("labels")) is not None:
        inputs = {**inputs, "num_items_in_batch": (labels[:, 1:] >= 0).sum().clamp(min=1)}
    return args, inputs


def _liger_model_types() -> list[str]:
    """The model types that Liger has kernels for; empty if it is not installed."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError:
        return []
    return sorted(MODEL_TYPE_TO_APPLY_LIGER_FN)


def _problem(where: str, message: str) -> Problem:
    return Problem(kind=where.partition(".")[0], where=where, message=message)
