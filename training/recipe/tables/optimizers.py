"""The optimizers of transformers: those that a recipe may name, their packages, and the settings that they read.

transformers passes a setting to some optimizers and silently drops it for others; in a recipe, that is an error.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")


@dataclass(frozen=True)
class Optimizer:
    """The needs and settings of one optimizer."""

    module: str | None = None
    """The module that must be importable; None for torch and transformers themselves."""
    package: str | None = None
    """The package to install for it."""
    settings: tuple[str, ...] = ()
    """Fields of training.extra that it reads, besides optim_args."""
    args: tuple[str, ...] = ()
    """Names that optim_args may set."""
    schedules_itself: bool = False
    """Whether it needs no schedule of the learning rate."""
    state_bytes: float = 8
    """Bytes of state for each trained number, without momentum and the like that optim_args may add."""


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
"""The values of training.optim, by their names in transformers."""

_WITHIN_BACKWARD = "it steps inside the backward pass, so accumulation, clipping and checkpoints do not work"
_AS_OBJECTS = (
    "its state is stored in checkpoints as objects that torch does not load again, so a run that was killed could not "
    "resume"
)

REFUSED: dict[str, str] = {
    **dict.fromkeys(("galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw"), _AS_OBJECTS),
    **dict.fromkeys(
        ("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise"), _WITHIN_BACKWARD
    ),
    **dict.fromkeys(("apollo_adamw_layerwise", "adalomo", "lomo"), _WITHIN_BACKWARD),
    "grokadamw": "its state is not complete in a checkpoint, so a resumed run would end with other weights",
    "adamw_anyprecision": "torchdistx is no longer developed; use adamw_torch_fused",
    "adamw_torch_xla": "TPUs are not supported; train on an NVIDIA GPU or a CPU",
    "adamw_torch_npu_fused": "Ascend NPUs are not supported; train on an NVIDIA GPU or a CPU",
}
"""The other optimizers, and why they are refused."""


def missing_package(name: str) -> str | None:
    """The package to install before the optimizer can be used; None if nothing is missing."""
    optimizer = OPTIMIZERS[name]
    missing = optimizer.module is not None and importlib.util.find_spec(optimizer.module) is None
    return optimizer.package if missing else None


def optim_args(text: str) -> dict[str, str] | None:
    """`momentum=0.9,nesterov=true` by name; None if the text is not in this form."""
    pairs = [pair.split("=") for pair in text.replace(" ", "").split(",")]
    return {name: value for name, value in pairs} if all(len(pair) == 2 and all(pair) for pair in pairs) else None
