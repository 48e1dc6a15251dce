"""Kernels of other packages that run on NVIDIA GPUs alone: the package of each and the GPUs that it needs.

Another attention is a line in ATTENTION; transformers knows it by the same name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Kernels:
    """The needs of one package of kernels."""

    module: str
    """The module that must be importable."""
    package: str
    """The package to install for it."""
    capability: tuple[int, int]
    """The lowest compute capability of a GPU."""
    drops: bool = True
    """Whether its attention has dropout."""

    def find_lacks(self, capabilities: list[tuple[int, int]]) -> Iterator[str]:
        """What a machine lacks whose GPUs have these compute capabilities, in words that follow "but"."""
        if not capabilities:
            yield "there is no NVIDIA GPU here"
        elif min(capabilities) < self.capability:
            needed, found = (f"{major}.{minor}" for major, minor in (self.capability, min(capabilities)))
            yield f"the GPU has compute capability {found} and not {needed}"
        if importlib.util.find_spec(self.module) is None:
            yield f"the package {self.package} is not installed (pip install {self.package})"


ATTENTION: dict[str, Kernels] = {
    "flash_attention_2": Kernels("flash_attn", "flash-attn", (8, 0)),
    "flash_attention_3": Kernels("flash_attn_interface", "flash-attn-3", (9, 0), drops=False),
}
"""The values of model.attn_implementation."""

LIGER = Kernels("liger_kernel", "liger-kernel", (7, 0))
"""For training.use_liger_kernel."""


def kernels_of(attn_implementation: str | None, use_liger_kernel: bool) -> dict[str, Kernels]:
    """The kernels that a recipe names, by its field."""
    found = {} if attn_implementation is None else {"model.attn_implementation": ATTENTION[attn_implementation]}
    return found | ({"training.use_liger_kernel": LIGER} if use_liger_kernel else {})
