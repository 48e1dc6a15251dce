"""The optimizers of transformers: which a recipe may name, what each needs, and which settings it takes notice of.

transformers passes a setting on to some optimizers and drops it for others without a word; a recipe is told.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")


@dataclass(frozen=True)
class Optimizer:
    """What one of them needs and takes."""

    module: str | None = None
    """What must be importable; None for torch and transformers themselves."""
    package: str | None = None
    """What to install for it."""
    settings: tuple[str, ...] = ()
    """Fields of training.extra that it takes notice of, beside optim_args."""
    args: tuple[str, ...] = ()
    """What optim_args may set."""
    schedules_itself: bool = False
    """Whether it does without a schedule of the learning rate."""
    state_bytes: float = 8
    """What it remembers of each number that it trains; momentum and the like, where optim_args asks, not counted."""


def _bitsandbytes(state: float, settings: tuple[str, ...] = _ADAM, args: tuple[str, ...] = ()) -> Optimizer:
    return Optimizer("bitsandbytes", "bitsandbytes", settings, args, state_bytes=state)


def _schedule_free(state: float = 8, settings: tuple[str, ...] = _ADAM) -> Optimizer:
    args = ("weight_lr_power", "r")
    return Optimizer("schedulefree", "schedulefree", settings, args, schedules_itself=True, state_bytes=state)


def _ademamix(state: float) -> Optimizer:
    return _bitsandbytes(state, args=("beta1", "beta2", "beta3", "alpha", "eps", "t_alpha", "t_beta3"))


def _torchao(state: float) -> Optimizer:
    return Optimizer("torchao", "torchao", _ADAM, ("bf16_stochastic_round",), state_bytes=state)


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw_torch_fused": Optimizer(settings=_ADAM),
    "adamw_torch": Optimizer(settings=_ADAM),
    "adafactor": Optimizer(state_bytes=0.1),  # a number a row and a column
    "sgd": Optimizer(args=("momentum", "dampening", "nesterov"), state_bytes=0),
    "adagrad": Optimizer(args=("lr_decay", "eps"), state_bytes=4),
    "rmsprop": Optimizer(args=("momentum", "alpha", "eps", "centered"), state_bytes=4),
    "schedule_free_adamw": _schedule_free(),
    "schedule_free_sgd": _schedule_free(4, settings=()),
    "schedule_free_radam": _schedule_free(),
    "stable_adamw": Optimizer("optimi", "torch-optimi", _ADAM, ("max_lr",)),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), _bitsandbytes(4, _ADAM[:2])),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), _bitsandbytes(1, _ADAM[:2])),
    "paged_adamw_32bit": _bitsandbytes(8),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), _bitsandbytes(2)),
    **dict.fromkeys(("ademamix", "paged_ademamix_32bit"), _ademamix(12)),
    **dict.fromkeys(("ademamix_8bit", "paged_ademamix_8bit"), _ademamix(3)),
    **dict.fromkeys(("rmsprop_bnb", "rmsprop_bnb_32bit"), _bitsandbytes(4, ())),
    "rmsprop_bnb_8bit": _bitsandbytes(1, ()),
    "adamw_torch_4bit": _torchao(1),
    "adamw_torch_8bit": _torchao(2),
}
"""By their names in transformers: those that a recipe may ask for."""

_WITHIN_BACKWARD = "it steps inside the backward pass, of which accumulation, clipping and checkpoints know nothing"
_AS_OBJECTS = (
    "a checkpoint holds what it remembers as objects, which torch does not load again: a run that was killed could "
    "not go on"
)

REFUSED: dict[str, str] = {
    **dict.fromkeys(("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw"), _AS_OBJECTS),
    **dict.fromkeys(
        ("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"), _WITHIN_BACKWARD
    ),
    **dict.fromkeys(("apollo_adamw_layerwise", "adalomo", "lomo"), _WITHIN_BACKWARD),
    "grokadamw": "what it remembers is not all in a checkpoint: a run that was killed would end with other weights",
    "adamw_anyprecision": "torchdistx is no longer developed; use adamw_torch_fused",
    "adamw_torch_xla": "TPUs are not supported; train on an NVIDIA GPU or a CPU",
    "adamw_torch_npu_fused": "Ascend NPUs are not supported; train on an NVIDIA GPU or a CPU",
}
"""The others, and why not."""


def missing_package(name: str) -> str | None:
    """What to install before the optimizer can be used; None where nothing is missing."""
    optimizer = OPTIMIZERS[name]
    missing = optimizer.module is not None and importlib.util.find_spec(optimizer.module) is None
    return optimizer.package if missing else None


def optim_args(text: str) -> dict[str, str] | None:
    """`momentum=0.9,nesterov=true` by its names; None where it is not written so."""
    pairs = [pair.split("=") for pair in text.replace(" ", "").split(",")]
    return {name: value for name, value in pairs} if all(len(pair) == 2 and all(pair) for pair in pairs) else None
