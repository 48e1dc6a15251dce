"""The section `training.lora`: adapters, under the names of peft's LoraConfig."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from training.recipe.error_messages import LIST, WORD
from training.recipe.section import Section, Text

AllOrNames = Annotated[
    Annotated[Literal["all-linear"], Tag(WORD)] | Annotated[list[Text], Field(min_length=1), Tag(LIST)],
    Discriminator(lambda value: LIST if isinstance(value, list) else WORD),
]


class Lora(Section):
    """Low-rank adapters, trained instead of the model's own weights. Names, meanings and defaults are those of peft's
    LoraConfig."""

    r: int = Field(default=8, ge=1)
    """The rank: the inner dimension of the two matrices of an adapter."""
    lora_alpha: int = Field(default=8, ge=1)
    """The scale: an adapter's output is multiplied by lora_alpha / r."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the adapters' input during training."""
    target_modules: AllOrNames | None = None
    """The linear layers that get adapters: ends of their names, such as [q_proj, v_proj], or all-linear (null: peft's
    choice for this type of model, and all layers for a type that it does not know)."""
    modules_to_save: list[Text] | None = Field(default=None, min_length=1)
    """Layers that are trained whole, by the ends of their names. Layers with new random weights, such as a classifier's
    head, always are."""
    use_rslora: bool = False
    """Whether an adapter's output is scaled by lora_alpha / √r instead, so that large ranks do not learn slowly."""
    use_dora: bool = False
    """Whether the length and the direction of weights are trained separately (DoRA): more computation, and often better
    results for small ranks."""
    init_lora_weights: Literal["pissa"] | None = None
    """pissa: adapters start as the principal components of their layer's weights, which the layer then holds without
    them (PiSSA). They learn faster; each start decomposes the layers (null: adapters start without effect)."""
    quantization: Literal["nf4"] | None = None
    """nf4: the model's linear layers are held in 4 bits during training (QLoRA), by bitsandbytes on an NVIDIA GPU. The
    exported model is the original one in float32 with the adapters."""


def packages_of(lora: Lora | None) -> list[str]:
    """The packages that the adapters need beyond those of this project."""
    if lora is None:
        return []
    return ["peft"] if lora.quantization is None else ["peft", "bitsandbytes"]
