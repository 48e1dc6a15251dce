"""The kinds of peft's adapters, and the settings of those besides LoRA, which has fields of its own.

Each of them is merged into the weights of linear layers so that the merged model gives the same answers. A new kind is
a line here, if peft merges it so: tests/training/models/test_adapters.py tries each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LORA = "LORA"


@dataclass(frozen=True)
class Setting:
    """A field of a configuration of peft, as the rules of a recipe see it."""

    kind: type
    """int, float, bool, or list for a list of texts."""
    least: float = 0
    below: float = float("inf")

    def problem(self, value: Any) -> str | None:
        """What is wrong with a value; None if it fits."""
        if self.kind is list:
            fits = isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)
            return None if fits else f"{value!r} is of the wrong type: it takes a list of names."
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (isinstance(value, self.kind) or (self.kind is float and is_number)) or is_number == (self.kind is bool):
            takes = {int: "a whole number", float: "a number", bool: "true or false"}[self.kind]
            return f"{value!r} is of the wrong type: it takes {takes}."
        if self.kind is not bool and not self.least <= value < self.below:
            limit = "" if self.below == float("inf") else f" and below {self.below:g}"
            return f"{value!r} is out of range: it must be at least {self.least:g}{limit}."
        return None


_DROPOUT, _RANK = Setting(float, 0, 1), Setting(int, 1)
ADAPTERS: dict[str, Mapping[str, Setting]] = {
    LORA: {},
    "IA3": {"feedforward_modules": Setting(list)},
    "VERA": {
        "r": _RANK,
        "vera_dropout": _DROPOUT,
        "d_initial": Setting(float, -float("inf")),
        "projection_prng_key": Setting(int),
    },
    "OFT": {
        "r": Setting(int),
        "oft_block_size": Setting(int),
        "module_dropout": _DROPOUT,
        "block_share": Setting(bool),
        "use_cayley_neumann": Setting(bool),
        "num_cayley_neumann_terms": Setting(int, 2),
    },
    "LOKR": {
        "r": _RANK,
        "alpha": _RANK,
        "rank_dropout": _DROPOUT,
        "module_dropout": _DROPOUT,
        "rank_dropout_scale": Setting(bool),
        "decompose_both": Setting(bool),
        "decompose_factor": Setting(int, -1),
    },
    "LOHA": {"r": _RANK, "alpha": _RANK, "rank_dropout": _DROPOUT, "module_dropout": _DROPOUT},
}
"""The values of training.lora.peft_type, each with the fields of its configuration in training.lora.settings."""
